"""Codes of a format: the bits that are stored."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from repro.quant.bits import FRACTION, HIDDEN, INFINITY, NAN, SIGN, extend, from_bits, pattern_of, to_bits
from repro.quant.codebook import entry, nearest_entry
from repro.quant.formats import Format, format_of
from repro.quant.rounding import round_to


def encode(x: jax.Array, fmt: str | Format) -> jax.Array:
    """The codes of `x`, of any shape, in `fmt`: an array of `fmt.dtype` and of the same shape.

    Values off the grid are rounded to nearest, and overflow follows the format's standard (`overflow="ieee"` of
    `round_to`), so infinities and NaNs keep their code. Raises `ReproError` for NaN where the format has none; under
    jit it then has the code of an arbitrary value.
    """
    fmt = format_of(fmt)
    return encode_grid(round_to(x, fmt, overflow="ieee"), fmt)


@functools.partial(jax.jit, static_argnames="fmt")
def encode_grid(x: jax.Array, fmt: Format) -> jax.Array:
    """`encode` for float32 values that are on the grid already."""
    if fmt.codebook:
        return nearest_entry(x, fmt)[0]
    if fmt.mantissa_bits == 23:
        return x
    pattern = to_bits(x)
    mag = pattern & ~SIGN
    code = _magnitude_code(mag, fmt)
    if fmt.fixed_point:
        return jnp.where(pattern < 0, -code, code).astype(fmt.dtype)
    if fmt.signed:
        code = code | jnp.where(pattern < 0, 1 << (fmt.bits - 1), 0)
    unsigned = code.astype(jnp.uint8 if fmt.bits <= 8 else jnp.uint16)
    return unsigned if unsigned.dtype == fmt.dtype else lax.bitcast_convert_type(unsigned, fmt.dtype)


def _magnitude_code(mag: jax.Array, fmt: Format) -> jax.Array:
    extended = extend(mag)
    m, lowest, field = fmt.mantissa_bits, fmt.min_exponent + 127, extended >> 23
    drop = jnp.minimum((23 - m) + jnp.maximum(lowest - field, 0), 31)
    # The hidden bit of a normal number lands in the exponent field, which therefore starts one lower.
    code = ((jnp.maximum(field, lowest) - lowest) << m) + (((extended & FRACTION) | HIDDEN) >> drop)
    if not fmt.signed:
        code = code - 1  # no subnormals: field 0 is a normal number
    top = 2 ** (fmt.bits - 1) - 1 if fmt.signed else 2**fmt.bits - 1
    if fmt.specials == "nan":
        return jnp.where(mag > INFINITY, top, code)
    if fmt.specials == "ieee":
        infinity = top - 2**m + 1
        quiet = infinity + 2 ** (m - 1)
        return jnp.where(mag >= INFINITY, jnp.where(mag > INFINITY, quiet, infinity), code)
    return code


@functools.partial(jax.jit, static_argnames="fmt")
def _decode(codes: jax.Array, fmt: Format) -> jax.Array:
    if fmt.codebook:
        return entry(codes, fmt)
    if fmt.mantissa_bits == 23:
        return codes
    if fmt.fixed_point:
        return codes.astype(jnp.float32) * np.float32(fmt.min_subnormal)
    integers = codes
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        integers = lax.bitcast_convert_type(codes, jnp.uint8 if fmt.bits <= 8 else jnp.uint16)
    code = integers.astype(jnp.int32)
    if not fmt.signed:
        # 2^-127, the value of code 0, is a subnormal of float32.
        return from_bits(jnp.where(code == 255, NAN, jnp.where(code == 0, HIDDEN >> 1, code << 23)))
    top = 2 ** (fmt.bits - 1) - 1
    code, negative = code & top, code > top
    mag = _magnitude(code, fmt)
    if fmt.specials == "nan":
        mag = jnp.where(code == top, NAN, mag)
    elif fmt.specials == "ieee":
        infinity = top - 2**fmt.mantissa_bits + 1
        mag = jnp.where(code >= infinity, jnp.where(code > infinity, NAN, INFINITY), mag)
    return from_bits(mag | jnp.where(negative, SIGN, 0))


def _magnitude(code: jax.Array, fmt: Format) -> jax.Array:
    m = fmt.mantissa_bits
    normal = (code << (23 - m)) + ((127 - fmt.bias) << 23)
    if fmt.bias == 127:  # subnormals have the exponent of float32's own
        return normal
    subnormal = to_bits(code.astype(jnp.float32) * from_bits(jnp.int32(pattern_of(fmt.min_subnormal))))
    return jnp.where(code < 2**m, subnormal, normal)


def decode(codes: jax.Array, fmt: str | Format) -> jax.Array:
    """The float32 values of codes, of any shape. `codes` has the type `fmt.dtype`, or holds the bits as integers."""
    return _decode(jnp.asarray(codes), format_of(fmt))
