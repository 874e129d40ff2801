"""What the singular values of a matrix or of an update say: entropy, participation, alignment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def svd_entropy(x: np.ndarray) -> np.ndarray:
    """H = -sum p log p / log n over p = s^2 / sum s^2, for the n singular values s of each matrix [..., A, B], in float64
    on the host: 1 where all are equal, 0 at rank one (Moonlight, arXiv 2502.16982, section 3.4). Zero matrices give 0.
    """
    squares = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False) ** 2
    total = squares.sum(-1, keepdims=True)
    p = squares / np.where(total > 0, total, 1.0)
    if p.shape[-1] == 1:
        return np.zeros(p.shape[:-1])
    return -np.sum(p * np.log(np.where(p > 0, p, 1.0)), -1) / np.log(p.shape[-1])


def participation(x: jax.Array) -> jax.Array:
    """(sum s^2)^2 / sum s^4 over the singular values s of each matrix [..., A, B]: between 1 (rank one) and min(A, B)
    (all equal). Needs one product and no decomposition. Zero matrices give 0."""
    x = x.astype(jnp.float32)
    x = jnp.swapaxes(x, -1, -2) if x.shape[-2] > x.shape[-1] else x
    x = _of_norm_one(x)
    gram = jnp.matmul(x, jnp.swapaxes(x, -1, -2), precision="highest")
    fourth = jnp.sum(gram * gram, (-2, -1))
    return jnp.where(fourth > 0, 1.0 / jnp.where(fourth > 0, fourth, 1.0), 0.0)


def top_direction(x: jax.Array, iterations: int = 16) -> tuple[jax.Array, jax.Array]:
    """Approximate top singular vectors (u [..., A], v [..., B]) of each matrix, by power iteration from a fixed start."""
    x = _of_norm_one(x.astype(jnp.float32))
    unit = lambda v: v / jnp.maximum(jnp.linalg.norm(v, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    start = jnp.cos(jnp.arange(x.shape[-1]) * 1.7)  # no symmetry that a matrix could be orthogonal to

    def again(_: int, v: jax.Array) -> jax.Array:
        return unit(jnp.einsum("...ab,...a->...b", x, jnp.einsum("...ab,...b->...a", x, v)))

    v = jax.lax.fori_loop(0, iterations, again, jnp.broadcast_to(unit(start), (*x.shape[:-2], x.shape[-1])))
    return unit(jnp.einsum("...ab,...b->...a", x, v)), v


def top_share(weight: jax.Array, change: jax.Array, iterations: int = 16) -> jax.Array:
    """u^T change v / ||change||_F for the top singular vectors u, v of `weight`, per matrix: which part of a change, with
    its sign, goes into making the largest singular value larger. Between -1 and 1; 1 / sqrt(min(A, B)) at most for an
    orthogonal change. A zero change gives 0."""
    u, v = top_direction(weight, iterations)
    change = _of_norm_one(change.astype(jnp.float32))
    return jnp.einsum("...a,...ab,...b->...", u, change, v)


def _of_norm_one(x: jax.Array) -> jax.Array:
    """x over its Frobenius norm, per matrix; its largest entry is divided out first, since squares leave the range of
    float32 early. Zero stays zero."""
    top = jnp.max(jnp.abs(x), (-2, -1), keepdims=True)
    x = x / jnp.where(top > 0, top, 1.0)
    norm = jnp.sqrt(jnp.sum(x * x, (-2, -1), keepdims=True))
    return x / jnp.where(norm > 0, norm, 1.0)
