"""What every kind of attention does with its logits: soft-cap, causal softmax, sink, statistics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from repro.models.quantile import quantile

# Finite, so that a row's gradient stays defined, and below every logit, also those of a run that diverges.
_MASKED = float(np.finfo(np.float32).min)
_FAR = -104.0  # below it exp is 0 in float32


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(logits / cap); its slope at z is 1 - tanh(z / cap)^2 (Gemma 2, arXiv 2408.00118, section 2)."""
    return cap * jnp.tanh(logits / cap)


def causal_softmax(logits_BHTS: jax.Array, mask_TS: np.ndarray, sink_H: jax.Array | None = None) -> jax.Array:
    """exp(z) over its sum along the unmasked keys. A sink adds exp(sink) of its head to the sum, so that weights sum to
    less than 1 (DeepSeek-V4, section 4.2.1; gpt-oss)."""
    masked_BHTS = jnp.where(mask_TS, logits_BHTS, _MASKED)
    if sink_H is None:
        return jax.nn.softmax(masked_BHTS, -1)
    sink_H11 = sink_H.astype(jnp.float32)[:, None, None]
    top_BHT1 = jax.lax.stop_gradient(jnp.maximum(masked_BHTS.max(-1, keepdims=True), sink_H11))
    weight_BHTS = jnp.exp(masked_BHTS - top_BHT1)
    return weight_BHTS / (weight_BHTS.sum(-1, keepdims=True) + jnp.exp(sink_H11 - top_BHT1))


def logit_statistics(
    raw_BHTS: jax.Array, seen_BHTS: jax.Array, mask_TS: np.ndarray, details: bool = False
) -> dict[str, jax.Array]:
    """Per-head statistics `[H]` of attention logits over unmasked positions (fields of `Stats`).

    `raw_BHTS` are the scaled products q.k, `seen_BHTS` what the softmax sees (after a soft-cap, if any). The entropy is
    that of the weights among positions: what a sink takes is left out, and the others sum to 1 again. With `details`
    those that take longer too.
    """
    raw, seen = jax.lax.stop_gradient((raw_BHTS, seen_BHTS))
    # In the very words of `jax.nn.softmax`, so that XLA finds them equal and takes no second exponential.
    masked_BHTS = jnp.where(mask_TS, seen, _MASKED)
    top_BHT1 = jnp.max(masked_BHTS, -1, keepdims=True)
    weight_BHTS = jnp.exp(masked_BHTS - top_BHT1)
    total_BHT1 = jnp.sum(weight_BHTS, -1, keepdims=True)
    # H = log Z - E[z], with both taken relative to the row's maximum.
    # Bounded, since 0 times the -inf of a masked logit would be no number.
    mean_BHT = (weight_BHTS * jnp.maximum(masked_BHTS - top_BHT1, _FAR)).sum(-1) / total_BHT1[..., 0]
    entropy_BHT = jnp.log(total_BHT1[..., 0]) - mean_BHT
    # Row by row first: a CPU is fast where it reduces along the last axis alone.
    max_abs = jnp.where(mask_TS, jnp.abs(raw), 0.0).max(-1).max((0, 2))
    if seen_BHTS is raw_BHTS:
        top, capped = top_BHT1[..., 0].max((0, 2)), max_abs
    else:
        top = jnp.where(mask_TS, raw, -jnp.inf).max(-1).max((0, 2))
        capped = jnp.where(mask_TS, jnp.abs(seen), 0.0).max(-1).max((0, 2))
    statistics = {
        "max_logit": top,
        "max_abs_logit": max_abs,
        "max_capped_logit": capped,
        "entropy": entropy_BHT.mean((0, 2)),
    }
    if details:
        statistics["logit_p999"] = _quantile(raw, mask_TS, 0.999)
        statistics["relative_entropy"] = _relative(entropy_BHT, mask_TS)
    return statistics


def _quantile(raw_BHTS: jax.Array, mask_TS: np.ndarray, q: float) -> jax.Array:
    """Of every head's unmasked logits, [H]."""
    rows = jnp.moveaxis(raw_BHTS, 1, 0).reshape(raw_BHTS.shape[1], -1)
    return quantile(rows, q, np.broadcast_to(mask_TS, (raw_BHTS.shape[0], *mask_TS.shape)).reshape(-1))


def _relative(entropy_BHT: jax.Array, mask_TS: np.ndarray) -> jax.Array:
    """[H]; 1 where every query sees one position, which leaves no choice."""
    sights = mask_TS.sum(1)
    if (sights < 2).all():
        return jnp.ones(entropy_BHT.shape[1], jnp.float32)
    return (entropy_BHT[..., sights > 1] / np.log(sights[sights > 1]).astype(np.float32)).mean((0, 2))


def attend(
    raw_BHTS: jax.Array, v_BSHV: jax.Array, cap: float, sink_H: jax.Array | None = None, details: bool = False
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Values mixed by the causal softmax of float32 logits, [B, T, H, V], and the statistics of those logits [H].

    `cap` is that of a soft-cap, 0 for none; `sink_H` are the logits of the sinks, which are not capped. `details` asks
    for all statistics.
    """
    seen_BHTS = soft_cap(raw_BHTS, cap) if cap else raw_BHTS
    mask_TS = np.tril(np.ones(raw_BHTS.shape[-2:], bool))
    weights_BHTS = causal_softmax(seen_BHTS, mask_TS, sink_H).astype(v_BSHV.dtype)
    with jax.named_scope("mix"):
        mixed_BTHV = jnp.einsum("bhts,bshv->bthv", weights_BHTS, v_BSHV)
    return mixed_BTHV, logit_statistics(raw_BHTS, seen_BHTS, mask_TS, details)
