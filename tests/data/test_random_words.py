import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.data.random_words import Purpose, RandomWords, scale_to_range
from repro.errors import ReproError

WORD = st.integers(0, 2**64 - 1)


@settings(derandomize=True, deadline=None)
@given(words=st.lists(WORD, min_size=1, max_size=20), size=st.integers(1, 2**63))
def test_scaling_is_the_exact_high_half_of_the_product(words, size):
    scaled = scale_to_range(np.array(words, np.uint64), size)
    assert scaled.tolist() == [word * size >> 64 for word in words]


@pytest.mark.parametrize("size", [1, 2, 2**32 - 1, 2**32, 2**32 + 1, 5 * 2**32 + 7, 2**40, 2**63 - 1, 2**63])
def test_scaling_reaches_both_ends_and_no_further(size):
    words = np.array([0, 2**32 - 1, 2**32, 2**63, 2**64 - 1], np.uint64)
    scaled = scale_to_range(words, size)
    assert scaled[0] == 0 and scaled[-1] == size - 1
    assert scaled.tolist() == [int(word) * size >> 64 for word in words]


@pytest.mark.parametrize("size", [0, -1, 2**63 + 1])
def test_an_impossible_range_is_refused(size):
    with pytest.raises(ReproError, match="between 1 and 2\\*\\*63"):
        scale_to_range(np.zeros(1, np.uint64), size)


def test_words_are_those_of_a_philox_with_this_key_and_counter():
    philox = np.random.Philox(
        key=np.array([11, Purpose.MKV2_TEXT], np.uint64), counter=np.array([0, 0, 0, 5], np.uint64)
    )
    assert RandomWords(Purpose.MKV2_TEXT).draw(11, 5, 9).tolist() == philox.random_raw(9).tolist()


def test_words_are_pinned():
    assert RandomWords(Purpose.WINDOWS).draw(0, 0, 3).tolist() == GOLDEN_WORDS


GOLDEN_WORDS = [15003734204198539638, 13859618513508960101, 12389738016430293093]


@settings(derandomize=True, deadline=None)
@given(seed=WORD, step=WORD, short=st.integers(1, 9), more=st.integers(0, 9))
def test_a_longer_draw_begins_with_the_shorter_and_order_of_calls_is_nothing(seed, step, short, more):
    words = RandomWords(Purpose.WINDOWS)
    first = words.draw(seed, step, short)
    words.draw(seed ^ 1, step, 3)
    assert words.draw(seed, step, short + more)[:short].tolist() == first.tolist()


def test_streams_of_different_seed_step_or_purpose_share_no_word():
    drawn = [
        RandomWords(purpose).draw(seed, step, 50)
        for purpose in Purpose
        for seed in [0, 1, 2, 2**32, 2**63]
        for step in [0, 1, 2, 2**32, 2**63]
    ]
    assert len(np.unique(np.concatenate(drawn))) == 50 * len(drawn)


@pytest.mark.parametrize("value", [-1, 2**64, 0.5, "0", None])
def test_seed_and_step_outside_their_range_are_refused(value):
    words = RandomWords(Purpose.WINDOWS)
    with pytest.raises(ReproError, match="The seed of a random stream must be a whole number"):
        words.draw(value, 0, 1)
    with pytest.raises(ReproError, match="The step of a random stream must be a whole number"):
        words.draw(0, value, 1)
