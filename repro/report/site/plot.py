"""An interactive figure as data: Plotly's traces and layout, a sentence for those who cannot see it, and its table."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro.claims import Experiment
from repro.report.look import PALETTE, arm_index, marker_index

DASHES = ("solid", "dash", "dot", "dashdot")
ROW = 14  # pixels of a line of labels
YELLOW, YELLOW_RIM = "#F0E442", "#857D00"
# Matplotlib's dose figures give arms these markers in the same order.
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star")


@dataclass(frozen=True)
class Plot:
    """One interactive figure.

    Fields:
        name: file name without an ending, unique on the page.
        title, caption: for readers.
        summary: what it shows in words, for a screen reader.
        data, layout: of Plotly; colours and fonts of the page are added when it is drawn.
        headings, rows: the numbers of the figure.
    """

    name: str
    title: str
    caption: str
    summary: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    headings: tuple[str, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def script(self) -> str:
        """A JavaScript file that registers the figure; it loads from a file without a server."""
        value = {"data": self.data, "layout": self.layout, "headings": self.headings, "rows": self.rows}
        text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        # Inside a script element or an HTML comment nothing of the text may end it.
        text = text.replace("<", "\\u003c").replace(">", "\\u003e")
        return f"(window.reproFigures=window.reproFigures||{{}})[{json.dumps(self.name)}]={text};\n"

    def csv(self) -> str:
        """The numbers as comma-separated values."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.headings)
        writer.writerows(self.rows)
        return buffer.getvalue()


def text(words: object) -> str:
    """Words that Plotly shows as they are: it reads a little HTML."""
    return str(words).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def sentence(words: str) -> str:
    """Words with which a title or a sentence can begin."""
    return words[:1].upper() + words[1:]


def short(value: float, digits: int = 5) -> float | None:
    """A number of few digits for a figure; None where there is nothing to draw."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def drawn(values: Iterable[float], log: bool) -> list[float | None]:
    """Values for an axis: what it cannot show is a gap."""
    return [None if log and not value > 0 else short(value) for value in values]


def line_style(experiment: Experiment, arm: str) -> dict[str, Any]:
    """Colour and dash of an arm: the same as in the still figures."""
    index = arm_index(experiment, arm)
    return {"color": PALETTE[index % len(PALETTE)], "dash": DASHES[index // len(PALETTE) % len(DASHES)], "width": 2}


def symbol(experiment: Experiment, arm: str) -> str:
    return SYMBOLS[marker_index(experiment, arm, len(SYMBOLS))]


def line_trace(x: Sequence, y: Sequence, name: str, style: dict, **more) -> list[dict[str, Any]]:
    """A line, over a darker one where it would be faint on white."""
    trace = {"x": list(x), "y": list(y), "name": text(name), "legendgroup": name, "mode": "lines", "line": style} | more
    if style["color"] != YELLOW:
        return [trace]
    rim = {"x": trace["x"], "y": trace["y"], "legendgroup": name, "mode": "lines", "showlegend": False}
    return [rim | {"hoverinfo": "skip", "line": {"color": YELLOW_RIM, "width": 4.5}}, trace]


def band_traces(x: Sequence, low: Sequence, high: Sequence, name: str, color: str) -> list[dict[str, Any]]:
    """A band between two lines."""
    common = {"x": list(x), "mode": "lines", "line": {"width": 0}, "legendgroup": name, "showlegend": False}
    common |= {"hoverinfo": "skip"}
    fill = {"fill": "tonexty", "fillcolor": faint(color, 0.16)}
    return [common | {"y": list(low)}, common | {"y": list(high)} | fill]


def faint(color: str, alpha: float) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def axis(title: str, *, log: bool = False, **more) -> dict[str, Any]:
    return {"title": {"text": text(title)}, "type": "log" if log else "linear", "automargin": True} | more


def add_level(data: list, layout: dict[str, Any], value: float, label: str, *, vertical: bool = False, **more) -> None:
    """Draw a straight reference line with its label, and make the axis reach it."""
    shape, note = level(value, label, vertical=vertical, **more)
    notes = layout.setdefault("annotations", [])
    if vertical:  # each in a row of its own above the figure, which makes room for them
        note["yshift"] = ROW * sum("yshift" in other for other in notes)
    layout.setdefault("shapes", []).append(shape)
    notes.append(note)
    if not vertical:  # where lines are close, labels on one side of them would cover each other
        levels = sorted((other for other in notes if other.get("xref") == "paper"), key=lambda other: other["y"])
        for other in levels:
            other["yanchor"] = "top" if other is levels[0] and len(levels) > 1 else "bottom"
    # Shapes do not stretch an axis; a point that is not drawn does.
    other = next((part for trace in data for part in trace.get("y" if vertical else "x", ()) if part is not None), 1)
    unseen = {"mode": "markers", "marker": {"opacity": 0}, "hoverinfo": "skip", "showlegend": False}
    data.append(unseen | ({"x": [value], "y": [other]} if vertical else {"x": [other], "y": [value]}))


def level(
    value: float, label: str, *, log: bool = False, vertical: bool = False, dash: str = "dot", at: float = 1
) -> tuple[dict, dict]:
    """A straight reference line and its label: a shape, and an annotation for the layout. The label of a level stands
    `at` a part of the width, its right end at 1 and else its middle."""
    along, across = ("y", "x") if vertical else ("x", "y")
    shape = {
        "type": "line",
        f"{along}ref": "paper",
        f"{along}0": 0,
        f"{along}1": 1,
        "line": {"width": 1.3, "dash": dash},
    }
    shape |= {f"{across}ref": across, f"{across}0": value, f"{across}1": value}
    place = math.log10(value) if log else value
    note = {"text": text(label), "showarrow": False, f"{across}ref": across, across: place, f"{along}ref": "paper"}
    note |= (
        {"x": place, "y": 1, "yanchor": "bottom"}
        if vertical
        else {
            "x": at,
            "xanchor": "right" if at == 1 else "center",
            "yanchor": "bottom",
        }
    )
    return shape, note


def _finite(value: Any) -> Any:
    """JSON has no NaN: in a table they are words."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
