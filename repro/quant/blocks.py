"""Which elements of an array form a block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from repro.errors import ReproError
from repro.quant.recipes import Recipe


@dataclass(frozen=True)
class Blocks:
    """The division of an array of `shape` into blocks of `sizes` (one size per axis; 1 does not divide an axis).

    In the *blocked view* each axis whose blocks are larger than 1 is two axes, (number of blocks, size of a block);
    it is padded with zeros, which change neither a block's largest magnitude nor anything that is kept.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks along each axis: the shape of an array of scales."""
        return tuple(-(-n // b) for n, b in zip(self.shape, self.sizes, strict=True))

    def view(self, x: jax.Array) -> jax.Array:
        """The blocked view of an array of `shape`."""
        pads = [(0, count * b - n) for n, b, count in zip(self.shape, self.sizes, self.counts, strict=True)]
        if any(after for _, after in pads):
            x = jnp.pad(x, pads)
        return x.reshape(self._viewed(self.sizes))

    def unview(self, x: jax.Array) -> jax.Array:
        """The array of `shape` of a blocked view."""
        padded = x.reshape([count * b for count, b in zip(self.counts, self.sizes, strict=True)])
        return padded[tuple(slice(n) for n in self.shape)] if padded.shape != self.shape else padded

    def spread(self, scale: jax.Array) -> jax.Array:
        """An array of `counts`, in a shape that broadcasts against the blocked view."""
        return scale.reshape(self._viewed([1] * len(self.sizes)))

    def reduce_max(self, view: jax.Array) -> jax.Array:
        """The largest element of every block of a view of non-negative integers: an array of `counts`."""
        axes, position = [], 0
        for b in self.sizes:
            position += 1
            if b > 1:
                axes.append(position)
                position += 1
        return _largest(view, axes)

    def _viewed(self, inner) -> list[int]:
        shape = []
        for count, b, size in zip(self.counts, self.sizes, inner, strict=True):
            shape += [count, size] if b > 1 else [count]
        return shape


def largest_of_all(x: jax.Array) -> jax.Array:
    """The largest of an array of non-negative integers, with as many axes of size 1."""
    return _largest(x, range(x.ndim)).reshape((1,) * x.ndim)


_AT_ONCE = 16


def _largest(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The maximum of non-negative integers over `axes`, ascending, in steps that are fast loops on a CPU.

    XLA's CPU compiler fuses a short reduction with what comes before and vectorises it, but makes of a long one two
    more passes over memory, and of one over an axis before the last that it cannot fuse a call for every element.
    """
    untouched = True
    for axis in reversed(axes):
        while (step := _step(x, axis)) > 1:
            x = x.reshape(*x.shape[:axis], step, x.shape[axis] // step, *x.shape[axis + 1 :])
            if untouched or axis == x.ndim - 2:
                # Without the barrier XLA would join the steps again.
                x = lax.optimization_barrier(jnp.max(x, axis=axis))
            else:
                x = functools.reduce(jnp.maximum, (lax.index_in_dim(x, k, axis, keepdims=False) for k in range(step)))
            untouched = False
        x = jnp.max(x, axis=axis, initial=0)
    return x


def _step(x: jax.Array, axis: int) -> int:
    """How much of an axis to reduce next; 1 where it is at its end, or cannot be divided."""
    if jax.typeof(x).sharding.spec[axis] is not None:  # JAX does not slice an axis that is laid over devices
        return 1
    return next((n for n in range(min(_AT_ONCE, x.shape[axis]), 1, -1) if x.shape[axis] % n == 0), 1)


@functools.lru_cache(maxsize=4096)
def blocks_of(shape: tuple[int, ...], recipe: Recipe, axis: int) -> Blocks:
    """The blocks of a recipe along the negative `axis`. Raises `ReproError` where the array lacks an axis."""
    ndim = len(shape)
    if recipe.block_shape is None:
        return Blocks(shape, tuple(max(n, 1) for n in shape))
    across, along = recipe.block_shape
    sizes = [1] * ndim
    sizes[axis] = max(1, shape[axis] if along is None else min(along, shape[axis]))
    if across != 1:
        if ndim < 2:
            raise ReproError(f"Blocks of {across} x {along} need an array of at least two axes, not of {ndim}.")
        other = other_axis(axis)
        sizes[other] = max(1, shape[other] if across is None else min(across, shape[other]))
    return Blocks(shape, tuple(sizes))


def blocks_of_codes(shape: tuple[int, ...], counts: tuple[int, ...], recipe: Recipe, axis: int) -> Blocks:
    """The blocks of an array of codes with `counts` scales; leading axes that vmap added are not divided."""
    if recipe.block_shape is None:
        return Blocks(shape, tuple(1 if count == n else n for n, count in zip(shape, counts, strict=True)))
    return blocks_of(shape, recipe, axis)


def other_axis(axis: int) -> int:
    """The axis, counted from the end, that two-dimensional blocks cover besides `axis`."""
    return -2 if axis == -1 else -1


def negative_axis(axis: int, ndim: int) -> int:
    """`axis` counted from the end, so that it stays right under vmap. Raises `ReproError` if there is no such axis."""
    if not -ndim <= axis < ndim:
        raise ReproError(f"Axis {axis} does not exist in an array of {ndim} axes.")
    return axis if axis < 0 else axis - ndim
