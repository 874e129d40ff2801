"""From a run folder to a small one that can be committed: every scalar that a criterion reads, and thinned curves."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl

from repro.report.record import RunFolder

EVERY = 10


def store(run: Path, out: Path, every: int = EVERY) -> None:
    """Copies a finished run to `out` without event files, and with only each `every`-th and the last step of its
    curves, per-head values left out. `runs.parquet` is copied whole, so the verdicts derived from `out` are the same.

    Raises `ReproError` if `run` is not a finished, unedited run folder, or `out` is not empty.
    """
    source, target = RunFolder(run), RunFolder.create(out)
    _, verdict, runs = source.sealed()
    curves = pl.read_parquet(source.path / "metrics.parquet").drop("head_logits", strict=False)
    step = pl.col("step")
    thinned = curves.filter((step % every == 0) | (step == step.max()))
    target.write_results(runs, thinned)
    shutil.copy(source.path / "run.json", target.path / "run.json")
    shutil.copy(source.path / "report.md", target.path / "report.md")
    shutil.copytree(source.path / "figures", target.path / "figures")
    kept = {name: value for name, value in verdict.items() if name not in ("schema", "files")}
    target.seal(kept | ({"curves": f"every {every}th step and the last"} if len(curves) else {}))
