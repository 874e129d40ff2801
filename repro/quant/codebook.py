"""Nearest entry of a format that is a table."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from repro.quant.formats import Format


@functools.lru_cache
def _thresholds(fmt: Format) -> np.ndarray:
    """For each code above the first, the smallest float32 that is nearer to it than to the code below, `[codes - 1]`.

    A tie goes to the even code. Midpoints of two float32 are exact in float64, and not always a float32.
    """
    entries = np.array(fmt.codebook, np.float32)
    middle = (entries[1:].astype(np.float64) + entries[:-1]) / 2
    first = middle.astype(np.float32)
    upper_is_even = np.arange(1, len(entries)) % 2 == 0
    below = (first < middle) | ((first == middle) & ~upper_is_even)
    return np.where(below, np.nextafter(first, np.float32(np.inf)), first)


def nearest_entry(x: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """The uint8 codes and the float32 values of the entries nearest to `x` (float32); NaN has the first."""
    codes = jnp.zeros(x.shape, jnp.uint8)
    for threshold in _thresholds(fmt):
        codes = codes + (x >= threshold).astype(jnp.uint8)
    return codes, entry(codes, fmt)


def entry(codes: jax.Array, fmt: Format) -> jax.Array:
    """The float32 values of codes."""
    return jnp.asarray(np.array(fmt.codebook, np.float32))[codes]
