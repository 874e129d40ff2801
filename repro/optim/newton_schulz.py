"""Newton–Schulz iterations towards the orthogonal factor of a matrix.

Every schedule is a table of rows (a, b, c), one per step: X becomes a X + (b A + c A A) X with A = X X^T, so a singular
value s becomes a s + b s^3 + c s^5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from repro.errors import ReproError

Schedule = tuple[tuple[float, float, float], ...]

# Amsel, Persson, Musco and Gower, arXiv 2505.16932, appendix A: each row is the best odd quintic for the interval that the
# row before it leaves of [1e-3, 1]. All rows but the last are scaled by the safety factor 1.01 given there.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

NS_SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        # Keller Jordan's quintic, five times: lifts small singular values fast and leaves all near 1, not at 1
        # (Jordan et al., "Muon", 2024; used unchanged by Moonlight, arXiv 2502.16982, section 2.1).
        "muon5": ((3.4445, -4.7750, 2.0315),) * 5,
        # Eight lifting steps, then two that converge to 1 (DeepSeek-V4 report, hybrid Newton–Schulz).
        "hybrid10": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
        # Rows fitted one after another; converges to 1 from a thousandth of the norm up. In Muon the first five are usual.
        "polar_express": (*((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS), (1.875, -1.25, 0.375)),
        # The classical cubic: slow, monotone, exact in the limit (Higham, Functions of Matrices, 2008, eq. 8.20).
        "cubic": ((1.5, -0.5, 0.0),) * 30,
    }
)


_RESTART = 3
"""Steps between two products with the long side. On the Gram side alone an error of the small singular values grows
with every step; three steps at a time were as exact as the direct form in float32, ten diverged."""

_GRAM_FROM = 2.0
"""Aspect ratio from which iterating on the Gram matrix needs fewer operations: 8 r + 28 against 20 r + 10 per cubed small
side, for five steps and aspect ratio r."""


def schedule_table(schedule: str | Schedule, steps: int | None = None) -> Schedule:
    """The rows (a, b, c) of a named schedule, or the given table itself.

    Raises `ReproError` for an unknown name, a row that is not three finite numbers, or `steps` that contradict the table.
    """
    if isinstance(schedule, str):
        if schedule not in NS_SCHEDULES:
            raise ReproError(f"Newton–Schulz schedule {schedule!r} is unknown; known are {', '.join(NS_SCHEDULES)}.")
        table = NS_SCHEDULES[schedule]
    else:
        table = tuple(tuple(map(float, row)) for row in schedule)
        if any(len(row) != 3 or not all(map(math.isfinite, row)) for row in table):
            raise ReproError("a Newton–Schulz schedule is a table of rows of three finite numbers (a, b, c).")
    if steps is not None and steps != len(table):
        raise ReproError(
            f"the Newton–Schulz schedule has {len(table)} rows, one per step, and {steps} steps were asked for; "
            "leave out the steps, or give a table of that many rows."
        )
    return table


def newton_schulz(
    x: jax.Array, schedule: str | Schedule = "muon5", *, steps: int | None = None, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """Approximates U V^T for x = U S V^T on the last two axes; leading axes are a batch. Returns x's dtype.

    One step maps X to a X + (b A + c A A) X with A = X X^T, on the wide orientation, after X is divided by its
    Frobenius norm. The number of steps is the number of rows of the schedule; `steps` only checks it. The norm is taken
    in float32 after an exact power-of-two rescaling, so the result does not depend on the scale of x; zero stays zero.
    `dtype` is the type of the operands of the matrix products; everything else, their sums included, is float32.

    In float32 a matrix of aspect ratio 2 or more is iterated on its small side: the polynomials of A multiply up to one
    small matrix, and only every third step touches the long side.
    Source: Moonlight (arXiv 2502.16982), section 2.1.
    """
    table = schedule_table(schedule, steps)
    if x.ndim > 2 and math.prod(x.shape[:-2]) == 1:  # a stack of one is that one, also to the compiler
        return newton_schulz(x.reshape(x.shape[-2:]), table, dtype=dtype).reshape(x.shape)
    tall = x.shape[-2] > x.shape[-1]
    y = jnp.swapaxes(x, -1, -2) if tall else x
    # The barrier keeps a transposition out of the products, which would add up in another order.
    y = jax.lax.optimization_barrier(_rescaled(y.astype(jnp.float32)))
    norm = jnp.sqrt(_pairwise_sum(y * y))
    y = y / jnp.where(norm > 0, norm, 1.0)
    small, large = y.shape[-2:]
    if jnp.dtype(dtype) == jnp.float32 and large >= _GRAM_FROM * small:
        for start in range(0, len(table), _RESTART):
            y = _on_gram_side(y, table[start : start + _RESTART])
    else:
        for a, b, c in table:
            gram = _product(y, jnp.swapaxes(y, -1, -2), dtype)
            y = a * y + _product(b * gram + c * _product(gram, gram, dtype), y, dtype)
    return (jnp.swapaxes(y, -1, -2) if tall else y).astype(x.dtype)


def _rescaled(y: jax.Array) -> jax.Array:
    """y over the power of two at or below its largest entry, which is exact: without this the squares of a tiny or huge
    matrix under- or overflow in the norm."""
    largest = jnp.max(jnp.abs(y), (-2, -1), keepdims=True)
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000  # frexp takes ten times as long to compile
    power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    return y / jnp.where(power > 0, power, 1.0)


def _pairwise_sum(y: jax.Array) -> jax.Array:
    """The sum over the last two axes, kept, in one fixed order: XLA adds up a single matrix in another order than the same
    matrix in a stack, and the iteration would make a last bit of the norm visible."""
    for axis in (y.ndim - 2, y.ndim - 1):
        n = 1 << (y.shape[axis] - 1).bit_length()  # zeros up to a power of two
        y = jax.lax.pad(y, jnp.float32(0), [(0, (n - y.shape[axis]) * (i == axis), 0) for i in range(y.ndim)])
        while n > 1:
            n //= 2
            low, high = (jax.lax.slice_in_dim(y, start, start + n, axis=axis) for start in (0, n))
            y = low + high
            if n.bit_length() % 4 == 1:  # fused, k levels become one loop whose body has 2^k sums
                y = jax.lax.optimization_barrier(y)
    return y


def _product(left: jax.Array, right: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    # By default XLA multiplies float32 as TF32 on GPUs and as bfloat16 on TPUs.
    return jnp.matmul(left.astype(dtype), right.astype(dtype), precision="highest", preferred_element_type=jnp.float32)


def _on_gram_side(y: jax.Array, rows: Schedule) -> jax.Array:
    """The steps `rows` applied to y: with Q = a I + b A + c A^2 a step is X <- Q X, and A <- Q A Q."""
    gram = _product(y, jnp.swapaxes(y, -1, -2))
    eye = jnp.eye(y.shape[-2], dtype=jnp.float32)
    step = total = None
    for a, b, c in rows:
        if step is not None:
            gram = _product(step, _product(gram, step))
        step = a * eye + b * gram + c * _product(gram, gram)
        total = step if total is None else _product(step, total)
    return _product(total, y)
