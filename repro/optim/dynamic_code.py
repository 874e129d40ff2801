"""Eight-bit codes whose exponent is decimal and as long as it needs to be, with a scale per block."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

DECADES = 7


@functools.lru_cache
def dynamic_levels(signed: bool) -> np.ndarray:
    """The 256 values of the code, ascending, float32: 0, 1, and in the i-th of seven decades below 1 (from the lowest,
    10^-7 to 10^-6) the middles of 2^i equal parts of [0.1, 1], with both signs; without a sign of 2^(i+1) parts.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, section 1.3, as in the
    table of bitsandbytes.
    """
    values = [0.0, 1.0]
    for i in range(DECADES):
        edges = np.linspace(0.1, 1.0, 2 ** (i if signed else i + 1) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - DECADES + 1)
        values += [*middles, *(-middles if signed else [])]
    return np.sort(np.array(values)).astype(np.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale"), meta_fields=("signed", "block"))
@dataclass(frozen=True)
class DynamicCodes:
    """`codes [n]` uint8, and `scale [blocks]` float32, the largest magnitude of every `block` of them in a row."""

    codes: jax.Array
    scale: jax.Array
    signed: bool
    block: int

    def dequantize(self) -> jax.Array:
        """float32 `[n]`."""
        values = jnp.asarray(dynamic_levels(self.signed))[self.codes]
        return values * jnp.repeat(self.scale, self.block, total_repeat_length=self.codes.shape[0])


def encode_dynamic(x: jax.Array, *, signed: bool, block: int, key: jax.Array | None = None) -> DynamicCodes:
    """`x [n]` (float32) in dynamic codes: nearest, or with a key stochastically between the two neighbours, so that the
    expected value is x. Without a sign, negative numbers become 0. A block with a NaN or an infinity decodes to NaN."""
    size = x.shape[0]
    count = -(-size // block)
    blocks = jnp.pad(x, (0, count * block - size)).reshape(count, block)
    scale = jnp.max(jnp.abs(blocks), axis=1)
    ratio = jnp.where(scale[:, None] > 0, blocks / scale[:, None], 0.0).ravel()[:size]
    levels = dynamic_levels(signed)
    if key is None:
        middles = (levels[:-1].astype(np.float64) + levels[1:]) / 2
        codes = jnp.searchsorted(jnp.asarray(middles.astype(np.float32)), ratio)
    else:
        table = jnp.asarray(levels)
        low = jnp.clip(jnp.searchsorted(table, ratio, side="right") - 1, 0, len(levels) - 2)
        chance = (ratio - table[low]) / (table[low + 1] - table[low])
        codes = low + (jax.random.uniform(key, ratio.shape) < chance)
    return DynamicCodes(codes.astype(jnp.uint8), jnp.where(jnp.isfinite(scale), scale, jnp.nan), signed, block)
