"""What a monitor is, and what it sees of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from repro.models import Output

if TYPE_CHECKING:
    from repro.train.config import TrainConfig
    from repro.train.monitors.config import MonitorConfig

Metrics = dict[str, jax.Array]


class Observation(NamedTuple):
    """One step of one run. `config`, `apply` and `layouts` are static, all else are arrays or trees of them."""

    config: TrainConfig
    apply: Callable[..., Output]
    """`apply(params, tokens_BT, **options)`, the model."""
    layouts: Any
    """The `repro.optim.Layout` of every parameter, by path."""
    numbers: Any
    """The numeric settings of the run (`TrainConfig.numbers`)."""
    step: jax.Array
    """From 0."""
    params: Any
    """Before the step, those of `output`, `loss` and `grads`."""
    new_params: Any
    """After the optimizer, QK-Clip and rounding; a guard may still refuse them."""
    grads: Any
    """As the optimizer got them: after guards, before its own clip."""
    updates: Any
    """What was added to `params`: of the optimizer, after guards."""
    opt_state: Any
    """After the step."""
    output: Output
    loss: jax.Array
    """Cross entropy [], nats per token."""
    window_BT1: jax.Array
    validation_NT1: jax.Array
    """A few fixed windows of the validation text, the same in every step."""
    options: Mapping[str, Any]
    """Options of the model's call in this step."""
    memory: Mapping[str, jax.Array]
    """What monitors remember; `initial_memory` at first."""
    probe: Output | None = None
    """The model on `validation_NT1` with `params`, with hidden states and all statistics, for those that ask for it."""


@dataclasses.dataclass(frozen=True)
class Monitor:
    """A named group of metrics. `measure(config, seen)` is pure, of one run, and returns some of `metrics`: those whose
    subject the run has (there is no load without experts)."""

    name: str
    group: str
    """Where TensorBoard shows it."""
    dear: bool
    """Measured every `MonitorConfig.interval` steps, and in every step otherwise."""
    sees: str
    """What it can suggest."""
    cannot_prove: str
    metrics: Mapping[str, str]
    """Name and definition of every metric."""
    measure: Callable[[MonitorConfig, Observation], Metrics]
    probes: bool = False
    """Whether it needs `Observation.probe`."""
    start: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Its memory before the first step."""
    remember: Callable[[MonitorConfig, Observation], Metrics] | None = None
    """Its memory after this step; `measure` sees the new one."""
