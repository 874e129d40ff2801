"""A scalar against a numeric dose."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from repro.claims import Arm, Experiment, Run, Runs
from repro.report.look import (
    GREY,
    add_legend,
    arm_style,
    dose_text,
    legend_height,
    log_scale,
    mark_lost,
    mark_low,
    marker_index,
    panels,
    spread_out,
)
from repro.report.specs import Dose, Reference

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ((0, (4, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1.2, 1.5)))


def doses(spec: Dose, rows: list[Run]) -> dict[float, list[float]]:
    """Dose -> the metric of every run there, seeds ascending; doses ascending, those without a run left out."""
    dose_of = dict(spec.points)
    found: dict[float, list[float]] = {}
    for run in sorted(rows, key=lambda run: (dose_of[run.point], run.seed)):
        found.setdefault(dose_of[run.point], []).append(run.metrics[spec.metric])
    return found


def dose_figure(spec: Dose, experiment: Experiment, runs: Runs) -> Figure | None:
    """Draw a `Dose`; None if no test run at one of its points reports its metric for any of its arms.

    ReproError for an unknown arm.
    """
    names = [experiment.arm(name).name for name in spec.arms] or [arm.name for arm in experiment.labelled()]
    dose_of = dict(spec.points)
    rows = [run for run in runs.select() if run.arm in names and run.point in dose_of and spec.metric in run.metrics]
    if not rows:
        return None
    sizes = list(dict.fromkeys(run.size for run in rows))
    arms = [arm for arm in experiment.labelled() if any(run.arm == arm.name for run in rows)]
    handles = [
        Line2D([], [], marker=_marker(experiment, arm), label=arm.label, **_style(experiment, arm)) for arm in arms
    ]
    handles += [
        Line2D([], [], color="black", linewidth=1.1, linestyle=_LINES[i % len(_LINES)], label=line.label)
        for i, line in enumerate(spec.lines)
    ]
    height = 3.7 + legend_height(handle.get_label() for handle in handles)
    figure, axes = panels(sizes, spec.title, height=height)
    values = [run.metrics[spec.metric] for run in rows]
    means: list[float] = []
    for axis, size in zip(axes, sizes, strict=True):
        here = {arm.name: doses(spec, [r for r in rows if r.arm == arm.name and r.size == size]) for arm in arms}
        for index, line in enumerate(spec.lines):
            _draw_line(axis, line, _LINES[index % len(_LINES)])
        for arm in arms:
            _draw_arm(axis, experiment, arm, here[arm.name], spec.log_y)
        _mark_edges(axis, experiment, here, spec.log_y)
        means += [_mean(found) for of_arm in here.values() for found in of_arm.values()]
        _x_axis(axis, spec, sorted({dose for of_arm in here.values() for dose in of_arm}), len(sizes))
    axes[0].set_ylabel(spec.ylabel)
    if spec.log_y:
        log_scale(axes[0].yaxis, [*values, *means, *(line.y for line in spec.lines if line.y is not None)])
    add_legend(figure, handles, _note(rows, means, values, spec.log_y))
    return figure


def _note(rows: list[Run], means: list[float], values: list[float], log_y: bool) -> str:
    several = len({run.seed for run in rows}) > 1
    parts = ["line: mean over seeds; dots: single seeds"] if several else []
    parts += ["cross at the upper edge: a value that is not finite"] if not all(map(math.isfinite, values)) else []
    if log_y and any(mean <= 0 for mean in means):
        parts.append("triangle at the lower edge: zero or below")
    elif log_y and any(value <= 0 for value in values):
        parts.append("seeds at zero or below have no dot")
    return "; ".join(parts)


def _style(experiment: Experiment, arm: Arm) -> dict:
    return arm_style(experiment, arm.name)


def _marker(experiment: Experiment, arm: Arm) -> str:
    # Lines may lie on top of one another, so arms differ in their markers as well.
    return MARKERS[marker_index(experiment, arm.name, len(MARKERS))]


def _mean(values: list[float]) -> float:
    """The mean, NaN where some value is not finite."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _mark_edges(axis: Axes, experiment: Experiment, here: dict[str, dict[float, list[float]]], log_y: bool):
    """Crosses and triangles for means that the axes cannot show, side by side where several arms have one."""
    for dose in sorted({dose for found in here.values() for dose in found}):
        means = {name: _mean(found[dose]) for name, found in here.items() if dose in found}
        lost = [name for name, mean in means.items() if math.isnan(mean)]
        low = [name for name, mean in means.items() if log_y and mean <= 0]
        for names, mark in ((lost, mark_lost), (low, mark_low)):
            for index, name in enumerate(names):
                offset = 8 * (index - (len(names) - 1) / 2)
                mark(axis, dose, offset=offset, color=arm_style(experiment, name)["color"])


def _draw_arm(axis: Axes, experiment: Experiment, arm: Arm, found: dict[float, list[float]], log_y: bool):
    style, marker = _style(experiment, arm), _marker(experiment, arm)
    means = [_mean(values) for values in found.values()]
    means = [math.nan if log_y and mean <= 0 else mean for mean in means]
    axis.plot(list(found), means, marker=marker, markersize=6, zorder=3, **style)
    dots = [(dose, value) for dose, values in found.items() if len(values) > 1 for value in values]
    dots = [(dose, value) for dose, value in dots if math.isfinite(value) and (value > 0 or not log_y)]
    axis.plot(
        [dose for dose, _ in dots],
        [value for _, value in dots],
        marker=marker,
        markersize=4,
        linestyle="none",
        color=style["color"],
        alpha=0.4,
        zorder=2,
    )


def _draw_line(axis: Axes, line: Reference, linestyle):
    style = dict(color="black", linewidth=1.1, linestyle=linestyle, zorder=1)
    axis.axhline(line.y, **style) if line.y is not None else axis.axvline(line.x, **style)


def _x_axis(axis: Axes, spec: Dose, found: list[float], panels: int):
    axis.set_xlabel(spec.xlabel)
    if spec.log_x:
        axis.set_xscale("log", base=spec.log_x)
    axis.margins(x=0.06)
    ticks = spread_out(found, at_most=max(2, 12 // panels), log=bool(spec.log_x))
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: dose_text(x, spec.log_x)))
    axis.tick_params("x", labelcolor="black", color=GREY)
