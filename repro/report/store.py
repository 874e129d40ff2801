"""From a run folder to a small one that can be committed: every scalar in full, thinned curves, and no repetition."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from repro import catalogue
from repro.errors import ReproError
from repro.report.ledger_tables import fold
from repro.report.picture import small_picture
from repro.report.record import KEYS, RunFolder, sha256, write_atomically, write_json, write_table
from repro.report.rule_words import parts
from repro.report.specs import Curve, Effects

POINTS = 41
BITS = 12
RULE = (
    "test runs; metrics that a rule, a control or a figure over steps reads; every k-th recorded step and the last, at "
    f"most {POINTS} a run; {BITS} significant bits; no lists"
)
_REPEATED = ("Test runs", "What was computed", "What was run", "Ledgers")
_NOTE = """## Not in this copy

The tables of all runs, the settings, the ledgers, and the effects of single seeds with their figure: `runs.parquet`,
`run.json` and `verdict.json` hold them. `repro report` with this folder writes this page again with them, and the
evidence pages (`repro report --out DIR`) show them.
"""


def store(run: Path, out: Path | None = None) -> None:
    """Copies a finished run to `out` without event files and without what can be written again from the rest, its
    curves thinned and its figures in few pixels and colours. Without `out` the folder itself is replaced; doing that
    again changes nothing.

    `runs.parquet` and `run.json` keep all their values, so the verdicts derived from `out` are the same. `verdict.json`
    says under `thinned` by what rule the curves were thinned, and the SHA-256 of the table that they are from.
    Raises `ReproError` if `run` is not a finished, unedited run folder, or `out` is not empty.
    """
    source = RunFolder(run)
    record, verdict, _ = source.sealed()
    if out is None:
        with tempfile.TemporaryDirectory(prefix=f".{source.path.name}-", dir=source.path.parent) as beside:
            target = RunFolder(Path(beside) / "thin")
            _copy(source, record, verdict, target)
            kept = {path.relative_to(target.path) for path in target.path.rglob("*") if path.is_file()}
            for name in sorted(kept):
                write_atomically(source.path / name, (target.path / name).read_bytes())
            for figure in (source.path / "figures").glob("*"):
                if figure.relative_to(source.path) not in kept:
                    figure.unlink()
        return
    _copy(source, record, verdict, RunFolder.create(out))


def thin(curves: pl.DataFrame, metrics: Collection[str] | None = None) -> pl.DataFrame:
    """The curves of the test runs, by the rule that `RULE` states; NaN and infinities stay. `metrics` are those to
    keep, None for all."""
    fixed = (*KEYS, "step")
    gone = [
        name
        for name, kind in curves.schema.items()
        if name not in fixed and (kind.is_nested() or (metrics is not None and name not in metrics))
    ]
    rows = curves.drop(gone).filter(pl.col("phase") == "test")
    run = [pl.col(name).fill_null("") if curves.schema[name] == pl.String else pl.col(name) for name in KEYS]
    place, last = pl.int_range(pl.len()).over(run), pl.len().over(run) - 1
    k = (last + POINTS - 2) // (POINTS - 1)
    kept = rows.filter((place % pl.max_horizontal(k, 1) == 0) | (place == last))
    values = [name for name, kind in kept.schema.items() if kind.is_float() and name not in KEYS]
    rounded = [pl.Series(name, round_bits(kept[name].to_numpy()), dtype=pl.Float32) for name in values]
    nulls = [pl.when(kept[name].is_null()).then(None).otherwise(pl.col(name)).alias(name) for name in values]
    return kept.with_columns(rounded).with_columns(nulls)


def round_bits(values: np.ndarray) -> np.ndarray:
    """The nearest float32 values of `BITS` significant bits, ties away from zero; NaN and infinities as they are."""
    x = np.asarray(values, np.float32)
    unit = np.uint32(1 << (24 - BITS))
    with np.errstate(over="ignore"):
        coarse = ((x.view(np.uint32) + (unit >> 1)) & ~(unit - 1)).view(np.float32)
    return np.where(np.isfinite(x) & np.isfinite(coarse), coarse, x)


def short_report(report: str, figures: Collection[str] = ()) -> str:
    """A report without the sections and tables that only repeat the files beside it, and without these figures."""
    parts = re.split(r"(?m)^(?=## )", report)
    kept = [part for part in parts if part.removeprefix("## ").split("\n")[0] not in _REPEATED]
    text = "".join(part for part in kept if not part.startswith(_NOTE.split("\n")[0]))
    for name in figures:
        text = re.sub(rf"!\[[^\n]*\]\([^\n]*figures/{re.escape(name)}\.png\)\n\n[^\n]*\n\n?", "", text)
    text = re.sub(r"(?m)^\|( seed -?\d+ \|)+\n\|[-| ]+\n\|[^\n]*\n\n?", "", text)
    if text == report:
        return report
    before, again, after = text.rstrip("\n").partition("## To run it again")
    return f"{before.rstrip()}\n\n{_NOTE}\n{again}{after}".rstrip("\n") + "\n"


def _copy(source: RunFolder, record: dict[str, Any], verdict: dict[str, Any], target: RunFolder) -> None:
    shown, redrawn = _shown(record, source.path)
    table = pl.read_parquet(source.path / "metrics.parquet")
    fewer = thin(table, shown)
    target.path.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in verdict.items() if name not in ("schema", "files")}
    if len(table) and not fewer.equals(table):
        # A folder of an earlier version says in one sentence under `curves` how it was thinned first.
        first = [{"rule": kept.pop("curves"), "from_sha256": None}] if "curves" in kept else kept.get("thinned", [])
        kept["thinned"] = [*first, {"rule": RULE, "from_sha256": sha256(source.path / "metrics.parquet")}]
    write_table(target.path / "metrics.parquet", fewer if len(table) else table, small=True)
    write_table(target.path / "runs.parquet", pl.read_parquet(source.path / "runs.parquet"), small=True)
    folded = {"ledgers_by_arm": fold(record)} if "ledgers_by_arm" in record else {}
    write_json(target.path / "run.json", record | folded)
    report = (source.path / "report.md").read_text(encoding="utf-8")
    write_atomically(target.path / "report.md", short_report(report, redrawn).encode())
    for figure in sorted((source.path / "figures").glob("*")):
        if figure.stem not in redrawn:
            data = figure.read_bytes()
            data = small_picture(data) if figure.suffix == ".png" else data
            write_atomically(target.path / "figures" / figure.name, data)
    target.seal(kept)


def _shown(record: dict[str, Any], path: Path) -> tuple[set[str] | None, set[str]]:
    """The metrics whose curves the pages show, None for all where this installation does not have the experiment or its
    settings, and the names of figures whose every number `verdict.json` holds."""
    name = str(record.get("experiment", ""))
    if name.replace("_", "-") not in catalogue.modules():
        return None, set()
    experiment = catalogue.load(name)
    redrawn = {spec.name for spec in experiment.figures if isinstance(spec, Effects)}
    try:
        claims = experiment.claims_for(catalogue.stored_preset(experiment, record, path))
    except ReproError:
        return None, redrawn
    rules = [rule for claim in claims if claim.criterion for rule in (claim.criterion, claim.control.criterion)]
    read = {part.metric for rule in rules for part in parts(rule)}
    return read | {spec.metric for spec in experiment.figures if isinstance(spec, Curve)}, redrawn
