"""Matrices as colours."""

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from repro.errors import ReproError
from repro.report.look import DPI, WIDTH, plain_number
from repro.report.specs import Heatmap

# Cividis reads the same to colour-blind readers: J. R. Nunez et al., PLoS ONE 13, 2018.
COLOURS = "cividis"
MISSING = "#c8c8c8"


def heatmap_figure(spec: Heatmap) -> Figure | None:
    """Draw a `Heatmap`; None if it computes no panel, or no value that has a colour.

    ReproError for a panel that is not a matrix.
    """
    found = {title: _matrix(spec, title, values) for title, values in spec.compute().items()}
    usable = [values[np.isfinite(values) & ((values > 0) | (not spec.log))] for values in found.values()]
    if not any(values.size for values in usable):
        return None
    low, high = (float(end) for end in (min(v.min() for v in usable if v.size), max(v.max() for v in usable if v.size)))
    norm = LogNorm(low, max(high, low * 1.01)) if spec.log else Normalize(low, high if high > low else low + 1)
    colours = colormaps[COLOURS].with_extremes(bad=MISSING)
    columns = min(len(found), 3)
    rows = -(-len(found) // columns)
    figure = Figure(
        figsize=(WIDTH, 0.9 + rows * (7.6 / columns if columns > 1 else 4.6)), dpi=DPI, layout="constrained"
    )
    figure.suptitle(spec.title, x=0.012, ha="left", weight="bold", size=12.5)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (title, values) in zip(axes.flat, found.items(), strict=False):
        shown = np.ma.masked_where(~np.isfinite(values) | (spec.log & (values <= 0)), values)
        image = axis.imshow(shown, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
        axis.grid(False)
        axis.set_title(title, loc="left")
        axis.set_xlabel(spec.xlabel)
        axis.set_ylabel(spec.ylabel)
        for direction in (axis.xaxis, axis.yaxis):
            direction.set_major_locator(MaxNLocator(6, integer=True))
    bar = figure.colorbar(image, ax=list(axes.flat), shrink=0.9, pad=0.02)
    bar.set_label(spec.label)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: plain_number(x)))
    bar.ax.minorticks_off()
    return figure


def _matrix(spec: Heatmap, title: str, values) -> np.ndarray:
    values = np.asarray(values, float)
    if values.ndim != 2 or 0 in values.shape:
        raise ReproError(f"figure {spec.name}: {title} is an array of shape {values.shape}, not a matrix")
    return values
