"""A final scalar against the learning rate."""

import dataclasses
import math
import statistics
from collections import defaultdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from repro.claims import Experiment, Run, Runs
from repro.report.look import GREY, add_legend, arm_style, fixed_ticks, legend_height, log_scale, mark_lost, panels
from repro.report.specs import Ladder


def ladder_figure(spec: Ladder, experiment: Experiment, runs: Runs) -> Figure | None:
    """Draw a `Ladder`; None if no run with a learning rate reports its metric for any of its arms.

    ReproError for an unknown arm.
    """
    names = [experiment.arm(name).name for name in spec.arms] or [arm.name for arm in experiment.arms]
    rows = [row for row in runs if row.arm in names and spec.metric in row.metrics and row.rate > 0]
    if not rows:
        return None
    if not spec.log:
        rows = _without_far_ones(rows, spec.metric)
    sizes = list(dict.fromkeys(row.size for row in rows))
    arms = [arm for arm in experiment.arms if any(row.arm == arm.name for row in rows)]
    handles = [Line2D([], [], label=arm.label, **arm_style(experiment, arm.name)) for arm in arms]
    handles += [_phase_handle(phase) for phase in ("tuning", "test") if any(row.phase == phase for row in rows)]
    height = 3.7 + legend_height(handle.get_label() for handle in handles)
    figure, axes = panels(sizes, spec.title, height=height)
    for axis, size in zip(axes, sizes, strict=True):
        here = [row for row in rows if row.size == size]
        for arm in arms:
            for phase in ("tuning", "test"):
                mine = [row for row in here if row.arm == arm.name and row.phase == phase]
                _draw(axis, mine, spec.metric, arm_style(experiment, arm.name), filled=phase == "test")
        for rate in sorted({row.rate for row in here}):
            lost = {row.arm for row in here if row.rate == rate and not math.isfinite(row.metrics[spec.metric])}
            for index, name in enumerate(arm.name for arm in arms if arm.name in lost):
                color = arm_style(experiment, name)["color"]
                mark_lost(axis, rate, offset=8 * (index - (len(lost) - 1) / 2), color=color)
        axis.set_xlabel("learning rate")
        log_scale(axis.xaxis, [row.rate for row in here])
        fixed_ticks(axis.xaxis, sorted({row.rate for row in here}), at_most=max(2, 9 // len(sizes)))
    axes[0].set_ylabel(spec.ylabel)
    if spec.log:
        log_scale(axes[0].yaxis, [row.metrics[spec.metric] for row in rows])
    lost = any(not math.isfinite(row.metrics[spec.metric]) for row in rows)
    note = "line: mean over seeds; dots: single seeds"
    note += "; cross at the upper edge: runs of that arm diverged, or lie far above" if lost else ""
    add_legend(figure, handles, note)
    return figure


def _without_far_ones(rows: list[Run], metric: str) -> list[Run]:
    """Values of more than ten times the median are infinite here: on a linear axis they would flatten all others."""
    finite = [row.metrics[metric] for row in rows if math.isfinite(row.metrics[metric])]
    limit = 10 * abs(statistics.median(finite)) if finite else math.inf
    far = lambda row: row.metrics[metric] > limit
    return [dataclasses.replace(row, metrics={metric: math.inf}) if far(row) else row for row in rows]


def _phase_handle(phase: str) -> Line2D:
    face = GREY if phase == "test" else "white"
    return Line2D([], [], marker="o", linestyle="none", color=GREY, markerfacecolor=face, label=f"{phase} seeds")


def _draw(axis: Axes, rows: list[Run], metric: str, style: dict, *, filled: bool):
    by_rate: dict[float, list[float]] = defaultdict(list)
    for run in sorted(rows, key=lambda run: (run.rate, run.seed)):
        by_rate[run.rate].append(run.metrics[metric])
    if not by_rate:
        return
    face = style["color"] if filled else "white"
    # A rate at which a run diverged has no mean: the line breaks there.
    means = [math.fsum(v) / len(v) if all(map(math.isfinite, v)) else math.nan for v in by_rate.values()]
    axis.plot(list(by_rate), means, marker="o", markersize=6, markerfacecolor=face, zorder=3, **style)
    dots = [(rate, value) for rate, values in by_rate.items() for value in values if math.isfinite(value)]
    axis.plot(
        [rate for rate, _ in dots],
        [value for _, value in dots],
        marker="o",
        markersize=4,
        linestyle="none",
        color=style["color"],
        markerfacecolor=face,
        alpha=0.4,
        zorder=2,
    )
