"""A preset: the sweep that an experiment's plan asks for, at one scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, Self

from repro.claims import Cell, Runs, best_rate, extend_ladder
from repro.errors import ReproError
from repro.train.config import TrainConfig, at_size


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Sizes and seeds of a sweep, and the training settings that all its runs share. A subclass adds what varies."""

    train: TrainConfig = TrainConfig()
    data: str = "kjv"
    """A corpus: kjv, kjv-words:SIZE, mkv2, a path or text:GLOB, nanogpt:GLOB, llmc:GLOB."""
    sizes: tuple[str, ...] = ("xs",)
    """Model sizes at which every claim is judged; `custom` is the shape that `train` gives."""
    test_seeds: tuple[int, ...] = tuple(range(8))
    lanes_per_device: int = 16
    """Most runs that share a device in one job."""
    evidence: bool = True
    """Whether verdicts count as evidence; false for a quick look and for a preset changed by hand."""
    platform: Literal["any", "gpu"] = "any"
    """The hardware that this preset is made for."""

    def __post_init__(self) -> None:
        for name in ("sizes", "test_seeds"):
            if not getattr(self, name):
                raise ReproError(f"{name} is empty; give at least one value.")
        if self.lanes_per_device < 1:
            raise ReproError(f"lanes_per_device is {self.lanes_per_device}; it must be at least 1.")
        for size in self.all_sizes():
            self.config(size)

    def all_sizes(self) -> tuple[str, ...]:
        """Every size that something is trained at, once."""
        return tuple(dict.fromkeys(self.sizes))

    def quick_look(self) -> Self:
        """The same sweep in a few steps, at the smallest size and on two seeds: whether it runs, and no evidence."""
        train = dataclasses.replace(self.train, steps=3, eval_windows=4)
        return dataclasses.replace(self, train=train, sizes=("tiny",), test_seeds=(0, 1), evidence=False)

    def config(self, size: str) -> TrainConfig:
        """The shared training settings at one size."""
        return self.train if size == "custom" else at_size(self.train, size)


@dataclasses.dataclass(frozen=True)
class Preset(Sweep):
    """A sweep whose rates are searched for on tuning seeds, beside a ladder of rates that arms share."""

    trend_sizes: tuple[str, ...] = ()
    """Sizes over which a trend is judged; those that are not among `sizes` run only what the trend needs."""
    rates: tuple[float, ...] = (0.01, 0.0316, 0.1)
    """The ladder of learning rates that arms share, ascending; the last is the stress rate."""
    tuning_rates: tuple[float, ...] = (0.01, 0.01414, 0.02)
    """Where the search for each arm's best rate starts; it goes on in steps of sqrt(2) while the best is at an end."""
    tuning_limit: int = 9
    """Most rates that the search may try per arm."""
    tuning_seeds: tuple[int, ...] = (1000, 1001, 1002)

    def __post_init__(self) -> None:
        for name in ("rates", "tuning_rates", "tuning_seeds"):
            if not getattr(self, name):
                raise ReproError(f"{name} is empty; give at least one value.")
        super().__post_init__()
        for name in ("rates", "tuning_rates"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or values[0] <= 0:
                raise ReproError(f"{name} is {values}; rates must be positive, different and ascending.")
        if self.tuning_limit < len(self.tuning_rates):
            raise ReproError(f"tuning_limit {self.tuning_limit} is below the {len(self.tuning_rates)} tuning rates.")

    def all_sizes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.sizes, *self.trend_sizes)))


TUNING_STEP = math.sqrt(2)
"""The factor between neighbouring rates of a search."""


def tuned(
    preset: Preset,
    arms: Sequence[tuple[str, str]],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    starts: Mapping[str, Sequence[float]] | None = None,
    factor: float = TUNING_STEP,
) -> Generator[list[Cell], Runs, tuple[Runs, dict[tuple[str, str], float]]]:
    """The best rate of each (arm, size) by mean validation loss over the tuning seeds, as a part of a plan.

    The search starts at the preset's `tuning_rates`, or for an arm in `starts` at rates of its own, and goes on in steps of
    `factor` while the best rate is at an end, up to `tuning_limit` rates, the same for every arm. `settings` are further ones
    of an arm's cells. Returns the runs so far and the rates: `runs, best = yield from tuned(...)`.
    """
    settings, starts = settings or {}, starts or {}
    tried = {(arm, size): list(starts.get(arm, preset.tuning_rates)) for arm, size in arms}
    wanted = [(arm, size, rate) for (arm, size), rates in tried.items() for rate in rates]
    runs, best = Runs(), {}
    while wanted:
        runs = yield [
            Cell(arm, size, rate, "tuning", "tuning", preset.tuning_seeds, settings.get(arm, {}))
            for arm, size, rate in wanted
        ]
        best = {key: best_rate(runs, *key) for key in tried}
        wanted = []
        for (arm, size), rates in tried.items():
            further = extend_ladder(rates, best[arm, size], factor)
            if further is not None and len(rates) < preset.tuning_limit:
                rates.append(further)
                wanted.append((arm, size, further))
    return runs, best
