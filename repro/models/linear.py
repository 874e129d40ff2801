"""Linear layers that follow a policy of `repro.quant`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from repro.models.config import ModelConfig
from repro.quant import dot, fake_quantize, round_to
from repro.quant.rounding import as_float32


def linear(
    x: jax.Array, w: jax.Array, config: ModelConfig, role: str, key: jax.Array | None, *, inputs: int = 1
) -> jax.Array:
    """x w over the last `inputs` axes of x and the first of w, in the type of x.

    `role` names the entry of `config.precision` that decides the operands' formats; `key` is needed where its policy
    rounds stochastically, and unused elsewhere.
    """
    policy = config.dots.policy(role)
    if policy is None:
        return jnp.tensordot(x, w.astype(x.dtype), inputs)
    size = math.prod(w.shape[:inputs])
    x = x.reshape(*x.shape[: x.ndim - inputs], size)
    y = dot(x, w.reshape(size, *w.shape[inputs:]), policy, key=key if policy.stochastic else None)
    return y.astype(x.dtype)


def stored(table_ZD: jax.Array, config: ModelConfig) -> jax.Array:
    """The embedding table in the format in which its policy keeps weights, blocks along D; gradients pass through."""
    policy = config.dots.policy("embedding")
    if policy is None or policy.fprop_w is None:
        return table_ZD
    if policy.fprop_w in ("bf16", "fp16"):
        table_ZD = as_float32(table_ZD)
        return table_ZD + jax.lax.stop_gradient(round_to(table_ZD, policy.fprop_w) - table_ZD)
    return fake_quantize(table_ZD, policy.fprop_w)


def folded(key: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    """A key for one of several uses, or None without one."""
    return None if key is None else jax.random.fold_in(key, number)
