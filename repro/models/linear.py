"""Linear layers that follow a policy of `repro.quant`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from repro.models.config import ModelConfig
from repro.quant import dot


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


def folded(key: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    """A key for one of several uses, or None without one."""
    return None if key is None else jax.random.fold_in(key, number)
