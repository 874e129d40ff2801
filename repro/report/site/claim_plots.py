"""The figures of one claim: its metric by step, the effect of every seed, and the effect against model size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import polars as pl

from repro.claims import Equivalent, Verdict
from repro.claims.runs import parse_place
from repro.report.effects_figure import LABEL_COLORS, Row, deciding
from repro.report.numbers import effect_text, interval_text, is_statistical
from repro.report.rule_words import parts
from repro.report.site.load import Result, key
from repro.report.site.plot import Plot, axis, drawn, level, sentence, short, text
from repro.report.site.spec_plots import plots, size_plot
from repro.report.specs import Curve, Dose, Ladder, Width

NO_EFFECT = {"ratio": 1.0, "difference": 0.0}
DECADE = 30.0  # a metric whose largest value is so many times its smallest is drawn on a logarithmic axis


def measure(result: Result, metric: str) -> str:
    """What a metric is, as the experiment's figures label their axes, or in its words; its name where it has neither."""
    name = metric if "@" in metric else metric.replace("_", " ")
    if result.experiment is None:
        return name
    labels = (spec.ylabel for spec in result.experiment.figures if getattr(spec, "metric", None) == metric)
    return next(labels, result.experiment.words.get(metric, name))


def place_words(result: Result, at: str, *, size: bool = True) -> str:
    """An address in the words of the experiment: "Muon (best, xs)"."""
    place = parse_place(at)
    labels = {arm.name: arm.label for arm in result.experiment.labelled()} if result.experiment else {}
    rest = [words for words in (place.point, place.size if size else None) if words]
    return labels.get(place.arm, place.arm) + (f" ({', '.join(rest)})" if rest else "")


def by_step(result: Result, verdicts: Sequence[Verdict]) -> Iterator[Plot]:
    """Curves of the metrics that the verdicts' rules and controls read, with only the arms that they name."""
    if result.experiment is None or result.curves.is_empty():
        return
    wanted: dict[tuple[str, str, str], dict[str, None]] = {}
    for verdict in verdicts:
        claim = result.claim(verdict)
        rules = () if claim is None or claim.criterion is None else (claim.criterion, claim.control.criterion)
        for part in (part for rule in rules for part in parts(rule)):
            for at in part.reads():
                place = parse_place(at)
                for size in [place.size] if place.size else [name for name, _ in getattr(part, "sizes", ())] or [""]:
                    wanted.setdefault((part.metric, place.point or "", size), {})[place.arm] = None
    trained = {arm.name for arm in result.experiment.arms}
    for number, ((metric, point, size), arms) in enumerate(wanted.items()):
        named = tuple(arm for arm in arms if arm in trained)
        if not named or metric not in result.curves.columns:
            continue
        rows = result.curves.filter((pl.col("phase") == "test") & pl.col("arm").is_in(named))
        rows = rows.filter(pl.col("size") == size) if size else rows
        rows = rows.filter(pl.col("point") == point) if point else rows
        if rows.is_empty() or rows.select("arm", "point", "rate", "size").n_unique() > rows["arm"].n_unique():
            continue
        like = next((s for s in result.experiment.figures if isinstance(s, Curve) and s.metric == metric), None)
        values = rows[metric].cast(pl.Float64)
        values = values.filter(values.is_finite())
        wide = len(values) > 0 and values.min() > 0 and values.max() / values.min() > DECADE
        where = ", ".join(
            words for words in (f"at the point {point}" if point else "", f"size {size}" if size else "") if words
        )
        spec = Curve(
            f"step-{number}", metric, sentence(f"{measure(result, metric)} by step") + (f", {where}" if where else ""),
            measure(result, metric), arms=named, log=bool(wide) or bool(like and like.log),
            smooth=like.smooth if like else 1, start=like.start if like else 0,
        )  # fmt: skip
        yield from plots(spec, result.experiment, rows, result.runs)


