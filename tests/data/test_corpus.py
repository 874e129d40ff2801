import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.data import Corpus, load_corpus
from repro.data.corpus import split_last_twentieth
from repro.data.token_shards import TokenShards
from repro.errors import ReproError


def counting_corpus(size, validation_start=None, shards=None):
    """Token i is i, so that a window shows where it was read."""
    tokens = np.arange(size, dtype=np.uint16)
    if shards:
        tokens = TokenShards(np.split(tokens, shards))
    if validation_start is None:
        validation_start = split_last_twentieth(size)
    return Corpus("counting", tokens, 2**16, "-", "made for a test", validation_start)


@pytest.fixture(scope="module")
def kjv():
    return load_corpus("kjv")


def test_shape_and_dtype(kjv):
    batch = kjv.batch(0, 0, batch_size=3, length=10)
    assert batch.shape == (3, 11) and batch.dtype == np.uint16
    assert kjv.batches([0, 1], range(4), batch_size=3, length=10).shape == (4, 2, 3, 11)
    assert kjv.validation(5, 10).shape == (5, 11) and kjv.validation(5, 10).dtype == np.uint16


def test_windows_are_uint32_only_where_the_vocabulary_needs_it():
    corpus = counting_corpus(1000)
    for vocab_size, dtype in [(2**16, np.uint16), (2**16 + 1, np.uint32)]:
        sized = dataclasses.replace(corpus, vocab_size=vocab_size)
        assert sized.batch(0, 0, batch_size=2, length=4).dtype == dtype
        assert sized.validation(2, 4).dtype == dtype


def test_windows_are_consecutive_tokens():
    batch = counting_corpus(1000).batch(3, 4, batch_size=50, length=20)
    assert (batch == batch[:, :1] + np.arange(21)).all()


@settings(derandomize=True, deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**64 - 1), step=st.integers(0, 2**64 - 1))
def test_batch_is_a_pure_function_of_seed_and_step(kjv, seed, step):
    first = kjv.batch(seed, step, batch_size=4, length=16)
    kjv.batch(seed ^ 1, step, batch_size=4, length=16)
    assert (kjv.batch(seed, step, batch_size=4, length=16) == first).all()
    assert (kjv.batch(seed, step, batch_size=6, length=16)[:4] == first).all()
    assert (kjv.batch(np.uint64(seed), np.uint64(step), batch_size=np.int64(4), length=16) == first).all()


def test_other_seed_or_step_gives_another_batch(kjv):
    batches = kjv.batches(range(5), range(5), batch_size=2, length=32).reshape(25, -1)
    assert len(np.unique(batches, axis=0)) == 25


def test_batches_equal_the_single_ones(kjv):
    seeds, steps = [7, 0, 2**40], range(90, 100, 3)
    batches = kjv.batches(seeds, steps, batch_size=3, length=9)
    for row, step in enumerate(steps):
        for column, seed in enumerate(seeds):
            assert (batches[row, column] == kjv.batch(seed, step, batch_size=3, length=9)).all()


def test_no_seeds_or_no_steps_give_an_empty_array(kjv):
    assert kjv.batches([], range(3), batch_size=2, length=5).shape == (3, 0, 2, 6)
    assert kjv.batches([1], range(0), batch_size=2, length=5).shape == (0, 1, 2, 6)


def test_golden_starts():
    batches = counting_corpus(60_000).batches([0, 1], range(2), batch_size=4, length=64)
    assert batches[..., 0].tolist() == GOLDEN_STARTS


GOLDEN_STARTS = [
    [[46309, 42777, 38241, 27507], [4278, 56013, 53941, 39721]],
    [[7747, 8663, 39912, 51617], [8655, 37237, 33683, 13021]],
]


def test_golden_text(kjv):
    assert bytes(kjv.batch(0, 0, batch_size=1, length=30)[0].tolist()) == b"him, It is written again, Thou "


