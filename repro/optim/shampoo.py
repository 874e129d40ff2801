"""Shampoo: a matrix update preconditioned on both sides."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.decompositions import eigh
from repro.optim.adamw import Decay, adamw, decayed
from repro.optim.finite import check_adam, check_positive
from repro.optim.groups import blocks_of, by_role, tree_of
from repro.optim.muon import RMS, update_factor


class ShampooState(NamedTuple):
    """`momentum`: a tree like the parameters. `rows [..., A, A]` and `columns [..., B, B]`: the statistics of every
    A x B block in turn. All float32."""

    count: jax.Array
    momentum: Any
    rows: tuple[jax.Array, ...]
    columns: tuple[jax.Array, ...]


def times(x: jax.Array, y: jax.Array) -> jax.Array:
    """The product of float32 matrices in full precision on every backend."""
    return jnp.matmul(x, y, precision="float32")


def turned(x: jax.Array) -> jax.Array:
    """The transposed matrices."""
    return jnp.swapaxes(x, -1, -2)


def statistics(blocks: list[jax.Array]) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """G G^T and G^T G of every block."""
    return tuple(times(g, turned(g)) for g in blocks), tuple(times(turned(g), g) for g in blocks)


def inverse_fourth_root(x: jax.Array, eps: float) -> jax.Array:
    """x^-1/4 of symmetric matrices [..., A, A] that are not negative; eigenvalues below eps times the largest count as
    that much. Zero where x is zero."""
    values, vectors = eigh(x)
    largest = values[..., -1:]
    roots = jnp.where(largest > 0, jnp.maximum(values, eps * largest) ** -0.25, 0.0)
    roots = jnp.where(jnp.isnan(largest), jnp.nan, roots)
    return times(vectors * roots[..., None, :], turned(vectors))


def scale_by_shampoo(
    layouts: Any,
    *,
    b1: float | None = None,
    b2: float | None = None,
    eps: float = 1e-6,
    rms: float | RMS | None = None,
) -> optax.GradientTransformation:
    """L^-1/4 G R^-1/4 for every matrix of the layout, L += G G^T and R += G^T G (Gupta et al., arXiv 1802.09568,
    algorithm 1). Where L and R hold one gradient this is U V^T of G = U S V^T, the target of Muon.

    With `b2` L and R are debiased running means instead of sums, with `b1` G is one too; with `rms` the block is
    multiplied by `muon.update_factor`. Eigenvalues in float32: singular values of G below sqrt(eps) of the largest are
    lifted less (the paper adds an absolute eps I instead). optax has no Shampoo.
    """
    check_adam(b1=b1, b2=b2)
    check_positive(eps=eps, rms=rms)

    def init(params: Any) -> ShampooState:
        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
        rows, columns = statistics(blocks_of(zeros, layouts))
        return ShampooState(jnp.zeros((), jnp.int32), zeros, rows, columns)

    def update(grads: Any, state: ShampooState, params: Any = None) -> tuple[Any, ShampooState]:
        del params
        count = optax.safe_increment(state.count)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        gathered = statistics(blocks_of(wide, layouts))
        if b2 is None:
            rows, columns = jax.tree.map(jnp.add, (state.rows, state.columns), gathered)
            used = rows, columns
        else:
            rows, columns = optax.tree.update_moment(gathered, (state.rows, state.columns), b2, 1)
            used = optax.tree.bias_correction((rows, columns), b2, count)
        momentum = state.momentum
        if b1 is not None:
            momentum = optax.tree.update_moment(wide, state.momentum, b1, 1)
            wide = optax.tree.bias_correction(momentum, b1, count)
        blocks = []
        for g, left, right in zip(blocks_of(wide, layouts), *used, strict=True):
            block = times(times(inverse_fourth_root(left, eps), g), inverse_fourth_root(right, eps))
            blocks.append(block if rms is None else update_factor(rms, *g.shape[-2:]) * block)
        return tree_of(blocks, grads, layouts), ShampooState(count, momentum, rows, columns)

    return optax.GradientTransformation(init, update)


def shampoo(
    learning_rate: Any,
    *,
    layouts: Any,
    weight_decay: Any = 0.1,
    decay: Decay = "coupled",
    b1: float | None = 0.9,
    b2: float | None = 0.95,
    eps: float = 1e-6,
    rms: float | RMS | None = 0.2,
    roles: tuple[str, ...] = ("matrix",),
    adamw_b2: float = 0.95,
) -> optax.GradientTransformationExtraArgs:
    """Shampoo for matrices, AdamW with the same rate and decay for all others.

    `b2=None` with `b1=None` and `rms=None` is the published rule, whose steps shrink like those of AdaGrad; the
    defaults, averages and the size of an AdamW update, are this package's, for runs beside the other optimizers.
    """
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay)
    scaled = scale_by_shampoo(layouts, b1=b1, b2=b2, eps=eps, rms=rms)
    others = adamw(learning_rate, b2=adamw_b2, weight_decay=weight_decay, decay=decay)
    return by_role(layouts, roles, decayed(scaled, learning_rate, weight_decay, decay), others)
