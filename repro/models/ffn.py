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


def hidden_statistics(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maximum of |h| and root mean square, float32, without gradient."""
    seen = jax.lax.stop_gradient(h).astype(jnp.float32)
    return jnp.abs(seen).max(), jnp.sqrt(jnp.mean(seen * seen))


class DenseFFN(nnx.Module):
    """down(h) without biases, where h = `activate`(gate(x), up(x)), or of up(x) alone where `config.glu` has no gate."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.width, config.ffn
        self.config = config
        shape = dict(role="matrix", inputs=(0,), outputs=(1,))
        if config.glu != "gelu":
            self.gate_DF = parameter(matrix(config, rngs.params(), (D, F), branch=True), **shape)
        self.up_DF = parameter(matrix(config, rngs.params(), (D, F), branch=True), **shape)
        self.down_FD = parameter(matrix(config, rngs.params(), (F, D), writer=True, branch=True), **shape)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, FFNRecord]:
        """The output [B, T, D] and its record. `key` is for policies that round stochastically."""
        config = self.config
        apply = lambda x, w, i: linear(x, w, config, "ffn", folded(key, i))
        g_BTF = None if config.glu == "gelu" else apply(x_BTD, self.gate_DF[...], 0)
        h_BTF = activate(config, g_BTF, apply(x_BTD, self.up_DF[...], 1))
        record, down_FD = FFNRecord(*hidden_statistics(h_BTF)), self.down_FD[...]
        if config.glu == "smooth":  # the down projection quantises smooth units and scaled rows
            h_BTF, scale_F = smoothed(h_BTF)
            down_FD = scale_F[:, None] * down_FD
        return apply(h_BTF, down_FD, 2), record
