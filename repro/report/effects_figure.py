"""A forest plot of the statistical claims."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from repro.claims import (
    All,
    AtLeast,
    AtMost,
    Criterion,
    Equivalent,
    Experiment,
    Greater,
    NonInferior,
    Ratio,
    Verdict,
)
from repro.report.look import DPI, GREY, WIDTH, add_legend, log_scale
from repro.report.numbers import INTERVAL, effect_text, interval_text, is_statistical, verdict_name
from repro.report.rule_words import parts
from repro.report.specs import Effects

LABEL_COLORS = {
    "supported": "#00704F",
    "contradicted": "#B34700",
    "not supported": "#8A5A00",
    "inconclusive": GREY,
    "not testable at this scale": GREY,
}
_ROW = 0.8  # inches
_NO_EFFECT = {"ratio": 1.0, "difference": 0.0}


@dataclass(frozen=True)
class Row:
    """One claim of the plot: its verdict, the comparisons that its effect is of (`deciding`), and its axis."""

    verdict: Verdict
    parts: tuple[Criterion, ...]

    @property
    def rule(self) -> Criterion | None:
        """The first of them; None if it is not known which decided."""
        return self.parts[0] if self.parts else None

    @property
    def group(self) -> tuple[str, str]:
        """Scale and what is measured: rows that agree in both share an axis. All ratios share one."""
        scale, rule = self.verdict.scale, self.rule
        if scale == "ratio":
            return scale, ""
        if rule is None:
            return scale, self.verdict.quantity.rstrip(",")
        return scale, rule.metric + (", relative" if getattr(rule, "relative", False) else "")

    @property
    def bounds(self) -> tuple[float, ...]:
        """The bounds that the comparisons state, on the axis of the effect."""
        return tuple(bound for part in self.parts for bound in _stated(part))

    @property
    def dots(self) -> list[float]:
        """The effects of single seeds that can be drawn."""
        return [value for value in self.verdict.per_seed.values() if math.isfinite(value)]

    @property
    def line(self) -> tuple[float, float] | None:
        """The interval, if it has two finite ends."""
        ends = self.verdict.interval
        return ends if ends is not None and all(map(math.isfinite, ends)) else None


def effects_figure(spec: Effects, experiment: Experiment, verdicts: Sequence[Verdict]) -> Figure | None:
    """Draw an `Effects`; None if no verdict is of a statistical claim."""
    chosen = [verdict for verdict in verdicts if is_statistical(verdict)]
    if not chosen:
        return None
    rules = _rules(experiment, [verdict_name(verdict) for verdict in verdicts])
    groups: dict[tuple[str, str], list[Row]] = {}
    for verdict in chosen:
        row = Row(verdict, deciding(rules.get(verdict_name(verdict)), verdict.quantity))
        groups.setdefault(row.group, []).append(row)
    heights = [len(rows) for rows in groups.values()]
    inches = 1.1 + sum(_ROW * rows + 0.75 for rows in heights)
    figure = Figure(figsize=(WIDTH, inches), dpi=DPI, layout="constrained")
    figure.suptitle(spec.title, x=0.012, ha="left", weight="bold", size=12.5)
    ratios = [_ROW * rows + 0.2 for rows in heights]
    panels = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    for axes, ((scale, measured), rows) in zip(panels, groups.items(), strict=True):
        _draw_group(axes, scale, measured, rows)
    add_legend(figure, _handles())
    return figure


def _handles() -> list[Line2D]:
    return [
        Line2D([], [], marker="D", markersize=8, color=GREY, linewidth=2.4, label=f"effect and {INTERVAL}"),
        Line2D([], [], marker="o", linestyle="none", alpha=0.5, color=GREY, label="single seeds"),
        Line2D([], [], color="black", linewidth=1.1, linestyle=(0, (4, 2)), label="no effect"),
        Line2D([], [], marker="|", markersize=12, mew=1.6, linestyle="none", color="black", label="bound of the rule"),
    ]


def _rules(experiment: Experiment, names: list[str]) -> dict[str, Criterion]:
    """Claim name -> criterion, for the claims on which all presets that judge exactly these claims agree."""
    found: dict[str, set[Criterion]] = {}
    for preset in experiment.presets.values():
        claims = experiment.claims_for(preset)
        if [claim.name for claim in claims] == names:
            for claim in claims:
                found.setdefault(claim.name, set()).add(claim.criterion)
    return {name: next(iter(rules)) for name, rules in found.items() if len(rules) == 1}


def _stated(part: Criterion) -> tuple[float, ...]:
    match part:
        case Greater(smallest=float() | int() as smallest):
            return (smallest,)
        case Ratio(at_least=bound) | AtLeast(bound=bound) | AtMost(bound=bound) | NonInferior(margin=bound):
            return (bound,)
        case Equivalent(margin=margin):
            return (-margin, margin)
    return ()


def deciding(rule: Criterion | None, quantity: str) -> tuple[Criterion, ...]:
    """The comparisons in a rule of the quantity that a verdict shows: several where one quantity lies between bounds,
    none where it is not known which decided."""
    if not isinstance(rule, All):
        return parts(rule)
    fitting = [part for part in rule.criteria if all(f"{at}" in quantity for at in (part.metric, *part.reads()))]
    if " and " not in quantity:  # "a over b" names what "a" alone does, and more
        most = max((len(part.reads()) for part in fitting), default=0)
        fitting = [part for part in fitting if len(part.reads()) == most]
    measured = {(part.metric, part.reads(), getattr(part, "log", False)) for part in fitting}
    return tuple(fitting) if len(measured) == 1 else ()


def _draw_group(axes: Axes, scale: str, measured: str, rows: list[Row]):
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    for y, row in enumerate(rows):
        _draw_row(axes, y, row)
    base = _NO_EFFECT.get(scale)
    extent = [x for row in rows for x in (*row.dots, *(row.line or ()), *row.bounds)] + ([] if base is None else [base])
    if base is not None:
        axes.axvline(base, color="black", linewidth=1.1, linestyle=(0, (4, 2)), zorder=1)
    levels = scale == "value" and all(getattr(row.rule, "log", False) for row in rows)
    if scale == "ratio" or levels:
        log_scale(axes.xaxis, extent)
    elif extent and min(extent) < max(extent):
        margin = 0.05 * (max(extent) - min(extent))
        axes.set_xlim(min(extent) - margin, max(extent) + margin)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel({"ratio": "ratio", "difference": f"difference in {measured}"}.get(scale, measured))


def _draw_row(axes: Axes, y: int, row: Row):
    verdict = row.verdict
    color = LABEL_COLORS[verdict.label]
    side = axes.get_yaxis_transform()
    left = {"transform": side, "ha": "right", "linespacing": 1.05}
    axes.text(-0.02, y - 0.05, _lines(verdict_name(verdict), 38), va="bottom", weight="bold", size=9.5, **left)
    axes.text(-0.02, y, _lines(verdict.quantity.rstrip(","), 44), va="top", size=8.5, color=GREY, **left)
    axes.text(1.02, y - 0.06, verdict.label, transform=side, va="bottom", weight="bold", size=10.5, color=color)
    if verdict.effect is None or not math.isfinite(verdict.effect):
        axes.text(1.02, y, "no finite effect", transform=side, va="top", size=9.5)
        return
    seeds = "" if verdict.n is None else f", n = {verdict.n}"
    numbers = f"{effect_text(verdict)}\n{interval_text(verdict)}{seeds}"
    axes.text(1.02, y, numbers, transform=side, va="top", size=9, linespacing=1.1)
    axes.plot(row.dots, [y + 0.22] * len(row.dots), "o", color=color, alpha=0.4, markersize=4.5, markeredgewidth=0)
    if row.line:
        axes.plot(row.line, (y, y), color=color, linewidth=2.4, solid_capstyle="butt", zorder=3)
    axes.plot(verdict.effect, y, marker="D", color=color, markersize=8, zorder=4)
    for bound in row.bounds:
        axes.plot((bound, bound), (y - 0.3, y + 0.3), color="black", linewidth=1.6, zorder=2)


def _lines(text: str, width: int) -> str:
    """Two lines at most."""
    return textwrap.fill(textwrap.shorten(text, 2 * width - 8, placeholder=" …"), width)
