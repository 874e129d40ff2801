"""Choosing a learning rate on tuning seeds."""

import math
from collections.abc import Sequence

from repro.claims.runs import Runs
from repro.errors import ReproError


def best_rate(runs: Runs, arm: str, size: str, metric: str = "loss") -> float:
    """The rate with the least mean of `metric` over the tuning runs of an arm at a size.

    A run that is not finite makes its rate lose; ties, also among lost rates, go to the smaller rate.
    ReproError if no tuning run reports the metric, or the rates were not tried on the same seeds.
    """
    by_rate: dict[float, dict[int, float]] = {}
    for run in runs.select(arm=arm, size=size, phase="tuning"):
        if metric in run.metrics:
            values = by_rate.setdefault(run.rate, {})
            if run.seed in values:
                raise ReproError(f"two tuning runs of {arm} at rate {run.rate:g} have the seed {run.seed}")
            values[run.seed] = run.metrics[metric]
    if not by_rate:
        raise ReproError(f"no tuning run of {arm} at size {size!r} reports {metric!r}")
    if len({frozenset(values) for values in by_rate.values()}) > 1:
        tried = {rate: sorted(values) for rate, values in sorted(by_rate.items())}
        raise ReproError(f"the rates of {arm} were tried on different seeds: {tried}")

    def mean(values: dict[int, float]) -> float:
        finite = all(math.isfinite(value) for value in values.values())
        return math.fsum(values.values()) / len(values) if finite else math.inf

    return min(by_rate, key=lambda rate: (mean(by_rate[rate]), rate))


def extend_ladder(rates: Sequence[float], best: float, factor: float) -> float | None:
    """The next rate to try where the best one is at an end of the ladder, one `factor` beyond it; None inside.

    ReproError if the ladder has fewer than two rates, does not hold `best`, or the factor is not above 1.
    """
    if len(set(rates)) < 2 or best not in rates or not 1 < factor < math.inf:
        raise ReproError(
            f"a ladder has at least two rates, the best among them, and a factor above 1; got the rates {list(rates)}, "
            f"the best {best} and the factor {factor}"
        )
    if best == min(rates):
        return best / factor
    if best == max(rates):
        return best * factor
    return None
