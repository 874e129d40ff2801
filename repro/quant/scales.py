"""How the scales of a tensor follow from the largest magnitudes of its blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from repro.quant.bits import (
    FRACTION,
    INFINITY,
    LARGEST,
    NAN,
    SIGN,
    extend,
    from_bits,
    magnitude,
    pattern_of,
    quotient,
    times_power_of_two,
    to_bits,
)
from repro.quant.blocks import Blocks, largest_of_all
from repro.quant.codes import decode, encode_grid
from repro.quant.formats import FORMATS, Format, format_of
from repro.quant.recipes import SMALLEST_FLOOR, Recipe
from repro.quant.rounding import round_to

_GROUP = 256  # scales per second-level scale (QLoRA, arXiv 2305.14314, section 3)


class Scales(NamedTuple):
    """Scales of a tensor: `block`, one per block and in the type of the recipe's scale format; `tensor` as in QTensor;
    and, for rules other than powers of two, the float32 `divisor` or `factor` that brings x to the element's range."""

    block: jax.Array
    tensor: jax.Array | tuple[jax.Array, jax.Array] | None = None
    divisor: jax.Array | None = None
    factor: jax.Array | None = None


def scales_of(amax: jax.Array, recipe: Recipe) -> Scales:
    """The scales of blocks with largest magnitudes `amax` (patterns, one per block).

    A block with a NaN or an infinity has the scale NaN, and so has every block of a tensor with a tensor scale.
    """
    element = format_of(recipe.element)
    if recipe.power_of_two:
        exponent = shared_exponent(jnp.maximum(amax, pattern_of(recipe.amax_floor)), element, recipe.scale_rule)
        code = jnp.where(amax >= INFINITY, 255, exponent + 127)
        return Scales(lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu))
    if recipe.tensor_scale == "amax":
        return _two_level(amax, element, recipe.amax_floor)
    largest = jnp.float32(element.max)
    finite = from_bits(jnp.clip(amax, pattern_of(recipe.amax_floor), LARGEST))
    scale = jnp.where(amax >= INFINITY, jnp.nan, quotient(finite, largest))
    if recipe.tensor_scale == "double":
        return Scales(*_double(scale), divisor=scale)
    return Scales(scale, divisor=scale)


def shared_exponent(amax: jax.Array, element: Format, rule: str) -> jax.Array:
    """The exponent, in [-127, 127], of the power-of-two scale of finite magnitudes (OCP MX v1.0, section 6.3)."""
    extended = extend(amax)
    if rule == "even":
        extended = extended + (1 << (22 - element.mantissa_bits))
    exponent = (extended >> 23) - 127
    if rule == "rceil":
        # The product of the significand alone, which is a normal number, and has the fraction of the whole product.
        significand = from_bits((extended & FRACTION) | pattern_of(1.0))
        product = to_bits(significand * np.float32(1 / element.max))
        exponent = exponent + (product >> 23) - 127 + ((product & FRACTION) != 0)
    else:
        exponent = exponent - element.max_exponent
    if rule == "ceil":
        exponent = exponent + ((extended & FRACTION) != 0)
    return jnp.clip(exponent, -127, 127)


def _two_level(amax: jax.Array, element: Format, floor: float) -> Scales:
    """NVFP4 (TransformerEngine, `core_nvfp4.cuh`): the tensor scale makes the largest block scale 448."""
    inner = FORMATS["e4m3"]
    tensor = largest_of_all(amax)
    finite = from_bits(jnp.clip(tensor, pattern_of(floor), LARGEST))
    # Without the barriers XLA may make 1 / (c / a) a / c, or multiply two constants first, which rounds differently.
    encode = lax.optimization_barrier(quotient(jnp.full_like(finite, inner.max * element.max), finite))
    decode_scale = quotient(jnp.ones_like(encode), encode)
    decode_scale = jnp.where(tensor >= INFINITY, jnp.nan, decode_scale)
    per_element = lax.optimization_barrier(encode * np.float32(1 / element.max))
    block = round_to(from_bits(jnp.minimum(amax, LARGEST)) * per_element, inner)
    # A block far below the tensor's largest has the scale 0 and is zero; 1 / 0 would make its elements the largest.
    whole = lax.optimization_barrier(block * decode_scale)
    factor = jnp.where(block > 0, quotient(jnp.ones_like(whole), whole), 0.0)
    return Scales(encode_grid(block, inner), decode_scale, factor=factor)


def _double(scale: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Scales less their mean as E4M3 in groups of 256: (codes, (mean, scales of the groups))."""
    inner = FORMATS["e4m3"]
    mean = jnp.sum(scale * np.float32(1 / max(scale.size, 1)))
    centred = lax.optimization_barrier(scale - mean).ravel()
    groups = jnp.pad(centred, (0, -centred.size % _GROUP)).reshape(-1, _GROUP)
    amax = from_bits(jnp.maximum(jnp.max(magnitude(groups), axis=1, initial=0), pattern_of(SMALLEST_FLOOR)))
    second = quotient(amax, jnp.float32(inner.max))
    ratios = from_bits(to_bits(quotient(groups, second[:, None])) | (to_bits(groups) & SIGN))
    grid = round_to(ratios.ravel()[: scale.size], inner)
    return encode_grid(grid.reshape(scale.shape), inner), (mean, second)


def float_scale(block: jax.Array, tensor, recipe: Recipe) -> jax.Array:
    """The float32 scales, `[blocks...]`, of a recipe whose scales are not powers of two: both levels in one."""
    if recipe.tensor_scale == "amax":
        return decode(block, recipe.scale_format) * tensor
    if recipe.tensor_scale is None:
        return block
    mean, second = tensor
    codes = decode(block, "e4m3").ravel()
    # Without the barrier the product and the sum may be contracted into one rounding.
    product = lax.optimization_barrier(codes * jnp.repeat(second, _GROUP)[: codes.size])
    return jnp.maximum(product.reshape(block.shape) + mean, 0.0)


def rescale(grid: jax.Array, block: jax.Array, tensor, recipe: Recipe, blocks: Blocks) -> jax.Array:
    """The magnitudes x_hat (patterns) of magnitudes of elements (patterns), both in the blocked view.

    A product that exceeds the largest float32, which rounding up can do to a block that holds it, becomes that.
    """
    if recipe.power_of_two:
        code = blocks.spread(lax.bitcast_convert_type(block, jnp.uint8).astype(jnp.int32))
        # Any number becomes NaN when the bits of a NaN are set in it.
        return times_power_of_two(grid, jnp.minimum(code, 254) - 127) | jnp.where(code == 255, NAN, 0)
    product = from_bits(grid) * blocks.spread(float_scale(block, tensor, recipe))
    pattern = to_bits(product)
    return jnp.where(pattern == INFINITY, LARGEST, pattern)