@settings(derandomize=True, deadline=None, max_examples=200)
@given(data=st.data(), length=st.integers(1, 40), training=st.integers(2, 300), held_out=st.integers(2, 300))
def test_training_and_validation_never_overlap(data, length, training, held_out):
    training, held_out = training + length, held_out + length
    size = training + held_out
    cuts = sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=4)))
    corpus = counting_corpus(size, validation_start=training, shards=cuts)
    batch = corpus.batch(data.draw(st.integers(0, 9)), 0, batch_size=64, length=length)
    count = data.draw(st.integers(1, held_out - length))
    windows = corpus.validation(count, length)
    assert batch.max() < training <= windows.min() and windows.max() < size
    assert (batch == batch[:, :1] + np.arange(length + 1)).all()
    assert (windows == windows[:, :1] + np.arange(length + 1)).all()
    assert len(np.unique(windows[:, 0])) == count


@settings(derandomize=True, deadline=None)
@given(size=st.integers(0, 2**50))
def test_validation_is_the_last_twentieth(size):
    assert size - split_last_twentieth(size) == size // 20


def test_both_splits_are_read_up_to_their_ends():
    corpus = counting_corpus(40, validation_start=20)
    starts = corpus.batches(range(10), range(10), batch_size=10, length=10)[..., 0]
    assert sorted(np.unique(starts)) == list(range(10))
    windows = corpus.validation(3, 10)
    assert windows[:, 0].tolist() == [20, 24, 29] and windows[-1, -1] == 39
    assert corpus.validation(1, 10)[0, 0] == 20


def test_starts_are_uniform():
    corpus = counting_corpus(1020, validation_start=1010)
    starts = corpus.batches(range(20), range(100), batch_size=100, length=10)[..., 0].ravel()
    counts = np.bincount(starts, minlength=1000)
    expected = len(starts) / 1000
    assert len(counts) == 1000
    # Chi-square with 999 degrees of freedom: mean 999, standard deviation 44.7; the bounds are its 0.05 % tails.
    assert 858 < np.sum((counts - expected) ** 2) / expected < 1153


def test_starts_of_neighbouring_seeds_and_steps_are_uncorrelated():
    starts = counting_corpus(60_000).batches(range(50), range(50), batch_size=40, length=1)[..., 0].astype(float)
    for axis in range(3):
        left, right = np.delete(starts, 0, axis), np.delete(starts, -1, axis)
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / np.sqrt(left.size)


@pytest.mark.parametrize(("size", "length"), [(0, 1), (2, 1), (17, 16), (17, 1000)])
def test_a_training_split_that_is_too_short_is_refused(size, length):
    message = f"training split of counting has {size} tokens but windows of length {length} need at least {length + 2}"
    with pytest.raises(ReproError, match=message):
        counting_corpus(size, validation_start=size).batch(0, 0, batch_size=1, length=length)


def test_a_validation_split_that_is_too_short_is_refused():
    corpus = counting_corpus(200)
    corpus.validation(2, 8)
    with pytest.raises(ReproError, match="validation split of counting has 10 tokens .* length 9 need at least 11"):
        corpus.validation(1, 9)


def test_more_validation_windows_than_there_are_is_refused():
    with pytest.raises(ReproError, match="has 2 different validation windows of length 8 but 3 were asked for"):
        counting_corpus(200).validation(3, 8)


@pytest.mark.parametrize("value", [0, -1, 2.5, "8"])
def test_sizes_below_one_are_refused(value):
    corpus = counting_corpus(200)
    with pytest.raises(ReproError, match="batch_size is .* at least 1"):
        corpus.batch(0, 0, batch_size=value, length=4)
    with pytest.raises(ReproError, match="length is .* at least 1"):
        corpus.batch(0, 0, batch_size=1, length=value)
    with pytest.raises(ReproError, match="count is .* at least 1"):
        corpus.validation(value, 4)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ReproError, match="The seed of a random stream"):
        counting_corpus(200).batch(seed, 0, batch_size=1, length=4)


@pytest.mark.parametrize(
    "tokens", [np.zeros((2, 3), np.uint8), np.zeros(5, np.int64), np.zeros(5, np.uint64), np.zeros(5, np.float32)]
)
def test_arrays_that_are_no_token_sequence_are_refused(tokens):
    with pytest.raises(ReproError, match="1-D array of uint8, uint16 or uint32"):
        Corpus("bad", tokens, 256, "-", "-", 1)


@pytest.mark.parametrize("start", [-1, 6])
def test_a_split_outside_the_text_is_refused(start):
    with pytest.raises(ReproError, match=f"starts at {start} but must start within its 5 tokens"):
        Corpus("bad", np.zeros(5, np.uint8), 256, "-", "-", start)
