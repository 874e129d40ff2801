"""Float32 seen as integers.

XLA flushes float32 subnormals on some backends, may turn a division into a product with a reciprocal, and computes
exp2 and log2 inexactly. None of this can happen to integers, so exponents, comparisons and roundings work on patterns:
int32 values holding the bits of a float32. A *magnitude* is the pattern of |x|; as patterns of non-negative floats are
ordered like the floats, a maximum of magnitudes is the magnitude of the maximum, and NaN is above infinity.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FRACTION = 0x7FFFFF
HIDDEN = 0x800000
LARGEST = 0x7F7FFFFF
INFINITY = 0x7F800000
NAN = 0x7FC00000
SIGN = -0x80000000

# What stands for zero in an extended pattern: its exponent is below that of every subnormal of float32 (-22), and far
# enough from the ends of int32 that a power of two in [2^-127, 2^127] can be added or taken away.
ZERO = -60 << 23


def to_bits(x: jax.Array) -> jax.Array:
    """The pattern of a float32 array."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(pattern: jax.Array) -> jax.Array:
    """The float32 array of a pattern."""
    return lax.bitcast_convert_type(pattern, jnp.float32)


def magnitude(x: jax.Array) -> jax.Array:
    """The pattern of |x|."""
    return to_bits(x) & ~SIGN


def pattern_of(value: float) -> int:
    """The pattern of a positive Python float, as a float32."""
    return int(np.float32(value).view(np.int32))


def extend(mag: jax.Array) -> jax.Array:
    """A magnitude with its exponent field continued below 1, so that every number is (1 + fraction) 2^(field - 127)."""
    # A subnormal is an integer times 2^-149, and integers below 2^24 convert exactly.
    normalised = to_bits(mag.astype(jnp.float32)) - (149 << 23)
    return jnp.where(mag < HIDDEN, jnp.maximum(normalised, ZERO), mag)


def restore(extended: jax.Array) -> jax.Array:
    """The magnitude of an extended pattern; what lies below the last bit of float32 is cut off."""
    field = extended >> 23
    shifted = ((extended & FRACTION) | HIDDEN) >> jnp.clip(1 - field, 0, 31)
    return jnp.where(field > 0, extended, shifted)


def times_power_of_two(mag: jax.Array, exponent: jax.Array) -> jax.Array:
    """The magnitude times 2^exponent, for a magnitude that is 0 or in [2^-126, 2^127] and an exponent in [-150, 127].

    At most the largest float32.
    """
    # Above this a sum would be read as NaN, or wrap to a negative number.
    largest = LARGEST - (jnp.maximum(exponent, 0) << 23)
    return jnp.where(mag == 0, 0, restore(jnp.minimum(mag, largest) + (exponent << 23)))


def quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """|x| / divisor by IEEE division, for divisor > 0; shapes broadcast.

    XLA replaces a division by a constant or by a broadcast array by a product with the rounded reciprocal, which
    differs in a quarter of all quotients. A divisor that carries the sign of x is neither.
    """
    return x / from_bits((to_bits(x) & SIGN) | to_bits(divisor))
