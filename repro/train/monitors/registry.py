"""All monitors by name, and the group of every metric."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from repro.train.monitors import (
    activation,
    attention,
    experts,
    gradient,
    loss,
    optimizer_state,
    quantisation,
    system,
    update,
    weight,
)
from repro.train.monitors.monitor import Monitor

_MODULES = (
    loss, attention, activation, gradient, update, weight, quantisation, optimizer_state, experts, system,
)  # fmt: skip

MONITORS: Mapping[str, Monitor] = MappingProxyType(
    {monitor.name: monitor for module in _MODULES for monitor in module.MONITORS}
)
"""Monitors by name."""

_CORE = {
    "loss": "loss log_z_rms",
    "attention": "max_logit max_abs_logit max_capped_logit entropy_mean entropy_min clipped_share head_logits",
    "activation": "activation_max activation_rms hidden_max hidden_rms",
    "gradient": "grad_norm",
    "update": "update_norm retained",
    "experts": "max_violation least_load router_logit_max router_log_z expert_hidden_max sum_rms routed_rms",
    "residual": "gain_forward_max gain_forward_min gain_backward_max gain_backward_min stream_spread",
    "guards": "guard_fired guard_active",
}

GROUPS: Mapping[str, str] = MappingProxyType(
    {name: group for group, names in _CORE.items() for name in names.split()}
    | {name: monitor.group for monitor in MONITORS.values() for name in monitor.metrics}
)
"""The group of every metric of the engine, those that are always measured and those of monitors."""

DEAR: frozenset[str] = frozenset(name for monitor in MONITORS.values() if monitor.dear for name in monitor.metrics)
"""Metrics that are NaN (whole numbers: -1) between their steps."""


def group_of(metric: str) -> str:
    """The group of a metric; `task` for those of an experiment's own program."""
    return GROUPS.get(metric, "task")
