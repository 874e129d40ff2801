"""The product of a linear layer with quantised operands, forwards and backwards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from repro.errors import ReproError
from repro.quant.accumulator import Accumulator, accumulate
from repro.quant.blocks import blocks_of
from repro.quant.codes import decode
from repro.quant.fake import fake_quantize
from repro.quant.formats import FORMATS
from repro.quant.hadamard import TRANSFORMER_ENGINE_SIGNS, hadamard
from repro.quant.policies import GemmPolicy, Operand, policy_of
from repro.quant.qtensor import quantize
from repro.quant.recipes import recipe_of
from repro.quant.rounding import as_float32, round_to


def dot(x: jax.Array, w: jax.Array, policy: str | GemmPolicy, *, key: jax.Array | None = None) -> jax.Array:
    """y = x w for `x` [..., D] and `w` [D, ...]: float32, the leading axes of x, then the last axes of w.

    Operands are quantised as the policy says, in the forward pass and again, from the unquantised x, w and dy, in the
    backward pass: never a quantised tensor a second time, and each along the axis its product sums over. Gradients
    have the types of x and w. Leading axes of x are tokens, flattened in order; so are the last axes of w.
    `key` is a JAX random key, exactly where the policy rounds stochastically. Raises `ReproError` if the sizes of D
    differ, or if a promotion interval of the accumulator does not fit into blocks.
    Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.
    """
    policy = policy_of(policy)
    if x.ndim < 1 or w.ndim < 2 or x.shape[-1] != w.shape[0]:
        raise ReproError(f"x {x.shape} and w {w.shape} do not match; the last axis of x is the first of w.")
    if policy.stochastic != (key is not None):
        wanted = "needs key=, a JAX random key" if policy.stochastic else "uses no random numbers; leave out key="
        raise ReproError(f"This policy {wanted}.")
    y = _dot(policy, x.reshape(-1, x.shape[-1]), w.reshape(w.shape[0], -1), key)
    return y.reshape(x.shape[:-1] + w.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(policy: GemmPolicy, x_TD: jax.Array, w_DF: jax.Array, key: jax.Array | None) -> jax.Array:
    keys = _keys(key, 0)
    return _product(x_TD, w_DF, policy.fprop_x, policy.fprop_w, keys, policy.accumulator)


def _dot_forward(policy, x_TD, w_DF, key):
    return _dot(policy, x_TD, w_DF, key), (x_TD, w_DF, key)


def _dot_backward(policy, saved, dy_TF):
    x_TD, w_DF, key = saved
    dx = _product(dy_TF, w_DF.T, policy.dgrad_dy, policy.dgrad_w, _keys(key, 1), policy.accumulator)
    left, right = as_float32(x_TD).T, dy_TF
    if policy.wgrad_hadamard:
        pad = (0, -dy_TF.shape[0] % len(TRANSFORMER_ENGINE_SIGNS))
        left, right = hadamard(jnp.pad(left, ((0, 0), pad))), hadamard(jnp.pad(right, (pad, (0, 0))), axis=0)
    dw = _product(left, right, policy.wgrad_x, policy.wgrad_dy, _keys(key, 2), policy.accumulator)
    return dx.astype(x_TD.dtype), dw.astype(w_DF.dtype), None


_dot.defvjp(_dot_forward, _dot_backward)


def _keys(key: jax.Array | None, product: int) -> tuple[jax.Array | None, jax.Array | None]:
    if key is None:
        return None, None
    return tuple(jax.random.fold_in(jax.random.fold_in(key, product), operand) for operand in range(2))


def _product(a_MK, b_KN, a_format: Operand, b_format: Operand, keys, accumulator: Accumulator | None) -> jax.Array:
    if accumulator is not None:
        return _accumulated(a_MK, b_KN, a_format, b_format, keys, accumulator)
    a = _rounded(a_MK, a_format, -1, keys[0])
    b = _rounded(b_KN, b_format, 0, keys[1])
    # By default XLA multiplies float32 as TF32 on GPUs and as bfloat16 on TPUs.
    return jnp.matmul(a, b, precision="highest", preferred_element_type=jnp.float32)


def _rounded(x: jax.Array, operand: Operand, axis: int, key: jax.Array | None) -> jax.Array:
    if operand is None:
        return as_float32(x)
    if operand in ("bf16", "fp16"):
        return round_to(x, operand)
    return fake_quantize(x, operand, axis=axis, key=_key_for(operand, key))


def _key_for(operand: Operand, key: jax.Array | None) -> jax.Array | None:
    return key if recipe_of(operand).rounding == "stochastic" else None


def _accumulated(a_MK, b_KN, a_format, b_format, keys, accumulator: Accumulator) -> jax.Array:
    interval = accumulator.promote_every or a_MK.shape[1]
    a, a_scale = _elements(a_MK, a_format, -1, keys[0], interval)
    b, b_scale = _elements(b_KN, b_format, 0, keys[1], interval)
    return accumulate(a, b, accumulator, a_scale, b_scale)


def _elements(x, operand: Operand, axis: int, key, interval: int) -> tuple[jax.Array, jax.Array | None]:
    """What a tensor core multiplies, and what it scales every promotion interval by, as `accumulate` takes them.

    Scales of MX and the block scales of NVFP4 are inside its sums; a float32 scale is outside.
    """
    if operand == "bf16":
        return round_to(x, operand), None
    if operand in (None, "fp16") or FORMATS[recipe_of(operand).element].codebook:
        raise ReproError("An accumulator needs operands with exact products: bf16, or a recipe without a table.")
    recipe = recipe_of(operand)
    q = quantize(x, recipe, axis=axis, key=_key_for(operand, key))
    if recipe.power_of_two:
        return q.dequantize(), None
    blocks = blocks_of(x.shape, recipe, q.axis)

    def every_element(scale: jax.Array) -> jax.Array:
        view = blocks.view(x)
        return blocks.unview(jnp.broadcast_to(blocks.spread(jnp.broadcast_to(scale, blocks.counts)), view.shape))

    elements = decode(q.codes, recipe.element)
    if recipe.tensor_scale == "amax":
        elements, outside = elements * every_element(decode(q.scale, recipe.scale_format)), q.tensor_scale
    else:
        outside = q.scale
        along = blocks.sizes[axis]
        if along % interval and along < x.shape[axis]:
            raise ReproError(f"A promotion interval of {interval} does not divide blocks of {along}; make it do so.")
    every = [slice(None), slice(None)]
    every[axis] = slice(None, None, interval)
    return elements, every_element(outside)[tuple(every)]
