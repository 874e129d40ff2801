"""Files of token ids that other projects write: nanoGPT's headerless `.bin` and the shards of llm.c.

nanoGPT (karpathy/nanoGPT, `data/*/prepare.py`) writes uint16 ids and nothing else. llm.c (karpathy/llm.c,
`dev/data/data_common.py`, `write_datafile`) writes 256 int32, of which the first three are a magic number, a version
and the number of tokens, and then the ids: uint16 after magic 20240520 version 1 (GPT-2), uint32 after magic 20240801
version 7 (Llama 3). modded-nanogpt uses the GPT-2 form. All of it is little-endian.
"""

from dataclasses import dataclass

import numpy as np

from repro.data.corpus import Corpus, split_last_twentieth
from repro.data.find_files import find_files, list_names
from repro.data.token_hash import hash_tokens
from repro.data.token_shards import TokenShards
from repro.data.vocabulary import check_vocabulary, choose_vocab_size
from repro.errors import ReproError

_GPT2_IDS = 50257
_LLAMA3_IDS = 128256
_HEADER_BYTES = 256 * 4


@dataclass(frozen=True)
class _LlmcForm:
    dtype: str
    vocab_size: int


_LLMC_FORMS = {(20240520, 1): _LlmcForm("<u2", _GPT2_IDS), (20240801, 7): _LlmcForm("<u4", _LLAMA3_IDS)}


def load_nanogpt(patterns, vocab_size=None):
    """Headerless uint16 files, memory-mapped.

    Args:
      patterns: `GLOBS`, whose last 5 % is the validation split, or `TRAIN_GLOBS|VALIDATION_GLOBS`.
      vocab_size: number of token ids, by default the 50,257 of GPT-2.

    Raises:
      ReproError: no file matches, a file is empty, has an odd number of bytes or an llm.c header, a file is in both
        splits, or an id lies outside the vocabulary.
    """
    return _load("nanogpt", patterns, vocab_size, _map_nanogpt)


def load_llmc(patterns, vocab_size=None):
    """Shards with an llm.c header, memory-mapped.

    Args:
      patterns: `GLOBS`, whose last 5 % is the validation split, or `TRAIN_GLOBS|VALIDATION_GLOBS`.
      vocab_size: number of token ids, by default 50,257 (GPT-2) or 128,256 (Llama 3), as the header says.

    Raises:
      ReproError: no file matches, a header is not of llm.c, a file does not hold the tokens that its header counts,
        files of both forms are mixed, a file is in both splits, or an id lies outside the vocabulary.
    """
    return _load("llmc", patterns, vocab_size, _map_llmc)


def _load(kind, patterns, requested_vocab_size, map_file):
    splits = [find_files(split) for split in patterns.split("|", 1)]
    paths = [path for split in splits for path in split]
    _refuse_shared_files(splits)
    mapped = [map_file(path) for path in paths]
    if len({tokens.dtype for tokens, _ in mapped}) > 1:
        raise ReproError(f"{list_names(paths)} mix uint16 (GPT-2) and uint32 (Llama 3) shards: name files of one form.")
    parts = [tokens for tokens, _ in mapped]
    vocab_size = choose_vocab_size(requested_vocab_size, mapped[0][1])
    for path, tokens in zip(paths, parts, strict=True):
        check_vocabulary(tokens, vocab_size, path)
    tokens = parts[0] if len(parts) == 1 else TokenShards(parts)
    training_tokens = sum(len(part) for part in parts[: len(splits[0])])
    digest, scope = hash_tokens(parts)
    return Corpus(
        name=f"{kind}:{list_names(paths)}",
        tokens=tokens,
        vocab_size=vocab_size,
        sha256=digest,
        provenance=f"the user's own {kind} token files {list_names(paths)}",
        validation_start=training_tokens if len(splits) == 2 else split_last_twentieth(training_tokens),
        hash_scope=scope,
    )


def _refuse_shared_files(splits):
    training = {path.resolve() for path in splits[0]}
    for path in [path for split in splits[1:] for path in split]:
        if path.resolve() in training:
            raise ReproError(f"{path} is in the training and the validation list: name it in one of them.")


def _map_nanogpt(path):
    header, size = _header(path)
    if header[:2] in _LLMC_FORMS:
        raise ReproError(f'{path} begins with an llm.c header: read it with "llmc:" instead of "nanogpt:".')
    if size % 2:
        raise ReproError(f"{path} has {size} bytes but uint16 ids take an even number: it is cut off or no such file.")
    if size == 0:
        raise ReproError(f"{path} is empty: name a file that holds tokens.")
    return np.memmap(path, "<u2", "r"), _GPT2_IDS


def _map_llmc(path):
    header, size = _header(path)
    if size < _HEADER_BYTES:
        raise ReproError(
            f"{path} has {size} bytes but the header of an llm.c shard has {_HEADER_BYTES}: it is cut off or no "
            "such shard."
        )
    form = _LLMC_FORMS.get(header[:2])
    if form is None:
        raise ReproError(
            f"{path} begins with magic {header[0]}, version {header[1]} but an llm.c shard begins with 20240520, 1 "
            '(GPT-2) or 20240801, 7 (Llama 3): a file without a header is read with "nanogpt:".'
        )
    count = header[2]
    if count < 1:
        raise ReproError(f"The header of {path} counts {count} tokens: name a shard that holds some.")
    expected = _HEADER_BYTES + count * np.dtype(form.dtype).itemsize
    if size != expected:
        raise ReproError(
            f"{path} has {size} bytes but its header counts {count} tokens, which makes {expected}: it is cut off or "
            "damaged."
        )
    return np.memmap(path, form.dtype, "r", offset=_HEADER_BYTES, shape=(count,)), form.vocab_size


def _header(path):
    """The first three int32 (fewer in a shorter file) and the size in bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(12)
            size = file.seek(0, 2)
    except OSError as error:
        raise ReproError(f"{path} cannot be read ({error.strerror}): name a file that you may read.") from error
    return tuple(np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist()), size
