"""Causal multi-head attention with RoPE, and the statistics of its logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.linear import folded, linear
from repro.models.norm import layer_norm, rms_norm
from repro.models.parameter import normal, parameter

_NORMS = {"rms": rms_norm, "layer": layer_norm}
# Finite, so that a row's gradient stays defined, and below every logit, also those of a run that diverges.
_MASKED = float(np.finfo(np.float32).min)


def rope(x_BTHK: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding, half-split form (Su et al., arXiv 2104.09864, section 3.2).

    Pair i couples components i and i + K/2 and turns by the angle t * theta^(-2i/K) at position t.
    """
    T, K = x_BTHK.shape[1], x_BTHK.shape[-1]
    angle = np.arange(T)[:, None] * theta ** (-np.arange(K // 2) / (K // 2))
    cos_T1K, sin_T1K = (jnp.asarray(f(angle)[:, None, :], jnp.float32) for f in (np.cos, np.sin))
    a, b = jnp.split(x_BTHK.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos_T1K - b * sin_T1K, b * cos_T1K + a * sin_T1K], -1).astype(x_BTHK.dtype)


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(logits / cap); its slope at z is 1 - tanh(z / cap)^2 (Gemma 2, arXiv 2408.00118, section 2)."""
    return cap * jnp.tanh(logits / cap)


def logit_statistics(raw_BHTS: jax.Array, seen_BHTS: jax.Array, mask_TS: np.ndarray) -> dict[str, jax.Array]:
    """Per-head statistics `[H]` of attention logits over unmasked positions (fields of `Stats`).

    `raw_BHTS` are the scaled products q.k, `seen_BHTS` what the softmax sees (after a soft-cap, if any).
    """
    raw, seen = jax.lax.stop_gradient((raw_BHTS, seen_BHTS))
    top_BHT1 = jnp.max(jnp.where(mask_TS, seen, _MASKED), -1, keepdims=True)
    weight = jnp.where(mask_TS, jnp.exp(seen - top_BHT1), 0.0)
    total_BHT = weight.sum(-1)
    # H = log Z - E[z], with both taken relative to the row's maximum.
    mean_BHT = jnp.where(mask_TS, weight * (seen - top_BHT1), 0.0).sum(-1) / total_BHT
    max_abs = jnp.where(mask_TS, jnp.abs(raw), 0.0).max((0, 2, 3))
    capped = max_abs if seen_BHTS is raw_BHTS else jnp.where(mask_TS, jnp.abs(seen), 0.0).max((0, 2, 3))
    return {
        "max_logit": jnp.where(mask_TS, raw, -jnp.inf).max((0, 2, 3)),
        "max_abs_logit": max_abs,
        "max_capped_logit": capped,
        "entropy": (jnp.log(total_BHT) - mean_BHT).mean((0, 2)),
    }


class MultiHeadAttention(nnx.Module):
    """softmax(q.k / sqrt(K)) v over earlier positions, heads as an axis.

    With `qk_norm` queries and keys are normalised over the head axis K before RoPE, one gain vector shared by all
    heads (Dehghani et al., arXiv 2302.05442, section 2; Wortsman et al., arXiv 2309.14322, section 2.2).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, H, K = config.width, config.heads, config.head_size
        self.config = config
        self.q_DHK = parameter(
            normal(rngs.params(), (D, H, K), D), "matrix", inputs=(0,), outputs=(1, 2), head=1, qk="q"
        )
        self.k_DHK = parameter(
            normal(rngs.params(), (D, H, K), D), "matrix", inputs=(0,), outputs=(1, 2), head=1, qk="k"
        )
        self.v_DHV = parameter(normal(rngs.params(), (D, H, K), D), "matrix", inputs=(0,), outputs=(1, 2), head=1)
        self.o_HVD = parameter(
            normal(rngs.params(), (H, K, D), H * K, gain=(2 * config.layers) ** -0.5),
            "matrix", inputs=(0, 1), outputs=(2,), head=0,
        )  # fmt: skip
        if config.qk_norm != "none":
            self.q_gain_K = parameter(jnp.ones(K, jnp.float32), "norm")
            self.k_gain_K = parameter(jnp.ones(K, jnp.float32), "norm")

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the attention output [B, T, D] and the statistics of `logit_statistics` [H]. `key` is for policies
        that round stochastically."""
        config, dtype = self.config, x_BTD.dtype
        with jax.named_scope("qkv"):
            q_BTHK, k_BSHK, v_BSHV = (
                linear(x_BTD, w[...], config, "attention", folded(key, i))
                for i, w in enumerate((self.q_DHK, self.k_DHK, self.v_DHV))
            )
        if config.qk_norm != "none":
            norm = _NORMS[config.qk_norm]
            q_BTHK = norm(q_BTHK, self.q_gain_K[...], config.norm_eps)
            k_BSHK = norm(k_BSHK, self.k_gain_K[...], config.norm_eps)
        q_BTHK, k_BSHK = rope(q_BTHK, config.rope_theta), rope(k_BSHK, config.rope_theta)
        with jax.named_scope("logits"):
            raw_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
            raw_BHTS = raw_BHTS * config.head_size**-0.5
            seen_BHTS = soft_cap(raw_BHTS, config.soft_cap) if config.soft_cap else raw_BHTS
        mask_TS = np.tril(np.ones((x_BTD.shape[1],) * 2, bool))
        weights_BHTS = jax.nn.softmax(jnp.where(mask_TS, seen_BHTS, _MASKED), -1).astype(dtype)
        with jax.named_scope("mix"):
            mixed_BTHV = jnp.einsum("bhts,bshv->bthv", weights_BHTS, v_BSHV)
            out_BTD = linear(mixed_BTHV, self.o_HVD[...], config, "attention", folded(key, 3), inputs=2)
        return out_BTD, logit_statistics(raw_BHTS, seen_BHTS, mask_TS)
