"""Which optimizer a run uses, and its settings beside the rate and the decay."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any, Literal

import jax
import optax

from repro.errors import ReproError
from repro.optim import (
    NS_SCHEDULES,
    OPTIMIZERS,
    clip_by_global_norm,
    optimizer,
    per_head,
    with_low_precision_state,
)

Name = Literal[
    "adamw", "muon", "sgd", "adam", "adafactor", "lion", "signum", "stable_adamw", "adalayer", "shampoo", "soap"
]
StateStorage = Literal["fp32", "bf16", "bf16_stochastic", "e4m3", "int8", "dynamic8"]
_FORMATS: dict[str, Any] = {
    "bf16": "bf16",
    "bf16_stochastic": "bf16",
    "e4m3": "e4m3",
    "int8": "int8",
    "dynamic8": {"mu": "dynamic8", "nu": "dynamic8_unsigned"},
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings that are part of a run's structure; each optimizer takes those that it has.

    Raises `ReproError` for values that none can use.
    """

    momentum: float = 0.95
    """Of Muon and SGD."""
    nesterov: bool = True
    """Of Muon and SGD."""
    schedule: str = "muon5"
    """Newton-Schulz steps of Muon, a name of `repro.optim.NS_SCHEDULES`."""
    rms: float = 0.2
    """Root mean square of an exactly orthogonal update of Muon or Shampoo, over the rate."""
    per_head: bool = False
    """Whether each head of a query, key or value projection is a matrix of its own (Per-Head Muon)."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    """Of AdamW and its kin, also for the parameters that a matrix optimizer leaves to AdamW."""
    coordinates: str = ""
    """Of Adalayer: the roles that keep a second moment per coordinate, such as `head,norm`."""
    gradient_clip: float = math.inf
    """Largest norm of the whole gradient; inf is off."""
    state: StateStorage = "fp32"
    """What moments are stored in between steps: float32, bfloat16 (rounded to nearest or stochastically), FP8 E4M3 or
    linear 8-bit integers in blocks of 256 with a scale, or Adam's moments in the dynamic 8-bit codes."""

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
        if self.state != "fp32" and self.state not in _FORMATS:
            raise ReproError(f"train.optim.state is {self.state!r}; known are fp32, {', '.join(_FORMATS)}.")


def check_name(name: str) -> None:
    """Raises `ReproError` for an optimizer that does not exist."""
    if name not in OPTIMIZERS:
        raise ReproError(f"train.optimizer is {name!r}; known are {', '.join(OPTIMIZERS)}.")


def build(
    name: Name,
    config: OptimizerConfig,
    layouts: Any,
    learning_rate: Any,
    weight_decay: Any,
    decay: str,
    seed: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a run. Its state does not depend on the rate or the decay, which may be traced, as may `seed`,
    from which stochastic rounding of its state is drawn."""
    options = dataclasses.asdict(config) | {
        "weight_decay": weight_decay,
        "decay": decay,
        "coordinate_roles": tuple(filter(None, config.coordinates.split(","))),
    }
    known = inspect.signature(OPTIMIZERS[name]).parameters
    own = {key: value for key, value in options.items() if key in known}
    tx = optimizer(name, learning_rate, layouts=per_head(layouts) if config.per_head else layouts, **own)
    if config.state != "fp32":
        rounding = "stochastic" if config.state == "bf16_stochastic" else "nearest_even"
        tx = with_low_precision_state(tx, _FORMATS[config.state], rounding=rounding, seed=seed)
    if math.isfinite(config.gradient_clip):  # of the gradient, so that no orthogonalised update is rescaled
        tx = optax.chain(clip_by_global_norm(config.gradient_clip), tx)
    return optax.with_extra_args_support(tx)
