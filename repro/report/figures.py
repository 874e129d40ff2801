"""From an experiment's figure specs to PNG files."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from repro.claims import Experiment, Runs, Verdict
from repro.errors import ReproError
from repro.report.curve_figure import curve_figure
from repro.report.dose_figure import dose_figure
from repro.report.effects_figure import effects_figure
from repro.report.heatmap_figure import heatmap_figure
from repro.report.ladder_figure import ladder_figure
from repro.report.look import house_style, save
from repro.report.specs import Curve, Dose, Effects, Heatmap, Ladder, Spec, Width
from repro.report.width_figure import width_figure


def figure(
    spec: Spec, experiment: Experiment, curves: pl.DataFrame, runs: Runs, verdicts: Sequence[Verdict]
) -> Figure | None:
    """Draw one spec, without writing it; None if nothing in the data matches it.

    Args:
        spec: what to draw.
        experiment: gives the arms their labels and colours, and the claims their rules.
        curves: one row per (run, step), columns `arm size point phase rate seed step` and metrics; null where a metric
            was not measured, NaN or infinite where the run has diverged.
        runs: the scalars.
        verdicts: in the order of the experiment's claims.

    ReproError if the spec is of an unknown kind, names an arm that the experiment does not have, or fits several
    points of one arm.
    """
    with house_style():
        match spec:
            case Curve():
                return curve_figure(spec, experiment, curves)
            case Ladder():
                return ladder_figure(spec, experiment, runs)
            case Effects():
                return effects_figure(spec, experiment, verdicts)
            case Width():
                return width_figure(spec, experiment, runs)
            case Dose():
                return dose_figure(spec, experiment, runs)
            case Heatmap():
                return heatmap_figure(spec)
    raise ReproError(f"experiment {experiment.name} lists a figure that is a {type(spec).__name__}, which is not drawn")


def draw(
    experiment: Experiment, curves: pl.DataFrame, runs: Runs, verdicts: Sequence[Verdict], folder: Path
) -> list[Path]:
    """Write `<spec.name>.png` into a folder, made if it is not there, for every spec of `experiment.figures`.

    A spec that nothing in the data matches (an arm left out by a small preset, a metric not recorded) is left out.
    The same input gives the same bytes. ReproError as in `figure`, or if two specs have one name.

    Returns the files, in the order of the specs.
    """
    for name, count in Counter(spec.name for spec in experiment.figures if isinstance(spec, Spec)).items():
        if count > 1:
            raise ReproError(f"experiment {experiment.name} has {count} figures of the name {name!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for spec in experiment.figures:
        drawn = figure(spec, experiment, curves, runs, verdicts)
        if drawn is not None:
            path = folder / f"{spec.name}.png"
            save(drawn, path)
            paths.append(path)
    return paths
