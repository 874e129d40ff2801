"""Decompositions of matrices that are safe in a program over several CPU devices.

For a batch of matrices jaxlib's LAPACK calls hand parts of it to the thread pool that the program runs on, and wait
there. With a CPU device per core all threads can come to wait for each other, and the process stands still. A single
matrix is decomposed where the call is, so on a CPU matrices go one by one, under `vmap` too; the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _each(decompose: Callable[[jax.Array], Any], x: jax.Array) -> Any:
    """`decompose` of every matrix of `x` [..., A, B]; results keep the leading axes."""
    if jax.default_backend() != "cpu":
        return decompose(x)
    lead = x.shape[:-2]
    flat = jax.lax.map(jax.custom_batching.sequential_vmap(decompose), x.reshape(-1, *x.shape[-2:]))
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), flat)


def svd(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(U [..., A, n], singular values [..., n] descending, V^T [..., n, B]) of `x` [..., A, B], n = min(A, B)."""
    return _each(lambda m: tuple(jnp.linalg.svd(m, full_matrices=False)), x)


def eigh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Eigenvalues [..., A] ascending, eigenvectors in columns [..., A, A]) of symmetric matrices [..., A, A]."""
    return _each(lambda m: tuple(jnp.linalg.eigh(m)), x)


def eigvalsh(x: jax.Array) -> jax.Array:
    """Eigenvalues [..., A], ascending, of symmetric matrices [..., A, A]."""
    return _each(lambda m: jnp.linalg.eigvalsh(m), x)


def qr(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Q [..., A, n], R [..., n, B]) of `x` [..., A, B], n = min(A, B)."""
    return _each(lambda m: tuple(jnp.linalg.qr(m)), x)
