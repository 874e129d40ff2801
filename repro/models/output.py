"""What a forward pass returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEStats:
    """Statistics of layers with experts, float32, without gradient, over all tokens of the pass. L such layers,
    E experts."""

    load: jax.Array
    """[L, E] share of all (token, choice) pairs that went to each expert; sums to 1."""
    max_violation: jax.Array
    """[L] largest load over the mean load, minus 1 (MaxVio; Wang et al., arXiv 2408.15664, section 4.1)."""
    router_logit_max: jax.Array
    """[L] maximum of |router logit|."""
    router_log_z: jax.Array
    """[L] root mean square of the log-sum-exp of the router's logits."""
    expert_hidden_max: jax.Array
    """[L, E] maximum of |hidden unit| of each routed expert over the tokens that it got; 0 without any."""
    sum_rms: jax.Array
    """[L] root mean square of the gated sum of the routed experts (in LatentMoE the latent before its norm)."""
    routed_rms: jax.Array
    """[L] root mean square of the routed branch as it is added to the shared experts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidualStats:
    """What the mixing matrices of all sublayers do together to the streams of a token, float32, without gradient: row
    and column sums of their product, mean over tokens (mHC, arXiv 2512.24880, section 3.1, there the maxima of the
    absolute values)."""

    forward_max: jax.Array
    """[] largest |row sum| of the product: the gain from the entry to the exit."""
    forward_min: jax.Array
    """[] smallest |row sum|: a gain below 1 is hidden by a maximum."""
    backward_max: jax.Array
    """[] largest |column sum|: the gain of the gradient."""
    backward_min: jax.Array
    """[] smallest |column sum|."""
    spread: jax.Array
    """[L] standard deviation over streams, over their root mean square, after each layer; 0 is one stream N times."""


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
    """[L] maximum of |x| in the residual stream after the layer (with several streams, in their sum)."""
    activation_rms: jax.Array
    """[L] root mean square of the residual stream after the layer."""
    hidden_max: jax.Array
    """[L] maximum of |hidden unit| that the down projection of the feed-forward block sees, of routed experts where
    there are some."""
    hidden_rms: jax.Array
    """[L] their root mean square."""
    logit_p999: jax.Array | None = None
    """[L, H] 99.9th percentile of the raw logits; on request (`details`)."""
    relative_entropy: jax.Array | None = None
    """[L, H] attention entropy over its largest possible value, the log of the number of positions in sight: 1 is even
    weights. Mean over batch and all query positions but the first; on request (`details`)."""
    moe: MoEStats | None = None
    """Where there are experts."""
    residual: ResidualStats | None = None
    """Where there are several residual streams."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FFNRecord:
    """What a feed-forward block reports of one pass: `hidden_max []`, `hidden_rms []`, and where there are experts
    `aux_loss []`, `routes [B, T, K]` (int32, the chosen experts), `buffers` (their next values, by name) and `moe`."""

    hidden_max: jax.Array
    hidden_rms: jax.Array
    aux_loss: jax.Array | None = None
    routes: jax.Array | None = None
    buffers: dict[str, jax.Array] | None = None
    moe: MoEStats | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """`logits [B, T, Z]` float32, `aux_loss []` to be added to the loss, `stats`, and on request
    `hidden [L + 1, B, T, D]`: the embedding, the output of each layer, the last one after the final norm.

    With experts `routes [layers with experts, B, T, K]` holds who was chosen, and `buffers` what the model carries into
    the next step (else an empty dict).
    """

    logits: jax.Array
    aux_loss: jax.Array
    stats: Stats
    hidden: jax.Array | None = None
    routes: jax.Array | None = None
    buffers: Any = dataclasses.field(default_factory=dict)
