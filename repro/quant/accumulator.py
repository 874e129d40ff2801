"""Matrix products with the sums of a tensor core: aligned, truncated, and promoted to float32 at intervals."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from repro.errors import ReproError
from repro.quant.bits import FRACTION, HIDDEN, from_bits, magnitude, times_power_of_two, to_bits


@dataclass(frozen=True)
class Accumulator:
    """Sums with `mantissa_bits` fraction bits over `chunk` products at a time, promoted every `promote_every` products.

    The products of a chunk and the running sum are shifted to the largest exponent among them, cut towards zero
    `mantissa_bits` below it, and added exactly; the sum is cut to 1 + mantissa_bits significant bits. At a promotion
    it is multiplied by the scales and added to a float32 sum. `promote_every` None promotes once, at the end.
    The H800's FP8 units are reported to keep about 14 bits, promoted every 128 products (DeepSeek-V3, arXiv
    2412.19437, sections 3.3.2 and 3.5.2); the model is that of Khattak and Mikaitis, arXiv 2512.07004, without guard
    bits. Raises `ReproError` unless `chunk` divides `promote_every` and a chunk's sum fits in 31 bits.
    """

    mantissa_bits: int
    chunk: int
    promote_every: int | None

    def __post_init__(self):
        if not 1 <= self.mantissa_bits <= 23 or self.chunk < 1:
            raise ReproError("An accumulator needs 1 to 23 mantissa bits and chunks of at least one product.")
        if self.mantissa_bits + 1 + self.chunk.bit_length() > 31:
            raise ReproError(
                f"Sums of {self.chunk} products with {self.mantissa_bits} mantissa bits do not fit in 31 bits; "
                "use smaller chunks or fewer bits."
            )
        if self.promote_every is not None and (self.promote_every < 1 or self.promote_every % self.chunk):
            raise ReproError(f"Chunks of {self.chunk} do not divide the interval {self.promote_every} of promotion.")


@functools.partial(jax.jit, static_argnames="accumulator")
def accumulate(
    a: jax.Array, b: jax.Array, accumulator: Accumulator, a_scale: jax.Array | None = None, b_scale=None
) -> jax.Array:
    """The product of `a` [M, K] and `b` [K, N], whose products must be exact in float32: float32 [M, N].

    `a_scale` [M, G] and `b_scale` [G, N] multiply what is promoted, G being the number of promotion intervals in K.
    """
    m, k = a.shape
    n = b.shape[1]
    chunk = accumulator.chunk
    interval = accumulator.promote_every or max(-(-k // chunk) * chunk, chunk)
    groups = -(-k // interval)
    pad = groups * interval - k
    a_GCML = jnp.pad(a, ((0, 0), (0, pad))).reshape(m, groups, -1, chunk).transpose(1, 2, 0, 3)
    b_GCLN = jnp.pad(b, ((0, pad), (0, 0))).reshape(groups, -1, chunk, n)
    a_GM = jnp.ones((groups, m), jnp.float32) if a_scale is None else a_scale.T
    b_GN = jnp.ones((groups, n), jnp.float32) if b_scale is None else b_scale

    def add_chunk(part, operands):
        left, right = operands
        return _add(part, left[:, :, None] * right[None], accumulator.mantissa_bits), None

    def promote(total, operands):
        left, right, left_scale, right_scale = operands
        part, _ = lax.scan(add_chunk, jnp.zeros((m, n), jnp.float32), (left, right))
        return total + lax.optimization_barrier(part * (left_scale[:, None] * right_scale)), None

    total, _ = lax.scan(promote, jnp.zeros((m, n), jnp.float32), (a_GCML, b_GCLN, a_GM, b_GN))
    return total


def _add(part: jax.Array, products_MLN: jax.Array, mantissa_bits: int) -> jax.Array:
    terms = jnp.concatenate([part[:, None], products_MLN], axis=1)
    mag = magnitude(terms)
    field = mag >> 23
    largest = jnp.max(field, axis=1, keepdims=True)
    shift = jnp.minimum((23 - mantissa_bits) + (largest - field), 31)
    aligned = jnp.where(field > 0, ((mag & FRACTION) | HIDDEN) >> shift, 0)
    total = jnp.sum(jnp.where(to_bits(terms) < 0, -aligned, aligned), axis=1, dtype=jnp.int32)
    size = jnp.abs(total)
    drop = jnp.maximum(32 - lax.clz(size) - (mantissa_bits + 1), 0)
    # At most 24 bits are left, so the conversion to float32 is exact.
    kept = ((size >> drop) << drop).astype(jnp.float32)
    scaled = from_bits(times_power_of_two(to_bits(kept), largest[:, 0] - 127 - mantissa_bits))
    return jnp.where(total < 0, -scaled, scaled)
