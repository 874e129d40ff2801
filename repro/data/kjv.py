"""The embedded corpus: the King James Bible, as bytes. `PROVENANCE.md` says where it comes from."""

import hashlib
import lzma
from functools import cache
from importlib.resources import files

import numpy as np

from repro.data.corpus import Corpus, split_last_twentieth
from repro.data.vocabulary import check_vocabulary, choose_vocab_size
from repro.errors import ReproError

KJV_SHA256 = "b8781f16bec348b7cb933f28feb37465b6a3c833e3bc6da2cc429119e1b83250"


def load_kjv(vocab_size=None):
    """The King James Bible: 4,152,808 bytes of ASCII, one verse a line, two empty lines between chapters.

    Args:
      vocab_size: number of token ids, 256 by default.

    Raises:
      ReproError: the shipped file is damaged, or a byte lies outside the vocabulary.
    """
    tokens = np.frombuffer(_unpack(files("repro.data").joinpath("kjv.txt.xz").read_bytes()), np.uint8)
    vocab_size = choose_vocab_size(vocab_size, 256)
    check_vocabulary(tokens, vocab_size, "kjv")
    return Corpus(
        name="kjv",
        tokens=tokens,
        vocab_size=vocab_size,
        sha256=KJV_SHA256,
        provenance="King James Bible, shipped with this package; public domain outside the United Kingdom",
        validation_start=split_last_twentieth(len(tokens)),
    )


@cache
def _unpack(packed):
    try:
        text = lzma.decompress(packed)
    except lzma.LZMAError as error:
        message = f"The shipped text kjv.txt.xz cannot be unpacked ({error}): install the package again."
        raise ReproError(message) from error
    found = hashlib.sha256(text).hexdigest()
    if found != KJV_SHA256:
        raise ReproError(
            f"The shipped text kjv.txt.xz has SHA-256 {found} instead of {KJV_SHA256}: install the package again."
        )
    return text
