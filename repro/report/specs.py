"""What a figure shows, as data: an experiment lists these before anything has run."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from repro.claims.runs import parse_place
from repro.errors import ReproError

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def _check_name(name: str):
    if not _FILE_NAME.fullmatch(name):
        raise ReproError(f"the name of a figure is a file name of letters, digits, '-', '_' and '.', not {name!r}")


@dataclass(frozen=True)
class Curve:
    """A metric at every step: per arm the median over the test seeds, in a band from the smallest to the largest.

    Fields:
        name: file name of the figure, without its ending.
        metric: column of the table of curves.
        title, ylabel: text above and beside the axes; the label names the unit.
        arms: names of the arms to draw; empty for all.
        point: point of the ladder whose runs are drawn; empty where an arm has only one.
        log: logarithmic y axis. Zeros and negative values then lie below its lower end.
        line, line_label: a horizontal reference, in the metric's unit, and what it is.
        smooth: number of recorded steps of the trailing mean taken of each seed's curve, at least 1 (none).
        start: first step drawn, so that a steep beginning does not flatten what follows.

    ReproError for a name that is no file name, a line that is not finite, a label without a line, smooth below 1, or a
    negative start.
    """

    name: str
    metric: str
    title: str
    ylabel: str
    arms: tuple[str, ...] = ()
    point: str = ""
    log: bool = False
    line: float | None = None
    line_label: str = ""
    smooth: int = 1
    start: int = 0

    def __post_init__(self):
        _check_name(self.name)
        if self.smooth < 1:
            raise ReproError(f"figure {self.name}: smooth is a number of steps, at least 1, not {self.smooth}")
        if self.start < 0:
            raise ReproError(f"figure {self.name}: start is a step, at least 0, not {self.start}")
        if self.line is not None and not (math.isfinite(self.line) and (self.line > 0 or not self.log)):
            raise ReproError(f"figure {self.name}: {self.line} is no reference line on its axis")
        if self.line_label and self.line is None:
            raise ReproError(f"figure {self.name} labels a line that it does not have")

    @property
    def caption(self) -> str:
        """One or two sentences for under the figure."""
        smoothed = f" of the trailing mean over {self.smooth} recorded steps" if self.smooth > 1 else ""
        point = f" at the point {self.point}" if self.point else ""
        since = f" from step {self.start}" if self.start else ""
        return (
            f"{self.title}: {self.metric}{point} by step{since}; lines are medians over test seeds{smoothed}, bands "
            "reach from the smallest to the largest seed. A line ends in a cross where most of its seeds have diverged."
        )


@dataclass(frozen=True)
class Ladder:
    """A final scalar against the learning rate: the mean over seeds, and every seed as a dot.

    Tuning seeds are hollow and test seeds filled. A run without a finite value is a cross at the upper edge.

    Fields:
        name, title, ylabel, arms: as in `Curve`.
        metric: name of a scalar of the runs.
        log: logarithmic y axis.

    ReproError for a name that is no file name.
    """

    name: str
    metric: str
    title: str
    ylabel: str
    arms: tuple[str, ...] = ()
    log: bool = True

    def __post_init__(self):
        _check_name(self.name)

    @property
    def caption(self) -> str:
        """One or two sentences for under the figure."""
        return (
            f"{self.title}: {self.metric} at the end of training against the learning rate; lines join means over "
            "seeds, dots are seeds (tuning hollow, test filled). A cross at the upper edge is a run that diverged."
        )


@dataclass(frozen=True)
class Effects:
    """The effects of all statistical claims: every seed, the mean with its interval, and the line of no effect.

    Fields:
        name, title: as in `Curve`.

    ReproError for a name that is no file name.
    """

    name: str
    title: str

    def __post_init__(self):
        _check_name(self.name)

    @property
    def caption(self) -> str:
        """One or two sentences for under the figure."""
        return (
            f"{self.title}: diamonds are effects over test seeds with their 95 % intervals, dots are single seeds, "
            "the dashed line is no effect, and short ticks are the bounds that the rules state."
        )


@dataclass(frozen=True)
class Width:
    """The ratio of a scalar between two arms, seed by seed, against model width.

    Fields:
        name, title, ylabel: as in `Curve`.
        metric: name of a scalar of the runs; it is positive.
        left, right: the arms, as "arm" or "arm@point"; the ratio is left over right.
        sizes: pairs of a size's name and its width, a positive number.

    ReproError for a name that is no file name, no or repeated sizes, a width that is not positive, or an address with
    a size of its own.
    """

    name: str
    metric: str
    left: str
    right: str
    title: str
    ylabel: str
    sizes: tuple[tuple[str, float], ...]

    def __post_init__(self):
        _check_name(self.name)
        object.__setattr__(self, "sizes", tuple((size, width) for size, width in self.sizes))
        if not self.sizes or len(dict(self.sizes)) < len(self.sizes):
            raise ReproError(f"figure {self.name} needs one or more different sizes, not {list(self.sizes)}")
        if not all(0 < width < math.inf for _, width in self.sizes):
            raise ReproError(f"figure {self.name}: widths are positive numbers, unlike {list(self.sizes)}")
        if parse_place(self.left).size or parse_place(self.right).size:
            raise ReproError(f"figure {self.name} goes through its sizes; leave them out of the arms' addresses")

    @property
    def caption(self) -> str:
        """One or two sentences for under the figure."""
        return (
            f"{self.title}: {self.metric} of {self.left} over {self.right} against model width; dots are test seeds, "
            "the line joins geometric means, and the dashed line is equality."
        )


@dataclass(frozen=True)
class Reference:
    """A labelled straight line across a figure: horizontal at `y` or vertical at `x`, in the unit of that axis.

    ReproError unless exactly one of the two is given and finite.
    """

    label: str
    x: float | None = None
    y: float | None = None

    def __post_init__(self):
        given = [value for value in (self.x, self.y) if value is not None]
        if len(given) != 1 or not math.isfinite(given[0]):
            raise ReproError(f"the line {self.label!r} lies at one finite x or y, not at x = {self.x}, y = {self.y}")


@dataclass(frozen=True)
class Dose:
    """A scalar against a numeric dose: per arm the mean over test seeds, and every seed as a dot.

    Deterministic checks, whose only seed is 0, are drawn the same way without the words about seeds. A panel per size.

    Fields:
        name, title, ylabel, arms: as in `Curve`.
        metric: name of a scalar of the runs.
        xlabel: text below the axis; it names the unit of the dose.
        points: pairs of a point's name (`Run.point`) and its dose.
        log_x: base of a logarithmic x axis, 2 or 10; False for a linear one.
        log_y: logarithmic y axis. A zero or negative value is then a triangle at the lower edge.
        lines: reference lines.

    ReproError for a name that is no file name, no or repeated points, a dose that is not finite, or one that is not
    positive on a logarithmic axis; the same for the lines.
    """

    name: str
    metric: str
    title: str
    xlabel: str
    ylabel: str
    points: tuple[tuple[str, float], ...]
    arms: tuple[str, ...] = ()
    log_x: Literal[False, 2, 10] = False
    log_y: bool = False
    lines: tuple[Reference, ...] = ()

    def __post_init__(self):
        _check_name(self.name)
        object.__setattr__(self, "points", tuple((point, float(dose)) for point, dose in self.points))
        if not self.points or len(dict(self.points)) < len(self.points):
            raise ReproError(f"figure {self.name} needs one or more different points, not {list(self.points)}")
        if self.log_x not in (False, 2, 10) or self.log_x is True:
            raise ReproError(f"figure {self.name}: log_x is the base 2 or 10, or False, not {self.log_x!r}")
        across = [dose for _, dose in self.points] + [line.x for line in self.lines if line.x is not None]
        upwards = [line.y for line in self.lines if line.y is not None]
        for log, values in ((self.log_x, across), (self.log_y, upwards)):
            if not all(math.isfinite(value) and (value > 0 or not log) for value in values):
                raise ReproError(f"figure {self.name}: {values} do not all have a place on their axis")

    @property
    def caption(self) -> str:
        """One or two sentences for under the figure."""
        return (
            f"{self.title}: {self.metric} against {self.xlabel}. Lines join means, dots are single runs where there "
            "are several." + (" A triangle at the lower edge is a value of zero or below." if self.log_y else "")
        )


@dataclass(frozen=True)
class Heatmap:
    """Matrices as colours, computed when the figure is drawn; one panel each, on one colour scale.

    Fields:
        name, title: as in `Curve`.
        compute: () -> {panel title: array [rows, columns]}. The same every time, and quick: it runs at every drawing.
        label: text beside the colour bar; it names the unit.
        xlabel, ylabel: what a column and a row are.
        log: logarithmic colours. Values that are not positive, and NaN, are grey.

    ReproError for a name that is no file name.
    """

    name: str
    title: str
    compute: Callable[[], Mapping[str, np.ndarray]]
    label: str
    xlabel: str = "column"
    ylabel: str = "row"
    log: bool = False

    def __post_init__(self):
        _check_name(self.name)

    @property
    def caption(self) -> str:
        """One or two sentences for under the figure."""
        grey = "a value that is not a positive number" if self.log else "a value that is not a number"
        return f"{self.title}: {self.label}, by {self.ylabel} and {self.xlabel}. Grey is {grey}."


Spec = Curve | Ladder | Effects | Width | Dose | Heatmap
