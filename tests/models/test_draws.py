import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.models import ModelConfig, Transformer, draws
from repro.models.draws import Draw, Keys, KeysOf, Later, draw, normal

CONFIG = ModelConfig(vocab_size=32, layers=2, width=8, heads=2, ffn=12)

pytestmark = pytest.mark.usefixtures("quick_compile")


class Pair(nnx.Module):
    """A matrix for each of two layers, and a vector."""

    def __init__(self, rngs):
        keys = KeysOf(rngs)
        layer = lambda key: nnx.Param(normal(Keys(key).params(), (3, 5), 0.25))
        self.w_LDF = nnx.vmap(layer)(keys.split(2))
        self.b_D = nnx.Param(normal(keys.params(), (7,), 2.0))
        self.one = nnx.Param(jnp.ones(2))


def drawn(rngs, then=draw):
    module = Pair(rngs)
    then(module)
    return nnx.to_pure_dict(nnx.split(module)[1])


def one_by_one(seed):
    """The same in JAX's own words."""
    key = jax.random.key(seed)
    layers = [jax.random.fold_in(k, 0) for k in jax.random.split(jax.random.fold_in(key, 0), 2)]
    w = jnp.stack([jax.random.normal(k, (3, 5)) * 0.25 for k in layers])
    return {"w_LDF": w, "b_D": jax.random.normal(jax.random.fold_in(key, 1), (7,)) * 2.0, "one": jnp.ones(2)}


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_bits_are_those_of_separate_draws(seed):
    found = jax.jit(lambda s: drawn(nnx.Rngs(params=jax.random.key(s))))(np.uint32(seed))
    wanted = jax.jit(one_by_one)(np.uint32(seed))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, wanted))


def test_blocks_join(monkeypatch):
    whole = drawn(nnx.Rngs(params=5))
    monkeypatch.setattr(draws, "_BLOCK", 8)  # 37 weights: the last block is not full
    np.testing.assert_array_equal(drawn(nnx.Rngs(params=5))["w_LDF"], whole["w_LDF"])
    np.testing.assert_array_equal(drawn(nnx.Rngs(params=5))["b_D"], whole["b_D"])


def test_another_position_or_key_is_another_number(monkeypatch):
    right = drawn(nnx.Rngs(params=0))
    folded = draws._folded
    monkeypatch.setattr(draws, "_folded", lambda found: folded(found)[::-1])
    wrong = drawn(nnx.Rngs(params=0))
    assert not np.allclose(right["w_LDF"], wrong["w_LDF"]) and not np.allclose(right["b_D"], wrong["b_D"])


@pytest.mark.parametrize("how", ["large", "other_bits", "not_partitionable"])
def test_what_cannot_be_drawn_together_is_drawn_one_by_one(how, monkeypatch):
    if how == "large":
        monkeypatch.setattr(draws, "_TOGETHER_UP_TO", 30)
    impl = "rbg" if how == "other_bits" else "threefry2x32"
    with jax.threefry_partitionable(how != "not_partitionable"):
        found = drawn(nnx.Rngs(params=jax.random.key(3, impl=impl)))
        each = lambda module: [v.set_value(v.get_value().now()) for v in (module.w_LDF, module.b_D)]
        wanted = drawn(nnx.Rngs(params=jax.random.key(3, impl=impl)), each)
    np.testing.assert_array_equal(found["w_LDF"], wanted["w_LDF"])
    np.testing.assert_array_equal(found["b_D"], wanted["b_D"])
    assert found["w_LDF"].shape == (2, 3, 5) and abs(found["b_D"]).max() > abs(found["w_LDF"]).max()


def test_a_stream_moves_on():
    rngs = nnx.Rngs(params=0)
    first, second = drawn(rngs), drawn(rngs)
    assert not np.allclose(first["b_D"], second["b_D"])
    assert int(rngs.params.count[...]) == 4


def test_a_key_is_drawn_at_once():
    value = normal(jax.random.key(1), (4,), 0.5)
    np.testing.assert_array_equal(value, jax.random.normal(jax.random.key(1), (4,)) * 0.5)
    later = normal(Later(jax.random.key(1), 6), (4,), 0.5)
    assert isinstance(later, Draw) and later.batched == (4,)


def test_nothing_of_a_model_is_left_undrawn():
    leaves = jax.tree.leaves(
        nnx.split(Transformer(CONFIG, rngs=nnx.Rngs(0)))[1], is_leaf=lambda leaf: isinstance(leaf, Draw)
    )
    assert leaves and not any(isinstance(leaf, Draw) for leaf in leaves)
