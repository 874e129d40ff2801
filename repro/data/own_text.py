"""The user's own text files, read as bytes."""

import hashlib

import numpy as np

from repro.data.corpus import Corpus, split_last_twentieth
from repro.data.find_files import find_files, list_names
from repro.data.vocabulary import check_vocabulary, choose_vocab_size
from repro.errors import ReproError


def load_text(patterns, vocab_size=None):
    """Files joined in the order of their paths, with one newline between two of them; one byte is one token.

    Any bytes will do: no encoding is assumed and nothing is normalised. The text is held in memory.

    Args:
      patterns: `PATH_OR_GLOB[,PATH_OR_GLOB...]`.
      vocab_size: number of token ids, 256 by default.

    Raises:
      ReproError: no file matches, a file cannot be read, there is no text in them, or a byte lies outside the
        vocabulary.
    """
    paths = find_files(patterns)
    text = b"\n".join(_read(path) for path in paths)
    if not text.strip(b"\n"):
        raise ReproError(f"There is no text in {list_names(paths)}: name files that hold some.")
    tokens = np.frombuffer(text, np.uint8)
    vocab_size = choose_vocab_size(vocab_size, 256)
    check_vocabulary(tokens, vocab_size, list_names(paths))
    return Corpus(
        name=f"text:{list_names(paths)}",
        tokens=tokens,
        vocab_size=vocab_size,
        sha256=hashlib.sha256(text).hexdigest(),
        provenance=f"the user's own text as bytes, from {list_names(paths)}",
        validation_start=split_last_twentieth(len(tokens)),
    )


def _read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReproError(f"{path} cannot be read ({error.strerror}): name a file that you may read.") from error
