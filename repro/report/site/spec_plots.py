"""An experiment's figure specs as interactive figures."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import polars as pl

from repro.claims import Experiment, Run, Runs
from repro.report.curve_figure import band, check_one_place, curve_rows
from repro.report.dose_figure import doses
from repro.report.heatmap_figure import COLOURS
from repro.report.site.plot import (
    Plot,
    add_level,
    axis,
    band_traces,
    drawn,
    faint,
    line_style,
    line_trace,
    sentence,
    short,
    symbol,
    text,
)
from repro.report.specs import Curve, Dose, Heatmap, Ladder, Spec, Width
from repro.report.width_figure import ratios

BANDS = "Lines are medians over test seeds, bands reach from the smallest to the largest seed."
CROSSES = " A line ends in a cross where most of its seeds have diverged."
BETWEEN = 0.27  # of the width of a figure over three model sizes
MOST_CELLS = 20_000  # of a heat map; a larger one is shown as every n-th row and column


def plots(spec: Spec, experiment: Experiment, curves: pl.DataFrame, runs: Runs) -> Iterator[Plot]:
    """The figures of a spec, one per model size or panel; none where nothing in the data matches. `Effects` is drawn by
    `claim_plots`, which knows the rules."""
    match spec:
        case Curve():
            yield from _curves(spec, experiment, curves)
        case Ladder():
            yield from _ladders(spec, experiment, runs)
        case Dose():
            yield from _doses(spec, experiment, runs)
        case Width():
            yield from _widths(spec, experiment, runs)
        case Heatmap():
            yield from _heatmaps(spec)


def _caption(spec: Spec) -> str:
    """The caption without the title, which stands above a figure on a page; a metric as its axis names it."""
    caption, metric = spec.caption.removeprefix(f"{spec.title}: "), getattr(spec, "metric", "")
    if isinstance(spec, Width):
        metric = f"{metric} of {spec.left} over {spec.right}"
    return sentence(spec.ylabel + caption[len(metric) :] if metric and caption.startswith(metric) else caption)


def _named(spec: Spec, size: str, sizes: list[str]) -> tuple[str, str]:
    """File name and title of the panel of one size."""
    several = len(sizes) > 1
    return (
        f"{spec.name}-{sizes.index(size)}" if several else spec.name,
        f"{spec.title}, size {size}" if several else spec.title,
    )


def _curves(spec: Curve, experiment: Experiment, curves: pl.DataFrame) -> Iterator[Plot]:
    rows = curve_rows(spec, experiment, curves)
    if rows.is_empty():
        return
    sizes = rows["size"].unique(maintain_order=True).to_list()
    for size in sizes:
        name, title = _named(spec, size, sizes)
        here = rows.filter(pl.col("size") == size)
        data, table, ends, smoothed, crosses = [], [], [], 1, ""
        for arm in experiment.arms:
            mine = here.filter(pl.col("arm") == arm.name)
            if mine.is_empty():
                continue
            check_one_place(spec, arm.name, mine)
            found = band(mine, spec.metric, smooth=spec.smooth, start=spec.start)
            style, x = line_style(experiment, arm.name), found.steps.tolist()
            smoothed = max(smoothed, found.smoothed)
            low, middle, high = (drawn(values, spec.log) for values in (found.low, found.median, found.high))
            label = arm.label + (f" ({found.lost} of {found.seeds} diverged)" if found.lost else "")
            if found.seeds > 1:
                data += band_traces(x, low, high, arm.name, style["color"])
            data += line_trace(x, middle, label, style, legendgroup=arm.name)
            if found.ended and x:
                data.append(_cross(x[-1], middle[-1], style["color"], arm.name))
                crosses = CROSSES
            table += [
                (arm.label, step, *(f"{value:.6g}" for value in (a, b, c)), found.seeds)
                for step, a, b, c in zip(x, found.median, found.low, found.high, strict=True)
            ]
            if len(x):
                ends.append(f"{arm.label} {found.median[-1]:.3g}" + (f" ({found.lost} diverged)" if found.lost else ""))
        layout = {"xaxis": axis("step"), "yaxis": axis(spec.ylabel, log=spec.log)}
        if spec.line is not None:
            add_level(data, layout, spec.line, spec.line_label or f"{spec.line:g}", log=spec.log)
        summary = f"{title}: {spec.ylabel} by step. At the last step drawn, medians over seeds: {'; '.join(ends)}."
        headings = ("arm", "step", f"{spec.ylabel}, median", "smallest seed", "largest seed", "seeds")
        caption = BANDS + crosses + (f" Trailing means over {smoothed} steps." if smoothed > 1 else "")
        yield Plot(name, title, caption, summary, data, layout, headings, table)


def _cross(x: float, y: float | None, color: str, group: str) -> dict:
    marker = {"symbol": "x", "size": 9, "color": color}
    return {"x": [x], "y": [y], "mode": "markers", "marker": marker, "legendgroup": group, "showlegend": False,
            "hovertemplate": "most seeds diverged<extra></extra>"}  # fmt: skip


def _means_and_dots(
    experiment: Experiment, arm, found: dict[float, list[float]], log: bool, filled: bool, legend: bool
):
    """A line through means and a dot for every seed, at the places of `found`."""
    style, mark = line_style(experiment, arm.name), symbol(experiment, arm.name)
    shape = mark if filled else f"{mark}-open"
    means = [math.fsum(v) / len(v) if all(map(math.isfinite, v)) else math.nan for v in found.values()]
    color = style["color"]
    lines = line_trace(
        list(found), drawn(means, log), arm.label, style, mode="lines+markers", showlegend=legend, legendgroup=arm.name,
        marker={"symbol": shape, "size": 8, "color": color},
    )  # fmt: skip
    dots = [(x, value) for x, values in found.items() if len(values) > 1 for value in values if math.isfinite(value)]
    dots = [(x, value) for x, value in dots if value > 0 or not log]
    if dots:
        lines.append(
            {
                "x": [x for x, _ in dots],
                "y": [short(y) for _, y in dots],
                "mode": "markers",
                "legendgroup": arm.name,
                "marker": {"symbol": shape, "size": 5, "color": color},
                "opacity": 0.45,
                "showlegend": False,
                "hovertemplate": "%{y}<extra>one seed</extra>",
            }  # fmt: skip
        )
    return lines, dict(zip(found, means, strict=True))


def _mark_unseen(layout: dict, experiment: Experiment, means: dict[str, dict[float, float]], log_x: bool, log_y: bool):
    """A cross at the upper edge for a mean that is not finite, a triangle at the lower for one that a log axis cannot
    show."""
    notes = layout.setdefault("annotations", [])
    unseen: dict[tuple[float, str], int] = defaultdict(int)
    for name, found in means.items():
        for x, mean in found.items():
            sign = "×" if not math.isfinite(mean) else "▾" if log_y and mean <= 0 else ""
            if sign:
                shift = 9 * unseen[x, sign]
                unseen[x, sign] += 1
                notes.append({
                    "text": sign, "showarrow": False, "xref": "x", "x": math.log10(x) if log_x else x, "xshift": shift,
                    "yref": "paper", "y": 1 if sign == "×" else 0,
                    "font": {"size": 16, "color": line_style(experiment, name)["color"]},
                })  # fmt: skip


def _ladders(spec: Ladder, experiment: Experiment, runs: Runs) -> Iterator[Plot]:
    names = [experiment.arm(name).name for name in spec.arms] or [arm.name for arm in experiment.arms]
    rows = [row for row in runs if row.arm in names and spec.metric in row.metrics and row.rate > 0]
    sizes = list(dict.fromkeys(row.size for row in rows))
    for size in sizes:
        name, title = _named(spec, size, sizes)
        here = [row for row in rows if row.size == size]
        finite = [row.metrics[spec.metric] for row in here if math.isfinite(row.metrics[spec.metric])]
        limit = 10 * abs(statistics.median(finite)) if finite and not spec.log else math.inf
        data, means = [], {}
        for arm in experiment.arms:
            for phase in ("tuning", "test"):
                mine = sorted(
                    (r for r in here if r.arm == arm.name and r.phase == phase), key=lambda r: (r.rate, r.seed)
                )
                if mine:
                    found = _by(mine, "rate", spec.metric, limit)
                    legend = phase == "test" or not any(r.arm == arm.name and r.phase == "test" for r in here)
                    traces, found_means = _means_and_dots(experiment, arm, found, spec.log, phase == "test", legend)
                    data += traces
                    means[arm.name] = means.get(arm.name, {}) | found_means
        layout = {
            "xaxis": axis("learning rate", log=True),
            "yaxis": axis(spec.ylabel, log=spec.log),
        }
        _mark_unseen(layout, experiment, means, True, spec.log)
        table = _table(experiment, here, spec.metric, lambda run: f"{run.rate:g}")
        headings = ("arm", "phase", "learning rate", "seed", spec.ylabel)
        yield Plot(
            name,
            title,
            _caption(spec),
            _summary(title, spec.ylabel, "learning rate", experiment, means),
            data,
            layout,
            headings,
            table,
        )


def _by(rows: list[Run], what: str, metric: str, limit: float = math.inf) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for run in rows:
        value = run.metrics[metric]
        found.setdefault(getattr(run, what), []).append(math.inf if value > limit else value)
    return found


def _table(experiment: Experiment, rows: list[Run], metric: str, place) -> list[tuple]:
    labels = {arm.name: arm.label for arm in experiment.labelled()}
    return [(labels.get(r.arm, r.arm), r.phase, place(r), r.seed, f"{r.metrics[metric]:.6g}") for r in rows]


def _summary(title: str, ylabel: str, xlabel: str, experiment: Experiment, means: dict[str, dict[float, float]]) -> str:
    def of(name: str) -> str:
        found = means[name]
        shown = list(found.items())
        ends = shown if len(shown) <= 3 else [shown[0], shown[len(shown) // 2], shown[-1]]
        return f"{experiment.arm(name).label}: " + ", ".join(f"{y:.3g} at {x:.3g}" for x, y in ends)

    return f"{title}: {ylabel} against {xlabel}. " + "; ".join(map(of, means)) + "."


def _doses(spec: Dose, experiment: Experiment, runs: Runs) -> Iterator[Plot]:
    names = [experiment.arm(name).name for name in spec.arms] or [arm.name for arm in experiment.labelled()]
    dose_of = dict(spec.points)
    rows = [run for run in runs.select() if run.arm in names and run.point in dose_of and spec.metric in run.metrics]
    sizes = list(dict.fromkeys(run.size for run in rows))
    for size in sizes:
        name, title = _named(spec, size, sizes)
        here = [run for run in rows if run.size == size]
        if len({dose_of[run.point] for run in here}) < 2:
            continue  # a small preset may run one dose only, and that is no curve
        data, means = [], {}
        for arm in experiment.labelled():
            mine = [run for run in here if run.arm == arm.name]
            if mine:
                traces, means[arm.name] = _means_and_dots(experiment, arm, doses(spec, mine), spec.log_y, True, True)
                data += traces
        layout = {"xaxis": axis(spec.xlabel, log=bool(spec.log_x)), "yaxis": axis(spec.ylabel, log=spec.log_y)}
        if spec.log_x == 2:
            layout["xaxis"] |= _powers_of_two(sorted({dose for found in means.values() for dose in found}))
        for line in spec.lines:
            upright = line.x is not None
            value, log = (line.x, bool(spec.log_x)) if upright else (line.y, spec.log_y)
            add_level(data, layout, value, line.label, log=log, vertical=upright)
        _mark_unseen(layout, experiment, means, bool(spec.log_x), spec.log_y)
        table = _table(experiment, here, spec.metric, lambda run: f"{dose_of[run.point]:g}")
        headings = ("arm", "phase", spec.xlabel, "seed", spec.ylabel)
        yield Plot(
            name,
            title,
            _caption(spec),
            _summary(title, spec.ylabel, spec.xlabel, experiment, means),
            data,
            layout,
            headings,
            table,
        )


def _powers_of_two(found: list[float]) -> dict:
    """Ticks at some powers of two."""
    low, high = math.floor(math.log2(found[0])), math.ceil(math.log2(found[-1]))
    step = max(1, -(-(high - low) // 8))
    ticks = list(range(low, high + 1, step))
    plain = -3 <= low and high <= 10
    return {
        "tickvals": [2.0**e for e in ticks],
        "ticktext": [f"{2.0**e:g}" if plain or not e else f"2<sup>{e}</sup>".replace("-", "−") for e in ticks],
    }


def _widths(spec: Width, experiment: Experiment, runs: Runs) -> Iterator[Plot]:
    by_width = ratios(spec, runs)
    if len(by_width) < 2:
        return
    arm = spec.left.split("@")[0]
    yield size_plot(
        spec.name, spec.title, _caption(spec), spec.ylabel, by_width, line_style(experiment, arm), base=1.0, log=True
    )


def _mean(values: list[float], log: bool) -> float:
    """The mean, geometric where `log`; NaN where a value does not allow it."""
    if not values or not all(math.isfinite(x) and (x > 0 or not log) for x in values):
        return math.nan
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if log else math.fsum(values) / len(values)


def size_plot(
    name, title, caption, ylabel, by_width: dict[float, list[float]], style: dict, *, base, log, **more
) -> Plot:
    """Effects of single seeds and their mean (geometric where `log`) against model width, joined from three on."""
    means = [_mean(values, log) for values in by_width.values()]
    mean = {"marker": {"size": 9, "symbol": "diamond", "color": style["color"]}}
    mean["mode"] = "lines+markers" if len(by_width) > 2 else "markers"  # a line would make two sizes a trend
    data = line_trace(list(by_width), drawn(means, log), "mean over seeds", style, **mean)[-1:]
    dots = [(w, v) for w, values in by_width.items() for v in values if math.isfinite(v) and (v > 0 or not log)]
    data.append({"x": [w for w, _ in dots], "y": [short(v) for _, v in dots], "mode": "markers", "name": "single seeds",
                 "marker": {"size": 6, "color": faint(style["color"], 0.5)}})  # fmt: skip
    widths = sorted(by_width)
    layout = {
        "xaxis": axis("model width", log=True, tickvals=widths, ticktext=[f"{w:g}" for w in widths]),
        "yaxis": axis(ylabel, log=log),
    }
    bounds = [bound for bound in more.get("bounds", ()) if bound > 0 or not log]
    at = 0.5 if len(by_width) == 2 else BETWEEN  # between the first two widths, where no seeds are
    if base is not None:
        add_level(data, layout, base, "no effect", log=log, dash="dash", at=at)
    for bound in bounds:
        add_level(data, layout, bound, "bound of the rule", log=log, at=at)
    rows = [(f"{w:g}", f"{v:.6g}") for w, values in by_width.items() for v in values]
    told = ", ".join(f"{m:.3g} at width {w:g}" for w, m in zip(by_width, means, strict=True))
    return Plot(
        name,
        title,
        caption,
        f"{title}: {ylabel}, means over seeds: {told}.",
        data,
        layout,
        ("model width", ylabel),
        rows,
    )


def _heatmaps(spec: Heatmap) -> Iterator[Plot]:
    found = {title: np.asarray(values, float) for title, values in spec.compute().items()}
    usable = [v[np.isfinite(v) & ((v > 0) | (not spec.log))] for v in found.values()]
    if not any(v.size for v in usable):
        return
    low, high = min(v.min() for v in usable if v.size), max(v.max() for v in usable if v.size)
    ends = [math.log10(low), math.log10(max(high, low * 1.01))] if spec.log else [low, high]
    for index, (title, values) in enumerate(found.items()):
        every = [max(1, math.ceil(n / math.isqrt(MOST_CELLS))) if values.size > MOST_CELLS else 1 for n in values.shape]
        shown = values[:: every[0], :: every[1]]
        z = np.log10(np.where(shown > 0, shown, np.nan)) if spec.log else shown
        bar = {"title": {"text": text(spec.label), "side": "right"}, "thickness": 14}
        if spec.log:
            ticks = list(range(math.floor(ends[0]), math.ceil(ends[1]) + 1))
            bar |= {"tickvals": ticks, "ticktext": [f"10<sup>{t}</sup>".replace("-", "−") for t in ticks]}
        data = [{
            "type": "heatmap", "z": [[short(x, 3) for x in row] for row in z.tolist()],
            "dx": every[1], "dy": every[0], "x0": 0, "y0": 0, "zmin": short(ends[0]), "zmax": short(ends[1]),
            "colorscale": COLOURS.capitalize(), "colorbar": bar, "hoverongaps": False,
        }]  # fmt: skip
        layout = {"xaxis": axis(spec.xlabel), "yaxis": axis(spec.ylabel, autorange="reversed")}
        what = f"{spec.label} by {spec.ylabel} and {spec.xlabel}"
        told = f"{spec.title}, {title}: {what}, from {low:.3g} to {high:.3g} over all panels."
        rows = [(int(i * every[0]), *(f"{x:.4g}" for x in row)) for i, row in enumerate(shown)]
        headings = (spec.ylabel, *(f"{spec.xlabel} {j * every[1]}" for j in range(shown.shape[1])))
        caption = _caption(spec)
        yield Plot(f"{spec.name}-{index}", f"{spec.title}: {title}", caption, told, data, layout, headings, rows)
