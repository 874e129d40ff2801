"""Gradients as the backward pass left them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from repro.train.monitors.monitor import Metrics, Monitor, Observation
from repro.train.monitors.tensors import layer_norms, norms, tensors

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig


def nonfinite_count(tree: Any) -> jax.Array:
    """How many numbers of a tree are NaN or infinite, int32."""
    return sum(jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in jax.tree.leaves(tree))


def _measure(config: MonitorConfig, seen: Observation) -> Metrics:
    norms_P, model = norms(seen.grads, seen.layouts), seen.config.model
    return {
        "gradient_norms": norms_P,
        "layer_gradient_norms": layer_norms(norms_P, tensors(model, seen.grads, seen.layouts), model.layers),
        "gradient_norm_max": norms_P.max(),
        "nonfinite_gradients": nonfinite_count(seen.grads),
    }


GRADIENT = Monitor(
    name="gradient",
    group="gradient",
    dear=False,
    sees="that the backward pass went wrong, in which layer and tensor, and numbers that are not finite",
    cannot_prove="how large the step was: an adaptive or orthogonalised update does not have the gradient's size",
    metrics={
        "gradient_norms": "[P] norm of each tensor's gradient",
        "layer_gradient_norms": "[L] norm of all gradients of a layer",
        "gradient_norm_max": "the largest of `gradient_norms`",
        "nonfinite_gradients": "int32, how many numbers are NaN or infinite",
    },
    measure=_measure,
)

MONITORS = (GRADIENT,)
