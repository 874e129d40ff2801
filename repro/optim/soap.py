"""SOAP: Adam in the eigenbasis of Shampoo's statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.decompositions import eigh, qr
from repro.errors import ReproError
from repro.optim.adamw import Decay, adamw, decayed
from repro.optim.finite import check_adam, check_range
from repro.optim.groups import blocks_of, by_role, tree_of
from repro.optim.shampoo import times, turned


class Block(NamedTuple):
    """Of A x B matrices: the momentum `mu [..., A, B]` as it is, the second moment `nu [..., A, B]` in the basis,
    Shampoo's statistics `rows [..., A, A]` and `columns [..., B, B]`, and their bases, eigenvectors in columns. All
    float32."""

    mu: jax.Array
    nu: jax.Array
    rows: jax.Array
    columns: jax.Array
    row_basis: jax.Array
    column_basis: jax.Array


class SoapState(NamedTuple):
    count: jax.Array
    blocks: tuple[Block, ...]


def scale_by_soap(
    layouts: Any, *, b1: float = 0.95, b2: float = 0.95, eps: float = 1e-8, refresh: int = 10
) -> optax.GradientTransformation:
    """Q_L Adam(Q_L^T G Q_R) Q_R^T for every matrix of the layout, with Q_L and Q_R the eigenvectors of the running
    means of G G^T and G^T G (Vyas et al., arXiv 2409.11321, algorithm 3).

    The momentum is kept unrotated and projected anew in each step. Bases follow by one power iteration and a QR
    factorisation in every `refresh`-th step. The first step only sets them and changes no parameter, as in the released
    code: in its own basis a gradient is diagonal, and Adam would lift the rounding errors beside the diagonal to full
    size. optax has no SOAP.
    """
    check_adam(b1=b1, b2=b2, eps=eps)
    check_range(1, float("inf"), refresh=refresh)
    if isinstance(refresh, float) and not refresh.is_integer():
        raise ReproError(f"refresh is {refresh}; it must be a whole number of steps.")

    def init(params: Any) -> SoapState:
        def empty(w: jax.Array) -> Block:
            *batch, a, b = w.shape
            shapes = (a, b), (a, b), (a, a), (b, b), (a, a), (b, b)
            return Block(*(jnp.zeros((*batch, *shape), jnp.float32) for shape in shapes))

        return SoapState(jnp.zeros((), jnp.int32), tuple(empty(w) for w in blocks_of(params, layouts)))

    def started(g: jax.Array, block: Block) -> tuple[jax.Array, Block]:
        rows, columns = (1 - b2) * times(g, turned(g)), (1 - b2) * times(turned(g), g)
        bases = eigh(rows)[1], eigh(columns)[1]
        return jnp.zeros_like(g), Block(block.mu, block.nu, rows, columns, *bases)

    def stepped(g: jax.Array, block: Block, step: jax.Array) -> tuple[jax.Array, Block]:
        left, right = block.row_basis, block.column_basis
        mu = b1 * block.mu + (1 - b1) * g
        projected = times(times(turned(left), g), right)
        nu = b2 * block.nu + (1 - b2) * jnp.square(projected)
        mean, square = times(times(turned(left), mu), right) / (1 - b1**step), nu / (1 - b2**step)
        u = times(times(left, mean / (jnp.sqrt(square) + eps)), turned(right))
        rows = b2 * block.rows + (1 - b2) * times(g, turned(g))
        columns = b2 * block.columns + (1 - b2) * times(turned(g), g)
        bases = jax.lax.cond(
            step % refresh == 0,
            lambda: (qr(times(rows, left))[0], qr(times(columns, right))[0]),
            lambda: (left, right),
        )
        return u, Block(mu, nu, rows, columns, *bases)

    def update(grads: Any, state: SoapState, params: Any = None) -> tuple[Any, SoapState]:
        del params
        blocks = blocks_of(jax.tree.map(lambda g: g.astype(jnp.float32), grads), layouts)
        step = state.count.astype(jnp.float32)
        done = jax.lax.cond(
            state.count == 0,
            lambda: [started(g, block) for g, block in zip(blocks, state.blocks, strict=True)],
            lambda: [stepped(g, block, step) for g, block in zip(blocks, state.blocks, strict=True)],
        )
        updates = tree_of([u for u, _ in done], grads, layouts)
        return updates, SoapState(optax.safe_increment(state.count), tuple(block for _, block in done))

    return optax.GradientTransformation(init, update)


def soap(
    learning_rate: Any,
    *,
    layouts: Any,
    weight_decay: Any = 0.1,
    decay: Decay = "coupled",
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    refresh: int = 10,
    roles: tuple[str, ...] = ("matrix",),
    adamw_b1: float = 0.9,
    adamw_b2: float = 0.95,
) -> optax.GradientTransformationExtraArgs:
    """SOAP for matrices, AdamW with the same rate and decay for all others. See `scale_by_soap`."""
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay)
    scaled = scale_by_soap(layouts, b1=b1, b2=b2, eps=eps, refresh=refresh)
    others = adamw(learning_rate, b1=adamw_b1, b2=adamw_b2, weight_decay=weight_decay, decay=decay)
    return by_role(layouts, roles, decayed(scaled, learning_rate, weight_decay, decay), others)
