"""Experts: who is chosen, and what comes out of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from repro.train.monitors.monitor import Metrics, Monitor, Observation

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig


def route_counts(routes_LBTK: jax.Array, experts: int) -> jax.Array:
    """How many (token, choice) pairs reached each expert, [L, E] int32; a pair that names no expert reached none."""
    pairs_LP1 = routes_LBTK.reshape(routes_LBTK.shape[0], -1, 1)
    return (pairs_LP1 == np.arange(experts)).sum(1, dtype=jnp.int32)


def selection_biases(buffers: Any) -> list[jax.Array]:
    """The selection biases [layers of a stack, E] among what the model carries."""
    found = jax.tree_util.tree_flatten_with_path(buffers)[0]
    return [leaf for path, leaf in found if getattr(path[-1], "key", None) == "bias_E"]


def _measure(config: MonitorConfig, seen: Observation) -> Metrics:
    output = seen.output
    if output.routes is None:
        return {}
    count_LE = route_counts(output.routes, seen.config.model.moe.experts)
    pairs = output.routes[0].size
    load_LE = count_LE / pairs
    reached_L = count_LE.sum(1)
    metrics = {
        "expert_loads": load_LE,
        "expert_violations": load_LE.max(1) * load_LE.shape[1] - 1,
        "expert_drop": 1 - reached_L.min() / pairs,
    }
    if output.stats.moe is not None:
        metrics["expert_hidden"] = output.stats.moe.expert_hidden_max
    if biases := selection_biases(output.buffers):
        metrics["expert_bias_range"] = jnp.concatenate([b.max(-1) - b.min(-1) for b in biases]).max()
    return metrics


EXPERTS = Monitor(
    name="experts",
    group="experts",
    dear=False,
    sees="a router and outliers of its experts that feed each other: load, bias and activations of the same expert",
    cannot_prove="that dense layers are in order",
    metrics={
        "expert_loads": "[L, E] share of the (token, choice) pairs of each layer with experts that each expert got",
        "expert_violations": "[L] largest share over 1 / E, minus 1 (MaxVio)",
        "expert_drop": "share of the pairs that no expert got, largest layer; counted from the routes",
        "expert_hidden": "[L, E] largest |hidden unit| of each expert",
        "expert_bias_range": "largest minus smallest selection bias after the step, largest layer",
    },
    measure=_measure,
)

MONITORS = (EXPERTS,)
