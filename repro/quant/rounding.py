"""Rounding of float32 to the grid of a format."""

from __future__ import annotations

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from repro.errors import ReproError
from repro.quant.bits import (
    FRACTION,
    HIDDEN,
    INFINITY,
    NAN,
    SIGN,
    ZERO,
    extend,
    from_bits,
    magnitude,
    pattern_of,
    restore,
    to_bits,
)
from repro.quant.codebook import nearest_entry
from repro.quant.formats import Format, format_of

Rounding = Literal["nearest_even", "stochastic", "toward_zero"]
Overflow = Literal["saturate", "ieee"]


def round_to(
    x: jax.Array,
    fmt: str | Format,
    *,
    rounding: Rounding = "nearest_even",
    key: jax.Array | None = None,
    overflow: Overflow = "saturate",
) -> jax.Array:
    """The values of `x`, of any shape, on the grid of `fmt`: float32 of the same shape.

    `x` is taken as float32 (a float64 array is rounded to float32 first, as everywhere in JAX). The result is a
    function of the bits of x: equal eagerly, under jit and under vmap, with subnormals kept, and the sign of zero where
    the format has two zeros (integers and NF4 have one).

    - `rounding`: `"nearest_even"` (IEEE 754-2019, section 4.3.1; in E8M0, where every significand is odd, a tie goes
      up, and in NF4 to the even code), `"toward_zero"`, or `"stochastic"`: up with probability (|x| - low) / (high -
      low) between the neighbouring magnitudes low and high, rounded down to a multiple of 2^-32; a value on the grid
      never moves. Noise is a function of `key`, which stochastic rounding needs and the others refuse. NF4 is only
      rounded to nearest.
    - `overflow`: a magnitude that exceeds the largest one after rounding becomes that one under `"saturate"`, and so
      does infinity (OCP OFP8 v1.0, saturating conversion). Under `"ieee"` it becomes what the format's standard says:
      infinity, NaN where there is no infinity (E4M3, E8M0), the largest where there is neither (OCP MX v1.0, section
      5.3).
    - NaN stays NaN. A format without NaN refuses it with `ReproError`; under jit, where nothing can be refused, the
      result is NaN. E8M0 has no zero and no sign: what is not positive becomes NaN, and what is below 2^-127 becomes
      2^-127.

    The derivative is zero; see `fake_quantize` for a straight-through one.
    """
    fmt = format_of(fmt)
    check_rounding(rounding, key, fmt)
    if overflow not in get_args(Overflow):
        raise ReproError(f"Overflow {overflow!r} is unknown; known are {', '.join(get_args(Overflow))}.")
    x = as_float32(x)
    if not fmt.has_nan and not isinstance(x, jax.core.Tracer) and bool(jnp.any(magnitude(x) > INFINITY)):
        raise ReproError(f"{fmt.name} has no NaN, but the array holds one; remove it or round to a format that has.")
    return _round_to(x, random_words(key, x.shape), fmt, rounding, overflow)


