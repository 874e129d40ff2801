"""Causal multi-head and grouped-query attention with RoPE, and what every kind of attention does with its logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.linear import folded, linear
from repro.models.norm import layer_norm, rms_norm
from repro.models.parameter import matrix, parameter

_NORMS = {"rms": rms_norm, "layer": layer_norm}
# Finite, so that a row's gradient stays defined, and below every logit, also those of a run that diverges.
_MASKED = float(np.finfo(np.float32).min)


def rope(x_BTHK: jax.Array, theta: float, *, interleaved: bool = False) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv 2104.09864, section 3.2).

    Pair i turns by the angle t * theta^(-2i/K) at position t. It couples the components i and i + K/2, or 2i and 2i + 1
    where `interleaved`.
    """
    T, K = x_BTHK.shape[1], x_BTHK.shape[-1]
    angle = np.arange(T)[:, None] * theta ** (-np.arange(K // 2) / (K // 2))
    cos_T1K, sin_T1K = (jnp.asarray(f(angle)[:, None, :], jnp.float32) for f in (np.cos, np.sin))
    x32 = x_BTHK.astype(jnp.float32)
    a, b = (x32[..., ::2], x32[..., 1::2]) if interleaved else jnp.split(x32, 2, -1)
    turned = a * cos_T1K - b * sin_T1K, b * cos_T1K + a * sin_T1K
    y = jnp.stack(turned, -1).reshape(x_BTHK.shape) if interleaved else jnp.concatenate(turned, -1)
    return y.astype(x_BTHK.dtype)


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


def attend(raw_BHTS: jax.Array, v_BSHV: jax.Array, cap: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Values mixed by the causal softmax of float32 logits, [B, T, H, V], and the statistics of those logits [H].

    `cap` is that of a soft-cap, 0 for none.
    """
    seen_BHTS = soft_cap(raw_BHTS, cap) if cap else raw_BHTS
    mask_TS = np.tril(np.ones(raw_BHTS.shape[-2:], bool))
    weights_BHTS = jax.nn.softmax(jnp.where(mask_TS, seen_BHTS, _MASKED), -1).astype(v_BSHV.dtype)
    with jax.named_scope("mix"):
        mixed_BTHV = jnp.einsum("bhts,bshv->bthv", weights_BHTS, v_BSHV)
    return mixed_BTHV, logit_statistics(raw_BHTS, seen_BHTS, mask_TS)


class MultiHeadAttention(nnx.Module):
    """softmax(q.k / sqrt(K)) v over earlier positions, heads as an axis.

    With fewer `kv_heads` than heads, consecutive query heads share a key and a value head, and the head axis of `k_DHK`
    and `v_DHV` is the shorter one (grouped queries: Ainslie et al., arXiv 2305.13245, section 2.2).

    With `qk_norm` queries and keys are normalised over the head axis K before RoPE, one gain vector shared by all
    heads (Dehghani et al., arXiv 2302.05442, section 2; Wortsman et al., arXiv 2309.14322, section 2.2).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, H, G, K = config.width, config.heads, config.key_heads, config.head_size
        self.config = config
        q, k = ("q", "k") if G == H else ("q_shared", "k_shared")
        into_heads = dict(role="matrix", inputs=(0,), outputs=(1, 2), head=1)
        self.q_DHK = parameter(matrix(config, rngs.params(), (D, H, K)), qk=q, **into_heads)
        self.k_DHK = parameter(matrix(config, rngs.params(), (D, G, K)), qk=k, **into_heads)
        self.v_DHV = parameter(matrix(config, rngs.params(), (D, G, K), branch=True), **into_heads)
        self.o_HVD = parameter(
            matrix(config, rngs.params(), (H, K, D), 2, writer=True, branch=True),
            "matrix", inputs=(0, 1), outputs=(2,), head=0,
        )  # fmt: skip
        if config.qk_norm != "none":
            self.q_gain_K = parameter(jnp.ones(K, jnp.float32), "norm", qk="q")
            self.k_gain_K = parameter(jnp.ones(K, jnp.float32), "norm", qk="k")

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the attention output [B, T, D] and the statistics of `logit_statistics` [H]. `key` is for policies
        that round stochastically."""
        config = self.config
        with jax.named_scope("qkv"):
            q_BTHK, k_BSHK, v_BSHV = (
                linear(x_BTD, w[...], config, "attention", folded(key, i))
                for i, w in enumerate((self.q_DHK, self.k_DHK, self.v_DHV))
            )
        if config.qk_norm != "none":
            norm = _NORMS[config.qk_norm]
            q_BTHK = norm(q_BTHK, self.q_gain_K[...], config.norm_eps)
            k_BSHK = norm(k_BSHK, self.k_gain_K[...], config.norm_eps)
        q_BTHK, k_BSHK = (rope(x, config.rope_theta, interleaved=config.rope_interleaved) for x in (q_BTHK, k_BSHK))
        if config.key_heads < config.heads:
            k_BSHK, v_BSHV = (jnp.repeat(x, config.heads // config.key_heads, 2) for x in (k_BSHK, v_BSHV))
        with jax.named_scope("logits"):
            raw_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
            raw_BHTS = raw_BHTS * config.head_size**-0.5
        mixed_BTHV, statistics = attend(raw_BHTS, v_BSHV, config.soft_cap)
        return linear(mixed_BTHV, self.o_HVD[...], config, "attention", folded(key, 3), inputs=2), statistics
