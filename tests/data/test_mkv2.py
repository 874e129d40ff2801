import hashlib

import numpy as np
import pytest

from repro.data import load_corpus, mkv2
from repro.data.mkv2 import MKV2_SHA256, Mkv2Language
from repro.errors import ReproError


@pytest.fixture(scope="module")
def corpus():
    return load_corpus("mkv2")


@pytest.fixture(scope="module")
def language():
    return Mkv2Language.from_seed(0)


@pytest.fixture(scope="module")
def chain_text(language):
    return language.sample(1_000_000, copies=False).astype(np.int64)


def contexts(text):
    """(a mod 4, b) of every token from the third on, as one index."""
    return text[:-2] % 4 * 128 + text[1:-1]


def plug_in_entropy(counts):
    law = counts[counts > 0] / counts.sum()
    return -np.sum(law * np.log(law))


def test_the_default_text_is_pinned(corpus):
    assert corpus.sha256 == MKV2_SHA256 == hashlib.sha256(corpus.tokens).hexdigest()
    assert MKV2_SHA256 == "afb2fe10709ac9be5c588373f26871087ba484889638c0f8e4fdf8aaaa2d157a"
    assert (corpus.name, corpus.vocab_size, len(corpus.tokens), corpus.tokens.dtype) == ("mkv2", 128, 10**6, np.uint8)
    assert corpus.validation_start == 950_000


def test_a_text_that_came_out_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(mkv2, "MKV2_LENGTH", 100)
    with pytest.raises(ReproError, match="mkv2 came out with SHA-256 .* instead of afb2fe10"):
        load_corpus("mkv2")


def test_seeds_give_other_languages(monkeypatch, language):
    monkeypatch.setattr(mkv2, "MKV2_LENGTH", 2000)
    first, again, second = (load_corpus(f"mkv2:{seed}") for seed in (1, 1, 2))
    assert first.sha256 == again.sha256 != second.sha256
    assert first.name == "mkv2:1"
    assert (Mkv2Language.from_seed(1).successor != language.successor).any()
    assert first.entropy_floor != second.entropy_floor


def test_tables(language):
    assert language.successor.shape == (128, 8) and language.order.shape == (4, 8)
    assert all(len(set(row)) == 8 for row in language.successor.tolist())
    assert all(sorted(row) == list(range(8)) for row in language.order.tolist())
    assert len({tuple(row) for row in language.order.tolist()}) == 4
    assert 0 <= language.successor.min() and language.successor.max() < 128


def test_the_transition_is_the_one_that_is_stated(language):
    harmonic_8 = sum(1 / rank for rank in range(1, 9))
    harmonic_128 = sum(1 / rank for rank in range(1, 129))
    for a, b in [(0, 0), (5, 77), (127, 127)]:
        expected = np.array([0.1 / harmonic_128 / (x + 1) for x in range(128)])
        for rank in range(8):
            expected[language.successor[b, language.order[a % 4, rank]]] += 0.9 / harmonic_8 / (rank + 1)
        np.testing.assert_allclose(language.transition[a % 4, b], expected, rtol=1e-5)


def test_the_stationary_law_is_a_fixed_point(language):
    pairs = language.stationary[:, :, None] * language.transition
    following = np.zeros((4, 128))
    for token in range(128):
        following[token % 4] += pairs[:, token].sum(0)
    np.testing.assert_allclose(language.stationary.sum(), 1)
    np.testing.assert_allclose(following, language.stationary, atol=1e-14)


def test_a_longer_text_begins_with_the_shorter_one(language, corpus):
    for length in [1, 2, 51, 52, 53, 1000, 12_345]:
        text = language.sample(length)
        assert len(text) == length and (text == corpus.tokens[:length]).all()


def test_the_chain_follows_its_transition(language, chain_text):
    counts = np.bincount(contexts(chain_text) * 128 + chain_text[2:], minlength=4 * 128 * 128).reshape(512, 128)
    law = language.transition.reshape(512, 128)
    expected = counts.sum(1, keepdims=True) * law
    large = expected > 5
    standardised = (counts - expected)[large] / np.sqrt(expected * (1 - law))[large]
    assert large.sum() > 5000
    assert abs(standardised.std() - 1) < 0.05 and abs(standardised).max() < 6


def test_unigram_floor_is_what_is_counted(corpus, chain_text):
    floor = corpus.entropy_floor["unigram"]
    assert abs(plug_in_entropy(np.bincount(chain_text)) - floor) < 0.01
    assert abs(plug_in_entropy(np.bincount(corpus.tokens)) - floor) < 0.02


def test_order_2_floor_is_what_is_counted(corpus, chain_text):
    pairs, triples = np.bincount(contexts(chain_text)), np.bincount(contexts(chain_text) * 128 + chain_text[2:])
    plug_in = plug_in_entropy(triples) - plug_in_entropy(pairs)
    # Miller-Madow: a plug-in entropy is too low by about (cells - 1) / 2n; cells never seen make it a little more.
    correction = (np.count_nonzero(triples) - np.count_nonzero(pairs)) / (2 * len(chain_text))
    assert abs(plug_in + correction - corpus.entropy_floor["order2"]) < 0.015


def test_order_2_floor_is_the_loss_of_the_true_chain(language, corpus, chain_text):
    loss = -np.log(language.transition.reshape(512, 128)[contexts(chain_text), chain_text[2:]]).mean()
    assert abs(loss - corpus.entropy_floor["order2"]) < 0.005


def test_floors_are_in_order(corpus):
    floor = corpus.entropy_floor
    assert floor["copies_lower"] < floor["copies_upper"] < floor["order2"] < floor["unigram"] < floor["uniform"]
    assert floor["uniform"] == np.log(128)


def best_loss(transition, text):
    """Mean -ln P(token | tokens before it) under the true process, by filtering its hidden state.

    The text is cut into 100 rows that are filtered side by side. `running[k, row, i]` is the posterior that a copy from
    distance 12 + i is under way and has k tokens behind it; `free` is that of all else. A row starts without knowing
    what came before it, so its first 200 tokens are not counted.
    """
    rows = text.reshape(100, -1)
    free, running, losses = np.ones(100), np.zeros((8, 100, 41)), []
    for t in range(2, rows.shape[1]):
        token = rows[:, t]
        if t >= 52:
            running[0] = free[:, None] * 0.02 / 41
            free = free * 0.98
            running *= rows[:, t - 52 : t - 11][:, ::-1] == token[:, None]
        free = free * transition[rows[:, t - 2] % 4, rows[:, t - 1], token]
        evidence = free + running.sum((0, 2))
        losses.append(-np.log(evidence))
        free = (free + running[7].sum(1)) / evidence
        running[1:] = running[:-1] / evidence[:, None]
    return np.mean(losses[200:])


def test_the_best_possible_predictor_lies_between_the_bounds(language, corpus):
    loss = best_loss(language.transition, corpus.tokens.astype(np.int64))
    # The upper bound is nearly reached: 0.005 is three standard errors of the loss on a million tokens.
    assert corpus.entropy_floor["copies_lower"] < loss < corpus.entropy_floor["copies_upper"] + 0.005


@pytest.mark.parametrize("seed", ["", "-1", "x", "1.0", "²", str(2**64)])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(ReproError, match=f'The seed in "mkv2:{seed}" must be a whole number from 0'):
        load_corpus(f"mkv2:{seed}")


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(ReproError, match="of mkv2 has id .* but the vocabulary has 100 ids"):
        load_corpus("mkv2", vocab_size=100)
