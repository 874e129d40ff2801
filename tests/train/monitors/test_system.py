"""Bits, and the first number that is not finite."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.train.monitors import MONITORS, MonitorConfig
from repro.train.monitors.system import checksum, nonfinite_name, watched_names

pytestmark = pytest.mark.usefixtures("quick_compile")

TREE = {
    "a": jax.random.normal(jax.random.key(0), (3, 5)),
    "b": jnp.arange(7, dtype=jnp.int32),
    "c": jax.random.normal(jax.random.key(1), (4,)).astype(jnp.bfloat16),
    "d": jnp.array([True, False]),
}


def numpy_checksum(tree):
    words = []
    for leaf in jax.tree.leaves(tree):
        x = np.asarray(leaf)
        own = x.astype(np.uint32) if x.dtype == bool else x.view(f"u{x.dtype.itemsize}").astype(np.uint32)
        words += own.ravel().tolist()
    return sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**32


def test_checksum_is_the_same_everywhere():
    wanted = numpy_checksum(TREE)
    assert int(checksum(TREE)) == int(jax.jit(checksum)(TREE)) == wanted
    stacked = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), TREE)
    other = numpy_checksum(jax.tree.map(lambda x: x[::-1], TREE))
    np.testing.assert_array_equal(jax.vmap(checksum)(stacked), np.array([wanted, other], np.uint32))
    np.testing.assert_array_equal(jax.lax.map(checksum, stacked), np.array([wanted, other], np.uint32))


def test_every_single_bit_and_every_exchange_shows():
    x = np.random.default_rng(0).normal(size=6).astype(np.float32)
    own, seen = int(checksum(x)), set()
    for place in range(6):
        for bit in range(32):
            flipped = x.view(np.uint32).copy()
            flipped[place] ^= np.uint32(1 << bit)
            seen.add(int(checksum(flipped.view(np.float32))))
    assert own not in seen
    exchanged = x.copy()
    exchanged[[1, 4]] = x[[4, 1]]
    assert int(checksum(exchanged)) != own
    plain = lambda values: int(values.view(np.uint32).sum(dtype=np.uint32))
    assert plain(exchanged) == plain(x), "a plain sum would not show it"
    assert int(checksum(np.float32([0.0]))) != int(checksum(np.float32([-0.0])))


def observation(**changes):
    params = {"w": jnp.ones((2, 2)), "z": jnp.ones(3)}
    stats = dict(max_abs_logit=jnp.ones((1, 2)), activation_max=jnp.ones(1), hidden_max=jnp.ones(1))
    stats |= {name: changes.pop(name) for name in list(changes) if name in stats}
    trees = {name: params for name in ("grads", "updates", "new_params")} | {"loss": jnp.float32(1.0)}
    return SimpleNamespace(output=SimpleNamespace(stats=SimpleNamespace(**stats)), **(trees | changes))


def first(**changes):
    found = jax.jit(lambda: MONITORS["nonfinite"].measure(MonitorConfig(), observation(**changes)))()["first_nonfinite"]
    assert found.dtype == jnp.int32
    return nonfinite_name(int(found), {"w": jnp.ones((2, 2)), "z": jnp.ones(3)})


def test_the_first_in_order_of_computation_is_named():
    bad = {"w": jnp.ones((2, 2)), "z": jnp.array([1.0, jnp.nan, 1.0])}
    assert first() is None
    assert first(new_params=bad) == "parameter z"
    assert first(new_params=bad, updates=bad) == "update z"
    assert first(new_params=bad, updates=bad, grads=jax.tree.map(lambda x: x * jnp.inf, bad)) == "gradient w"
    assert first(loss=jnp.float32(jnp.inf), grads=bad) == "loss"
    assert first(max_abs_logit=jnp.array([[1.0, jnp.nan]]), loss=jnp.float32(jnp.nan)) == "attention logits"


def test_names_are_listed_once_and_bounded():
    names = watched_names({"w": jnp.ones(1), "z": jnp.ones(1)})
    assert len(names) == len(set(names)) == 4 + 3 * 2 and names[4] == "gradient w"
    with pytest.raises(ReproError, match="no tensor 10 among the 10"):
        nonfinite_name(10, {"w": jnp.ones(1), "z": jnp.ones(1)})
