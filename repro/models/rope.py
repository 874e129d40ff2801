"""Rotary positions, and YaRN, which stretches them to longer windows."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from repro.models.config import YarnConfig

_OFF = YarnConfig()


def rope(x_BTHK: jax.Array, theta: float, *, interleaved: bool = False, yarn: YarnConfig = _OFF) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv 2104.09864, section 3.2).

    Pair i turns by the angle t * theta^(-2i/K) at position t. It couples the components i and i + K/2, or 2i and 2i + 1
    where `interleaved`. With `yarn` the frequencies are `yarn_frequencies`, and the result is `yarn_length` times as
    long.
    """
    T, K = x_BTHK.shape[1], x_BTHK.shape[-1]
    angle = np.arange(T)[:, None] * yarn_frequencies(K, theta, yarn)
    cos_T1K, sin_T1K = (jnp.asarray(f(angle)[:, None, :] * yarn_length(yarn), jnp.float32) for f in (np.cos, np.sin))
    x32 = x_BTHK.astype(jnp.float32)
    a, b = (x32[..., ::2], x32[..., 1::2]) if interleaved else jnp.split(x32, 2, -1)
    turned = a * cos_T1K - b * sin_T1K, b * cos_T1K + a * sin_T1K
    y = jnp.stack(turned, -1).reshape(x_BTHK.shape) if interleaved else jnp.concatenate(turned, -1)
    return y.astype(x_BTHK.dtype)


def yarn_frequencies(size: int, theta: float, yarn: YarnConfig) -> np.ndarray:
    """Radians per position of each of the size / 2 pairs, float64 (Peng et al., arXiv 2309.00071, section 3.2, as in
    the released DeepSeek-V2 and V3 models).

    theta^(-2i/size) for pairs that turn often over the original window, that over `factor` for those that hardly turn,
    and in between a mean of both whose weight is linear in i. The ends of that ramp are whole pairs, the lower rounded
    down and the upper up.
    """
    i = np.arange(size // 2)
    frequency = theta ** (-i / (size // 2))
    if yarn.factor == 1:
        return frequency

    def pair(turns: float) -> float:
        """The pair that turns so often over the original window, a real number."""
        return size * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), size - 1)
    slowed = np.clip((i - low) / (high - low if high != low else 1e-3), 0, 1)
    return frequency * (1 - slowed) + frequency / yarn.factor * slowed


def yarn_m(coefficient: float, factor: float) -> float:
    """m(c) = 0.1 c ln(factor) + 1: 1.369 for c = 1 and a factor of 40."""
    return 0.1 * coefficient * math.log(factor) + 1


def yarn_length(yarn: YarnConfig) -> float:
    """m(mscale) / m(mscale_all_dim), by which rotated components grow; 1 in the DeepSeek models."""
    return yarn_m(yarn.mscale, yarn.factor) / yarn_m(yarn.mscale_all_dim, yarn.factor)


def yarn_logits(yarn: YarnConfig) -> float:
    """m(mscale_all_dim)^2, by which all logits grow beside 1 / sqrt(head size); 1.874 for a factor of 40."""
    return yarn_m(yarn.mscale_all_dim, yarn.factor) ** 2
