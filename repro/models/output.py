"""What a forward pass returns."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of one forward pass, float32, without gradient. L layers, H heads.

    Attention logits are taken before the softmax, scaled by 1/sqrt(head size), over unmasked positions of the
    whole batch. Here `max_logit` is the signed maximum, the statistic S of QK-Clip (Kimi K2, arXiv 2507.20534,
    section 2.1); the absolute one is a diagnostic.
    """

    max_logit: jax.Array
    """[L, H] signed maximum of the raw logits, before any soft-cap."""
    max_abs_logit: jax.Array
    """[L, H] maximum of |raw logit|."""
    max_capped_logit: jax.Array
    """[L, H] maximum of |logit| as the softmax sees it; equals `max_abs_logit` without a soft-cap."""
    entropy: jax.Array
    """[L, H] attention entropy in nats, mean over batch and query positions."""
    activation_max: jax.Array
    """[L] maximum of |x| in the residual stream after the layer."""
    activation_rms: jax.Array
    """[L] root mean square of the residual stream after the layer."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """`logits [B, T, Z]` float32, `aux_loss []` to be added to the loss, `stats`, and on request
    `hidden [L + 1, B, T, D]`: the embedding, the output of each layer, the last one after the final norm."""

    logits: jax.Array
    aux_loss: jax.Array
    stats: Stats
    hidden: jax.Array | None = None
