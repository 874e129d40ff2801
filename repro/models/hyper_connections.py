"""Hyper-Connections and their manifold-constrained form: coefficients, and how N residual streams are read and written.

A sublayer f reads `pre x`, and the streams become `res x + post^T f(norm(pre x))` (mHC, arXiv 2512.24880, eq. 3).
Inside this file tokens are the last axes of a coefficient (`res_NNBT`), so that its arithmetic runs over long rows.
"""

from __future__ import annotations

import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Form = Literal["paper", "released"]
Maps = tuple[jax.Array, jax.Array, jax.Array]
"""(pre_NBT, post_NBT, res_NNBT), float32; res_NNBT[i, j] is how much of stream j goes to stream i."""


def sinkhorn(logits: jax.Array, iterations: int = 20) -> jax.Array:
    """exp(logits) over the last two axes, `iterations` times divided by its column sums and then by its row sums (mHC,
    arXiv 2512.24880, eq. 9): rows sum to 1, columns nearly. Differentiated through all iterations."""
    return jnp.moveaxis(_balanced(jnp.moveaxis(logits, (-2, -1), (0, 1)), iterations, 0.0), (0, 1), (-2, -1))


def _balanced(logits_NNBT: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Columns (axis 0 sums to 1) and rows in turn, rows last; `eps` is added where DeepSeek-V4's code adds it."""
    # Both divisions of the first round as a softmax: afterwards no row or column can underflow, whatever the logits.
    first = jax.nn.log_softmax(logits_NNBT, 0)
    if eps:
        first = jnp.exp(first) + eps
        first /= first.sum(1, keepdims=True) + eps
    else:
        first = jax.nn.softmax(first, 1)

    # All later rounds only scale rows and columns. The two vectors are less to compute and to keep than the matrix.
    def round_(scales: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
        row_NBT, column_NBT = scales
        column_NBT /= column_NBT * (first * row_NBT[:, None]).sum(0) + eps
        row_NBT /= row_NBT * (first * column_NBT[None]).sum(1) + eps
        return (row_NBT, column_NBT), None

    ones = jnp.ones_like(first[0])
    (row_NBT, column_NBT), _ = jax.lax.scan(round_, (ones, ones), length=iterations - 1)
    return row_NBT[:, None] * first * column_NBT[None]


def _projected(x_BTND: jax.Array, phi: jax.Array, eps: float) -> jax.Array:
    """(x phi) / rms(x) over all streams of a token at once (mHC, eq. 14 to 16), tokens last."""
    x = x_BTND.astype(jnp.float32).reshape(*x_BTND.shape[:2], -1)
    z_BTK = x @ phi / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return jnp.moveaxis(z_BTK, -1, 0)


def _raw(z_KBT: jax.Array, bias: jax.Array, alpha: jax.Array, streams: int) -> Maps:
    """alpha z + bias, cut into [reading | writing | mixing], the mixing part flat."""
    cuts = (streams, 2 * streams)
    parts = zip(jnp.split(z_KBT, cuts), jnp.split(bias, cuts), alpha, strict=True)
    return tuple(a * z + b[:, None, None] for z, b, a in parts)


def manifold_maps(
    x_BTND: jax.Array, phi: jax.Array, bias: jax.Array, alpha: jax.Array, *, iterations: int = 20, eps: float = 1e-6,
    norm_eps: float = 1e-6, form: Form = "paper",
) -> Maps:  # fmt: skip
    """`mhc_maps` with tokens last."""
    N = x_BTND.shape[2]
    eps = eps if form == "released" else 0.0
    pre, post, res = _raw(_projected(x_BTND, phi, norm_eps), bias, alpha, N)
    logits_NNBT = res.reshape(N, N, *res.shape[1:])
    logits_NNBT = logits_NNBT if form == "paper" else logits_NNBT.swapaxes(0, 1)
    return jax.nn.sigmoid(pre) + eps, 2 * jax.nn.sigmoid(post), _balanced(logits_NNBT, iterations, eps)


def mhc_maps(
    x_BTND: jax.Array, phi: jax.Array, bias: jax.Array, alpha: jax.Array, *, iterations: int = 20, eps: float = 1e-6,
    norm_eps: float = 1e-6, form: Form = "paper",
) -> Maps:  # fmt: skip
    """Coefficients (pre_BTN, post_BTN, res_BTNN) of mHC, float32 (arXiv 2512.24880, eq. 7 to 19).

    `phi [N D, 2N + N N]`, `bias [2N + N N]`, `alpha [3]`, each as [reading | writing | mixing by rows]. Form `released`
    is that of DeepSeek-V4's code: it reads the N x N logits as the transpose of the mixing matrix, and adds `eps` to
    the reading weights and to every sum of the Sinkhorn rounds.
    """
    found = manifold_maps(
        x_BTND, phi, bias, alpha, iterations=iterations, eps=eps, norm_eps=norm_eps, form=form
    )  # fmt: skip
    return tuple(jnp.moveaxis(m, range(m.ndim - 2), range(2, m.ndim)) for m in found)


def permutations(streams: int) -> np.ndarray:
    """All N! permutation matrices [N!, N, N], the identity first."""
    return np.eye(streams, dtype=np.float32)[list(itertools.permutations(range(streams)))]


def lite_maps(x_BTND: jax.Array, phi: jax.Array, bias: jax.Array, alpha: jax.Array, *, norm_eps: float = 1e-6) -> Maps:
    """mHC-lite (arXiv 2601.05732): the mixing matrix is a convex combination of all permutation matrices, so exactly
    doubly stochastic. `phi [N D, 2N + N!]`; tokens last."""
    pre, post, res = _raw(_projected(x_BTND, phi, norm_eps), bias, alpha, x_BTND.shape[2])
    res_NNBT = jnp.tensordot(permutations(x_BTND.shape[2]).transpose(1, 2, 0), jax.nn.softmax(res, 0), 1)
    return jax.nn.sigmoid(pre), 2 * jax.nn.sigmoid(post), res_NNBT


def hyper_maps(
    x_BTND: jax.Array, theta_DM: jax.Array, bias: jax.Array, alpha: jax.Array, *, norm_eps: float = 1e-6
) -> Maps:
    """Unconstrained coefficients of Hyper-Connections (arXiv 2409.19606) as mHC states them (arXiv 2512.24880, eq. 5):
    alpha tanh(theta x~) + bias, with x~ the RMSNorm of each stream by itself. `theta_DM` has M = 2 + N columns
    [reading | writing | rows of the mixing matrix], `bias` is as in `mhc_maps`; tokens last."""
    N, x = x_BTND.shape[2], x_BTND.astype(jnp.float32)
    z_BTNM = x @ theta_DM * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + norm_eps)
    z_MNBT = jnp.tanh(z_BTNM.transpose(3, 2, 0, 1))
    pre, post, res = _raw(z_MNBT.reshape(-1, *z_MNBT.shape[2:]), bias, alpha, N)
    return pre, post, res.reshape(N, N, *res.shape[1:])


def read_streams(x_BTND: jax.Array, pre_NBT: jax.Array) -> jax.Array:
    """sum_i pre_i x_i: what the sublayer's norm sees, [B, T, D], in the type of x."""
    terms = (pre_NBT[i, ..., None] * x_BTND[:, :, i] for i in range(len(pre_NBT)))
    return sum(terms).astype(x_BTND.dtype)


def write_streams(x_BTND: jax.Array, y_BTD: jax.Array, post_NBT: jax.Array, res_NNBT: jax.Array) -> jax.Array:
    """sum_j res_ij x_j + post_i y for every stream i, in the type of x."""
    N = len(post_NBT)
    mixed = [sum(res_NNBT[i, j, ..., None] * x_BTND[:, :, j] for j in range(N)) for i in range(N)]
    return jnp.stack([mixed[i] + post_NBT[i, ..., None] * y_BTD for i in range(N)], 2).astype(x_BTND.dtype)


def head_weights(
    x_BTND: jax.Array, phi: jax.Array, bias: jax.Array, alpha: jax.Array, *, eps: float = 1e-6, norm_eps: float = 1e-6
) -> jax.Array:
    """Reading weights [N, B, T] of DeepSeek-V4's readout, sigmoid(alpha z + bias) + eps, with `phi [N D, N]`,
    `bias [N]` and `alpha []` of its own."""
    return jax.nn.sigmoid(alpha * _projected(x_BTND, phi, norm_eps) + bias[:, None, None]) + eps
