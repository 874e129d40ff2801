"""The SwiGLU feed-forward block."""

from __future__ import annotations

import jax
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.functional import swiglu
from repro.models.linear import folded, linear
from repro.models.parameter import normal, parameter


class DenseFFN(nnx.Module):
    """down(swiglu(gate(x), up(x))) without biases."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.width, config.ffn
        self.config = config
        matrix = dict(role="matrix", inputs=(0,), outputs=(1,))
        self.gate_DF = parameter(normal(rngs.params(), (D, F), D), **matrix)
        self.up_DF = parameter(normal(rngs.params(), (D, F), D), **matrix)
        self.down_FD = parameter(normal(rngs.params(), (F, D), F, gain=(2 * config.layers) ** -0.5), **matrix)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """`key` is for policies that round stochastically."""
        apply = lambda x, w, i: linear(x, w[...], self.config, "ffn", folded(key, i))
        return apply(swiglu(apply(x_BTD, self.gate_DF, 0), apply(x_BTD, self.up_DF, 1)), self.down_FD, 2)
