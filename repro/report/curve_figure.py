"""Curves over steps, with bands over seeds."""

from dataclasses import dataclass

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from repro.claims import Experiment
from repro.errors import ReproError
from repro.report.look import add_legend, arm_style, legend_height, log_scale, panels
from repro.report.specs import Curve

_KEYS = ("arm", "size", "point", "phase", "rate", "seed", "step")


@dataclass(frozen=True)
class Band:
    """One arm's curve: arrays [steps], over the seeds that are finite there, while these are at least half of all.

    `seeds` is the number of seeds, `lost` how many of them end in a value that is not finite or end early,
    and `ended` whether the curve stops before the last recorded step. `smoothed` is the number of steps that a trailing
    mean spans, 1 for none.
    """

    steps: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int
    lost: int
    ended: bool
    smoothed: int = 1


def band(rows: pl.DataFrame, metric: str, *, smooth: int = 1, start: int = 0) -> Band:
    """The band of one arm at one size.

    Args:
        rows: columns `seed`, `step` and the metric, without nulls. NaN and infinities are where a run diverged.
        metric: name of the column.
        smooth: steps of the trailing mean, 1 for none. Of thinned curves, as many rows as lie in so many steps.
        start: first step of the band; the means reach back beyond it.
    """
    seeds, last = rows["seed"].n_unique(), rows["step"].max()
    finite = rows.select("seed", "step", pl.col(metric).cast(pl.Float64).alias("value"))
    finite = finite.filter(pl.col("value").is_finite()).sort("seed", "step")
    spacing = finite["step"].diff().filter(finite["step"].diff() > 0).median() or 1
    rows_of_mean = max(1, round(smooth / spacing))
    if rows_of_mean > 1:
        finite = finite.with_columns(pl.col("value").rolling_mean(rows_of_mean, min_samples=1).over("seed"))
    complete = finite.filter(pl.col("step") == last)["seed"].n_unique()
    value = pl.col("value")
    table = (
        finite.filter(pl.col("step") >= start)
        .group_by("step")
        .agg(value.median().alias("median"), value.min().alias("low"), value.max().alias("high"), pl.len().alias("n"))
        .filter(2 * pl.col("n") >= seeds)
        .sort("step")
    )
    steps, median, low, high = (table[name].to_numpy() for name in ("step", "median", "low", "high"))
    ended = bool(len(steps) == 0 or steps[-1] < last)
    return Band(steps, median, low, high, seeds, seeds - complete, ended, round((rows_of_mean - 1) * spacing) + 1)


def curve_figure(spec: Curve, experiment: Experiment, curves: pl.DataFrame) -> Figure | None:
    """Draw a `Curve`; None if no test row reports its metric for any of its arms.

    Nulls in the metric mean "not measured here" and are passed over; NaN and infinities mean that the run diverged.
    ReproError for an unknown arm, a missing key column, or an arm with runs at several points or rates.
    """
    rows = curve_rows(spec, experiment, curves)
    if rows.is_empty():
        return None
    sizes = rows["size"].unique(maintain_order=True).to_list()
    bands = {}
    for arm in (arm.name for arm in experiment.arms):
        for size in sizes:
            here = rows.filter((pl.col("arm") == arm) & (pl.col("size") == size))
            if not here.is_empty():
                check_one_place(spec, arm, here)
                bands[arm, size] = band(here, spec.metric, smooth=spec.smooth, start=spec.start)

    arms = list(dict.fromkeys(arm for arm, _ in bands))
    handles = [_handle(experiment, arm, [b for (name, _), b in bands.items() if name == arm]) for arm in arms]
    if spec.line is not None:
        label = spec.line_label or f"{spec.line:g}"
        handles.append(Line2D([], [], color="black", linewidth=1.1, linestyle=(0, (2, 2)), label=label))
    height = 3.5 + legend_height(handle.get_label() for handle in handles)
    figure, axes = panels(sizes, spec.title, height=height)
    for axis, size in zip(axes, sizes, strict=True):
        axis.set_xlabel("step")
        axis.margins(x=0.01)
        if spec.line is not None:
            axis.axhline(spec.line, color="black", linewidth=1.1, linestyle=(0, (2, 2)), zorder=3)
        for arm in arms:
            if (arm, size) in bands:
                _draw(axis, bands[arm, size], arm_style(experiment, arm), arm)
    axes[0].set_ylabel(spec.ylabel)
    if spec.log:
        values = [value for b in bands.values() for value in np.concatenate([b.low, b.high])]
        log_scale(axes[0].yaxis, [*values, *([] if spec.line is None else [spec.line])])
    counts = sorted({b.seeds for b in bands.values()})
    over = " to ".join(str(count) for count in (counts[0], counts[-1])[: len(counts)])
    note = "one test seed" if counts == [1] else f"median over {over} test seeds, band: smallest to largest seed"
    smoothed = max(b.smoothed for b in bands.values())
    note += f"; trailing means over {smoothed} steps" if smoothed > 1 else ""
    if any(b.ended for b in bands.values()):
        note += "; a cross ends a line where most seeds diverged"
    add_legend(figure, handles, note)
    return figure


def curve_rows(spec: Curve, experiment: Experiment, curves: pl.DataFrame) -> pl.DataFrame:
    arms = [experiment.arm(name).name for name in spec.arms] or [arm.name for arm in experiment.arms]
    if spec.metric not in curves.columns:
        return pl.DataFrame()
    missing = [name for name in _KEYS if name not in curves.columns]
    if missing:
        raise ReproError(f"figure {spec.name}: the table of curves has no column {', '.join(missing)}")
    text = [pl.col(name).cast(pl.String).fill_null("") for name in ("arm", "size", "point", "phase")]
    wanted = (pl.col("phase") == "test") & pl.col("arm").is_in(arms) & pl.col(spec.metric).is_not_null()
    if spec.point:
        wanted &= pl.col("point") == spec.point
    return curves.with_columns(text).filter(wanted)


def check_one_place(spec: Curve, arm: str, rows: pl.DataFrame):
    places = rows.select("point", pl.col("rate").fill_null(float("nan"))).unique().sort("point", "rate").rows()
    if len(places) > 1:
        listed = ", ".join(f"{point or 'no point'} at rate {rate:g}" for point, rate in places)
        raise ReproError(f"figure {spec.name}: arm {arm} has the curves {listed}; choose one by point")


def _handle(experiment: Experiment, arm: str, bands: list[Band]) -> Line2D:
    lost, seeds = sum(b.lost for b in bands), sum(b.seeds for b in bands)
    label = experiment.arm(arm).label + (f" ({lost} of {seeds} diverged)" if lost else "")
    return Line2D([], [], label=label, **arm_style(experiment, arm))


def _draw(axis, drawn: Band, style: dict, arm: str):
    if drawn.seeds > 1:
        axis.fill_between(drawn.steps, drawn.low, drawn.high, color=style["color"], alpha=0.16, linewidth=0, label=arm)
    axis.plot(drawn.steps, drawn.median, label=arm, **style)
    if drawn.ended and len(drawn.steps):
        axis.plot(drawn.steps[-1], drawn.median[-1], marker="x", color=style["color"], markersize=8, markeredgewidth=2)
