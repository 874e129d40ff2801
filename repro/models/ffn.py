"""The SwiGLU feed-forward block."""

from __future__ import annotations

import jax
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.functional import swiglu
from repro.models.parameter import normal, parameter


class DenseFFN(nnx.Module):
    """down(swiglu(gate(x), up(x))) without biases."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.width, config.ffn
        matrix = dict(role="matrix", inputs=(0,), outputs=(1,))
        self.gate_DF = parameter(normal(rngs.params(), (D, F), D), **matrix)
        self.up_DF = parameter(normal(rngs.params(), (D, F), D), **matrix)
        self.down_FD = parameter(normal(rngs.params(), (F, D), F, gain=(2 * config.layers) ** -0.5), **matrix)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate_DF, up_DF, down_FD = (w[...].astype(x_BTD.dtype) for w in (self.gate_DF, self.up_DF, self.down_FD))
        return swiglu(x_BTD @ gate_DF, x_BTD @ up_DF) @ down_FD
