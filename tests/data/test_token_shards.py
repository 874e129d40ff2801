import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.data.token_hash import hash_tokens
from repro.data.token_shards import TokenShards, gather_windows


@st.composite
def cut_sequences(draw):
    whole = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 60_000, draw(st.integers(2, 60)), np.uint16)
    cuts = sorted(draw(st.sets(st.integers(1, len(whole) - 1), max_size=6)))
    return whole, TokenShards(np.split(whole, cuts))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(pair=cut_sequences(), data=st.data())
def test_shards_read_like_the_joined_array(pair, data):
    whole, shards = pair
    assert len(shards) == len(whole) and shards.dtype == whole.dtype
    start, stop = (data.draw(st.one_of(st.none(), st.integers(-70, 70))) for _ in range(2))
    assert shards[start:stop].tolist() == whole[start:stop].tolist()
    index = data.draw(st.integers(-len(whole), len(whole) - 1))
    assert shards[index] == whole[index]
    assert np.asarray(shards).tolist() == whole.tolist()


@settings(derandomize=True, deadline=None, max_examples=200)
@given(pair=cut_sequences(), data=st.data())
def test_windows_cross_the_borders_between_shards(pair, data):
    whole, shards = pair
    width = data.draw(st.integers(1, len(whole)))
    starts = np.arange(len(whole) - width + 1)
    expected = whole[starts[:, None] + np.arange(width)]
    assert (gather_windows(shards, starts, width) == expected).all()
    assert (gather_windows(whole, starts, width) == expected).all()
    doubled = np.stack([starts, starts[::-1]])
    assert (gather_windows(shards, doubled, width) == np.stack([expected, expected[::-1]])).all()


def test_what_a_sequence_of_shards_cannot_do():
    shards = TokenShards([np.arange(3, dtype=np.uint8), np.arange(2, dtype=np.uint8)])
    for index in [5, -6]:
        with pytest.raises(IndexError, match="of 5"):
            shards[index]
    with pytest.raises(IndexError, match="step 1"):
        shards[::2]
    with pytest.raises(ValueError, match="always a copy"):
        np.asarray(shards, copy=False)
    assert np.asarray(shards, np.int64).dtype == np.int64


@settings(derandomize=True, deadline=None)
@given(pair=cut_sequences())
def test_the_full_hash_does_not_depend_on_the_cuts(pair):
    whole, shards = pair
    assert hash_tokens(shards.parts) == hash_tokens([whole])
    assert hash_tokens([whole])[1] == "every token"


def test_the_hash_of_a_large_sequence_sees_sizes_and_ends():
    tokens = np.arange(3 * 2**20, dtype=np.uint32).astype(np.uint8)

    def partial(tokens):
        digest, scope = hash_tokens([tokens], full_limit=2**20)
        assert scope == "byte count, first and last MiB of every file"
        return digest

    for position, seen in [(0, True), (2**20 - 1, True), (2**20, False), (2**21 - 1, False), (2**21, True), (-1, True)]:
        changed = tokens.copy()
        changed[position] ^= 1
        assert (partial(changed) != partial(tokens)) == seen
    assert partial(np.append(tokens, tokens[:256])) != partial(tokens)
