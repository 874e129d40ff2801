"""How tokens reach their experts, and how the results come back: three ways with one result, and no token dropped.

`dense` sends every token through every expert and is the oracle of the others. `tiles` sorts (token, choice) pairs by
expert into tiles of rows that belong to one expert, padded with zeros, and loops over the tiles: the number of tiles is
static, whatever the load. `ragged` sorts without padding for `jax.lax.ragged_dot`, which is fast on accelerators (on a
CPU it computes far more than it needs).

P = T K pairs, R rows, N tiles of M rows, C the width that experts work in, F the hidden width of one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from repro.models.config import ModelConfig
from repro.models.glu import activate, smoothed
from repro.models.linear import folded, linear

Weights = dict[str, jax.Array]
"""`up [E, C, F]`, `down [E, F, C]` and, where the unit has one, `gate [E, C, F]`."""

TILE, QUANTISED_TILE = 64, 128
"""Rows of a tile; under a policy, those of the longest blocks along the tokens, so that no block spans two experts."""


class Hidden(NamedTuple):
    """Statistics of the hidden units over the tokens that experts got: maximum of |h| per expert [E], sum of h^2 []."""

    max_E: jax.Array
    square_sum: jax.Array


def experts_of(config: ModelConfig) -> str:
    """The dispatch that `auto` stands for here. Only tiles and the oracle can follow a policy."""
    chosen = config.moe.dispatch
    if chosen != "auto":
        return chosen
    return "tiles" if jax.default_backend() == "cpu" or config.dots.policy("experts") is not None else "ragged"


def routed(
    config: ModelConfig,
    x_TC: jax.Array,
    gates_TK: jax.Array,
    experts_TK: jax.Array,
    weights: Weights,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Hidden]:
    """Sum over each token's experts of gate * expert(x), [T, C] in the type of x, and the statistics of hidden units.

    An expert is down(unit(gate(x), up(x))) with the unit of `config.glu`. `key` is for policies of the role `experts`
    that round stochastically.
    """
    run = {"dense": _dense, "tiles": _tiles, "ragged": _ragged}[experts_of(config)]
    return run(config, x_TC, gates_TK.astype(x_TC.dtype), experts_TK, weights, key)


# ---- One expert on rows of its own.


def _into_hidden(config: ModelConfig, x_MC: jax.Array, weights: Weights, key: jax.Array | None) -> Weights:
    """The gate and the linear branch of one expert."""
    names = [name for name in ("gate", "up") if name in weights]
    return {name: linear(x_MC, weights[name], config, "experts", folded(key, i)) for i, name in enumerate(names)}


def _out_of_hidden(
    config: ModelConfig, branches: Weights, down_FC: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The expert's output, and maximum of |h| and sum of h^2 over its rows (zero rows add nothing to either)."""
    h_MF = activate(config, branches.get("gate"), branches["up"])
    seen = jax.lax.stop_gradient(h_MF).astype(jnp.float32)
    if config.glu == "smooth":
        h_MF, scale_F = smoothed(h_MF)
        down_FC = scale_F[:, None] * down_FC
    y_MC = linear(h_MF, down_FC, config, "experts", folded(key, 2))
    return y_MC, (jnp.abs(seen).max(), (seen * seen).sum())


# ---- All experts on all tokens.


def _dense(config, x_TC, gates_TK, experts_TK, weights, key):
    E = weights["up"].shape[0]
    chosen_TKE = experts_TK[..., None] == np.arange(E)

    def expert(number, own, mine_T):
        # Rows of others are zeroed first, so that nothing of them enters the scale of a block.
        x = jnp.where(mine_T[:, None], x_TC, 0)
        own_key = folded(key, number)
        return _out_of_hidden(config, _into_hidden(config, x, own, own_key), own["down"], own_key)

    y_ETC, (max_E, square_E) = jax.vmap(expert)(jnp.arange(E), weights, chosen_TKE.any(1).T)
    gates_TE = jnp.where(chosen_TKE, gates_TK[..., None], 0).sum(1)
    return jnp.einsum("te,etc->tc", gates_TE, y_ETC), Hidden(max_E, square_E.sum())


# ---- Rows sorted by expert.


class _Rows(NamedTuple):
    """Where each pair sits: `row_TK` the row of each (token, choice), `pair_R` the pair t K + k of each row, P where a
    row is padding, `first_E` the first row of each expert and `count_E` its pairs."""

    row_TK: jax.Array
    pair_R: jax.Array
    first_E: jax.Array
    count_E: jax.Array


