"""The optimizer's state: how large its moments are, and whether the second one is up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from repro.optim.layout import matched
from repro.optim.low_precision_state import Packed
from repro.train.monitors.monitor import Metrics, Monitor, Observation
from repro.train.monitors.second_moment import (
    first_moments,
    restored,
    second_moments,
    second_moments_by_name,
    seen_gradients,
    staleness,
)

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig


def _sizes(config: MonitorConfig, seen: Observation) -> Metrics:
    state, metrics = restored(seen.opt_state), {}
    if first := first_moments(state):
        metrics["first_moment_max"] = jnp.stack([jnp.abs(m).max() for m in first]).max()
        metrics["first_moment_rms"] = jnp.sqrt(sum(jnp.sum(m * m) for m in first) / sum(m.size for m in first))
    if second := second_moments(state):
        count = sum(v.size for v in second)
        metrics["second_moment_max"] = jnp.stack([v.max() for v in second]).max()
        metrics["second_moment_min"] = jnp.stack([v.min() for v in second]).min()
        metrics["second_moment_zeros"] = sum(jnp.sum(v == 0) for v in second) / count
    leaves = jax.tree.leaves(seen.opt_state, is_leaf=lambda x: isinstance(x, Packed))
    if scales := [leaf.data.scale.astype(jnp.float32) for leaf in leaves if isinstance(leaf, Packed)]:
        metrics["state_scale_max"] = jnp.stack([s.max() for s in scales]).max()
        metrics["state_scale_min"] = jnp.stack([s.min() for s in scales]).min()
    return metrics


def _staleness(config: MonitorConfig, seen: Observation) -> Metrics:
    own = seen.config
    grads = seen_gradients(seen.grads, own, seen.numbers, seen.params)
    found = second_moments_by_name(restored(seen.opt_state), grads, own, seen.layouts)
    if not found:
        return {}
    parts = []
    for name, leaf, layout in matched(seen.grads, seen.layouts):
        layered = layout.layer is not None
        missing = jnp.full(leaf.shape[:1] if layered else (1,), -1.0, jnp.float32)
        parts.append(jnp.atleast_1d(staleness(found[name], layered)) if name in found else missing)
    rms_P = jnp.concatenate(parts)
    return {"staleness": rms_P, "staleness_max": rms_P.max()}


OPTIMIZER_STATE = Monitor(
    name="optimizer_state",
    group="optimizer",
    dear=False,
    sees="moments that overflow, vanish or turn to zero in the format they are stored in",
    cannot_prove="that the model is in order",
    metrics={
        "first_moment_max": "largest magnitude in the running means of the gradient, as stored",
        "first_moment_rms": "their root mean square",
        "second_moment_max": "largest running mean of squared gradients, not debiased (Adafactor: of rows and columns)",
        "second_moment_min": "the smallest",
        "second_moment_zeros": "share of them that are 0, so that an update is divided by epsilon alone",
        "state_scale_max": "largest block scale of a state that is stored in eight bits",
        "state_scale_min": "the smallest",
    },
    measure=_sizes,
)

STALENESS = Monitor(
    name="staleness",
    group="optimizer",
    dear=False,
    sees="a second moment that underestimates the present gradient, so that the step is too large",
    cannot_prove="that the model is in order: the gradient may have grown for any reason",
    metrics={
        "staleness": "[P] RMS_t = sqrt(mean(g^2 / max(v, eps^2))), v debiased and with the present g (StableAdamW, "
        "arXiv 2304.13013); -1 for a tensor without a second moment",
        "staleness_max": "the largest of `staleness`",
    },
    measure=_staleness,
)

MONITORS = (OPTIMIZER_STATE, STALENESS)
