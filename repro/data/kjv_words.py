"""The embedded corpus as words: a few of them make up most of the text, and most of them are rare (Zipf's law)."""

import hashlib
import re
from collections import Counter
from functools import cache

import numpy as np

from repro.data.corpus import Corpus, split_last_twentieth
from repro.data.kjv import load_kjv
from repro.data.vocabulary import choose_vocab_size
from repro.errors import ReproError

_WORD = re.compile(rb"[a-z]+|[0-9]+|[^a-z0-9\s]")


@cache
def _words():
    """Every word of the text in lower case, number or mark in order, and the different ones from the most to the least
    frequent (those of equal frequency by their bytes)."""
    words = _WORD.findall(load_kjv().tokens.tobytes().lower())
    counts = Counter(words)
    return words, sorted(counts, key=lambda word: (-counts[word], word))


def load_kjv_words(size, vocab_size=None):
    """The King James Bible as words: ids 0 to `size` - 2 are its most frequent ones in order, the last is all others.

    Args:
      size: int, 2 to the number of different words.
      vocab_size: number of token ids, `size` by default.

    Raises:
      ReproError: the size is out of range, or the vocabulary is too small.
    """
    words, ranked = _words()
    if not 2 <= size <= len(ranked):
        raise ReproError(f"kjv-words:{size} asks for {size} ids; give a whole number from 2 to {len(ranked)}.")
    vocab_size = choose_vocab_size(vocab_size, size)
    if vocab_size < size:
        raise ReproError(f"kjv-words:{size} has {size} token ids but the vocabulary has {vocab_size}.")
    ids = {word: rank for rank, word in enumerate(ranked[: size - 1])}
    tokens = np.array([ids.get(word, size - 1) for word in words], np.uint16)
    return Corpus(
        name=f"kjv-words:{size}",
        tokens=tokens,
        vocab_size=vocab_size,
        sha256=hashlib.sha256(tokens.astype("<u2")).hexdigest(),
        provenance=f"words, numbers and marks of the King James Bible, the {size - 1:,} most frequent and one id for others",
        validation_start=split_last_twentieth(len(tokens)),
    )
