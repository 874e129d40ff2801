"""Runs the chosen monitors on one step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from repro.models import Output
from repro.train.monitors.config import MonitorConfig
from repro.train.monitors.monitor import Metrics, Observation


def initial_memory(config: MonitorConfig) -> dict[str, jax.Array]:
    """What the chosen monitors remember before the first step: a dict of float32 scalars, empty without a memory."""
    return {
        name: jnp.asarray(value, jnp.float32)
        for monitor in config.chosen(dear=False)
        for name, value in monitor.start.items()
    }


def every_step(config: MonitorConfig, seen: Observation) -> tuple[Metrics, dict[str, jax.Array]]:
    """The metrics of the cheap monitors, and the memory after this step."""
    monitors = config.chosen(dear=False)
    memory = dict(seen.memory)
    for monitor in monitors:
        if monitor.remember is not None:
            memory |= monitor.remember(config, seen)
    seen = seen._replace(memory=memory)
    return {name: value for monitor in monitors for name, value in monitor.measure(config, seen).items()}, memory


def at_times(config: MonitorConfig, seen: Observation) -> Metrics:
    """The metrics of the dear monitors. They share one forward pass on the validation windows, with the parameters
    before the step, so that a curve over steps has no noise of the batch."""
    monitors = config.chosen(dear=True)
    if any(monitor.probes for monitor in monitors):
        seen = seen._replace(probe=_probe(seen))
    return {name: value for monitor in monitors for name, value in monitor.measure(config, seen).items()}


def in_between(config: MonitorConfig, seen: Observation) -> Metrics:
    """What stands in place of `at_times` in all other steps: NaN, and -1 for whole numbers."""

    def missing(like: Any) -> jax.Array:
        return jnp.full(like.shape, jnp.nan if jnp.issubdtype(like.dtype, jnp.floating) else -1, like.dtype)

    return jax.tree.map(missing, jax.eval_shape(lambda: at_times(config, seen)))


def _probe(seen: Observation) -> Output:
    tokens_NT = seen.validation_NT1[:, :-1].astype(jnp.int32)
    # Noise of stochastic rounding is the same at every step.
    key = jax.random.key(0) if seen.config.model.dots.stochastic else None
    own = {name: value for name, value in seen.options.items() if name == "buffers"}
    return seen.apply(seen.params, tokens_NT, hidden=True, details=True, key=key, **own)
