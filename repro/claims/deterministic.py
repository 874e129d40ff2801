"""Criteria for mechanisms: every run is compared with a value or a range; there is no n and no p."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from repro.claims.criterion import Criterion, need
from repro.claims.finding import Finding
from repro.claims.runs import Runs, parse_place


class _EveryRun(Criterion):
    deterministic: ClassVar[bool] = True

    def reads(self) -> tuple[str, ...]:
        return (self.arm,)

    def _compare(self, runs: Runs, excess: Callable[[float], float], asks: str) -> Finding:
        """`excess` is how far a value lies outside the allowed range, at most 0 inside."""
        values = runs.values(self.metric, self.arm)
        # NaN is outside every range and must win the search for the worst run.
        beyond = {seed: math.inf if math.isnan(value) else excess(value) for seed, value in values.items()}
        worst = max(beyond, key=beyond.get)
        holds = beyond[worst] <= 0
        return Finding(
            f"{self.metric} of {self.arm}",
            asks,
            "value",
            effect=values[worst],
            per_seed=values,
            p=0.0 if holds else 1.0,
            p_opposite=1.0 if holds else 0.0,
            claimed=holds,
            opposite=not holds,
            deterministic=True,
        )


@dataclass(frozen=True)
class Exact(_EveryRun):
    """Every run of the arm has the value, to an absolute `tolerance`. The effect is the run furthest from it."""

    metric: str
    arm: str
    value: float
    tolerance: float = 0.0
    kind: str = field(default="exact", init=False, repr=False)

    def __post_init__(self):
        parse_place(self.arm)
        need(math.isfinite(self.value), f"a value to compare with is finite, not {self.value}")
        need(0 <= self.tolerance < math.inf, f"a tolerance is finite and not negative, not {self.tolerance}")

    def find(self, runs: Runs, alpha: float) -> Finding:
        asks = f"{self.value:g}" + (f" to within {self.tolerance:g}" if self.tolerance else " exactly")
        return self._compare(runs, lambda value: abs(value - self.value) - self.tolerance, asks)


@dataclass(frozen=True)
class Within(_EveryRun):
    """Every run of the arm lies in [low, high], ends included; an end may be infinite. The effect is the worst run."""

    metric: str
    arm: str
    low: float
    high: float
    kind: str = field(default="within", init=False, repr=False)

    def __post_init__(self):
        parse_place(self.arm)
        need(self.low < self.high, f"a range has its low end below its high end, not {self.low} and {self.high}")
        need(self.low > -math.inf or self.high < math.inf, "a range without ends allows everything")

    def find(self, runs: Runs, alpha: float) -> Finding:
        # A value equal to an infinite end would give inf - inf.
        def excess(value: float) -> float:
            return max(end for end in (self.low - value, value - self.high) if not math.isnan(end))

        return self._compare(runs, excess, f"between {self.low:g} and {self.high:g}")
