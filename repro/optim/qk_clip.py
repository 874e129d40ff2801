"""QK-Clip: rescale the query and key weights of a head whose attention logits grew too large."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from repro.errors import ReproError
from repro.optim.layout import Layout, matched


def qk_clip_factor(max_logits: jax.Array, tau: jax.Array | float) -> jax.Array:
    """gamma = tau / S where S > tau, else 1, elementwise over heads.

    S is the signed maximum of a head's logits. The comparison comes first, so a head whose maximum is negative or
    zero gets exactly 1: min(1, tau / S) would be negative there and its square root NaN. tau = inf switches the clip
    off; S = +inf also gives 1, since a head that overflowed is a guard's business and not to be zeroed.
    Source: Kimi K2 (arXiv 2507.20534), section 2.1.
    """
    over = (max_logits > tau) & jnp.isfinite(max_logits)
    return jnp.where(over, tau / jnp.where(over, max_logits, 1.0), 1.0)


def qk_clip(params: Any, max_logits: jax.Array, *, tau: jax.Array | float, layouts: Any, alpha: float = 0.5) -> Any:
    """`params` after the clip: per head W_q *= gamma^alpha and W_k *= gamma^(1 - alpha). To be called after the
    optimizer's step, decay included, with the `max_logits [L, H]` of the forward pass of that step.

    The logit of a clipped head then scales by exactly gamma for the same inputs. Heads with gamma = 1 keep their bits.
    Momentum is left alone. Raises `ReproError` if no parameter is declared as query and key projection with a head
    and a layer axis, or if `max_logits` has another shape than those axes: a per-layer maximum would clip every head.
    Source: Kimi K2 (arXiv 2507.20534), section 2.1.
    """
    gamma_LH = qk_clip_factor(max_logits, tau)
    exponent = {"q": alpha, "k": 1.0 - alpha}
    seen = set()

    def clip(layout: Layout, weight: jax.Array) -> jax.Array:
        if not layout.qk:
            return weight
        if layout.head is None or layout.layer is None:
            raise ReproError(
                "QK-Clip needs a head axis and a layer axis in the layout of every query and key projection."
            )
        seen.add(layout.qk)
        heads_LH = (weight.shape[layout.layer], weight.shape[layout.head])
        if gamma_LH.shape != heads_LH:
            raise ReproError(f"QK-Clip got max_logits of shape {gamma_LH.shape} for {heads_LH} layers and heads.")
        shape = [1] * weight.ndim
        shape[layout.layer], shape[layout.head] = gamma_LH.shape
        factor = gamma_LH if layout.layer < layout.head else gamma_LH.T
        # sqrt, not pow: correctly rounded, and exactly 1 at 1.
        factor = jnp.sqrt(factor) if exponent[layout.qk] == 0.5 else factor ** exponent[layout.qk]
        return weight * factor.reshape(shape).astype(weight.dtype)

    leaves = [clip(layout, weight) for _, weight, layout in matched(params, layouts)]
    clipped = jax.tree.unflatten(jax.tree.structure(params), leaves)
    if seen != {"q", "k"}:
        raise ReproError("QK-Clip found no query and key projection; mark them with Layout(..., qk='q') and qk='k'.")
    return clipped
