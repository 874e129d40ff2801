"""Norms of queries and keys over their head axis, which bound the attention logit."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.norm import layer_norm, rms_norm
from repro.models.parameter import parameter

_GAINS = {"none": "", "rms": "qk", "layer": "qk", "rms_plain": "", "l2": "", "v4": "k"}
"""Which of queries and keys have a learned gain."""


def l2_norm(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(|x|^2 + eps), at most 1 long (Henry et al., arXiv 2010.04245), in float32, x's dtype out."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, -1, keepdims=True) + eps)).astype(x.dtype)


class QKNorm:
    """Queries and keys of an attention module, normalised over the whole head before RoPE; a mix-in, whose parameters
    are attributes of the module.

    With K the size of a head, the largest |logit| is
    - rms, layer: sqrt(K) times the largest |q gain| and the largest |k gain|, which can grow (Dehghani et al., arXiv
      2302.05442, section 2; Wortsman et al., arXiv 2309.14322, section 2.2),
    - v4: sqrt(K) times the largest |k gain| (DeepSeek-V4, section 2.4),
    - rms_plain: sqrt(K),
    - l2: |logit scale|, which is learned, one for all heads (Henry et al.),
    up to rounding; RoPE keeps lengths, and YaRN's factors multiply all of them.
    """

    letter: ClassVar[str] = "K"
    """The dimension letter of the head axis."""

    def add_qk_norm(self) -> None:
        """Makes the parameters `q_gain_K` and `k_gain_K` (or of another `letter`), 1 at first, one for all heads, or
        `logit_scale`. The latter starts at sqrt(K), where l2 computes the logits of rms_plain; what the paper starts at
        depends on the length of its sentences."""
        size = self.config.head_size
        for side in _GAINS[self.config.qk_norm]:
            setattr(self, f"{side}_gain_{self.letter}", parameter(jnp.ones(size, jnp.float32), "norm", qk=side))
        if self.config.qk_norm == "l2":
            self.logit_scale = parameter(jnp.asarray(size**0.5, jnp.float32), "norm", qk="q")

    def normed(self, side: str, x_BTHK: jax.Array) -> jax.Array:
        """The queries (`side` q) or keys (k) after the norm, if any."""
        config = self.config
        if config.qk_norm == "none":
            return x_BTHK
        if config.qk_norm == "l2":
            return l2_norm(x_BTHK, config.norm_eps)
        gain: nnx.Param | None = getattr(self, f"{side}_gain_{self.letter}", None)
        norm = layer_norm if config.qk_norm == "layer" else rms_norm
        return norm(x_BTHK, 1.0 if gain is None else gain[...], config.norm_eps)
