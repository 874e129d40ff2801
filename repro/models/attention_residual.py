"""Block Attention Residuals: every sublayer chooses, by attention over depth, which earlier blocks it reads.

Kimi K3 report, eq. 8 to 10. The sources are the embedding b_0 and b_n, the sum of the outputs of the sublayers of block
n. A sublayer sees those of finished blocks, and of its own block what there is so far.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.draws import normal
from repro.models.parameter import parameter
from repro.models.residual import Ends, Link, Sublayer


def attend_to_sources(
    sources_SBTD: jax.Array, seen_S: jax.Array, query_D: jax.Array, gain_D: jax.Array, eps: float
) -> jax.Array:
    """sum_s a_s v_s over the sources that `seen_S` marks, with a = softmax(query . RMSNorm(v)); scores in float32, no
    1/sqrt(D), values not normalised. [B, T, D] in the type of the sources."""
    v_SBTD = sources_SBTD.astype(jnp.float32)
    scores_SBT = v_SBTD @ (query_D * gain_D) * jax.lax.rsqrt(jnp.mean(v_SBTD * v_SBTD, -1) + eps)
    a_SBT = jax.nn.softmax(jnp.where(seen_S[:, None, None], scores_SBT, -jnp.inf), 0)
    return (a_SBT[..., None] * v_SBTD).sum(0).astype(sources_SBTD.dtype)


def _site(module: nnx.Module, config: ModelConfig, rngs: nnx.Rngs) -> None:
    D, std = config.width, config.residual.query_std
    # A query of zero is the uniform average, which a norm cannot tell from the sum, the plain residual stream. The gain
    # then has no gradient until the query has moved.
    query_D = normal(rngs.params(), (D,), std / D**0.5) if std else jnp.zeros(D)
    module.query_D = parameter(query_D, "static")
    module.key_gain_D = parameter(jnp.ones(D), "norm")


class BlockAttnRes(Link):
    """y = f(norm(attention over sources)), and y is added to the source of the own block. Each site has a query, zero
    at first, and the gain of the norm of its keys, as Kimi K3's released code has."""

    def __init__(self, config: ModelConfig, position: jax.Array | int, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, position, rngs=rngs)
        _site(self, config, rngs)

    def __call__(self, carry: jax.Array, norm: nnx.Module, f: Sublayer, position: jax.Array) -> tuple[jax.Array, Any]:
        per_block = 2 * self.config.residual.block_layers  # block_layers counts decoder layers of two sublayers
        own = 1 + position // per_block
        seen_S = jnp.arange(len(carry)) < own + (position % per_block > 0)
        with jax.named_scope("attention_residual"):
            x_BTD = attend_to_sources(carry, seen_S, self.query_D[...], self.key_gain_D[...], self.config.norm_eps)
        y_BTD, record = f(norm(x_BTD))
        partial_BTD = jax.lax.dynamic_index_in_dim(carry, own, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(carry, partial_BTD + y_BTD, own, 0), record


class BlockAttnResEnds(Ends):
    """The embedding is the first source; the final norm reads an attention over all of them."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        _site(self, config, rngs)

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        blocks = -(-self.config.layers // self.config.residual.block_layers)
        return jnp.zeros((1 + blocks, *x_BTD.shape), x_BTD.dtype).at[0].set(x_BTD)

    def leave(self, carry: jax.Array) -> jax.Array:
        seen_S = jnp.ones(len(carry), bool)
        return attend_to_sources(carry, seen_S, self.query_D[...], self.key_gain_D[...], self.config.norm_eps)

    def view(self, carry: jax.Array) -> jax.Array:
        """The sum of all sources: the embedding and all that sublayers have written, as in a plain residual."""
        return carry.sum(0)
