"""The product of a linear layer with quantised operands, forwards and backwards."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from repro.errors import ReproError
from repro.quant.accumulator import Accumulator, accumulate
from repro.quant.blocks import blocks_of
from repro.quant.codes import decode
from repro.quant.fake import fake_quantize
from repro.quant.formats import FORMATS
from repro.quant.hadamard import TRANSFORMER_ENGINE_SIGNS, hadamard
from repro.quant.native import native_product, native_reason
from repro.quant.policies import GemmPolicy, Operand, key_for, policy_of
from repro.quant.qtensor import QTensor, quantize
from repro.quant.recipes import recipe_of
from repro.quant.rounding import as_float32


def dot(x: jax.Array, w: jax.Array, policy: str | GemmPolicy, *, key: jax.Array | None = None) -> jax.Array:
    """y = x w for `x` [..., D] and `w` [D, ...]: float32, the leading axes of x, then the last axes of w.

    Operands are quantised as the policy says, in the forward pass and again, from the unquantised x, w and dy, in the
    backward pass, each along the axis its product sums over; a tensor is quantised a second time only where the policy
    caches x in a low precision. Gradients have the types of x and w. Leading axes of x are tokens, flattened in order;
    so are the last axes of w. Sums are float32. Policy `"fp32"` multiplies full float32 on every backend, where XLA by
    default takes TF32 on GPUs and bfloat16 on TPUs; `"bf16"` is the backend's own product of bfloat16 numbers, and
    half precision overflows to infinity as IEEE 754 says.
    `key` is a JAX random key, exactly where the policy rounds stochastically. Raises `ReproError` if the sizes of D
    differ, or if a promotion interval of the accumulator does not fit into blocks.
    Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.
    """
    policy = policy_of(policy)
    if isinstance(x, QTensor) or isinstance(w, QTensor):
        raise ReproError(
            "dot quantises its operands itself, along the axis it sums over; pass the source, not a QTensor."
        )
    x, w = jnp.asarray(x), jnp.asarray(w)
    if x.ndim < 1 or w.ndim < 2 or x.shape[-1] != w.shape[0]:
        raise ReproError(f"x {x.shape} and w {w.shape} do not match; the last axis of x is the first of w.")
    if policy.stochastic != (key is not None):
        wanted = "needs key=, a JAX random key" if policy.stochastic else "uses no random numbers; leave out key="
        raise ReproError(f"This policy {wanted}.")
    rows, columns = math.prod(x.shape[:-1]), math.prod(w.shape[1:])
    y = _dot(policy, x.reshape(rows, x.shape[-1]), w.reshape(w.shape[0], columns), key)
    return y.reshape(x.shape[:-1] + w.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(policy: GemmPolicy, x_TD: jax.Array, w_DF: jax.Array, key: jax.Array | None) -> jax.Array:
    return _dot_forward(policy, x_TD, w_DF, key)[0]


def _dot_forward(policy, x_TD, w_DF, key):
    keys = _keys(key, 0)
    kept, x, x_format = x_TD, x_TD, policy.fprop_x
    if policy.cache_x == "fprop":
        kept = _stored(x_TD, policy.fprop_x, keys[0])
        x, x_format = _restored(kept), _ready(policy.fprop_x)
    elif policy.cache_x is not None:
        kept = _stored(x_TD, policy.cache_x, _keys(key, 3)[0])
    y = _product(policy, x, w_DF, x_format, policy.fprop_w, keys)
    return y, (kept, jnp.zeros((), x_TD.dtype), w_DF, key)


def _dot_backward(policy, saved, dy_TF):
    kept, like_x, w_DF, key = saved
    forward = _keys(key, 0)
    w_FD, w_format = w_DF.T, policy.dgrad_w
    if w_format == "fprop":  # the keys of the forward pass give its noise again
        w_FD, w_format = _rounded(w_DF, policy.fprop_w, 0, forward[1]).T, _ready(policy.fprop_w)
    dx = _product(policy, dy_TF, w_FD, policy.dgrad_dy, w_format, _keys(key, 1))

    x_TD, x_format = _restored(kept), policy.wgrad_x
    if x_format == "fprop":
        if policy.cache_x is None:
            x_TD = _rounded(x_TD, policy.fprop_x, -1, forward[0])
        x_format = _ready(policy.fprop_x)
    left, right = x_TD.T, dy_TF
    if policy.wgrad_hadamard:
        pad = (0, -dy_TF.shape[0] % len(TRANSFORMER_ENGINE_SIGNS))
        left, right = hadamard(jnp.pad(left, ((0, 0), pad))), hadamard(jnp.pad(right, (pad, (0, 0))), axis=0)
    dw = _product(policy, left, right, x_format, policy.wgrad_dy, _keys(key, 2))
    return dx.astype(like_x.dtype), dw.astype(w_DF.dtype), None


_dot.defvjp(_dot_forward, _dot_backward)


def _keys(key: jax.Array | None, product: int) -> tuple[jax.Array | None, jax.Array | None]:
    if key is None:
        return None, None
    return tuple(jax.random.fold_in(jax.random.fold_in(key, product), operand) for operand in range(2))


def _stored(x_TD: jax.Array, operand: Operand, key: jax.Array | None) -> jax.Array | QTensor:
    """What is kept of x until the backward pass: half-precision numbers, or codes and scales."""
    if operand in ("bf16", "fp16"):
        return _rounded(x_TD, operand, -1, key)
    return quantize(x_TD, operand, key=key_for(operand, key))


def _restored(kept: jax.Array | QTensor) -> jax.Array:
    return kept.dequantize() if isinstance(kept, QTensor) else kept


def _ready(operand: Operand) -> Operand:
    """The format of a tensor that is rounded to `operand` already: half precision keeps its own type of product."""
    return operand if operand in ("bf16", "fp16") else None


def _product(policy: GemmPolicy, a_MK, b_KN, a_format: Operand, b_format: Operand, keys) -> jax.Array:
    if policy.accumulator is not None:
        return _accumulated(a_MK, b_KN, a_format, b_format, keys, policy.accumulator)
    if native_reason(policy) is None:
        return native_product(a_MK, b_KN, a_format, b_format, keys)
    a = _rounded(a_MK, a_format, -1, keys[0])
    b = _rounded(b_KN, b_format, 0, keys[1])
    if a.dtype != b.dtype:  # one is half precision, which float32 holds exactly
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # By default XLA multiplies float32 as TF32 on GPUs and as bfloat16 on TPUs.
    return jnp.matmul(a, b, precision="highest", preferred_element_type=jnp.float32)


_HALF = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


def _rounded(x: jax.Array, operand: Operand, axis: int, key: jax.Array | None) -> jax.Array:
    if operand is None:
        return as_float32(x)
    if operand in _HALF:  # by the hardware's own conversion, so that it costs what it costs elsewhere
        return as_float32(x).astype(_HALF[operand])
    return fake_quantize(x, operand, axis=axis, key=key_for(operand, key))


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
        return _rounded(x, operand, axis, key).astype(jnp.float32), None
    if operand in (None, "fp16") or FORMATS[recipe_of(operand).element].codebook:
        raise ReproError("An accumulator needs operands with exact products: bf16, or a recipe without a table.")
    recipe = recipe_of(operand)
    q = quantize(x, recipe, axis=axis, key=key_for(operand, key))
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
