"""The ratio of two arms against model width."""

import math

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from repro.claims import Experiment, Runs
from repro.claims.runs import parse_place
from repro.report.look import add_legend, arm_style, fixed_ticks, log_scale, mark_lost, panels
from repro.report.specs import Width


def ratios(spec: Width, runs: Runs) -> dict[float, list[float]]:
    """Width -> left over right for every seed that both arms have, NaN where that is no finite positive number.

    Sizes without such a pair are left out. ReproError if an address fits several places.
    """
    found = {}
    for size, width in spec.sizes:
        left, right = (_values(runs, spec.metric, at, size) for at in (spec.left, spec.right))
        pairs = [(left[seed], right[seed]) for seed in left if seed in right]
        if pairs:
            found[width] = [_ratio(over, under) for over, under in pairs]
    return dict(sorted(found.items()))


def width_figure(spec: Width, experiment: Experiment, runs: Runs) -> Figure | None:
    """Draw a `Width`; None if fewer than two sizes have a pair of test runs with the metric.

    ReproError for an unknown arm or an address that fits several places.
    """
    style = arm_style(experiment, parse_place(spec.left).arm)
    left, right = (experiment.arm(parse_place(at).arm).label for at in (spec.left, spec.right))
    by_width = ratios(spec, runs)
    if len(by_width) < 2:
        return None
    figure, (axis,) = panels([""], spec.title, height=4.2)
    finite = {width: [r for r in values if not math.isnan(r)] for width, values in by_width.items()}
    means = [_geometric_mean(values) for values in by_width.values()]
    axis.axhline(1, color="black", linewidth=1.1, linestyle=(0, (4, 2)), zorder=1)
    axis.plot(list(by_width), means, marker="D", markersize=7, zorder=3, **style)
    dots = [(width, ratio) for width, values in finite.items() for ratio in values]
    axis.plot([width for width, _ in dots], [ratio for _, ratio in dots], "o", color=style["color"], alpha=0.35)
    lost = [width for width, values in by_width.items() if len(finite[width]) < len(values)]
    for width in lost:
        mark_lost(axis, width, offset=0, color=style["color"])
    axis.set_xscale("log", base=2)
    fixed_ticks(axis.xaxis, list(by_width), at_most=10)
    axis.margins(x=0.08)
    axis.set_xlabel("model width")
    axis.set_ylabel(spec.ylabel)
    log_scale(axis.yaxis, [1, *(ratio for _, ratio in dots)])
    handles = [
        Line2D([], [], marker="D", markersize=7, label=f"{left} over {right}, geometric mean", **style),
        Line2D([], [], marker="o", linestyle="none", color=style["color"], alpha=0.35, label="single test seeds"),
        Line2D([], [], color="black", linewidth=1.1, linestyle=(0, (4, 2)), label="equal"),
    ]
    add_legend(figure, handles, "cross at the upper edge: a run diverged" if lost else "")
    return figure


def _values(runs: Runs, metric: str, at: str, size: str) -> dict[int, float]:
    place = parse_place(at)
    here = runs.select(place.arm, place.point, size)
    return runs.values(metric, at, size) if any(metric in run.metrics for run in here) else {}


def _ratio(left: float, right: float) -> float:
    usable = 0 < left < math.inf and 0 < right < math.inf
    return left / right if usable else math.nan


def _geometric_mean(values: list[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))  # the logarithm of NaN is NaN
