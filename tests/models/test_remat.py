"""Recomputing blocks in the backward pass changes memory, not gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.models import ModelConfig, init_and_apply

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = ModelConfig(vocab_size=32, layers=6, width=16, heads=2, ffn=24)
TOKENS = jnp.arange(24).reshape(2, 12)


def gradient(config, params):
    return jax.grad(lambda p: jnp.mean(init_and_apply(config)[1](p, TOKENS).logits ** 2))(params)


def kept(config):
    """Bytes that the forward pass leaves for the backward one."""
    shapes = jax.eval_shape(init_and_apply(config)[0], jax.random.key(0))
    _, pull = jax.eval_shape(lambda p: jax.vjp(lambda p: init_and_apply(config)[1](p, TOKENS).logits, p), shapes)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))


def test_gradients_are_the_same_and_each_policy_keeps_less():
    params = jax.jit(init_and_apply(CONFIG)[0])(jax.random.key(0))
    plain = jax.jit(gradient, static_argnums=0)(CONFIG, params)
    policies = {
        name: dataclasses.replace(CONFIG, remat=True, remat_policy=name)
        for name in ("dots", "unbatched_dots", "nothing")
    }
    memory = [kept(CONFIG), *(kept(config) for config in policies.values())]
    assert memory == sorted(memory, reverse=True) and len(set(memory)) == 4, memory
    again = jax.jit(gradient, static_argnums=0)(policies["nothing"], params)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
