"""From what a user writes after `--corpus` to a corpus."""

import os

from repro.data.kjv import load_kjv
from repro.data.kjv_words import load_kjv_words
from repro.data.mkv2 import load_mkv2
from repro.data.own_text import load_text
from repro.data.shard_files import load_llmc, load_nanogpt
from repro.errors import ReproError

KINDS = {
    "kjv": "the King James Bible as bytes, shipped with the package",
    "kjv:BYTES": "so many of its first bytes, to be learned by heart",
    "kjv-words:SIZE": "its words, the most frequent ones and one id for all others",
    "mkv2": "a synthetic language of known entropy",
    "mkv2:SEED": "the same with other tables",
    "text:GLOB[,GLOB...]": "your own text files as bytes; the path of one file does as well",
    "nanogpt:GLOB": "headerless uint16 token files; TRAIN_GLOB|VALIDATION_GLOB keeps your own split",
    "llmc:GLOB": "llm.c token shards; TRAIN_GLOB|VALIDATION_GLOB keeps your own split",
}
"""How a corpus may be named, with what it is."""

_FILE_LOADERS = {"text": load_text, "nanogpt": load_nanogpt, "llmc": load_llmc}


def load_corpus(spec, *, vocab_size=None):
    """The corpus that `spec` names, in one of the forms listed in `KINDS`.

    A name of this package comes before a file of the same name (`./kjv` is the file).

    Args:
      spec: string or path.
      vocab_size: number of token ids; None takes that of the kind: 256 for bytes, 128 for mkv2, 50,257 for nanogpt,
        and for llmc 50,257 or 128,256, as the header says. A larger one pads the vocabulary.

    Returns:
      `Corpus`.

    Raises:
      ReproError: the kind is unknown, its files cannot be used, or a token lies outside the vocabulary.
    """
    spec = os.fspath(spec)
    kind, colon, argument = spec.partition(":")
    if spec == "kjv":
        return load_kjv(vocab_size)
    if kind == "kjv" and colon:
        return load_kjv(vocab_size, _whole(argument, f"the number of bytes in {spec!r}"))
    if kind == "kjv-words" and colon:
        return load_kjv_words(_whole(argument, f"the number of ids in {spec!r}"), vocab_size)
    if kind == "mkv2":
        return load_mkv2(_seed(argument) if colon else 0, vocab_size)
    if colon and kind in _FILE_LOADERS:
        return _FILE_LOADERS[kind](argument, vocab_size)
    path = os.path.expanduser(spec)
    if not spec or not os.path.lexists(path):
        kinds = ", ".join(KINDS)
        raise ReproError(f"There is no corpus or file {spec!r}: write the path of a text file or one of {kinds}.")
    if path.endswith(".bin"):
        raise ReproError(
            f'{spec} may hold bytes or token ids: write "nanogpt:{spec}", "llmc:{spec}" or "text:{spec}" to say which.'
        )
    return load_text(spec, vocab_size)


def _whole(argument, what):
    if not (argument.isascii() and argument.isdigit()):
        raise ReproError(f"{what[0].upper()}{what[1:]} must be a whole number.")
    return int(argument)


def _seed(argument):
    if not (argument.isascii() and argument.isdigit() and int(argument) < 2**64):
        raise ReproError(f'The seed in "mkv2:{argument}" must be a whole number from 0 to 2**64 - 1.')
    return int(argument)
