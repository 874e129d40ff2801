"""Muon with RMS-matched updates, and AdamW for everything that is not a matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.optim.adamw import Decay, decayed
from repro.optim.adamw import adamw as adamw_for_all
from repro.optim.finite import check_finite
from repro.optim.groups import blocks_of, by_role, tree_of
from repro.optim.newton_schulz import Schedule, newton_schulz, schedule_table

RMS = Literal["jordan", "spectral"]


class MuonState(NamedTuple):
    """`momentum`: the running sum M of gradients, a tree like the parameters."""

    momentum: Any


def update_factor(rms: float | jax.Array | RMS, rows: int, columns: int) -> float | jax.Array:
    """What an orthogonalised block of `rows` inputs and `columns` outputs is multiplied by.

    A number: rms * sqrt(max(rows, columns)), since an orthogonal matrix has a root mean square of 1 / sqrt(max) and the
    update then one of `rms` (0.2: Moonlight, arXiv 2502.16982, section 2.2; 0.18: DeepSeek-V4 report, section 2.4).
    `"jordan"`: sqrt(max(1, columns / rows)) (Jordan et al., "Muon", 2024). `"spectral"`: sqrt(columns / rows), which gives
    the update the spectral norm that keeps feature changes of order one over width (Yang et al., arXiv 2310.17813).
    """
    if isinstance(rms, str):
        if rms not in RMS.__args__:
            raise ReproError(f"rms {rms!r} is unknown; give a number, or one of {', '.join(RMS.__args__)}.")
        ratio = columns / rows
        return max(1.0, ratio) ** 0.5 if rms == "jordan" else ratio**0.5
    return rms * max(rows, columns) ** 0.5


def orthogonalise(
    tree: Any,
    layouts: Any,
    *,
    schedule: str | Schedule,
    rms: Any,
    dtype: str | jnp.dtype = "float32",
    iterate: Callable[[list[jax.Array]], list[jax.Array]] | None = None,
) -> Any:
    """Every leaf with its matrices (see `Layout`) replaced by their orthogonal factors times `update_factor`.

    Matrices of equal shape, up to a transposition, are stacked over the whole tree and iterated as one batch, so the
    compiled program grows with the number of shapes and not with the number of parameters. `iterate` maps all stacks
    [n, small, large] to their orthogonal factors in place of `newton_schulz` on each, for matrices spread over devices.
    """
    blocks = blocks_of(tree, layouts)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, block in enumerate(blocks):
        groups.setdefault(tuple(sorted(block.shape[-2:])), []).append(i)
    wide = [jnp.swapaxes(b, -1, -2) if b.shape[-2] > b.shape[-1] else b for b in blocks]
    flat = [b.reshape(-1, *b.shape[-2:]).astype(jnp.float32) for b in wide]
    stacks = [jnp.concatenate([flat[i] for i in m]) if len(m) > 1 else flat[m[0]] for m in groups.values()]
    if iterate is None:
        done = [newton_schulz(stack, schedule, dtype=dtype) for stack in stacks]
    else:
        done = iterate(stacks)
    for members, stack in zip(groups.values(), done, strict=True):
        # The start is a value that the compiler does not see through: it then compiles one kernel for all leaves of a shape
        # in place of one for each, which was a third of the compile time of a tree with a leaf per layer.
        starts = itertools.accumulate((len(flat[i]) for i in members), initial=0)
        starts = jax.lax.optimization_barrier([jnp.array([start, -1], jnp.int32) for start in starts])
        for i, start in zip(members, starts, strict=False):
            rows, columns = blocks[i].shape[-2:]
            out = jax.lax.dynamic_slice_in_dim(stack, start[0], len(flat[i]))
            out = (jnp.swapaxes(out, -1, -2) if rows > columns else out).reshape(blocks[i].shape)
            blocks[i] = update_factor(rms, rows, columns) * out
    return tree_of(blocks, tree, layouts)


def accumulate(grads: Any, before: Any, momentum: Any, nesterov: bool) -> tuple[Any, Any]:
    """The momentum M = momentum * M + G, and what is orthogonalised of it: N = G + momentum * M, without Nesterov M."""
    summed = jax.tree.map(lambda m, g: momentum * m + g, before, grads)
    return summed, jax.tree.map(lambda g, m: g + momentum * m, grads, summed) if nesterov else summed


def scale_by_muon(
    layouts: Any,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    schedule: str | Schedule = "muon5",
    rms: float | RMS = 0.2,
    dtype: str | jnp.dtype = "float32",
) -> optax.GradientTransformation:
    """Orthogonalised momentum: M = momentum * M + G, N = G + momentum * M (without Nesterov N = M), and as the update
    the orthogonal factor of N by Newton–Schulz times `update_factor`, for every matrix of the layout (Moonlight, arXiv
    2502.16982, section 2.2; the factor comes from the block that is orthogonalised).

    Orthogonalises whatever leaf it is given: `muon` sends only matrices here. Momentum has the type of the parameters.
    """
    table = schedule_table(schedule)
    check_finite(momentum=momentum, rms=rms)

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        summed, ahead = accumulate(grads, state.momentum, momentum, nesterov)
        return orthogonalise(ahead, layouts, schedule=table, rms=rms, dtype=dtype), MuonState(summed)

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: Any,
    *,
    layouts: Any,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: Any = 0.1,
    schedule: str | Schedule = "muon5",
    rms: float | RMS = 0.2,
    decay: Decay = "coupled",
    dtype: str | jnp.dtype = "float32",
    roles: tuple[str, ...] = ("matrix",),
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    adamw: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon for the parameters whose role is among `roles`, AdamW with the same rate and decay for all others (Moonlight,
    arXiv 2502.16982, section 2.2). The decay is not multiplied by the RMS factor.

    `adamw` replaces the transform of the others, with a rate and a decay of its own. `learning_rate` and `weight_decay`
    may be traced scalars or (the rate) schedules; `dtype` is a name rather than a type, since `inject_hyperparams` takes
    anything that can be called for a schedule. Raises `ReproError` at once for hyper-parameters that are not finite,
    and at `init` for a parameter without a layout or without named input and output axes where its role needs them.
    """
    check_finite(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2, eps=eps)
    orthogonalised = scale_by_muon(
        layouts, momentum=momentum, nesterov=nesterov, schedule=schedule, rms=rms, dtype=dtype
    )
    if adamw is None:
        adamw = adamw_for_all(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, decay=decay)

    return by_role(layouts, roles, decayed(orthogonalised, learning_rate, weight_decay, decay), adamw)
