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


def load_kjv(vocab_size=None, first=None):
    """The King James Bible: 4,152,808 bytes of ASCII, one verse a line, two empty lines between chapters.

    Args:
      vocab_size: number of token ids, 256 by default.
      first: train on so many of its first bytes alone, to have a text that can be learned by heart; the validation
        split stays what it is.

    Raises:
      ReproError: the shipped file is damaged, a byte lies outside the vocabulary, or `first` is not less than the text.
    """
    tokens = np.frombuffer(_unpack(files("repro.data").joinpath("kjv.txt.xz").read_bytes()), np.uint8)
    vocab_size = choose_vocab_size(vocab_size, 256)
    check_vocabulary(tokens, vocab_size, "kjv")
    if first is not None:
        return _beginning(tokens, vocab_size, first)
    return Corpus(
        name="kjv",
        tokens=tokens,
        vocab_size=vocab_size,
        sha256=KJV_SHA256,
        provenance="King James Bible, shipped with this package; public domain outside the United Kingdom",
        validation_start=split_last_twentieth(len(tokens)),
    )


def _beginning(tokens, vocab_size, first):
    split = split_last_twentieth(len(tokens))
    if not 0 < first < split:
        raise ReproError(f"kjv:{first} asks for {first} bytes; give a whole number from 1 to {split - 1}.")
    kept = np.concatenate([tokens[:first], tokens[split:]])
    return Corpus(
        name=f"kjv:{first}",
        tokens=kept,
        vocab_size=vocab_size,
        sha256=hashlib.sha256(kept).hexdigest(),
        provenance=f"the first {first:,} bytes of the King James Bible, validated on its last twentieth",
        validation_start=first,
        hash_scope="the bytes trained on, then the validation split",
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
