"""Hyper-Connections and their manifold-constrained form: coefficients, and how N residual streams are read and written.

A sublayer f reads `pre x`, and the streams become `res x + post^T f(norm(pre x))` (mHC, arXiv 2512.24880, eq. 3).
Inside this file tokens are the last axes of a coefficient (`res_NNBT`), so that its arithmetic runs over long rows.
"""

from __future__ import annotations

import functools
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from repro.errors import ReproError

Form = Literal["paper", "released"]
Maps = tuple[jax.Array, jax.Array, jax.Array]
"""(pre_NBT, post_NBT, res_NNBT), float32; res_NNBT[i, j] is how much of stream j goes to stream i."""


def sinkhorn(logits: jax.Array, iterations: int = 20) -> jax.Array:
    """exp(logits) over the last two axes, `iterations` times divided by its column sums and then by its row sums (mHC,
    arXiv 2512.24880, eq. 9): rows sum to 1, columns nearly. The gradient passes through all iterations, which the
    backward pass computes again.

    Raises `ReproError` for matrices that are not square, or no iteration.
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ReproError(f"sinkhorn needs square matrices on the last two axes, not shape {logits.shape}.")
    if iterations < 1:
        raise ReproError(f"sinkhorn needs at least one iteration, not {iterations}.")
    return jnp.moveaxis(_balanced(jnp.moveaxis(logits, (-2, -1), (0, 1)), iterations, 0.0), (0, 1), (-2, -1))


@functools.partial(jax.checkpoint, static_argnums=(1, 2))
def _balanced(logits_NNBT: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Columns (axis 0 sums to 1) and rows in turn, rows last; `eps` is added where DeepSeek-V4's code adds it."""
    # Both divisions of the first round as a softmax: afterwards no row or column can underflow, whatever the logits.
    first = jax.nn.log_softmax(logits_NNBT, 0)
    if eps:
        first = jnp.exp(first) + eps
        first /= first.sum(1, keepdims=True) + eps
    else:
        first = jax.nn.softmax(first, 1)

    def half_round(m_NNBT: jax.Array, _: None) -> tuple[jax.Array, None]:
        # Slices are added one by one, since XLA's reduction over a leading axis took 20 times as long on a CPU.
        total_NBT = sum(m_NNBT[i] for i in range(len(m_NNBT)))
        return (m_NNBT / (total_NBT + eps)).swapaxes(0, 1), None

    return jax.lax.scan(half_round, first, length=2 * (iterations - 1))[0]


def _narrow(x: jax.Array, w: jax.Array) -> jax.Array:
    """x w for a w with few columns."""
    # The gradient of w.T has long rows, which takes a quarter of the time; the barrier keeps XLA from turning it back.
    return x @ jax.lax.optimization_barrier(w.T).T


def _projected(x_BTND: jax.Array, phi: jax.Array, eps: float) -> jax.Array:
    """(x phi) / rms(x) over all streams of a token at once (mHC, eq. 14 to 16), tokens last."""
    x = x_BTND.astype(jnp.float32).reshape(*x_BTND.shape[:2], -1)
    z_BTK = _narrow(x, phi) * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
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
    if form not in Form.__args__:
        raise ReproError(f"form {form!r} is unknown; known are {', '.join(Form.__args__)}.")
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
    z_BTNM = _narrow(x, theta_DM) * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + norm_eps)
    z_MNBT = jnp.tanh(z_BTNM.transpose(3, 2, 0, 1))
    pre, post, res = _raw(z_MNBT.reshape(-1, *z_MNBT.shape[2:]), bias, alpha, N)
    return pre, post, res.reshape(N, N, *res.shape[1:])


# The derivatives are written out: XLA's own of the slices below are sums of padded copies of all streams, with which a
# training step on a CPU took four times as long.


@jax.custom_vjp
def read_streams(x_BTND: jax.Array, pre_NBT: jax.Array) -> jax.Array:
    """sum_i pre_i x_i: what the sublayer's norm sees, [B, T, D], in the type of x."""
    return _sum(pre_NBT, x_BTND).astype(x_BTND.dtype)


def _sum(weights_NBT: jax.Array, x_BTND: jax.Array) -> jax.Array:
    return sum(weights_NBT[i, ..., None] * x_BTND[:, :, i] for i in range(len(weights_NBT)))


def _read_forward(x_BTND: jax.Array, pre_NBT: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return read_streams(x_BTND, pre_NBT), (x_BTND, pre_NBT)


def _read_backward(saved: tuple[jax.Array, jax.Array], g_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTND, pre_NBT = saved
    dx_BTND = jnp.stack([w_BT[..., None] * g_BTD for w_BT in pre_NBT], 2)
    return dx_BTND.astype(x_BTND.dtype), _products("btd,btnd->nbt", g_BTD, x_BTND)


def _products(subscripts: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *arrays, preferred_element_type=jnp.float32)


read_streams.defvjp(_read_forward, _read_backward)


@jax.custom_vjp
def write_streams(x_BTND: jax.Array, y_BTD: jax.Array, post_NBT: jax.Array, res_NNBT: jax.Array) -> jax.Array:
    """sum_j res_ij x_j + post_i y for every stream i, in the type of x."""
    streams = [_sum(row, x_BTND) + w_BT[..., None] * y_BTD for row, w_BT in zip(res_NNBT, post_NBT, strict=True)]
    return jnp.stack(streams, 2).astype(x_BTND.dtype)


def _write_forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return write_streams(*args), args


def _write_backward(saved: tuple[jax.Array, ...], g_BTND: jax.Array) -> tuple[jax.Array, ...]:
    x_BTND, y_BTD, post_NBT, res_NNBT = saved
    dx_BTND = jnp.stack([_sum(res_NNBT[:, j], g_BTND) for j in range(len(post_NBT))], 2)
    return (
        dx_BTND.astype(x_BTND.dtype),
        _sum(post_NBT, g_BTND).astype(y_BTD.dtype),
        _products("btnd,btd->nbt", g_BTND, y_BTD),
        _products("btid,btjd->ijbt", g_BTND, x_BTND),
    )


write_streams.defvjp(_write_forward, _write_backward)


def head_weights(
    x_BTND: jax.Array, phi: jax.Array, bias: jax.Array, alpha: jax.Array, *, eps: float = 1e-6, norm_eps: float = 1e-6
) -> jax.Array:
    """Reading weights [N, B, T] of DeepSeek-V4's readout, sigmoid(alpha z + bias) + eps, with `phi [N D, N]`,
    `bias [N]` and `alpha []` of its own."""
    return jax.nn.sigmoid(alpha * _projected(x_BTND, phi, norm_eps) + bias[:, None, None]) + eps