def _sorted_rows(experts_TK: jax.Array, experts: int, tile: int) -> _Rows:
    """Pairs in the order of their experts, then of their tokens; each expert starts at a multiple of `tile`."""
    P = experts_TK.size
    mine_PE = (experts_TK.reshape(P, 1) == np.arange(experts)).astype(jnp.int32)
    seen_PE = jnp.cumsum(mine_PE, 0)
    count_E = seen_PE[-1]
    room_E = -(-count_E // tile) * tile
    first_E = jnp.cumsum(room_E) - room_E
    row_P = (mine_PE * (first_E + seen_PE - 1)).sum(1)
    rows = P if tile == 1 else _tiles_of(P, experts, tile) * tile
    pair_R = jnp.full(rows, P, jnp.int32).at[row_P].set(np.arange(P, dtype=np.int32), unique_indices=True)
    return _Rows(row_P.reshape(experts_TK.shape), pair_R, first_E, count_E)


def _tiles_of(pairs: int, experts: int, tile: int) -> int:
    """Enough for any load: every expert leaves less than one tile of padding."""
    return -(-pairs // tile) + experts


# Each pair has one row, so the transpose of either gather is a gather too, where JAX would scatter.


@jax.custom_vjp
def _spread(x_TC: jax.Array, rows: _Rows) -> jax.Array:
    """The token of each row, [R, C]; zeros where a row is padding."""
    K = rows.row_TK.shape[1]
    return jnp.take(x_TC, rows.pair_R // K, 0, mode="fill", fill_value=0)


_spread.defvjp(
    lambda x_TC, rows: (_spread(x_TC, rows), rows),
    lambda rows, dx_RC: (dx_RC[rows.row_TK].sum(1), None),
)


@jax.custom_vjp
def _collect(y_RC: jax.Array, rows: _Rows) -> jax.Array:
    """The row of each pair, [T, K, C]."""
    return y_RC[rows.row_TK]


_collect.defvjp(
    lambda y_RC, rows: (_collect(y_RC, rows), rows),
    lambda rows, dy_TKC: (
        jnp.take(dy_TKC.reshape(-1, dy_TKC.shape[-1]), rows.pair_R, 0, mode="fill", fill_value=0),
        None,
    ),
)


def _gated_sum(y_RC: jax.Array, gates_TK: jax.Array, rows: _Rows) -> jax.Array:
    return jnp.einsum("tkc,tk->tc", _collect(y_RC, rows), gates_TK)


def _tiles(config, x_TC, gates_TK, experts_TK, weights, key):
    E, C = weights["up"].shape[0], x_TC.shape[-1]
    tile = TILE if config.dots.policy("experts") is None else QUANTISED_TILE
    rows = _sorted_rows(experts_TK, E, tile)
    count = rows.pair_R.size // tile
    # Tiles behind the last one hold zeros; the last expert takes them.
    expert_N = (np.arange(count)[:, None] * tile >= rows.first_E[1:]).sum(1)
    x_NMC = _spread(x_TC, rows).reshape(count, tile, C)
    y_NMC, max_N, square_N = _tile_loop(config, x_NMC, weights, expert_N, key)
    max_E = jnp.where(expert_N == np.arange(E)[:, None], max_N, 0).max(1)
    return _gated_sum(y_NMC.reshape(-1, C), gates_TK, rows), Hidden(max_E, square_N.sum())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tile_loop(config, x_NMC, weights, expert_N, key):
    """Each tile through its expert: outputs [N, M, C] and the statistics of hidden units per tile [N]."""
    return _tile_loop_forward(config, x_NMC, weights, expert_N, key)[0]


# Gathering the weights of every tile for one batched product took up to twice as long on a CPU, and so did the
# transpose that JAX makes of this loop, which adds a gradient of the size of all experts at every tile.


def _tile_loop_forward(config, x_NMC, weights, expert_N, key):
    def body(_, tile):
        number, x_MC, expert = tile
        own, own_key = _at(weights, expert), folded(key, number)
        branches = _into_hidden(config, x_MC, own, own_key)
        y_MC, (top, square) = _out_of_hidden(config, branches, own["down"], own_key)
        return None, ((y_MC, top, square), branches)

    _, (result, branches_N) = jax.lax.scan(body, None, (np.arange(x_NMC.shape[0]), x_NMC, expert_N))
    return result, (x_NMC, weights, expert_N, key, branches_N)


def _tile_loop_backward(config, saved, cotangents):
    x_NMC, weights, expert_N, key, branches_N = saved
    entry = [name for name in weights if name != "down"]

    def body(grads, tile):
        number, x_MC, expert, branches, dy_MC = tile
        own, own_key = _at(weights, expert), folded(key, number)
        # The forward parts of both are dead code, apart from the activation: branches are kept.
        _, pull_out, _ = jax.vjp(
            lambda b, w: _out_of_hidden(config, b, w, own_key), branches, own["down"], has_aux=True
        )
        d_branches, d_down = pull_out(dy_MC)
        _, pull_in = jax.vjp(
            lambda x, w: _into_hidden(config, x, w, own_key), x_MC, {name: own[name] for name in entry}
        )
        dx_MC, d_entry = pull_in(d_branches)
        added = jax.tree.map(jnp.add, _at(grads, expert), {**d_entry, "down": d_down})
        put = lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, expert, 0)
        return jax.tree.map(put, grads, added), dx_MC

    tiles = np.arange(x_NMC.shape[0]), x_NMC, expert_N, branches_N, cotangents[0]
    grads, dx_NMC = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, weights), tiles)
    return dx_NMC, grads, None, None


_tile_loop.defvjp(_tile_loop_forward, _tile_loop_backward)


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, keepdims=False), tree)


def _ragged(config, x_TC, gates_TK, experts_TK, weights, key):
    E = weights["up"].shape[0]
    rows = _sorted_rows(experts_TK, E, 1)
    x_RC = _spread(x_TC, rows)
    product = lambda x, w: jax.lax.ragged_dot(x, w.astype(x.dtype), rows.count_E)
    g_RF = product(x_RC, weights["gate"]) if "gate" in weights else None
    h_RF = activate(config, g_RF, product(x_RC, weights["up"]))
    seen = jax.lax.stop_gradient(h_RF).astype(jnp.float32)
    expert_R = (np.arange(x_RC.shape[0])[:, None] >= rows.first_E[1:]).sum(1)
    max_E = jax.ops.segment_max(jnp.abs(seen).max(-1), expert_R, E, indices_are_sorted=True)
    hidden = Hidden(jnp.maximum(max_E, 0), (seen * seen).sum())  # an expert without rows has a maximum of -inf
    return _gated_sum(product(h_RF, weights["down"]), gates_TK, rows), hidden
