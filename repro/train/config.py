"""What one training run is: the structure that is compiled and the numbers that are not."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from repro.errors import ReproError
from repro.models import SIZES, ModelConfig
from repro.optim.adamw import Decay
from repro.train.guards import Rule, check_rules, parse
from repro.train.monitors import MonitorConfig
from repro.train.optimizer import Name, OptimizerConfig, check_name

if TYPE_CHECKING:
    from repro.train.step import Program

NUMERIC = ("learning_rate", "weight_decay", "tau", "z_loss")
"""Settings that enter the compiled program as arguments; all others are part of its structure."""

SHAPE_FIELDS = ("model.layers", "model.width", "model.heads", "model.ffn", "length", "batch_size")
"""Settings that a named size decides."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. Raises `ReproError` for settings that contradict each other.

    An experiment with a task of its own derives a config from this one: further fields, `numeric` where some of them are
    numbers, `program_class` with the program, and `ledger_rows` for what the ten ledgers should say besides.
    """

    numeric: ClassVar[tuple[str, ...]] = NUMERIC
    """The fields that enter the compiled program as arguments."""

    model: ModelConfig = ModelConfig()
    length: int = 64
    """Tokens per window (T)."""
    batch_size: int = 16
    """Windows per step (B)."""
    steps: int = 300
    optimizer: Name = "muon"
    optim: OptimizerConfig = OptimizerConfig()
    learning_rate: float = 0.01
    """Peak rate, the same for matrices and for all other parameters."""
    warmup: float = 0.1
    """Fraction of the steps over which the rate rises linearly."""
    schedule: Literal["cosine", "constant"] = "cosine"
    final_fraction: float = 0.1
    """Where the cosine ends, as a fraction of the peak."""
    weight_decay: float = 0.0
    decay: Decay = "coupled"
    """Coupled: W shrinks by rate * decay per step. Independent: by schedule fraction * decay. L2: the decay is a part of
    the gradient. None: no decay whatever `weight_decay` says."""
    weights: Literal["fp32", "bf16", "bf16_stochastic"] = "fp32"
    """What weights are stored in between steps: float32, or bfloat16 after rounding to nearest or stochastically (there
    is then no float32 copy; the optimizer's state stays float32)."""
    tau: float = math.inf
    """QK-Clip threshold; inf is off. Any finite value needs plain attention logits."""
    z_loss: float = 0.0
    """Coefficient of mean (log Z)^2 of the output logits, added to the loss."""
    eval_windows: int = 64
    """Fixed validation windows that the final loss is a mean over."""
    monitors: MonitorConfig = MonitorConfig()
    """What is measured beside what always is."""
    guards: tuple[str, ...] = ()
    """Rules such as `when grad_norm > 4 ema then skip`; see `repro.train.guards`."""
    routing_lag: int = 0
    """Steps that the parameters which choose the experts are behind those of the gates (Anticipatory Routing, DeepSeek-V4,
    section 4.2.3); 0 is present ones."""

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "steps", "eval_windows"):
            if getattr(self, name) < 1:
                raise ReproError(f"train.{name} is {getattr(self, name)}; it must be at least 1.")
        check_name(self.optimizer)
        if not 0 < self.learning_rate < math.inf:
            raise ReproError(f"train.learning_rate is {self.learning_rate}; it must be positive and finite.")
        for name in ("weight_decay", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ReproError(f"train.{name} is {getattr(self, name)}; it must be zero or positive, and finite.")
        if not 0 <= self.warmup < 1 or not 0 <= self.final_fraction <= 1:
            raise ReproError("train.warmup must lie in [0, 1) and train.final_fraction in [0, 1].")
        if self.weights not in ("fp32", "bf16", "bf16_stochastic"):
            raise ReproError(f"train.weights is {self.weights!r}; it must be fp32, bf16 or bf16_stochastic.")
        if not self.tau > 0:
            raise ReproError(f"train.tau is {self.tau}; it must be positive, or inf for no clip.")
        if math.isfinite(self.tau) and not self.clips:
            raise ReproError(
                "train.tau asks for QK-Clip beside QK norm, sigma-reparametrisation or a soft-cap, which would undo or "
                "hide what it does; set tau to inf, or qk_norm to none, sigma_reparam to false and soft_cap to 0."
            )

        if self.routing_lag < 0 or (self.routing_lag and not self.model.moe.experts):
            raise ReproError(
                f"train.routing_lag is {self.routing_lag}; it is zero, or positive in a model with experts."
            )
        check_rules(self.rules, self)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The guards."""
        return tuple(parse(text) for text in self.guards)

    @property
    def clips(self) -> bool:
        """Whether QK-Clip can act: no norm (of queries and keys, or of weights) undoes it, and no soft-cap hides it."""
        return self.model.qk_norm == "none" and not self.model.sigma_reparam and not self.model.soft_cap

    def numbers(self) -> Any:
        return self.numbers_type()(*(getattr(self, name) for name in self.numeric))

    @classmethod
    def numbers_type(cls) -> type:
        """The named tuple of the numeric settings."""
        return _numbers_type(cls.numeric)

    def structure(self) -> TrainConfig:
        """This config with its numbers set to their defaults: runs of equal structure share one compiled program."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: defaults[name] for name in self.numeric})

    @classmethod
    def program_class(cls) -> type[Program]:
        """What is trained."""
        from repro.train.step import Program  # the program knows its config, not the other way round

        return Program

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        """Rows of the ledgers, `{"N2": {role: text}}`, beside and in place of those of every run."""
        return {}


class Numbers(NamedTuple):
    """The numeric settings of one run, or arrays of them over lanes."""

    learning_rate: Any
    weight_decay: Any
    tau: Any
    z_loss: Any


@functools.cache
def _numbers_type(names: tuple[str, ...]) -> type:
    return Numbers if names == NUMERIC else collections.namedtuple("Numbers", names)


def with_settings(config: TrainConfig, settings: dict[str, Any]) -> TrainConfig:
    """`config` with dotted fields replaced, such as `{"tau": 100.0, "model.qk_norm": "rms"}`.

    Raises `ReproError` naming a field that does not exist.
    """
    return _replaced(config, settings, "")


def _replaced(config: Any, settings: dict[str, Any], above: str) -> Any:
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        prefix, _, inner = name.partition(".")
        if inner and dataclasses.is_dataclass(getattr(config, prefix, None)):
            nested.setdefault(prefix, {})[inner] = value
        else:
            _check_field(config, name, above)
            own[name] = value
    for prefix, values in nested.items():
        own[prefix] = _replaced(own.get(prefix, getattr(config, prefix)), values, f"{above}{prefix}.")
    return dataclasses.replace(config, **own)


def _check_field(config: Any, name: str, prefix: str) -> None:
    known = [f.name for f in dataclasses.fields(config)]
    if name not in known:
        raise ReproError(f"setting {prefix}{name} does not exist; there is {', '.join(prefix + k for k in known)}.")


def at_size(config: TrainConfig, size: str) -> TrainConfig:
    """`config` at a named size of `repro.models.SIZES`: its model shape, window length and batch."""
    if size not in SIZES:
        raise ReproError(f"size {size!r} is unknown; known are {', '.join(SIZES)}.")
    chosen = SIZES[size]
    return dataclasses.replace(
        config, model=chosen.apply(config.model), length=chosen.length, batch_size=chosen.batch_size
    )
