"""RMSNorm and LayerNorm over the last axis, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.parameter import parameter
from repro.quant import GemmPolicy, stored


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * gain (Zhang and Sennrich, arXiv 1910.07467, eq. 4), in float32, x's dtype out."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps) * gain).astype(x.dtype)


def layer_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * gain, without bias (Ba et al., arXiv 1607.06450), in float32."""
    x32 = x.astype(jnp.float32)
    return rms_norm(x32 - jnp.mean(x32, -1, keepdims=True), gain, eps).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm with a learnable gain [D], kept in the format that `policy` gives to weights."""

    normalise = staticmethod(rms_norm)

    def __init__(self, width: int, eps: float, policy: GemmPolicy | None = None) -> None:
        self.gain = parameter(jnp.ones(width, jnp.float32), "norm")
        self.eps, self.policy = eps, policy

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.normalise(x, stored(self.gain[...], self.policy), self.eps)


class LayerNorm(RMSNorm):
    """LayerNorm with a learnable gain [D] and no bias, kept likewise."""

    normalise = staticmethod(layer_norm)


def block_norm(config: ModelConfig) -> RMSNorm:
    """The norm that `config` puts around the blocks, over the width."""
    return {"rms": RMSNorm, "layer": LayerNorm}[config.norm](config.width, config.norm_eps, config.dots.policy("norm"))
