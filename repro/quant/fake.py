"""Quantisation in the forward pass, straight through in the backward pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from repro.quant.qtensor import dequantized, prepared
from repro.quant.recipes import Recipe


def fake_quantize(
    x: jax.Array,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    key: jax.Array | None = None,
    scale: jax.Array | None = None,
    clip_gradient: bool = False,
) -> jax.Array:
    """`quantize(x, recipe, ...).dequantize()`, float32, with the derivative of the identity.

    The derivative is taken in x's own type and never passes through a cast to a low-precision format. With
    `clip_gradient` it is zero where |x_hat| < |x| because the element saturated, that is where |x| exceeds the largest
    element times the scale. Arguments and errors as in `quantize`.
    Source: Bengio et al., "Estimating or propagating gradients through stochastic neurons", arXiv 1308.3432.
    """
    x = jnp.asarray(x)
    arguments = prepared(jax.lax.stop_gradient(x), recipe, axis, key, scale)
    return _straight_through(x.astype(jnp.float32), *_forward(*arguments, clip_gradient))


@functools.partial(jax.jit, static_argnames=("recipe", "axis", "clip_gradient"))
def _forward(x, words, scale, recipe, axis, clip_gradient):
    return dequantized(x, words, scale, recipe, axis, clip_gradient)


@jax.custom_jvp
def _straight_through(x, x_hat, kept):
    return x_hat


@_straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    kept, tangent = primals[2], tangents[0]
    # The value goes through the same rule again, for derivatives of derivatives.
    return _straight_through(*primals), tangent if kept is None else jnp.where(kept, tangent, 0.0)
