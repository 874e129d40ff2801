import hashlib

import numpy as np
import pytest

from repro.data import load_corpus
from repro.errors import ReproError


def test_size_hash_and_frequencies():
    corpus = load_corpus("kjv-words:2048")
    tokens = corpus.tokens
    assert (corpus.name, corpus.vocab_size, len(tokens)) == ("kjv-words:2048", 2048, 919_789)
    assert tokens.dtype == np.uint16 and hashlib.sha256(tokens.astype("<u2")).hexdigest() == corpus.sha256
    counts = np.bincount(tokens)
    assert len(counts) == 2048 and counts.min() >= 1
    assert np.all(np.diff(counts[:-1]) <= 0)  # ids are ranks
    assert 0.05 < counts[-1] / len(tokens) < 0.055
    # Zipf's law: over two decades of ranks the frequency falls about like their inverse.
    slope = np.polyfit(np.log(np.arange(10, 1001)), np.log(counts[9:1000]), 1)[0]
    assert -1.35 < slope < -0.9


def test_what_the_ids_stand_for():
    few, more = load_corpus("kjv-words:3"), load_corpus("kjv-words:2048")
    # "Genesis 1", two empty lines left out: the comma is the most frequent, then "the"; everything else is the last id.
    text = load_corpus("kjv").tokens.tobytes().lower()
    assert np.sum(few.tokens == 0) == text.count(b",")
    np.testing.assert_array_equal(few.tokens, np.minimum(more.tokens, 2))
    assert not np.array_equal(few.tokens, np.minimum(more.tokens, 1))


@pytest.mark.parametrize("spec", ["kjv-words:", "kjv-words:many", "kjv-words:1", "kjv-words:99999"])
def test_a_size_that_is_none(spec):
    with pytest.raises(ReproError, match="whole number"):
        load_corpus(spec)


def test_a_vocabulary_can_be_padded_and_not_cut():
    from repro.data.kjv_words import load_kjv_words

    assert load_kjv_words(50, 64).vocab_size == 64
    with pytest.raises(ReproError, match="50 token ids but the vocabulary has 49"):
        load_kjv_words(50, 49)