def of_experiment(result: Result, verdicts: Sequence[Verdict]) -> Iterator[Plot]:
    """The experiment's own figures over a dose, a rate or a width that show a metric which the verdicts read."""
    if result.experiment is None:
        return
    rules = [rule for verdict in verdicts if (claim := result.claim(verdict)) and (rule := claim.criterion)]
    metrics = {part.metric for rule in rules for part in parts(rule)}
    arms = {parse_place(at).arm for rule in rules for at in rule.reads()}
    for spec in result.experiment.figures:
        if isinstance(spec, Dose | Ladder | Width) and spec.metric in metrics:
            named = getattr(spec, "arms", ()) or tuple(arm.name for arm in result.experiment.labelled())
            if isinstance(spec, Width) or arms & set(named):
                yield from plots(spec, result.experiment, result.curves, result.runs)


def effects(result: Result, verdicts: Sequence[Verdict], *, ids: bool = True) -> Iterator[Plot]:
    """The effect of every seed, the mean and its interval: a figure for each scale and metric. Without `ids` only the
    variants of the claims are named."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for verdict in verdicts:
        if is_statistical(verdict):
            claim = result.claim(verdict)
            row = Row(verdict, deciding(claim.criterion if claim else None, verdict.quantity))
            groups.setdefault(row.group, []).append(row)
    for number, ((scale, measured), rows) in enumerate(groups.items()):
        metric = measured.removesuffix(", relative")
        words = measure(result, metric) + measured.removeprefix(metric)
        yield _effects(f"effects-{number}", scale, words, rows, ids)


def _effects(name: str, scale: str, measured: str, rows: Sequence[Row], ids: bool) -> Plot:
    levels = scale == "value" and all(getattr(row.rule, "log", False) for row in rows)
    values = [x for row in rows for x in (*row.dots, *(row.line or ()))]
    log = (scale == "ratio" or levels) and bool(values) and min(values) > 0
    base = NO_EFFECT.get(scale)
    data, table, told = [], [], []
    shapes, notes = [], []
    for y, row in enumerate(rows):
        verdict, color = row.verdict, LABEL_COLORS[row.verdict.label]
        title = key(verdict) if ids or not verdict.variant else verdict.variant
        seeds = [(seed, value) for seed, value in verdict.per_seed.items() if math.isfinite(value)]
        data.append({
            "x": drawn((value for _, value in seeds), log), "y": [y + 0.22] * len(seeds), "mode": "markers",
            "marker": {"size": 7, "color": color, "opacity": 0.5}, "text": [f"seed {seed}" for seed, _ in seeds],
            "hovertemplate": "%{x}<extra>%{text}</extra>", "name": "single seeds", "showlegend": y == 0,
            "legendgroup": "seeds",
        })  # fmt: skip
        if verdict.effect is not None and math.isfinite(verdict.effect):
            numbers = text(f"{effect_text(verdict)} ({interval_text(verdict)})")
            trace = {
                "x": [short(verdict.effect, 8)], "y": [y], "mode": "markers", "name": "effect and 95 % interval",
                "marker": {"size": 11, "symbol": "diamond", "color": color}, "showlegend": y == 0,
                "legendgroup": "effect", "hovertemplate": f"{numbers}<extra>{text(verdict.label)}</extra>",
            }  # fmt: skip
            if row.line:
                low, high = row.line
                trace["error_x"] = {
                    "type": "data", "symmetric": False, "array": [high - verdict.effect],
                    "arrayminus": [verdict.effect - low], "color": color, "thickness": 2.4, "width": 0,
                }  # fmt: skip
            data.append(trace)
        for bound in row.bounds:
            if bound > 0 or not log:
                line = {"width": 1.6}
                shapes.append({"type": "line", "x0": bound, "x1": bound, "y0": y - 0.3, "y1": y + 0.3, "line": line})
        notes.append({
            "text": f"<b>{text(cut(title))}</b>: {text(verdict.label)}", "showarrow": False, "xref": "paper", "x": 0,
            "y": y - 0.42, "xanchor": "left", "yanchor": "middle", "align": "left",
        })  # fmt: skip
        told.append(f"{title}: {effect_text(verdict)} ({interval_text(verdict)}), {verdict.label}")
        table += [
            (title, "all", _number(verdict.effect), *(map(_number, verdict.interval or (None, None))), verdict.label)
        ]
        table += [(title, seed, _number(value), "", "", "") for seed, value in sorted(verdict.per_seed.items())]
    if base is not None:
        shape, _ = level(base, "", log=log, vertical=True, dash="dash")
        shapes.append(shape)
    xlabel = {"ratio": "ratio", "difference": f"difference in {measured}"}.get(scale, measured)
    layout = {
        "xaxis": axis(xlabel, log=log),
        "yaxis": {"range": [len(rows) - 0.45, -0.75], "visible": False, "fixedrange": True},
        "shapes": shapes, "annotations": notes, "height": 150 + 74 * len(rows),
    }  # fmt: skip
    title = {
        "ratio": "Effect of every seed, as ratios",
        "difference": f"Effect of every seed: differences in {measured}",
    }
    caption = (
        "Diamonds are effects over test seeds with their 95 % intervals, dots are single seeds, short lines are the "
        "bounds that the rules state." + (" The dashed line is no effect." if base is not None else "")
    )
    heading = title.get(scale, f"Every seed: {measured}")
    headings = ("claim", "seed", "effect", "interval from", "to", "verdict")
    return Plot(name, heading, caption, f"{heading}. " + "; ".join(told) + ".", data, layout, headings, table)


def cut(words: str, most: int = 42) -> str:
    """Words that fit over a narrow figure; what tells variants apart often stands at their end."""
    end = most // 3
    return words if len(words) <= most else f"{words[: most - end - 1].rstrip()}…{words[-end:].lstrip()}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def by_size(results: Sequence[tuple[Result, Verdict]]) -> Iterator[Plot]:
    """The effect against model width, for rules that are the same but for the size they name, from two sizes on."""
    groups: dict[tuple, list[tuple[float, Row, Result]]] = {}
    for result, verdict in results:
        claim = result.claim(verdict)
        row = Row(verdict, deciding(claim.criterion if claim else None, verdict.quantity))
        sizes = result.sizes(verdict)
        if row.rule is None or len(sizes) != 1 or not is_statistical(verdict) or not verdict.per_seed:
            continue
        width = result.width(sizes[0])
        if width is None or hasattr(row.rule, "sizes"):
            continue
        places = tuple(f"{p.arm}@{p.point or ''}" for p in map(parse_place, row.rule.reads()))
        limits = (type(row.rule).__name__, row.rule.metric, verdict.scale, row.bounds)
        test = verdict.variant.removesuffix(sizes[0]).rstrip(" ,")  # other tests of the metric are no larger model
        groups.setdefault((result.name, test, *limits, places), []).append((width, row, result))
    for number, members in enumerate(groups.values()):
        by_width: dict[float, list[float]] = {}
        for width, row, _ in sorted(members, key=lambda member: member[0]):
            by_width.setdefault(width, []).extend(row.dots)
        if len(by_width) < 2:
            continue
        _, row, result = members[0]
        scale, rule = row.verdict.scale, row.rule
        log = scale == "ratio" or (scale == "value" and getattr(rule, "log", False))
        log = log and all(value > 0 for values in by_width.values() for value in values)
        between = " over " if scale == "ratio" else " minus "
        names = between.join(place_words(result, at, size=False) for at in rule.reads())
        relative = ", relative" if isinstance(rule, Equivalent) and rule.relative else ""
        joined = "diamonds their means; two sizes are no trend" if len(by_width) == 2 else "the line joins their means"
        what = measure(result, rule.metric)
        yield size_plot(
            f"size-{number}", sentence(f"{what}: {names}"), f"Dots are test seeds, {joined}.",
            what if what.endswith(scale) else f"{what}{relative}, {'level' if scale == 'value' else scale}",
            by_width, {"color": "#0072B2", "dash": "solid", "width": 2}, base=NO_EFFECT.get(scale), log=log,
            bounds=row.bounds,
        )  # fmt: skip
