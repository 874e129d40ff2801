"""Newton–Schulz iterations towards the orthogonal factor of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from repro.errors import ReproError

Schedule = tuple[tuple[float, float, float], ...]

NS_SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        # Keller Jordan's quintic, five times: lifts small singular values fast and leaves all near 1, not at 1
        # (Jordan et al., "Muon", 2024; used unchanged by Moonlight, arXiv 2502.16982, section 2.1).
        "muon5": ((3.4445, -4.7750, 2.0315),) * 5,
        # Eight lifting steps, then two that converge to 1 (DeepSeek-V4 report, hybrid Newton–Schulz).
        "hybrid10": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
        # The classical cubic: slow, monotone, exact in the limit (Higham, Functions of Matrices, 2008, eq. 8.20).
        "cubic": ((1.5, -0.5, 0.0),) * 30,
    }
)


def schedule_table(schedule: str | Schedule) -> Schedule:
    """The rows (a, b, c) of a named schedule, or the given table itself. Raises `ReproError` for an unknown name."""
    if isinstance(schedule, str):
        if schedule not in NS_SCHEDULES:
            raise ReproError(f"Newton–Schulz schedule {schedule!r} is unknown; known are {', '.join(NS_SCHEDULES)}.")
        return NS_SCHEDULES[schedule]
    return tuple((float(a), float(b), float(c)) for a, b, c in schedule)


def newton_schulz(x: jax.Array, schedule: str | Schedule = "muon5", *, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Approximates U V^T for x = U S V^T on the last two axes; leading axes are a batch. Returns x's dtype.

    One step maps X to a X + (b A + c A A) X with A = X X^T, on the wide orientation, after X is divided by its
    Frobenius norm. The number of steps is the number of rows of the schedule. The norm is taken in float32 after an
    exact power-of-two rescaling, so the result does not depend on the scale of x; zero stays zero. `dtype` is the type
    of the operands of the matrix products; everything else, their sums included, is float32.
    Source: Moonlight (arXiv 2502.16982), section 2.1.
    """
    table = schedule_table(schedule)
    tall = x.shape[-2] > x.shape[-1]
    y = jnp.swapaxes(x, -1, -2) if tall else x
    y = y.astype(jnp.float32)
    # Without this the squares of a tiny or huge matrix under- or overflow in the norm.
    _, exponent = jnp.frexp(jnp.max(jnp.abs(y), (-2, -1), keepdims=True))
    y = jnp.ldexp(y, -exponent)
    norm = jnp.sqrt(jnp.sum(y * y, (-2, -1), keepdims=True))
    y = y / jnp.where(norm > 0, norm, 1.0)

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        # By default XLA multiplies float32 as TF32 on GPUs and as bfloat16 on TPUs.
        return jnp.matmul(
            left.astype(dtype), right.astype(dtype), precision="highest", preferred_element_type=jnp.float32
        )

    for a, b, c in table:
        gram = product(y, jnp.swapaxes(y, -1, -2))
        y = a * y + product(b * gram + c * product(gram, gram), y)
    return (jnp.swapaxes(y, -1, -2) if tall else y).astype(x.dtype)
