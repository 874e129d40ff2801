"""Delayed scaling: the scale of a step follows from the largest magnitudes of earlier steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from repro.errors import ReproError
from repro.quant.bits import INFINITY, from_bits, magnitude, quotient
from repro.quant.formats import Format, format_of
from repro.quant.rounding import as_float32


@functools.partial(jax.tree_util.register_dataclass, data_fields=("history",), meta_fields=())
@dataclass(frozen=True)
class DelayedScale:
    """The last amaxes of one tensor, newest first: `history`, float32 `[steps]`, in the unit of the tensor.

    A pytree of the training state. The order of a step: `quantize(x, "fp8_delayed", scale=state.scale())`, then
    `state = state.update(x)`, so that a tensor is quantised before its own amax is known and may saturate.
    Source: Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433; the algorithm "max" of NVIDIA's
    TransformerEngine, without margin.
    """

    history: jax.Array

    @classmethod
    def create(cls, steps: int = 1024) -> DelayedScale:
        """An empty history, of zeros. Raises `ReproError` unless `steps` is positive."""
        if steps < 1:
            raise ReproError(f"A history of {steps} steps holds nothing; give at least 1.")
        return cls(jnp.zeros(steps, jnp.float32))

    def scale(self, element: str | Format = "e4m3") -> jax.Array:
        """The decode scale, float32 `[]`: the largest amax of the history / the largest element; 1 without history."""
        largest = jnp.max(self.history)
        scale = quotient(largest, jnp.float32(format_of(element).max))
        # Below the normal numbers a scale would be flushed to zero on some backends.
        return jnp.where(largest > 0, jnp.maximum(scale, jnp.finfo(jnp.float32).tiny), 1.0)

    def update(self, x: jax.Array) -> DelayedScale:
        """The history after a step that used `x`, of any shape; see `push`."""
        return self.push(amax_of(x))

    def push(self, amax: jax.Array) -> DelayedScale:
        """The history after a step with the largest magnitude `amax`, `[]`; unchanged if that is 0 or not finite."""
        known = (magnitude(amax) > 0) & (magnitude(amax) < INFINITY)
        pushed = jnp.concatenate([amax.reshape(1), self.history[:-1]])
        return DelayedScale(jnp.where(known, pushed, self.history))


def amax_of(x: jax.Array) -> jax.Array:
    """The largest magnitude of `x`, float32 `[]`; NaN if x holds one."""
    return from_bits(jnp.max(magnitude(as_float32(x)), initial=0))
