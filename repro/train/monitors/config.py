"""Which monitors a run has."""

from __future__ import annotations

import dataclasses

from repro.errors import ReproError
from repro.quant import RECIPES
from repro.train.monitors.loss import TOKEN_CLASSES
from repro.train.monitors.monitor import Monitor
from repro.train.monitors.registry import MONITORS

ALL = "all"


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """Named monitors beside what is always measured. Raises `ReproError` for an unknown name or value."""

    names: tuple[str, ...] = ()
    """Names of `repro.train.monitors.MONITORS`, or `all`."""
    interval: int = 50
    """Dear monitors measure in steps 0, k, 2 k, ...; k is this."""
    classes: str = "bytes"
    """Kinds of target tokens of `loss_domains`, a name of `TOKEN_CLASSES`."""
    recipe: str = "mxfp8"
    """Of `quantisation` in a run whose linear layers are not quantised: a name of `repro.quant.RECIPES`."""
    ema: float = 0.98
    """How much of the running mean of the loss stays from step to step."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name != ALL and name not in MONITORS:
                raise ReproError(f"monitor {name!r} is unknown; known are {', '.join(MONITORS)}, and {ALL}.")
        if self.interval < 1:
            raise ReproError(f"train.monitors.interval is {self.interval}; it must be at least 1.")
        if self.classes not in TOKEN_CLASSES:
            raise ReproError(f"train.monitors.classes is {self.classes!r}; known are {', '.join(TOKEN_CLASSES)}.")
        fit = [name for name, recipe in RECIPES.items() if recipe.scale_rule != "given"]
        if self.recipe not in fit:
            raise ReproError(f"train.monitors.recipe is {self.recipe!r}; it must be one of {', '.join(fit)}.")
        if not 0 <= self.ema < 1:
            raise ReproError(f"train.monitors.ema is {self.ema}; it must lie in [0, 1).")

    def chosen(self, *, dear: bool) -> tuple[Monitor, ...]:
        """The monitors that were asked for, in the order of `MONITORS`: those of every step, or the dear ones."""
        return tuple(
            monitor
            for monitor in MONITORS.values()
            if monitor.dear == dear and (ALL in self.names or monitor.name in self.names)
        )
