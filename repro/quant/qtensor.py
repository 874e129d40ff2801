"""Quantised tensors: codes, and the scales that give them their values."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from repro.errors import ReproError
from repro.quant.bits import INFINITY, NAN, SIGN, extend, from_bits, magnitude, pattern_of, quotient, to_bits
from repro.quant.blocks import Blocks, blocks_of, blocks_of_codes, negative_axis
from repro.quant.codebook import entry, nearest_entry
from repro.quant.codes import decode, encode_grid
from repro.quant.formats import FORMATS
from repro.quant.recipes import Recipe, recipe_of
from repro.quant.rounding import as_float32, check_rounding, random_words, round_pattern
from repro.quant.scales import Scales, rescale, scales_of


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scale", "tensor_scale"),
    meta_fields=("recipe", "axis"),
)
@dataclass(frozen=True)
class QTensor:
    """A quantised tensor, a pytree: x_hat = decode(codes) * scale (* tensor_scale).

    - `codes`: the shape of x, in the `dtype` of the element's format; fixed-point codes are integers.
    - `scale`: the decode scale of every block, x's number of axes, with the number of blocks along each; in the
      `dtype` of the recipe's scale format.
    - `tensor_scale`: None; for NVFP4 the float32 scale of the whole tensor, with as many axes of size 1 as x has; for
      double quantisation the pair (mean of the scales, float32 `[]`; scale of each group of 256 of them, float32).
    - `recipe`, and `axis`, the axis along which blocks run, counted from the end.
    """

    codes: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | tuple[jax.Array, jax.Array] | None
    recipe: Recipe
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.codes.shape

    def dequantize(self) -> jax.Array:
        """x_hat, float32, in the shape of the tensor.

        Raises `ReproError` for scales that are not of the recipe's scale format: a float32 scale cannot be taken for a
        power of two, which would cut off its fraction.
        """
        expected = FORMATS[self.recipe.scale_format].dtype
        if self.scale.dtype != expected:
            raise ReproError(
                f"The recipe stores its scales as {expected}, these are {self.scale.dtype}; quantise from the source."
            )
        return _dequantize(self)

    def transpose(self) -> QTensor:
        """The quantised tensor with its last two axes exchanged, equal to that of the exchanged tensor along `axis`.

        Raises `ReproError` where that needs another quantisation: a block that is not square is another set of
        elements after the exchange.
        """
        shape = self.recipe.block_shape
        if len(self.shape) < 2:
            raise ReproError(f"A tensor of {len(self.shape)} axes has no two axes to exchange.")
        if shape is not None and (shape[0] != shape[1] or self.axis < -2):
            raise ReproError(
                f"Blocks of {shape[0]} x {shape[1]} along axis {self.axis} are other blocks after a transpose; "
                "quantize the transposed tensor from its source instead."
            )

        def exchange(x: jax.Array) -> jax.Array:
            return jnp.swapaxes(x, -1, -2)

        return replace(self, codes=exchange(self.codes), scale=exchange(self.scale))


def quantize(
    x: jax.Array,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    key: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> QTensor:
    """Quantises `x` (any shape, taken as float32) in blocks along `axis`, the axis a product will sum over.

    - A block that holds a NaN or an infinity is NaN as a whole, with a tensor scale the whole tensor; with a given
      scale the one element is (and must be in a format that has a NaN). Nothing else becomes NaN or infinite:
      elements beyond the range saturate, symmetrically also in fixed point. The sign of zero is kept where the
      element format keeps it.
    - `key`: a JAX random key, exactly where the recipe's rounding is `"stochastic"`.
    - `scale`: the decode scale, a positive normal float32 number, exactly where the recipe's scale rule is `"given"`.

    With float32 scales elements are x / scale by IEEE division, in NVFP4 x times the rounded reciprocal of the two
    scales (TransformerEngine); with a power of two both are the same and exact. Bits are equal eagerly, under jit and
    under vmap, but for the mean in double quantisation, which is a sum.
    """
    return _quantize(*prepared(x, recipe, axis, key, scale))


def prepared(x, recipe, axis: int, key, scale):
    """The checked arguments of `quantize`: x and scale as float32, random words, recipe, axis from the end."""
    recipe = recipe_of(recipe)
    element = FORMATS[recipe.element]
    check_rounding(recipe.rounding, key, element)
    if recipe.scale_rule == "given":
        if scale is None:
            raise ReproError("This recipe takes a given scale; pass scale=, for instance that of a DelayedScale.")
        if not element.has_nan:
            raise ReproError(f"{recipe.element} has no NaN, which a given scale needs; use e4m3, e5m2 or e5m6.")
        scale = jnp.asarray(scale, jnp.float32)
        if scale.size != 1:
            raise ReproError(f"A given scale is one number for the tensor, not an array of shape {scale.shape}.")
    elif scale is not None:
        raise ReproError(f"The scale rule {recipe.scale_rule!r} chooses the scale; leave out scale=.")
    x = as_float32(x)
    if x.ndim == 0:
        raise ReproError("A single number has no blocks; give an array of at least one axis.")
    if scale is not None:
        scale = scale.reshape((1,) * x.ndim)
    return x, random_words(key, x.shape), scale, recipe, negative_axis(axis, x.ndim)


def elements_of(
    view: jax.Array, words: jax.Array | None, scale: jax.Array | None, recipe: Recipe, blocks: Blocks
) -> tuple[jax.Array, Scales]:
    """The magnitudes of the elements (patterns, in the blocked view; for a table its codes) and the scales."""
    element = FORMATS[recipe.element]
    mag = magnitude(view)
    if recipe.scale_rule == "given":
        scales = Scales(jnp.broadcast_to(scale, blocks.counts), divisor=scale)
    else:
        scales = scales_of(blocks.reduce_max(mag).reshape(blocks.counts), recipe)
    if recipe.power_of_two:
        code = jax.lax.bitcast_convert_type(scales.block, jnp.uint8).astype(jnp.int32)
        relative = extend(mag) - ((blocks.spread(code) - 127) << 23)
    elif scales.factor is not None:
        relative = magnitude(from_bits(mag) * blocks.spread(scales.factor))
    else:
        ratio = quotient(view, blocks.spread(scales.divisor))
        if element.codebook:
            return nearest_entry(from_bits(to_bits(ratio) | (to_bits(view) & SIGN)), element)[0], scales
        relative = magnitude(ratio)
    if words is not None:
        words = blocks.view(words)
    # What saturates does so before it is rounded: noise has no say in it, and a NaN has no pattern to overflow.
    relative = jnp.minimum(relative, pattern_of(element.max))
    grid = round_pattern(relative, words, element, recipe.rounding)
    if recipe.scale_rule == "given":
        grid = jnp.where(mag >= INFINITY, NAN, grid)
    return grid, scales


@functools.partial(jax.jit, static_argnames=("recipe", "axis"))
def _quantize(x, words, scale, recipe: Recipe, axis: int) -> QTensor:
    blocks = blocks_of(x.shape, recipe, axis)
    view = blocks.view(x)
    element = FORMATS[recipe.element]
    grid, scales = elements_of(view, words, scale, recipe, blocks)
    codes = grid if element.codebook else encode_grid(from_bits(grid | (to_bits(view) & SIGN)), element)
    return QTensor(blocks.unview(codes), scales.block, scales.tensor, recipe, axis)


@jax.jit
def _dequantize(q: QTensor) -> jax.Array:
    blocks = blocks_of_codes(q.shape, q.scale.shape, q.recipe, q.axis)
    pattern = to_bits(decode(blocks.view(q.codes), q.recipe.element))
    mag = rescale(pattern & ~SIGN, q.scale, q.tensor_scale, q.recipe, blocks)
    return blocks.unview(from_bits(mag | (pattern & SIGN)))


def dequantized(
    x, words, scale, recipe: Recipe, axis: int, where_kept: bool
) -> tuple[jax.Array, jax.Array | None]:
    """x_hat without the codes, in one pass over x after that for the scales; if asked, where x did not saturate."""
    blocks = blocks_of(x.shape, recipe, axis)
    view = blocks.view(x)
    element = FORMATS[recipe.element]
    grid, scales = elements_of(view, words, scale, recipe, blocks)
    sign = to_bits(view) & SIGN
    if element.codebook:
        pattern = to_bits(entry(grid, element))
        grid, sign = pattern & ~SIGN, pattern & SIGN
    elif element.fixed_point:
        sign = jnp.where(grid == 0, 0, sign)
    mag = rescale(grid, scales.block, scales.tensor, recipe, blocks)
    x_hat = blocks.unview(from_bits(mag | sign))
    if not where_kept:
        return x_hat, None
    largest = blocks.spread(jnp.full(blocks.counts, pattern_of(element.max), jnp.int32))
    within = magnitude(view) <= rescale(largest, scales.block, scales.tensor, recipe, blocks)
    return x_hat, blocks.unview(within)
