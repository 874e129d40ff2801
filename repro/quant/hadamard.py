"""Random Hadamard transform: spreads outliers over a group before it is quantised."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from repro.errors import ReproError
from repro.quant.blocks import negative_axis
from repro.quant.rounding import as_float32

TRANSFORMER_ENGINE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs of NVIDIA's TransformerEngine for NVFP4."""


def hadamard(x: jax.Array, *, axis: int = -1, signs: tuple[int, ...] = TRANSFORMER_ENGINE_SIGNS) -> jax.Array:
    """Each group g of n = len(signs) elements along `axis` becomes g diag(signs) H / sqrt(n): float32, shape of x.

    H is the Sylvester matrix of +-1. The map is orthogonal, so applied to both factors of a product along the axis it
    sums over, it cancels. n is a power of four (then sqrt(n) is a power of two) that divides the axis.
    Raises `ReproError` for other sizes. Source: "Pretraining LLMs with NVFP4", arXiv 2509.25149.
    """
    x = as_float32(x)
    axis = negative_axis(axis, x.ndim)
    n = len(signs)
    stages = n.bit_length() - 1
    if n != 2**stages or stages % 2 or not set(signs) <= {1, -1}:
        raise ReproError(f"Signs must be a power of four numbers of +1 and -1, not {signs}.")
    if x.shape[axis] % n:
        raise ReproError(f"Axis {axis} of size {x.shape[axis]} does not divide into groups of {n}; pad it with zeros.")
    return _transform(x, axis, tuple(signs))


@functools.partial(jax.jit, static_argnames=("axis", "signs"))
def _transform(x: jax.Array, axis: int, signs: tuple[int, ...]) -> jax.Array:
    n = len(signs)
    groups = jnp.moveaxis(x, axis, -1)
    shape = groups.shape
    groups = groups.reshape(-1, n) * np.array(signs, np.float32)
    for stage in range(n.bit_length() - 1):
        # Sums and differences of pairs whose indices differ in one bit: a fixed order of additions.
        pairs = groups.reshape(-1, n >> (stage + 1), 2, 1 << stage)
        groups = jnp.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
    return jnp.moveaxis(groups.reshape(shape) * np.float32(1 / math.isqrt(n)), -1, axis)
