"""What one criterion found in the runs, before a label is put on it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from repro.claims.runs import Runs
from repro.claims.statistics import minimum_detectable_effect, paired_t_interval, sign_flip_p
from repro.errors import ReproError


@dataclass(frozen=True)
class Finding:
    """Everything the label rule needs to know.

    Fields:
        quantity: in words, what `effect` measures.
        asks: in words, what the criterion asks of it, such as "above 2 times".
        scale: "ratio" (effect, interval and mde are factors; the test worked on logarithms), "difference"
            (differences in the metric's units), "value" (a level of the metric; the mde is a distance from the bound)
            or, for a conjunction, "parts".
        effect, interval, mde, per_seed: the mean over seeds, its two-sided interval, the minimum detectable effect,
            and the effect of every seed, all on that scale. None or empty where nothing could be computed.
        n: number of seeds; None for a deterministic comparison.
        p, p_opposite: p-values of the claim and of its opposite, 1 where nothing could be computed.
        claimed, opposite: whether the whole interval lies on the claimed, or on the other, side of the bound.
        large_enough: whether the effect reaches the smallest one that counts.
        excluded: whether the interval leaves out every effect that counts.
        problem: why no effect could be computed; empty otherwise.
        deterministic: a comparison without n and p; `p` and `p_opposite` are then 0 or 1.
        parts: the findings of a conjunction.
    """

    quantity: str
    asks: str
    scale: str
    effect: float | None = None
    interval: tuple[float, float] | None = None
    mde: float | None = None
    per_seed: Mapping[int, float] = field(default_factory=dict)
    n: int | None = None
    p: float = 1.0
    p_opposite: float = 1.0
    claimed: bool = False
    opposite: bool = False
    large_enough: bool = True
    excluded: bool = False
    problem: str = ""
    deterministic: bool = False
    parts: tuple["Finding", ...] = ()


@dataclass(frozen=True)
class Readings:
    """One metric at several places, paired by seed: `values` is [places, seeds]; `problem` says what is unusable."""

    seeds: tuple[int, ...]
    values: np.ndarray
    problem: str


def read(runs: Runs, metric: str, places: Sequence[tuple[str, str | None]], *, positive: bool) -> Readings:
    """Read a metric at (address, size) places with one common set of seeds.

    A value that is not finite, or not positive where `positive` is asked for, is a `problem`, not an error: a
    diverged run is a result. ReproError if a place has no such metric or if the places were run with different seeds.
    """
    columns = [runs.values(metric, at, size) for at, size in places]
    seeds = tuple(columns[0])
    for (at, size), column in zip(places, columns, strict=True):
        where = at if size is None else f"{at}/{size}"
        if tuple(column) != seeds:
            raise ReproError(
                f"{metric} at {places[0][0]} has the seeds {list(seeds)} and at {where} {list(column)}; "
                "arms are paired by seed"
            )
        for seed, value in column.items():
            if not math.isfinite(value) or (positive and value <= 0):
                rule = "finite positive" if positive else "finite"
                problem = f"{metric} of {where} is {value:g} at seed {seed}, and the rule needs {rule} values"
                return Readings(seeds, np.empty((len(places), 0)), problem)
    return Readings(seeds, np.array([list(column.values()) for column in columns]), "")


def on_scale(transform: Callable, x: float) -> float:
    """A point of the test's axis on the scale of the effect; an exponential may overflow to infinity in silence."""
    with np.errstate(over="ignore"):
        return float(transform(np.float64(x)))


def displayed(readings: Readings, d: np.ndarray, scale: str, transform: Callable, alpha: float) -> dict:
    """The descriptive fields of a Finding from the per-seed numbers `d` and the map to the effect's scale."""
    ends = paired_t_interval(d, 1 - alpha)
    mde = minimum_detectable_effect(d, alpha)
    distance = on_scale(np.exp, mde) if scale == "ratio" else abs(on_scale(transform, mde) - on_scale(transform, 0.0))
    return {
        "scale": scale,
        "effect": on_scale(transform, d.mean()),
        "interval": tuple(sorted(on_scale(transform, end) for end in ends)),
        "mde": distance,
        "per_seed": {seed: on_scale(transform, value) for seed, value in zip(readings.seeds, d, strict=True)},
        "n": len(readings.seeds),
    }


def directional(
    readings: Readings,
    distance: Callable[[np.ndarray], np.ndarray],
    *,
    quantity: str,
    asks: str,
    scale: str,
    transform: Callable,
    alpha: float,
    smallest: float = 0.0,
    test: Callable = sign_flip_p,
) -> Finding:
    """The finding of a one-sided criterion.

    Args:
        distance: [places, seeds] values -> [seeds] numbers d, positive on the claimed side of the bound.
        transform: monotone map from d to the effect as it is reported.
        smallest: smallest d that counts, at least 0.
        test: p-value of d with `alternative` "greater" or "less".
    """
    if readings.problem:
        return Finding(quantity, asks, scale, problem=readings.problem)
    d = distance(readings.values)
    low, high = paired_t_interval(d, 1 - alpha)
    return Finding(
        quantity,
        asks,
        **displayed(readings, d, scale, transform, alpha),
        p=test(d, "greater"),
        p_opposite=test(d, "less"),
        claimed=low > 0,
        opposite=high < 0,
        large_enough=bool(d.mean() >= smallest),
        excluded=high < smallest,
    )
