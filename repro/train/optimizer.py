"""Which optimizer a run uses, and its settings beside the rate and the decay."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import optax

from repro.errors import ReproError
from repro.optim import NS_SCHEDULES, adamw, muon, per_head

Name = Literal["adamw", "muon"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings that are part of a run's structure. Raises `ReproError` for values that an optimizer cannot use."""

    momentum: float = 0.95
    """Of Muon, SGD and Signum."""
    nesterov: bool = True
    """Of Muon."""
    schedule: str = "muon5"
    """Newton-Schulz steps of Muon, a name of `repro.optim.NS_SCHEDULES`."""
    rms: float = 0.2
    """Root mean square of an exactly orthogonal update of Muon, over the rate."""
    per_head: bool = False
    """Whether each head of a query, key or value projection is a matrix of its own (Per-Head Muon)."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    """Of AdamW and its kin, also for the parameters that Muon leaves to AdamW."""
    gradient_clip: float = math.inf
    """Largest norm of the whole gradient; inf is off."""

    def __post_init__(self) -> None:
        if self.schedule not in NS_SCHEDULES:
            raise ReproError(f"train.optim.schedule is {self.schedule!r}; known are {', '.join(NS_SCHEDULES)}.")
        for name in ("momentum", "b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ReproError(f"train.optim.{name} is {getattr(self, name)}; it must lie in [0, 1).")
        for name in ("rms", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ReproError(f"train.optim.{name} is {getattr(self, name)}; it must be positive and finite.")
        if not self.gradient_clip > 0:
            raise ReproError(
                f"train.optim.gradient_clip is {self.gradient_clip}; it must be positive, or inf for none."
            )


def optimizer(
    name: Name, config: OptimizerConfig, layouts: Any, learning_rate: Any, weight_decay: Any, decay: str
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a run; its state does not depend on the rate or the decay, which may be traced."""
    adam = dict(b1=config.b1, b2=config.b2, eps=config.eps)
    shared = dict(weight_decay=weight_decay, decay=decay)
    if name == "muon":
        tx = muon(
            learning_rate, layouts=per_head(layouts) if config.per_head else layouts, momentum=config.momentum,
            nesterov=config.nesterov, schedule=config.schedule, rms=config.rms, **adam, **shared,
        )  # fmt: skip
    else:
        tx = adamw(learning_rate, **adam, **shared)
    if math.isfinite(config.gradient_clip):  # of the gradient, so that no orthogonalised update is rescaled
        tx = optax.chain(optax.clip_by_global_norm(config.gradient_clip), tx)
    return optax.with_extra_args_support(tx)
