"""Clipping by the global norm, of gradients and not of orthogonalised updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.optim.layout import ROLES, matched


class ClipState(NamedTuple):
    """Of the last step: the global `norm` of what was subject to the clip, and the `factor` it got; float32."""

    norm: jax.Array
    factor: jax.Array


def clip_by_global_norm(
    max_norm: Any, *, layouts: Any = None, except_roles: tuple[str, ...] = ()
) -> optax.GradientTransformation:
    """Multiplies by min(1, max_norm / ||all leaves||_2) (Pascanu et al., arXiv 1211.5063).

    It belongs *before* an optimizer that orthogonalises. Behind it, the norm of an orthogonalised A x B update is
    rms sqrt(A B) whatever the gradient was, and a clip would only divide the rate by a number that grows with the
    width. With `except_roles` (such as `("matrix",)`), parameters of these roles neither count for the norm nor change
    a bit, so that the transform may stand behind `muon` for the other group.

    A norm that is not finite makes the whole group NaN, for a guard to see. `optax.clip_by_global_norm` is right for
    float32 of moderate size; here the norm is float32 for every type, does not overflow before it must, and is kept in
    the state. Raises `ReproError` for a threshold that is not positive and finite, and for roles without layouts.
    """
    if isinstance(max_norm, (int, float)) and not 0 < max_norm < float("inf"):
        raise ReproError(f"max_norm is {max_norm}; it must be positive and finite.")
    for role in except_roles:
        if role not in ROLES:
            raise ReproError(f"role {role!r} is unknown; known are {', '.join(ROLES)}.")
    if except_roles and layouts is None:
        raise ReproError("except_roles needs layouts, which say what role a parameter has.")

    def init(params: Any) -> ClipState:
        del params
        return ClipState(jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32))

    def update(updates: Any, state: ClipState, params: Any = None) -> tuple[Any, ClipState]:
        del state, params
        leaves, treedef = jax.tree.flatten(updates)
        exempt = [False] * len(leaves)
        if except_roles:
            exempt = [layout.role in except_roles for _, _, layout in matched(updates, layouts)]
        subject = [u.astype(jnp.float32) for u, spared in zip(leaves, exempt, strict=True) if not spared]
        norm = _norm(subject)
        over = norm > max_norm
        factor = jnp.where(over, max_norm / jnp.where(over, norm, 1.0), 1.0)
        factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan).astype(jnp.float32)
        leaves = [
            u if spared else (u.astype(jnp.float32) * factor).astype(u.dtype)
            for u, spared in zip(leaves, exempt, strict=True)
        ]
        return treedef.unflatten(leaves), ClipState(norm, factor)

    return optax.GradientTransformation(init, update)


def _norm(leaves: list[jax.Array]) -> jax.Array:
    """||leaves||_2, whose squares cannot overflow or vanish: in units of the largest magnitude."""
    largest = jnp.max(jnp.stack([jnp.zeros((), jnp.float32), *(jnp.max(jnp.abs(x), initial=0.0) for x in leaves)]))
    unit = jnp.where(largest > 0, largest, 1.0)
    return unit * jnp.sqrt(sum((jnp.sum(jnp.square(x / unit)) for x in leaves), jnp.zeros((), jnp.float32)))
