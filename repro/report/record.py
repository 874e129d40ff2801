"""The run folder: what is in it, how it is written, and how it is checked when it is read again.

    run.json          what was run: preset, versions, hardware and rule hash; of training also the configurations,
                      the corpus and the ledgers N1-N10
    metrics.parquet   one row per run and step; no rows where nothing was trained
    runs.parquet      one row per run: the scalars that criteria read
    verdict.json      the verdicts, and the SHA-256 of the files above; written last
    report.md, figures/, tensorboard/

While a run is going, `jobs/` holds the finished jobs and `checkpoints/` the state of the current one, or with
`--keep-checkpoints` of all, which then stay.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from repro.claims import Run, Runs, Verdict
from repro.claims.canonical import plain
from repro.errors import ReproError
from repro.files import sha256, write_atomically

SCHEMA = 1
SEALED = ("run.json", "metrics.parquet", "runs.parquet")
KEYS = ("arm", "size", "point", "phase", "rate", "seed")


def write_json(path: Path, value: Any) -> None:
    """`value` as strict JSON, one line per entry of its first two levels; NaN and infinities become strings."""
    write_atomically(path, (_lines(plain(value)) + "\n").encode())


def _lines(value: Any, indent: str = "", levels: int = 2) -> str:
    """JSON with a line for every entry of some levels. Files of every digit on its own line would be twice as large."""
    if not levels or not isinstance(value, dict | list) or not value:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    deeper = indent + " "
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(value)
    items = value.values() if isinstance(value, dict) else value
    parts = (f"{deeper}{name}{_lines(item, deeper, levels - 1)}" for name, item in zip(names, items, strict=True))
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(parts) + f"\n{indent}{closing}"


def write_table(path: Path, table: pl.DataFrame, *, small: bool = False) -> None:
    """A Parquet file; `small` takes longer, and leaves out statistics that only a query over many files would use."""
    import io

    buffer = io.BytesIO()
    more = {"compression_level": 19, "statistics": False} if small else {}
    table.write_parquet(buffer, compression="zstd", **more)
    write_atomically(path, buffer.getvalue())


def no_curves() -> pl.DataFrame:
    """The table of curves of a run that trained nothing: the columns that name a run and a step, and no row."""
    kinds = {"rate": pl.Float64, "seed": pl.Int64, "step": pl.Int32}
    return pl.DataFrame(schema={name: kinds.get(name, pl.String) for name in (*KEYS, "step")})


def runs_table(runs: Runs) -> pl.DataFrame:
    """One row per run; a metric that a run does not have is null."""
    metrics = sorted({name for run in runs for name in run.metrics})
    columns: dict[str, Any] = {key: [getattr(run, key) for run in runs] for key in KEYS}
    columns |= {name: [run.metrics.get(name) for run in runs] for name in metrics}
    schema = {"rate": pl.Float64, "seed": pl.Int64, **{name: pl.Float64 for name in metrics}}
    return pl.DataFrame(columns, schema_overrides=schema)


def runs_from_table(table: pl.DataFrame) -> Runs:
    """The inverse of `runs_table`."""
    return Runs(
        Run(
            **{key: row[key] for key in KEYS},
            metrics={name: value for name, value in row.items() if name not in KEYS and value is not None},
        )
        for row in table.iter_rows(named=True)
    )


class RunFolder:
    """One run folder, locked while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.jobs = self.path / "jobs"
        self.checkpoints = self.path / "checkpoints"

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """A new folder. Raises `ReproError` if it exists and is not empty."""
        path = Path(path)
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ReproError(
                    f"{path} is not an empty folder; choose another --out, or continue it with `repro resume`."
                )
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReproError(f"{path} cannot be created ({error.strerror}); choose another --out.") from error
        return cls(path)

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """An existing run folder. Raises `ReproError` if there is none."""
        folder = cls(path)
        if not (folder.path / "run.json").is_file():
            raise ReproError(f"{path} holds no run.json; give the folder that `repro run` wrote.")
        return folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder against other processes. Raises `ReproError` if one has it."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ReproError(
                    f"{self.path} is in use by another process; wait for it, or choose another --out."
                ) from error
            yield
        finally:
            os.close(handle)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder. Raises `ReproError` if it is missing, damaged or of an unknown schema."""
        path = self.path / name
        try:
            value = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise ReproError(
                f"{self.path} is incomplete: {name} is missing; continue it with `repro resume {self.path}`."
            ) from error
        except (ValueError, OSError) as error:
            raise ReproError(f"{path} cannot be read as JSON; it was edited or damaged.") from error
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            found = value.get("schema") if isinstance(value, dict) else None
            raise ReproError(f"{path} has schema {found!r}; this version reads schema {SCHEMA}.")
        return value

    @property
    def finished(self) -> bool:
        return (self.path / "verdict.json").is_file()

    def has_job(self, key: str) -> bool:
        """Whether a job has finished."""
        return (self.jobs / f"{key}.runs.parquet").is_file()

    def read_job(self, key: str) -> tuple[Runs, pl.DataFrame] | None:
        """A finished job's runs and curves, or None if it has not finished."""
        runs, curves = self.jobs / f"{key}.runs.parquet", self.jobs / f"{key}.metrics.parquet"
        if not self.has_job(key):
            return None
        try:
            return runs_from_table(pl.read_parquet(runs)), pl.read_parquet(curves)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise ReproError(f"{runs} or its metrics cannot be read; remove both to run this job again.") from error

    def write_job(self, key: str, runs: Runs, curves: pl.DataFrame) -> None:
        """Stores a job; the runs come last, since their presence says that it finished."""
        write_table(self.jobs / f"{key}.metrics.parquet", curves)
        write_table(self.jobs / f"{key}.runs.parquet", runs_table(runs))

    def write_events(self, key: str, events: list[dict[str, Any]]) -> None:
        """Stores what guards did in a job, before the job itself."""
        write_json(self.jobs / f"{key}.events.json", events)

    def events(self) -> list[dict[str, Any]] | None:
        """What guards did in all jobs, in the order of the jobs; None where there were no guards."""
        stored = sorted(self.jobs.glob("*.events.json"))
        return [event for path in stored for event in json.loads(path.read_text())] if stored else None

    def write_results(self, runs: Runs, curves: pl.DataFrame) -> None:
        write_table(self.path / "metrics.parquet", curves)
        write_table(self.path / "runs.parquet", runs_table(runs))

    def remove_checkpoints(self, key: str) -> None:
        """Deletes those of one job."""
        shutil.rmtree(self.checkpoints / key, ignore_errors=True)

    def seal(self, verdict: dict[str, Any], keep_checkpoints: bool = False) -> None:
        """Writes verdict.json with the hashes of what it was derived from, and removes what only a resume needs."""
        files = {name: sha256(self.path / name) for name in SEALED}
        write_json(self.path / "verdict.json", {"schema": SCHEMA, **verdict, "files": files})
        for leftover in (self.jobs, *(() if keep_checkpoints else (self.checkpoints,))):
            shutil.rmtree(leftover, ignore_errors=True)

    def sealed(self) -> tuple[dict[str, Any], dict[str, Any], Runs]:
        """run.json, verdict.json and the runs of a finished folder.

        Raises `ReproError` if a file is missing, or is not the one that the verdict was derived from.
        """
        verdict = self.read("verdict.json")
        hashes = verdict.get("files")
        if not isinstance(hashes, dict):
            raise ReproError(f"{self.path / 'verdict.json'} was edited; restore it, or run the experiment again.")
        for name in SEALED:
            path = self.path / name
            if not path.is_file():
                raise ReproError(
                    f"{self.path} is incomplete: {name} is missing; restore it, or run the experiment again."
                )
            if sha256(path) != hashes.get(name):
                raise ReproError(
                    f"{path} was edited after its verdict was written; restore it, or run the experiment again."
                )
        return self.read("run.json"), verdict, runs_from_table(pl.read_parquet(self.path / "runs.parquet"))


def stored_verdicts(verdict: dict[str, Any]) -> tuple[Verdict, ...]:
    """The verdicts of a verdict.json. Raises `ReproError` if it does not hold them in the form of this version."""
    try:
        return tuple(Verdict.from_json(item) for item in verdict["verdicts"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReproError("verdict.json was edited or damaged; restore it, or run the experiment again.") from error
