"""The learning-rate schedule as a fraction of its peak."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from repro.train.config import TrainConfig


def fraction(config: TrainConfig, step: jax.Array) -> jax.Array:
    """Fraction of the peak rate at `step` (0-based): linear warm-up that reaches 1 on its last step, then constant or
    a cosine that reaches `final_fraction` on the last step."""
    warmup = max(1, round(config.warmup * config.steps))
    rising = (step + 1) / warmup
    if config.schedule == "constant":
        return jnp.minimum(rising, 1.0)
    progress = jnp.clip((step + 1 - warmup) / max(1, config.steps - warmup), 0.0, 1.0)
    cosine = config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return jnp.where(step + 1 < warmup, rising, cosine)
