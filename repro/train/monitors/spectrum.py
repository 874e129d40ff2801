"""Singular values of the matrices of a parameter tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from repro.decompositions import eigvalsh
from repro.models import ModelConfig
from repro.optim.adafactor import matrix_layout
from repro.optim.layout import Layout, matched, to_matrices
from repro.train.monitors.tensors import Tensor, tensors, together

ROLES = ("matrix", "embedding", "head", "router")


class Spectrum(NamedTuple):
    """Of every matrix [M], float32; of the heads or experts that are matrices of their own the worst: the largest
    `sigma_max`, the smallest of the others."""

    sigma_max: jax.Array
    """Largest singular value."""
    stable_rank: jax.Array
    """|W|_F^2 / sigma_max^2; 0 for a matrix of zeros."""
    entropy: jax.Array
    """-(1 / log n) sum p log p with p = sigma^2 / sum sigma^2 over n singular values (Moonlight, arXiv 2502.16982,
    section 3.4): 1 is even, 0 is rank one."""


def _wide(w: jax.Array) -> jax.Array:
    """Matrices with no more rows than columns, and the same singular values."""
    return jnp.swapaxes(w, -1, -2) if w.shape[-2] > w.shape[-1] else w


def singular_squares(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squares of the singular values [..., n] of matrices [..., A, B] in units of their sum, ascending, n = min(A, B),
    and the Frobenius norms [...]. Eigenvalues of the smaller Gram matrix in float32: what is below 1e-7 is rounding."""
    w = w.astype(jnp.float32)
    norm = jnp.linalg.norm(w, axis=(-2, -1))
    usable = jnp.isfinite(norm) & (norm > 0)
    unit = jnp.where(usable[..., None, None], w / jnp.where(usable, norm, 1.0)[..., None, None], 0.0)
    wide = _wide(unit)
    gram = jnp.matmul(wide, jnp.swapaxes(wide, -1, -2), precision="highest")
    squares = jnp.maximum(eigvalsh(gram), 0.0)
    return jnp.where(jnp.isfinite(norm)[..., None], squares, jnp.nan), norm


def spectrum(w: jax.Array) -> Spectrum:
    """The spectrum of matrices [..., A, B]; fields [...]."""
    squares, norm = singular_squares(w)
    largest, n = squares[..., -1], squares.shape[-1]
    total = squares.sum(-1, keepdims=True)
    p = squares / jnp.where(total > 0, total, 1.0)
    log_p = jnp.log(jnp.where(p > 0, p, 1.0))
    entropy = -(p * log_p).sum(-1) / jnp.log(float(n)) if n > 1 else jnp.where(total[..., 0] > 0, 1.0, 0.0)
    return Spectrum(
        norm * jnp.sqrt(largest),
        jnp.where(largest > 0, total[..., 0] / jnp.where(largest > 0, largest, 1.0), largest),
        entropy,
    )


def _matrices(tree: Any, layouts: Any) -> list[tuple[str, jax.Array, Layout, Layout]]:
    """(name, leaf, its layout, which of its axes are rows and columns) of every parameter that is a matrix."""
    found = [(n, x, own, matrix_layout(x.shape, own)) for n, x, own in matched(tree, layouts) if own.role in ROLES]
    return [entry for entry in found if entry[3] is not None]


def matrix_entries(model: ModelConfig, params: Any, layouts: Any) -> tuple[Tensor, ...]:
    """The entries of metrics over matrices [M], in the order of `tensors`."""
    names = {name for name, *_ in _matrices(params, layouts)}
    return tuple(entry for entry in tensors(model, params, layouts) if entry.parameter in names)


def spectra(tree: Any, layouts: Any) -> Spectrum:
    """The spectrum of every matrix of a tree like the parameters, [M]."""
    found = _matrices(tree, layouts)
    # Matrices of one shape together: fewer and larger programs.
    stacks = [_wide(to_matrices(leaf, rule)) for _, leaf, _, rule in found]
    spectra_of = together([stack.reshape(-1, *stack.shape[-2:]) for stack in stacks], spectrum)
    worst = (jnp.max, jnp.min, jnp.min)
    parts: list[list[jax.Array]] = [[], [], []]
    for (_, _, own, _), stack, values in zip(found, stacks, spectra_of, strict=True):
        # The layer axis is the first of a stack, so it stays the first of the matrices.
        layers = 1 if own.layer is None else stack.shape[0]
        for part, value, reduce in zip(parts, values, worst, strict=True):
            part.append(reduce(value.reshape(layers, -1), axis=1))
    return Spectrum(*map(jnp.concatenate, parts))
