"""Muon with RMS-matched updates, and AdamW for everything that is not a matrix."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.optim.layout import check_layouts, from_matrices, map_layouts, to_matrices
from repro.optim.newton_schulz import Schedule, newton_schulz, schedule_table

Decay = Literal["coupled", "independent"]


class MuonState(NamedTuple):
    """`momentum`: the running sum M of gradients, a tree like the parameters."""

    momentum: Any


def scale_by_muon(
    layouts: Any,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    schedule: str | Schedule = "muon5",
    rms: float = 0.2,
    dtype: jnp.dtype = jnp.float32,
) -> optax.GradientTransformation:
    """Orthogonalised momentum: M = momentum * M + G, N = G + momentum * M (without Nesterov N = M), and the update
    rms * sqrt(max(A, B)) * NewtonSchulz(N) for each A x B matrix of the layout, which has a root mean square near `rms`
    (Moonlight, arXiv 2502.16982, section 2.2; the factor comes from the block that is orthogonalised).

    Every parameter must be of role `matrix` (or a masked node): `muon` sends the rest elsewhere.
    """
    table = schedule_table(schedule)

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        summed = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, grads)
        ahead = jax.tree.map(lambda g, m: g + momentum * m, grads, summed) if nesterov else summed

        def orthogonalise(layout: Any, n: Any) -> Any:
            if isinstance(n, optax.MaskedNode):
                return n
            blocks = to_matrices(n, layout)
            factor = rms * max(blocks.shape[-2:]) ** 0.5
            return factor * from_matrices(newton_schulz(blocks, table, dtype=dtype), layout, n.shape)

        return map_layouts(orthogonalise, layouts, ahead), MuonState(summed)

    return optax.GradientTransformation(init, update)


def _decayed(
    scaled: optax.GradientTransformation, learning_rate: Any, weight_decay: Any, decay: Decay
) -> optax.GradientTransformation:
    """Decoupled decay of either kind behind a transform that has no learning rate yet."""
    if decay == "coupled":  # W <- W - lr * (U + decay * W)
        return optax.chain(scaled, optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))
    if decay == "independent":  # W <- W - lr * U - decay * W; a schedule of the decay is the caller's
        return optax.chain(
            scaled,
            optax.scale_by_learning_rate(learning_rate),
            optax.add_decayed_weights(-jnp.asarray(weight_decay)),
        )
    raise ReproError(f"weight decay {decay!r} is unknown; known are coupled and independent.")


def adamw(
    learning_rate: Any,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: Any = 0.1,
    decay: Decay = "coupled",
) -> optax.GradientTransformation:
    """AdamW on every parameter (Loshchilov and Hutter, arXiv 1711.05101), gains included.

    `decay="coupled"` equals `optax.adamw` and PyTorch: the decay is multiplied by the learning rate.
    `"independent"` shrinks by `weight_decay` alone; for the rule of Wortsman et al. (arXiv 2309.14322, section 3.2.1) pass
    the decay times the schedule's fraction, as `repro.train` does.
    """
    return _decayed(optax.scale_by_adam(b1=b1, b2=b2, eps=eps), learning_rate, weight_decay, decay)


def muon(
    learning_rate: Any,
    *,
    layouts: Any,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: Any = 0.1,
    schedule: str | Schedule = "muon5",
    rms: float = 0.2,
    decay: Decay = "coupled",
    dtype: jnp.dtype = jnp.float32,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Muon for the parameters whose layout says `matrix`, `adamw` with the same rate and decay for all others
    (Moonlight, arXiv 2502.16982, section 2.2). The decay is not multiplied by the RMS factor.

    `learning_rate` and `weight_decay` may be traced scalars or (the rate) schedules. Raises `ReproError` at `init` for
    a parameter without a layout.
    """
    groups = map_layouts(lambda layout: "muon" if layout.role == "matrix" else "adamw", layouts)
    orthogonalised = scale_by_muon(
        layouts, momentum=momentum, nesterov=nesterov, schedule=schedule, rms=rms, dtype=dtype
    )
    grouped = optax.partition(
        {
            "muon": _decayed(orthogonalised, learning_rate, weight_decay, decay),
            "adamw": adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, decay=decay),
        },
        groups,
    )

    def init(params: Any) -> Any:
        check_layouts(params, layouts)
        return grouped.init(params)

    return optax.GradientTransformationExtraArgs(init, grouped.update)
