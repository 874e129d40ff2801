"""The dense feed-forward block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.glu import activate, smoothed
from repro.models.linear import folded, linear
from repro.models.output import FFNRecord
from repro.models.parameter import matrix, parameter


def magnitudes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maximum of |x| and root mean square, float32, without gradient."""
    seen = jax.lax.stop_gradient(x).astype(jnp.float32)
    return jnp.abs(seen).max(), jnp.sqrt(jnp.mean(seen * seen))


class DenseFFN(nnx.Module):
    """down(h) without biases, h = `activate`(gate(x), up(x)), or of up(x) alone where `config.glu` has no gate."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.width, config.ffn
        self.config = config
        shape = dict(role="matrix", inputs=(0,), outputs=(1,))
        if config.glu != "gelu":
            self.gate_DF = parameter(matrix(config, rngs.params(), (D, F), branch=True), **shape)
        self.up_DF = parameter(matrix(config, rngs.params(), (D, F), branch=True), **shape)
        self.down_FD = parameter(matrix(config, rngs.params(), (F, D), writer=True, branch=True), **shape)

    def hidden(self, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """The hidden units [B, T, F]."""
        g_BTF = None if self.config.glu == "gelu" else self._linear(x_BTD, self.gate_DF[...], key, 0)
        return activate(self.config, g_BTF, self._linear(x_BTD, self.up_DF[...], key, 1))

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, FFNRecord]:
        """The output [B, T, D] and its record. `key` is for policies that round stochastically."""
        h_BTF = self.hidden(x_BTD, key)
        record, down_FD = FFNRecord(*magnitudes(h_BTF)), self.down_FD[...]
        if self.config.glu == "smooth":  # the down projection quantises smooth units and scaled rows
            h_BTF, scale_F = smoothed(h_BTF)
            down_FD = scale_F[:, None] * down_FD
        return self._linear(h_BTF, down_FD, key, 2), record

    def _linear(self, x: jax.Array, w: jax.Array, key: jax.Array | None, number: int) -> jax.Array:
        return linear(x, w, self.config, "ffn", folded(key, number))
