"""From a run folder to a small one that can be committed: every scalar that a criterion reads, and thinned curves."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
from PIL import Image

from repro.report.record import KEYS, SEALED, RunFolder, sha256, write_atomically, write_table

POINTS = 41
BITS = 12
COLOURS = 128
RULE = f"test runs; every k-th recorded step and the last, at most {POINTS} a run; {BITS} significant bits; no lists"


def store(run: Path, out: Path | None = None) -> None:
    """Copies a finished run to `out` without event files, its curves thinned and its figures in few colours. Without
    `out` the folder itself is replaced; thinning it again changes nothing.

    `runs.parquet` and `run.json` keep their bytes, so the verdicts derived from `out` are the same. `verdict.json`
    says under `thinned` by what rule the curves were thinned, and the SHA-256 of the table that they are from.
    Raises `ReproError` if `run` is not a finished, unedited run folder, or `out` is not empty.
    """
    source = RunFolder(run)
    _, verdict, _ = source.sealed()
    if out is None:
        with tempfile.TemporaryDirectory(prefix=f".{source.path.name}-", dir=source.path.parent) as beside:
            target = RunFolder(Path(beside) / "thin")
            _copy(source, verdict, target)
            for path in sorted(target.path.rglob("*")):
                if path.is_file():
                    write_atomically(source.path / path.relative_to(target.path), path.read_bytes())
        return
    _copy(source, verdict, RunFolder.create(out))


def thin(curves: pl.DataFrame) -> pl.DataFrame:
    """The curves of the test runs, by the rule that `RULE` states; NaN and infinities stay."""
    lists = [name for name, kind in curves.schema.items() if kind.is_nested()]
    rows = curves.drop(lists).filter(pl.col("phase") == "test")
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


def few_colours(png: bytes) -> bytes:
    """The picture in its `COLOURS` most frequent colours, others by the nearest of them, if that makes it smaller."""
    image = Image.open(io.BytesIO(png))
    if image.mode == "P":
        return png
    image = image.convert("RGB")
    counted = sorted(image.getcolors(image.width * image.height), reverse=True)[:COLOURS]
    # An adaptive palette would shift the colours of lines, which are few pixels, and those are the arms.
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in counted for part in colour] + [*counted[0][1]] * (256 - len(counted)))
    buffer = io.BytesIO()
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return min(png, buffer.getvalue(), key=len)


def _copy(source: RunFolder, verdict: dict, target: RunFolder) -> None:
    table = pl.read_parquet(source.path / "metrics.parquet")
    fewer = thin(table)
    target.path.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in verdict.items() if name not in ("schema", "files")}
    if len(table) and not fewer.equals(table):
        write_table(target.path / "metrics.parquet", fewer)
        # A folder of an earlier version says in one sentence under `curves` how it was thinned first.
        first = [{"rule": kept.pop("curves"), "from_sha256": None}] if "curves" in kept else kept.get("thinned", [])
        kept["thinned"] = [*first, {"rule": RULE, "from_sha256": sha256(source.path / "metrics.parquet")}]
    else:
        shutil.copy(source.path / "metrics.parquet", target.path)
    for name in (*(name for name in SEALED if name != "metrics.parquet"), "report.md"):
        shutil.copy(source.path / name, target.path / name)
    for figure in sorted((source.path / "figures").glob("*")):
        data = figure.read_bytes()
        write_atomically(target.path / "figures" / figure.name, few_colours(data) if figure.suffix == ".png" else data)
    target.seal(kept)
