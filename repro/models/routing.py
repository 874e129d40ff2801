"""Which experts a token goes to, and what keeps their load even: equations without parameters.

T may stand for any leading axes of tokens. Scores, biases and losses are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

_TINY = np.finfo(np.float32).tiny
_SMALLEST_SUM = 1e-20  # DeepSeek's kernels add it to the sum that gates are divided by

AFFINITIES: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        # DeepSeek-V3 (arXiv 2412.19437, eq. 15), Kimi K2 and K3.
        "sigmoid": jax.nn.sigmoid,
        # DeepSeek-V2 and most others; over all experts, before any selection.
        "softmax": lambda logits: jax.nn.softmax(logits, -1),
        # DeepSeek-V4. The bound keeps the root's slope finite where softplus underflows.
        "sqrt_softplus": lambda logits: jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), _TINY)),
    }
)
"""Scores of experts from the router's logits over the last axis, by name."""


def affinity(logits_TE: jax.Array, name: str) -> jax.Array:
    """Scores [T, E] in float32 by a name of `AFFINITIES`."""
    return AFFINITIES[name](logits_TE.astype(jnp.float32))


def select(
    scores_TE: jax.Array, bias_E: jax.Array | None, k: int, *, groups: int = 1, kept_groups: int = 1
) -> tuple[jax.Array, jax.Array]:
    """The k experts [T, K] (int32) with the highest score + bias, best first, and the best score + bias of an expert
    that was not chosen, [T]; -inf where every allowed expert was.

    With `groups` of neighbouring experts only those of the `kept_groups` best groups are allowed, where a group counts
    the sum of its two highest biased scores (its highest one in groups of one expert): DeepSeek-V3 (arXiv 2412.19437,
    section 2.1.2) and its released code. Neither result has a gradient.
    """
    biased_TE = jax.lax.stop_gradient(scores_TE if bias_E is None else scores_TE + bias_E)
    experts = biased_TE.shape[-1]
    if kept_groups < groups:
        grouped_TGM = biased_TE.reshape(*biased_TE.shape[:-1], groups, experts // groups)
        of_group_TG = jax.lax.top_k(grouped_TGM, min(2, experts // groups))[0].sum(-1)
        _, kept = jax.lax.top_k(of_group_TG, kept_groups)
        allowed_TG = (kept[..., None] == np.arange(groups)).any(-2)
        biased_TE = jnp.where(allowed_TG[..., None], grouped_TGM, -jnp.inf).reshape(biased_TE.shape)
    best, chosen = jax.lax.top_k(biased_TE, min(k + 1, experts))
    cutoff_T = best[..., k] if k < experts else jnp.full(best.shape[:-1], -jnp.inf, best.dtype)
    return chosen[..., :k], cutoff_T


def gates(scores_TE: jax.Array, experts_TK: jax.Array, *, scale: float = 1.0, normalise: bool = True) -> jax.Array:
    """The weights [T, K] of chosen experts from their unbiased scores, with `normalise` divided by their sum, times
    `scale` (DeepSeek-V3, arXiv 2412.19437, eq. 13)."""
    # A sum over one-hot rows, since the transpose of a gather is a slow scatter.
    chosen_TKE = experts_TK[..., None] == np.arange(scores_TE.shape[-1])
    gates_TK = jnp.where(chosen_TKE, scores_TE[..., None, :], 0.0).sum(-1)
    if normalise:
        gates_TK = gates_TK / (gates_TK.sum(-1, keepdims=True) + _SMALLEST_SUM)
    return gates_TK * scale


def top_k_gates(
    scores_TE: jax.Array,
    bias_E: jax.Array | None,
    k: int,
    *,
    groups: int = 1,
    kept_groups: int = 1,
    scale: float = 1.0,
    normalise: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The weights and the numbers of each token's experts, `(gates_TK, experts_TK)`, best biased score first.

    `bias_E` only selects (None is no bias): gates come from the scores without it, see `gates`, and groups from the
    scores with it, see `select`. DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), aux-loss-free balancing
    (arXiv 2408.15664).
    """
    experts_TK, _ = select(scores_TE, bias_E, k, groups=groups, kept_groups=kept_groups)
    return gates(scores_TE, experts_TK, scale=scale, normalise=normalise), experts_TK


def hash_table(vocab_size: int, experts: int, k: int, layer: jax.Array | int = 0) -> jax.Array:
    """A fixed table [Z, K] (int32) of k different experts for each token id, pseudo-random and different per `layer`.

    DeepSeek-V4 routes its first layers by such a table and ships it in the checkpoint; the hash that made it is not
    published. This one takes the k experts with the smallest hash of (layer, token, expert), in 32-bit integers (the
    finaliser of MurmurHash3), so that it is the same everywhere.
    """
    cell_ZE = jnp.arange(vocab_size * experts, dtype=jnp.uint32).reshape(vocab_size, experts)
    h = cell_ZE + _mixed(jnp.asarray(layer).astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
    return jnp.argsort(_mixed(h), -1, stable=True)[:, :k].astype(jnp.int32)


def _mixed(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def loads(experts_TK: jax.Array, experts: int) -> jax.Array:
    """How many (token, choice) pairs each expert got over all tokens, [E] int32."""
    return (experts_TK.reshape(-1, 1) == np.arange(experts)).sum(0, dtype=jnp.int32)


def sequence_balance_loss(scores_BTE: jax.Array, experts_BTK: jax.Array) -> jax.Array:
    """Sum over experts of f P per sequence, mean over sequences, without its coefficient; 1 where load is even.

    f is the expert's share of the sequence's choices times E, P its mean share of the scores; the gradient flows
    through P alone (DeepSeek-V3, arXiv 2412.19437, eqs. 17-20). The paper prints f with the choices that scores without
    the bias would make; here f counts the experts that were chosen, biased or given, as implementations do.
    """
    B, T, K = experts_BTK.shape
    E = scores_BTE.shape[-1]
    share_BTE = scores_BTE / scores_BTE.sum(-1, keepdims=True)
    count_BE = (experts_BTK.reshape(B, T * K, 1) == np.arange(E)).sum(1, dtype=jnp.int32)
    return ((E / (K * T)) * count_BE * share_BTE.mean(1)).sum(-1).mean()


def router_z_loss(logits_TE: jax.Array) -> jax.Array:
    """Mean over tokens of (log sum exp of the router's logits)^2, without its coefficient (ST-MoE, arXiv 2202.08906,
    eq. 5)."""
    return jnp.mean(jax.nn.logsumexp(logits_TE.astype(jnp.float32), -1) ** 2)


def sign_update(bias_E: jax.Array, load_E: jax.Array, rate: float, *, centred: bool = False) -> jax.Array:
    """The next selection bias: lower by `rate` for an expert above the mean load, higher for one below (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2; arXiv 2408.15664, algorithm 1).

    `load_E` are counts over the whole batch. `centred` takes the mean of the steps away, which selects the same experts
    and keeps the mean of the biases (as torchtitan does).
    """
    load_E = load_E.astype(jnp.float32)
    step_E = jnp.sign(load_E.mean() - load_E)
    return bias_E + rate * (step_E - step_E.mean() if centred else step_E)


def quantile_bias(scores_TE: jax.Array, cutoff_T: jax.Array, k: int) -> jax.Array:
    """The next selection bias by Quantile Balancing, exactly (Kimi K3, eq. 13).

    `scores_TE` are unbiased, `cutoff_T` each token's (k + 1)-th best biased score of this step (`select`). With margins
    s - cutoff and q = T k / E (rounded down), minus the bias of an expert is the (q + 1)-th largest of its margins:
    were the cutoffs to stay, q tokens would choose it. The mean over experts is taken away.
    """
    T, E = scores_TE.shape
    margins_TE = scores_TE - cutoff_T[:, None]
    bias_E = -jnp.sort(margins_TE, 0)[T - 1 - T * k // E]
    return bias_E - bias_E.mean()


def margin_histogram(
    scores_TE: jax.Array, cutoff_T: jax.Array, bias_E: jax.Array, bins: int = 1000
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Counts [E, bins] (int32) of cutoff - score per expert, with the first edge [] and the width [] of the bins.

    Bins are uniform between the smallest bias - 1 and the largest + 1, which covers scores between 0 and 1 under
    `bias_E`, the bias of this step. Counts of microbatches and devices add up, if all use this bias (Kimi K3).
    """
    E = scores_TE.shape[-1]
    low = bias_E.min() - 1
    width = (bias_E.max() - bias_E.min() + 2) / bins
    bin_TE = jnp.clip(jnp.floor((cutoff_T[:, None] - scores_TE - low) / width), 0, bins - 1).astype(jnp.int32)
    counts = jnp.zeros((E, bins), jnp.int32).at[np.arange(E), bin_TE].add(1)
    return counts, low, width


def histogram_bias(counts_EB: jax.Array, low: jax.Array, width: jax.Array, k: int) -> jax.Array:
    """The next selection bias by Quantile Balancing from `margin_histogram` (Kimi K3): in the first bin whose
    cumulative count reaches q = T k / E, the place at which the count would be q if it rose evenly, minus the mean over
    experts.
    """
    E = counts_EB.shape[0]
    pairs = k * counts_EB[0].sum()  # every token has one margin per expert
    reached_EB = jnp.cumsum(counts_EB, 1)
    chosen_E = jnp.argmax(reached_EB >= -(-pairs // E), 1)
    at = lambda values_EB: jnp.take_along_axis(values_EB, chosen_E[:, None], 1)[:, 0]
    inside_E, before_E = at(counts_EB), at(reached_EB - counts_EB)
    # In integers as far as they go: float32 does not hold the counts of a large batch.
    beyond_E = (pairs // E - before_E).astype(jnp.float32) + (pairs % E).astype(jnp.float32) / E
    part_E = jnp.clip(beyond_E / jnp.maximum(inside_E, 1), 0.0, 1.0)
    bias_E = low + (chosen_E + part_E) * width
    return bias_E - bias_E.mean()
