"""What the test runs of every arm came to, as text: the rows of a table, wherever it is shown."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from repro.claims import Experiment, Run, Runs
from repro.report.numbers import NONE


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation (n - 1), the mean alone for one value."""
    if len(values) == 1:
        return f"{values[0]:.5g}"
    return f"{np.mean(values):.5g} ± {np.std(values, ddof=1):.2g}"


def median(values: Sequence[float]) -> str:
    """The median."""
    return f"{np.median(values):.4g}"


def mean(values: Sequence[float]) -> str:
    """The mean."""
    return f"{np.mean(values):.4g}"


# Metric -> heading and how the seeds are put together. Others are shown by their median under their own name.
KNOWN: dict[str, tuple[str, Callable[[Sequence[float]], str]]] = {
    "loss": ("valid. loss, mean ± sd", mean_and_spread),
    "train_loss": ("train loss, mean ± sd", mean_and_spread),
    "max_logit": ("max logit, median", median),
    "peak_max_logit": ("peak logit, median", median),
    "clipped_share_peak": ("peak clipped share, mean", mean),
    "clipped_share": ("clipped share, mean", mean),
    "activation_max": ("largest activ., median", median),
}
# What matters most, for a table of limited width.
FIRST = ("loss", "max_logit", "peak_max_logit", "clipped_share", "clipped_share_peak")


@dataclass(frozen=True)
class Summary:
    """Headings and rows of text: size, arm, point, rate, seeds, then one column per metric."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summarise(experiment: Experiment, runs: Runs, *, every_metric: bool) -> Summary:
    """One row per (size, arm, point, rate) of the test runs, in the order of the experiment's labelled arms.

    Args:
        every_metric: all metrics; otherwise those in `FIRST`, or all where none of these was recorded.

    Columns and rows that would be empty are left out, and so is the number of seeds where all runs are deterministic
    checks. Runs whose value is not finite are counted apart as diverged.
    """
    test = list(runs.select())
    recorded = list(dict.fromkeys(name for run in test for name in run.metrics))
    metrics = [name for name in FIRST if name in recorded]
    if every_metric or not metrics:
        metrics = [name for name in KNOWN if name in recorded] + sorted(set(recorded) - set(KNOWN))
    order = {arm.name: index for index, arm in enumerate(experiment.labelled())}
    sizes = list(dict.fromkeys(run.size for run in test))
    groups: dict[tuple, list[Run]] = {}
    for run in sorted(test, key=lambda run: (sizes.index(run.size), order.get(run.arm, len(order)))):
        groups.setdefault((run.size, run.arm, run.point, f"{run.rate:g}"), []).append(run)
    checks = all(math.isnan(run.rate) for run in test) and all(len(here) == 1 for here in groups.values())
    labels = {arm.name: arm.label for arm in experiment.labelled()}
    rows = []
    for (size, arm, point, rate), here in groups.items():
        cells = [_cell(name, here) for name in metrics]
        if any(cells):
            seeds = "" if checks else str(len(here))
            rows.append((size, labels.get(arm, arm), point, "" if rate == "nan" else rate, seeds, *cells))
    named = [name if checks else KNOWN[name][0] if name in KNOWN else f"{name}, median" for name in metrics]
    headings = ("size", "arm", "point", "rate", "seeds", *named)
    used = [index for index in range(len(headings)) if any(row[index] for row in rows)]
    return Summary(tuple(headings[index] for index in used), tuple(tuple(row[index] for index in used) for row in rows))


def _cell(metric: str, runs: Sequence[Run]) -> str:
    values = [run.metrics[metric] for run in runs if metric in run.metrics]
    finite = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    text = KNOWN[metric][1](finite) if metric in KNOWN and finite else median(finite) if finite else NONE
    lost = len(values) - len(finite)
    return f"{text} ({lost} diverged)" if lost else text
