"""How every figure looks: fonts, the colour of an arm, logarithmic axes, and the file it becomes."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from repro.claims import Experiment

WIDTH = 9.6  # inches
DPI = 150
_CHARACTERS = 112  # of the legend's font, across the figure
GREY = "#595959"

# M. Okabe and K. Ito, "Color Universal Design", 2008; the yellow, faint on white, comes last and has a rim.
_YELLOW = "#F0E442"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", _YELLOW)
LINE_STYLES = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))

_SETTINGS = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    # Names come from users: a dollar sign in one is a dollar sign.
    "text.parse_math": False,
    "text.usetex": False,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's own defaults and these settings, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def arm_index(experiment: Experiment, name: str) -> int:
    """The place of an arm among those with a label, which gives it its colour, line and marker everywhere.

    ReproError if the experiment has no such arm.
    """
    return experiment.labelled().index(experiment.arm(name))


def marker_index(experiment: Experiment, name: str, markers: int) -> int:
    """Which of so many markers an arm has. Where there are more arms they begin again one further on, so that an arm
    that has the colour of another has not its marker too."""
    index = arm_index(experiment, name)
    return (index + index // markers) % markers


def arm_style(experiment: Experiment, name: str) -> dict:
    """Colour and line style of an arm, by its place in `experiment.arms`: the same in every figure.

    ReproError if the experiment has no such arm.
    """
    index = arm_index(experiment, name)
    color = PALETTE[index % len(PALETTE)]
    return {
        "color": color,
        "linestyle": LINE_STYLES[index // len(PALETTE) % len(LINE_STYLES)],
        "path_effects": [withStroke(linewidth=2.8, foreground="#857D00")] if color == _YELLOW else [],
    }


def panels(sizes: Sequence[str], title: str, *, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per size on one y axis; `height` in inches, the legend's included."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", weight="bold", size=12.5)
    axes = list(figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0])
    if len(sizes) > 1:
        for axis, size in zip(axes, sizes, strict=True):
            axis.set_title(f"size {size}" if size else "no size", loc="left")
    return figure, axes


def legend_shape(labels: Iterable[str]) -> tuple[int, int]:
    """Columns and rows of a legend under the axes that holds these labels without running over the edge."""
    lengths = [len(label) + 7 for label in labels]  # with room for the line and the gap
    for columns in range(min(4, len(lengths)), 1, -1):
        rows, longer = divmod(len(lengths), columns)
        starts = [column * rows + min(column, longer) for column in range(columns + 1)]
        if sum(max(lengths[start:end]) for start, end in pairwise(starts)) <= _CHARACTERS:
            return columns, math.ceil(len(lengths) / columns)
    return 1, len(lengths)


def legend_height(labels: Iterable[str]) -> float:
    """Inches that a legend of these labels and a note take."""
    return 0.4 + 0.225 * legend_shape(labels)[1]


def add_legend(figure: Figure, handles: Sequence[Line2D], note: str = ""):
    """A legend under the axes, with a line that says how to read the marks."""
    columns, _ = legend_shape(handle.get_label() for handle in handles)
    legend = figure.legend(
        handles=list(handles),
        loc="outside lower left",
        ncols=columns,
        title=textwrap.fill(note, _CHARACTERS) or None,
        frameon=False,
        alignment="left",
        handlelength=2.6,
        columnspacing=1.6,
    )
    legend.get_title().set(size=9.5, color=GREY)


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plain_number(x: float) -> str:
    """A tick's text: 0.0001 and 50000 in full, and powers of ten beyond, without mathematical markup."""
    if x == 0 or 1e-4 <= abs(x) < 1e5:
        return f"{x:.6g}"
    mantissa, exponent = f"{x:.3e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    return power if mantissa == "1" else f"{mantissa}·{power}"


def log_scale(axis: Axis, values: Iterable[float]) -> bool:
    """Make an axis logarithmic around its positive values; it stays linear if there are none.

    Values that are not positive are drawn beyond its lower end. Returns whether it became logarithmic.
    """
    positive = [value for value in values if 0 < value < math.inf]
    if not positive:
        return False
    low, high = min(positive), max(positive)
    margin = max((high / low) ** 0.06, 1.02)
    name = axis.axis_name
    getattr(axis.axes, f"set_{name}scale")("log", nonpositive="clip")
    getattr(axis.axes, f"set_{name}lim")(max(low / margin, 1e-300), min(high * margin, 1e300))
    decades = math.log10(high / low)
    if decades < 0.8:
        axis.set_major_locator(MaxNLocator(6, min_n_ticks=3))
    else:
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if decades < 2 else (1,), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda x, _: plain_number(x)))
    axis.set_minor_formatter(NullFormatter())
    if decades < 0.8:
        axis.set_minor_locator(NullLocator())
    return True


def fixed_ticks(axis: Axis, values: Sequence[float], *, at_most: int):
    """Ticks at measured positions of a log axis only, as many as stand apart: none nearer to its neighbour than the
    range over `at_most`."""
    axis.set_major_locator(FixedLocator(spread_out(values, at_most=at_most, log=True)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))


def spread_out(values: Sequence[float], *, at_most: int, log: bool) -> list[float]:
    """As many of the values, ascending, as stand apart on an axis: none nearer to its neighbour than the range over
    `at_most`."""
    place = math.log if log else float
    positions = sorted(set(values))
    apart = (place(positions[-1]) - place(positions[0])) / at_most
    chosen: list[float] = []
    for position in positions:
        if not chosen or place(position) - place(chosen[-1]) >= apart:
            chosen.append(position)
    return chosen


def dose_text(x: float, base: int | bool) -> str:
    """A tick's text: on an axis that counts in powers of two, those above 2^13 and below 2^-3 as powers."""
    exponent = math.log2(x) if base == 2 else 0.5
    if exponent.is_integer() and not -3 <= exponent <= 13:
        return "2" + str(int(exponent)).translate(_SUPERSCRIPT)
    return plain_number(x)


def mark_low(axes: Axes, x: float, *, offset: float, color: str):
    """A triangle at the lower edge for a value that a logarithmic axis cannot show; `offset` as in `mark_lost`."""
    place = axes.get_xaxis_transform() + ScaledTranslation(offset / 72, 0, axes.figure.dpi_scale_trans)
    axes.plot(x, 0, "v", color=color, markersize=6, transform=place, clip_on=False, zorder=4)


def mark_lost(axes: Axes, x: float, *, offset: float, color: str):
    """A cross at the upper edge for runs without a finite value; `offset` in points sets arms apart."""
    beside = ScaledTranslation(offset / 72, 0, axes.figure.dpi_scale_trans)
    place = axes.get_xaxis_transform() + beside
    axes.plot(x, 1, "x", color=color, markersize=6, markeredgewidth=1.6, transform=place, clip_on=False)


def save(figure: Figure, path: Path):
    """Write a PNG whose bytes depend on the figure alone."""
    with house_style():
        figure.savefig(path, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
