"""A linear layer with delayed scales: the amax of a gradient leaves the backward pass as a cotangent."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from repro.errors import ReproError
from repro.quant.delayed import DelayedScale, amax_of
from repro.quant.native import hardware_reason, product_of_codes
from repro.quant.qtensor import QTensor, quantize
from repro.quant.recipes import RECIPES

_FORWARD = RECIPES["fp8_delayed"]
_GRADIENT = replace(_FORWARD, element="e5m2")


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x", "w", "dy"), meta_fields=())
@dataclass(frozen=True)
class DelayedScales:
    """The histories of the three tensors of one linear layer: a pytree of the training state."""

    x: DelayedScale
    w: DelayedScale
    dy: DelayedScale

    @classmethod
    def create(cls, steps: int = 1024) -> DelayedScales:
        """Three empty histories. Raises `ReproError` unless `steps` is positive."""
        return cls(*(DelayedScale.create(steps) for _ in range(3)))

    def push(self, amax_x: jax.Array, amax_w: jax.Array, amax_dy: jax.Array) -> DelayedScales:
        """The histories after a step."""
        return DelayedScales(self.x.push(amax_x), self.w.push(amax_w), self.dy.push(amax_dy))


def delayed_dot(
    x: jax.Array, w: jax.Array, scales: DelayedScales, probe: jax.Array, *, native: bool = False
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """y = x w for `x` [..., D] and `w` [D, F], and the amaxes of x and of w, all float32.

    x and w are E4M3, dy is E5M2, each with the scale of its history; the backward pass multiplies the codes that the
    forward pass made, which with one scale per tensor is exact. `probe` is a zero, float32 `[]`, that changes nothing:
    its cotangent is the amax of dy. Differentiate with respect to it beside w, then `scales.push(amax_x, amax_w,
    gradient_of_probe)`. One probe belongs to one product, because cotangents of a shared one would be summed; under a
    scan over layers or microbatches give it a leading axis.
    `native` multiplies on FP8 units where `native.hardware_reason()` is None. Raises `ReproError` if sizes differ.
    Source: Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433.
    """
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ReproError(f"x {x.shape} and w {w.shape} do not match; the last axis of x is the first of w.")
    three = (scales.x.scale(_FORWARD.element), scales.w.scale(_FORWARD.element), scales.dy.scale(_GRADIENT.element))
    on_units = native and hardware_reason() is None
    y = _dot(on_units, x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w, jax.lax.stop_gradient(three), probe)
    return y.reshape(*x.shape[:-1], w.shape[1]), jax.lax.stop_gradient((amax_of(x), amax_of(w)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(native: bool, x_TD: jax.Array, w_DF: jax.Array, scales: tuple, probe: jax.Array) -> jax.Array:
    return _forward(native, x_TD, w_DF, scales, probe)[0]


def _forward(native, x_TD, w_DF, scales, probe):
    x, w = quantize(x_TD, _FORWARD, scale=scales[0]), quantize(w_DF, _FORWARD, scale=scales[1])
    return _product(native, x, w), (x, w, scales, jnp.zeros((), x_TD.dtype), jnp.zeros((), w_DF.dtype))


def _backward(native, saved, dy_TF):
    x, w, scales, like_x, like_w = saved
    dy = quantize(dy_TF, _GRADIENT, scale=scales[2])
    dx = _product(native, dy, w.transpose()).astype(like_x.dtype)
    dw = _product(native, x.transpose(), dy).astype(like_w.dtype)
    return dx, dw, jax.tree.map(jnp.zeros_like, scales), amax_of(dy_TF)


_dot.defvjp(_forward, _backward)


def _product(native: bool, a: QTensor, b: QTensor) -> jax.Array:
    if native:
        return product_of_codes(a, b)
    return jnp.matmul(a.dequantize(), b.dequantize(), precision="highest", preferred_element_type=jnp.float32)
