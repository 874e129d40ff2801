"""Number formats of at most 32 bits: what their codes mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import jax.numpy as jnp
import numpy as np

from repro.errors import ReproError

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, arXiv 2305.14314, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """One number format. All numbers are exact and have no unit.

    `bits` counts sign, exponent and mantissa; `mantissa_bits` does not count the hidden bit. `max` is the largest
    finite value, `min_normal` the smallest normal and `min_subnormal` the smallest positive one (the same where there
    are no subnormals). `dtype` is the type in which codes are stored: JAX's own where XLA computes with it on every
    backend, otherwise an integer type with one code per element.

    `specials` says what the top codes mean: `"ieee"` infinities and NaNs, `"nan"` one NaN code (per sign), `"none"`
    only numbers. `codebook` holds the values of a format that is a table. A format without exponent and without table
    is fixed point: the value is the two's complement code times 2^-mantissa_bits, as in OCP's INT8; its lowest code
    has no positive counterpart.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    dtype: np.dtype
    specials: Literal["ieee", "nan", "none"]
    codebook: tuple[float, ...] = ()

    @property
    def has_nan(self) -> bool:
        """Whether some code is a NaN."""
        return self.specials != "none"

    @property
    def signed(self) -> bool:
        """Whether the format has negative values; only E8M0 has none, and no zero either."""
        return self.exponent_bits != self.bits

    @property
    def fixed_point(self) -> bool:
        """Whether the values are the integers times one power of two."""
        return self.exponent_bits == 0 and not self.codebook

    @property
    def lowest(self) -> float:
        """The most negative finite value, or the smallest positive one of an unsigned format."""
        if not self.signed:
            return self.min_normal
        return -self.max - self.min_subnormal if self.fixed_point else -self.max

    @property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_exponent(self) -> int:
        """log2(min_normal)."""
        return math.frexp(self.min_normal)[1] - 1

    def values(self) -> np.ndarray:
        """All finite values, ascending, zero once: float32 `[values]`. Raises `ReproError` above 16 bits."""
        if self.bits > 16:
            raise ReproError(f"{self.name} has too many values to list; formats of at most 16 bits can be listed.")
        if self.codebook:
            return np.array(self.codebook, np.float32)
        if not self.signed:
            return np.ldexp(1.0, np.arange(2**self.bits - 1) - self.bias).astype(np.float32)
        if self.fixed_point:
            half = 2 ** (self.bits - 1)
            return np.arange(-half, half).astype(np.float32) * np.float32(self.min_subnormal)
        field, mantissa = np.divmod(np.arange(2 ** (self.bits - 1)), 2**self.mantissa_bits)
        hidden = np.where(field > 0, 2**self.mantissa_bits, 0)
        values = np.ldexp((hidden + mantissa).astype(np.float64), np.maximum(field, 1) - self.bias - self.mantissa_bits)
        values = values[values <= self.max].astype(np.float32)
        return np.concatenate([-values[:0:-1], values])


def _float(name: str, exponent_bits: int, mantissa_bits: int, dtype, specials: str) -> Format:
    bias = 2 ** (exponent_bits - 1) - 1
    # IEEE gives the whole top exponent to specials, OCP's E4M3 only its last mantissa.
    top = 2**exponent_bits - (2 if specials == "ieee" else 1) - bias
    spare = 2 if specials == "nan" else 1
    return Format(
        name=name,
        bits=1 + exponent_bits + mantissa_bits,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        max=2.0**top * (2 - spare * 2.0**-mantissa_bits),
        min_normal=2.0 ** (1 - bias),
        min_subnormal=2.0 ** (1 - bias - mantissa_bits),
        dtype=np.dtype(dtype),
        specials=specials,
    )


def _fixed(name: str, bits: int) -> Format:
    step = 2.0 ** (2 - bits)
    return Format(name, bits, 0, bits - 2, 0, 2 - step, 1.0, step, np.dtype(np.int8), "none")


_ALL = (
    _float("fp32", 8, 23, jnp.float32, "ieee"),
    _float("bf16", 8, 7, jnp.bfloat16, "ieee"),
    _float("fp16", 5, 10, jnp.float16, "ieee"),
    _float("e4m3", 4, 3, jnp.float8_e4m3fn, "nan"),  # OCP OFP8 v1.0, section 5
    _float("e5m2", 5, 2, jnp.float8_e5m2, "ieee"),  # the same
    # float16 without its last four mantissa bits; the layout is this package's reading of "E5M6" in
    # DeepSeek-V3 (arXiv 2412.19437, section 3.3.3).
    _float("e5m6", 5, 6, jnp.uint16, "ieee"),
    _float("e3m2", 3, 2, jnp.uint8, "none"),  # OCP MX v1.0, section 5.3
    _float("e2m3", 2, 3, jnp.uint8, "none"),
    _float("e2m1", 2, 1, jnp.uint8, "none"),
    Format("e8m0", 8, 8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, np.dtype(jnp.float8_e8m0fnu), "nan"),
    _fixed("int8", 8),
    _fixed("int4", 4),
    Format("nf4", 4, 0, 0, 0, 1.0, NF4[8], NF4[8], np.dtype(np.uint8), "none", NF4),
)

FORMATS: Mapping[str, Format] = MappingProxyType({fmt.name: fmt for fmt in _ALL})
"""All formats by name."""


def format_of(fmt: str | Format) -> Format:
    """The format of a name, or the format itself. Raises `ReproError` for an unknown name."""
    if isinstance(fmt, Format):
        return fmt
    if fmt not in FORMATS:
        raise ReproError(f"Number format {fmt!r} is unknown; known are {', '.join(FORMATS)}.")
    return FORMATS[fmt]
