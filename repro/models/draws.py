"""All random matrices of a model in one draw.

A program with one draw per matrix takes seconds to compile, most of a small model's start. JAX's default random bits are
a function of a key and of a position alone (threefry, `jax_threefry_partitionable`): the 32 bits of element i are the two
words of `fold_in(key, i)`, one xor the other. So a long vector of all matrices, each element with its own key and
position, has the bits that matrix by matrix would have, and compiles as one loop.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_TOGETHER_UP_TO, _BLOCK = 2**26, 2**16
"""Weights of a model, and of a block: keys and positions take about 40 bytes per weight, so they exist for a block at a
time. A larger model is drawn matrix by matrix, which takes half the time to run and can be sharded."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("key", "number"), meta_fields=("shape", "std"))
@dataclasses.dataclass(frozen=True)
class Draw:
    """A Gaussian float32 matrix that has not been drawn: N(0, std^2) of `shape`, of `fold_in(key, number)`. A batch of
    keys and numbers is a batch of matrices."""

    key: jax.Array
    number: jax.Array | int
    shape: tuple[int, ...]
    std: float

    @property
    def batched(self) -> tuple[int, ...]:
        """The shape with the axes of the keys in front."""
        return (*self.key.shape, *self.shape)

    def now(self) -> jax.Array:
        """The matrix, drawn by itself."""
        one = lambda key: jax.random.normal(key, self.shape, jnp.float32) * self.std
        return jax.vmap(one)(_folded([self])).reshape(self.batched)


@dataclasses.dataclass(frozen=True)
class Later:
    """The key `fold_in(key, number)`, for a `Draw`."""

    key: jax.Array
    number: jax.Array | int


class Keys:
    """What a module takes in place of `nnx.Rngs` where its matrices are drawn later: the same keys, each a `Later`."""

    def __init__(self, key: jax.Array) -> None:
        self._key, self._number = key, 0

    def params(self) -> Later:
        """The next key."""
        self._number += 1
        return Later(self._key, self._number - 1)


class KeysOf(Keys):
    """Those of the stream `params` of an `nnx.Rngs`, which moves on with them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self._stream = rngs.params

    def params(self) -> Later:
        later = Later(self._stream.key[...], self._stream.count[...])
        self._stream.count[...] += 1
        return later

    def split(self, n: int) -> jax.Array:
        """[n] keys, for as many `Keys`."""
        return jax.random.split(self._stream(), n)


def normal(key: jax.Array | Later, shape: tuple[int, ...], std: float) -> jax.Array | Draw:
    """Gaussian float32 with a standard deviation; of a `Later` the `Draw` of it."""
    if isinstance(key, Later):
        return Draw(key.key, key.number, shape, std)
    return jax.random.normal(key, shape, jnp.float32) * std


def draw(module: nnx.Module) -> None:
    """Puts a matrix in the place of every `Draw` among the parameters of a module."""
    found = [v for _, v in nnx.iter_graph(module) if isinstance(v, nnx.Param) and isinstance(v.get_value(), Draw)]
    draws = [variable.get_value() for variable in found]
    for variable, value in zip(found, _drawn(draws), strict=True):
        variable.set_value(value)


def _drawn(draws: list[Draw]) -> list[jax.Array]:
    total = sum(math.prod(one.batched) for one in draws)
    counted = jax.config.jax_threefry_partitionable and all(
        jax.random.key_impl(one.key) == "threefry2x32" for one in draws
    )
    if not counted or not 0 < total <= _TOGETHER_UP_TO:
        return [one.now() for one in draws]
    matrices = [math.prod(one.key.shape) for one in draws]
    keys = _folded(draws)
    sizes = np.repeat([math.prod(one.shape) for one in draws], matrices)
    first = np.cumsum(sizes) - sizes
    # As XLA folds the factor of `jax.random.normal` and the standard deviation where it sees both.
    scale = np.repeat([np.float32(math.sqrt(2)) * np.float32(one.std) for one in draws], matrices)
    size = min(_BLOCK, total)

    def block(start: jax.Array) -> jax.Array:
        place = start + jnp.arange(size)
        matrix = jnp.searchsorted(first, place, side="right") - 1
        of_element = lambda table: jnp.asarray(table).at[matrix].get(mode="promise_in_bounds")
        words = jax.random.key_data(jax.vmap(jax.random.fold_in)(of_element(keys), place - of_element(first)))
        return jax.lax.erf_inv(_uniform(words[:, 0] ^ words[:, 1])) * of_element(scale)

    flat = jax.lax.map(block, jnp.arange(0, total, size)).reshape(-1)[:total]
    ends = np.cumsum([math.prod(one.batched) for one in draws])[:-1]
    return [part.reshape(one.batched) for part, one in zip(jnp.split(flat, ends), draws, strict=True)]


def _folded(draws: list[Draw]) -> jax.Array:
    """The key of every matrix."""
    numbers = [jnp.broadcast_to(jnp.asarray(one.number, jnp.uint32), one.key.shape).reshape(-1) for one in draws]
    keys = [one.key.reshape(-1) for one in draws]
    return jax.vmap(jax.random.fold_in)(jnp.concatenate(keys), jnp.concatenate(numbers))


def _uniform(bits: jax.Array) -> jax.Array:
    """Float32 in (-1, 1) of 32 random bits, as `jax.random.normal` makes them: the upper 23 as a fraction."""
    fraction = jax.lax.bitcast_convert_type((bits >> 9) | np.uint32(0x3F800000), jnp.float32) - 1.0
    low = np.nextafter(np.float32(-1), np.float32(0))
    return jnp.maximum(low, fraction * (np.float32(1) - low) + low)