def as_float32(x: jax.Array) -> jax.Array:
    """`x` as a float32 array. Raises `ReproError` for complex numbers."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ReproError(f"An array of {x.dtype} cannot be rounded; round its real and its imaginary part.")
    return x.astype(jnp.float32)


def check_rounding(rounding: str, key: jax.Array | None, fmt: Format) -> None:
    """Raises `ReproError` unless the rounding exists for the format and has a key exactly where it needs one."""
    if rounding not in get_args(Rounding):
        raise ReproError(f"Rounding {rounding!r} is unknown; known are {', '.join(get_args(Rounding))}.")
    if fmt.codebook and rounding != "nearest_even":
        raise ReproError(f"{fmt.name} is a table and is only rounded to nearest_even, not {rounding}.")
    if rounding == "stochastic" and key is None:
        raise ReproError("Stochastic rounding needs key=, a JAX random key.")
    if rounding != "stochastic" and key is not None:
        raise ReproError(f"Rounding {rounding} uses no random numbers; leave out key= or ask for stochastic rounding.")


def random_words(key: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """One uniform uint32 per element, or None without a key."""
    return None if key is None else jax.random.bits(key, shape, jnp.uint32)


def round_pattern(
    extended: jax.Array, words: jax.Array | None, fmt: Format, rounding: Rounding, zero: int = 0
) -> jax.Array:
    """Rounds extended patterns (see `bits.extend`) to the grid of `fmt`, as if its exponents had no upper end.

    Returns extended patterns, and `zero` where the result is zero. `words` are the uint32 of stochastic rounding.
    Magnitudes that are not extended are allowed where every subnormal of float32 rounds to zero.
    """
    lowest = fmt.min_exponent + 127
    significand = (extended & FRACTION) | HIDDEN
    # Bits of the significand below the grid: more of them where the format is subnormal.
    fewest = 23 - fmt.mantissa_bits
    drop = jnp.maximum(lowest + fewest - (extended >> 23), fewest)
    if rounding == "stochastic":
        smallest = (lowest - fmt.mantissa_bits) << 23
        return _round_stochastic(extended, significand, drop, words, smallest, zero)
    drop = jnp.minimum(drop, 25)  # from 25 bits on, all is below half a step
    kept = jnp.left_shift(-1, drop)
    rounded = significand
    if rounding == "nearest_even":  # half a step less one, and one more where the last kept bit is odd
        rounded = rounded + (~kept >> 1) + ((significand >> drop) & 1)
    rounded = rounded & kept
    # A carry out of the significand moves the exponent field by itself.
    return jnp.where(rounded == 0, zero, extended + (rounded - significand))


def _round_stochastic(
    extended: jax.Array, significand: jax.Array, drop: jax.Array, words: jax.Array, smallest: int, zero: int
) -> jax.Array:
    bits = significand.astype(jnp.uint32)
    places = drop.astype(jnp.uint32)
    # The distance to the lower neighbour in units of 2^-32 steps; bits above the step leave the word on the left.
    distance = jnp.where(
        places < 32, bits << (32 - jnp.minimum(places, 32)), bits >> jnp.minimum(jnp.maximum(places, 32) - 32, 31)
    )
    up = words < distance
    kept = jnp.minimum(drop, 23)
    lower = (significand >> kept) << kept
    moved = extended + (lower - significand) + jnp.where(up, 1 << kept, 0)
    return jnp.where(drop >= 24, jnp.where(up, smallest, zero), moved)


@functools.partial(jax.jit, static_argnames=("fmt", "rounding", "overflow"))
def _round_to(x: jax.Array, words: jax.Array | None, fmt: Format, rounding: Rounding, overflow: Overflow) -> jax.Array:
    pattern = to_bits(x)
    mag, sign = pattern & ~SIGN, pattern & SIGN
    if fmt.codebook:
        return jnp.where(mag > INFINITY, from_bits(jnp.full_like(mag, NAN)), nearest_entry(x, fmt)[1])
    if fmt.mantissa_bits == 23:
        rounded = mag
    elif fmt.min_exponent <= -126:  # the grid reaches into the subnormals of float32
        zero = ZERO if fmt.signed else (fmt.min_exponent + 127) << 23
        rounded = restore(round_pattern(extend(mag), words, fmt, rounding, zero))
    else:
        rounded = round_pattern(mag, words, fmt, rounding)
    rounded = jnp.where(mag == INFINITY, INFINITY, rounded)
    rounded = jnp.where(rounded > _limit(sign, fmt), _overflown(mag, sign, fmt, rounding, overflow), rounded)
    result = jnp.where(rounded == 0, 0, sign | rounded) if fmt.fixed_point else sign | rounded
    nan = mag > INFINITY
    if not fmt.signed:
        nan = nan | (sign != 0) | (mag == 0)
    return from_bits(jnp.where(nan, NAN, result))


def _limit(sign: jax.Array, fmt: Format) -> jax.Array | int:
    largest = pattern_of(fmt.max)
    if fmt.fixed_point:
        return jnp.where(sign != 0, pattern_of(-fmt.lowest), largest)
    return largest


def _overflown(mag: jax.Array, sign: jax.Array, fmt: Format, rounding: Rounding, overflow: Overflow) -> jax.Array | int:
    if overflow == "saturate" or fmt.specials == "none":
        return _limit(sign, fmt)
    special = INFINITY if fmt.specials == "ieee" else NAN
    if rounding == "toward_zero":  # a finite number does not become infinite on the way to zero
        return jnp.where(mag == INFINITY, special, _limit(sign, fmt))
    return special
