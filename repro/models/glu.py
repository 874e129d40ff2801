"""What the hidden units of a feed-forward block do with a gate g and a linear branch u, elementwise."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from repro.errors import ReproError
from repro.models.config import ModelConfig
from repro.quant.bits import INFINITY, from_bits, magnitude


def swiglu(g: jax.Array, u: jax.Array) -> jax.Array:
    """g * sigmoid(g) * u (Shazeer, arXiv 2002.05202, eq. 5)."""
    return jax.nn.silu(g) * u


def clamped_swiglu(g: jax.Array, u: jax.Array, limit: float) -> jax.Array:
    """swiglu of min(g, limit) and of u clipped to [-limit, limit], in float32 (DeepSeek-V4, section 4.2.3: limit 10).

    The gradient is exactly zero where a branch is clamped, and that of swiglu at the limit itself. |f| is at most
    limit^2. Raises `ReproError` unless limit > 0.
    """
    _need(limit > 0, f"the limit of a clamped SwiGLU must be positive, not {limit}.")
    gate, up = g.astype(jnp.float32), u.astype(jnp.float32)
    # jnp.minimum and jnp.clip would halve the gradient of an input that equals the limit.
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return swiglu(gate, up).astype(g.dtype)


def situ_glu(g: jax.Array, u: jax.Array, beta_gate: float = 4.0, beta_up: float = 25.0) -> jax.Array:
    """beta_gate tanh(g / beta_gate) sigmoid(g) * beta_up tanh(u / beta_up), in float32 (Kimi K3, eq. 12).

    The sigmoid sees the uncapped g. |f| is at most beta_gate * beta_up; with a beta of inf a branch is not capped, and
    with both f is swiglu. In bfloat16 the derivative 1 - tanh^2 would become exactly 0 where tanh saturates. Raises
    `ReproError` unless both betas are positive.
    """
    _need(beta_gate > 0 and beta_up > 0, f"the betas of SiTU-GLU must be positive, not {beta_gate} and {beta_up}.")
    capped = lambda z, beta: z if beta == math.inf else beta * jnp.tanh(z / beta)
    gate, up = g.astype(jnp.float32), u.astype(jnp.float32)
    return (capped(gate, beta_gate) * jax.nn.sigmoid(gate) * capped(up, beta_up)).astype(g.dtype)


def powlu(x1: jax.Array, x2: jax.Array, m: float = 3.0) -> jax.Array:
    """x1 f(x2), in float32, with f(x) = x^(m / (sqrt(x) + 1)) sigmoid(x) for x > 0 and x sigmoid(x) elsewhere (PowLU,
    arXiv 2605.25704). f tends to 1, so the product grows with |x1| alone. Raises `ReproError` unless 0 < m < 10."""
    _need(0 < m < 10, f"the exponent m of PowLU must lie between 0 and 10, not {m}.")
    x = x2.astype(jnp.float32)
    positive = x > jnp.finfo(jnp.float32).tiny  # the logarithm of a subnormal number may be that of 0
    safe_x = jnp.where(positive, x, 1.0)  # else the branch that is not taken would send NaN into the gradient
    power = jnp.where(positive, safe_x ** (m / (jnp.sqrt(safe_x) + 1)), x)
    return (x1.astype(jnp.float32) * power * jax.nn.sigmoid(x)).astype(x1.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x) with the normal distribution function, not its tanh approximation (arXiv 1606.08415, section 2)."""
    return jax.nn.gelu(x, approximate=False)


def smoothed(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(h / scale, scale) with one scale per channel (last axis), float32 [F]: the power of two below the channel's largest
    magnitude, which comes to lie in [1, 2); 1 for a channel of zeros. No gradient passes through it."""
    amax_F = magnitude(jax.lax.stop_gradient(h).astype(jnp.float32)).max(range(h.ndim - 1))
    # So far from the ends of float32 that weights times a scale stay normal numbers.
    scale_F = from_bits(jnp.clip(amax_F & INFINITY, 64 << 23, 190 << 23))
    scale_F = jnp.where(amax_F > 0, scale_F, 1.0)
    return h / scale_F.astype(h.dtype), scale_F


def smooth_swiglu(g: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(h, scale) with h * scale = swiglu(g, u); see `smoothed`. Smooth-SwiGLU of Fishman et al., arXiv 2409.12517.

    Quantise h, and multiply the input rows of the down projection by scale: without quantisation nothing changes, not
    even a bit, because scales are powers of two (the paper's are the maxima themselves). They are no parameters.
    """
    return smoothed(swiglu(g, u))


def activate(config: ModelConfig, g: jax.Array | None, u: jax.Array) -> jax.Array:
    """The hidden units that `config.glu` makes of a gate g and a linear branch u; gelu has no gate, and ignores g.

    `smooth` is swiglu here: its scales stand around the quantisation of what this returns.
    """
    match config.glu:
        case "swiglu" | "smooth":
            return swiglu(g, u)
        case "clamped":
            return clamped_swiglu(g, u, config.glu_limit)
        case "situ":
            return situ_glu(g, u, config.situ_gate, config.situ_up)
        case "powlu":
            return powlu(u, g, config.powlu_m)
        case "gelu":
            return gelu(u)


def _need(holds: bool, words: str) -> None:
    if not holds:
        raise ReproError(words)
