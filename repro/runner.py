"""Runs an experiment: follows its plan, trains what it asks for, judges, and leaves a run folder."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import polars as pl

from repro.claims import Cell, Experiment, Run, Runs, Verdict, decide_all, gather, rule_hash
from repro.data import Corpus, load_corpus
from repro.errors import ReproError, Stopped
from repro.report import draw, write_report
from repro.report.record import KEYS, SCHEMA, RunFolder, no_curves, write_json
from repro.report.tensorboard import CELL, write_events
from repro.signals import Signals
from repro.train import Lane, Progress, TrainConfig, check_corpus, lane_mesh, prepare, train, with_settings
from repro.train.checkpoint import Restored
from repro.train.ledgers import ledgers
from repro.train.monitors import DEAR, group_of
from repro.train.origin import differences, package_versions
from repro.train.preset import Sweep


def versions() -> dict[str, str]:
    packages = package_versions()
    return {"repro": packages.pop("repro"), "python": platform.python_version()} | packages


def hardware() -> dict[str, Any]:
    """What ran it, without names of hosts or paths."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform, "device": devices[0].device_kind, "devices": len(devices),
        "deterministic_ops": "xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", ""),
        "cpu_cores": os.cpu_count(), "machine": platform.machine(), "system": platform.system(),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """Lanes of one structure at one size that train together."""

    config: TrainConfig
    lanes: tuple[tuple[Cell, TrainConfig, int], ...]
    """(cell, configuration, seed) of each."""

    def key(self, corpus: Corpus) -> str:
        """A name that is the same in every attempt."""
        text = json.dumps(
            [[dataclasses.asdict(config), seed, cell.point, cell.phase, cell.arm] for cell, config, seed in self.lanes]
            + [corpus.sha256],
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def lane_config(experiment: Experiment, preset: Sweep, cell: Cell) -> TrainConfig:
    """The whole configuration of a cell: the preset's at its size, the arm's and the cell's settings, the rate."""
    settings = experiment.settings(cell) | {"learning_rate": cell.rate}
    return with_settings(preset.config(cell.size), settings)


def jobs(experiment: Experiment, preset: Sweep, cells: Iterable[Cell], most_lanes: int) -> Iterator[Job]:
    """Cells grouped by structure, in the order in which structures first appear, at most `most_lanes` to a job."""
    groups: dict[TrainConfig, list[tuple[Cell, TrainConfig, int]]] = {}
    for cell in cells:
        config = lane_config(experiment, preset, cell)
        groups.setdefault(config.structure(), []).extend((cell, config, seed) for seed in cell.seeds)
    for structure, lanes in groups.items():
        for start in range(0, len(lanes), most_lanes):
            yield Job(structure, tuple(lanes[start : start + most_lanes]))


def curves_table(job: Job, curves: dict[str, np.ndarray]) -> pl.DataFrame:
    """Per-step metrics as rows; `head_logits` is a list over layers and heads."""
    steps, lanes = curves["loss"].shape
    repeat = lambda values, dtype=None: pl.Series(np.repeat(np.array(values), steps), dtype=dtype)
    cells = [cell for cell, _, _ in job.lanes]
    columns: dict[str, Any] = {
        name: repeat([getattr(c, name) for c in cells]) for name in ("arm", "size", "point", "phase")
    }
    columns["rate"] = repeat([cell.rate for cell in cells], pl.Float64)
    columns["seed"] = repeat([seed for _, _, seed in job.lanes], pl.Int64)
    columns["step"] = pl.Series(np.tile(np.arange(steps), lanes), dtype=pl.Int32)
    for name, values in curves.items():
        rows = np.moveaxis(values, 1, 0).reshape(lanes * steps, -1)
        # Lists rather than fixed-width arrays, since models of different sizes stand in one table.
        columns[name] = pl.Series(rows[:, 0]) if values.ndim == 2 else pl.Series(rows).cast(pl.List(pl.Float32))
    return pl.DataFrame(columns)


def curves_of(job: Job, table: pl.DataFrame) -> dict[str, np.ndarray]:
    """The inverse of `curves_table`, from a table that may hold other runs too: [step, run] or [step, run, entries], for
    the metrics that these runs have. Raises `ReproError` if a run is not there with every step from 0 on."""
    parts: list[dict[str, np.ndarray]] = []
    for cell, _, seed in job.lanes:
        where = (pl.col("seed") == seed) & (pl.col("rate") == cell.rate)
        for name in ("arm", "size", "point", "phase"):
            where &= pl.col(name) == getattr(cell, name)
        own = table.filter(where).sort("step")
        if not len(own) or own["step"].to_list() != list(range(len(own))):
            raise ReproError(f"the steps of {cell.arm}, seed {seed}, are not stored one by one from 0 on.")
        own = own.drop(*(name for name in own.columns if own[name].null_count()), *KEYS, "step", strict=False)
        parts.append(
            {c.name: c.to_numpy() if not c.dtype.is_nested() else np.array(c.to_list(), np.float32) for c in own}
        )
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: np.stack([part[name] for part in parts], 1) for name in shared}


def write_job_events(folder: RunFolder, curves: list[pl.DataFrame]) -> None:
    """The TensorBoard files of the cells in the last of `curves`; earlier jobs may hold other seeds of them."""
    numbers = (pl.Float32, pl.Int32)  # bits, such as a checksum, are no curve
    metrics = [name for name, kind in curves[-1].schema.items() if kind in numbers and name != "step"]
    of_cells = pl.concat(curves, how="diagonal").join(curves[-1].select(CELL).unique(), on=CELL, how="semi")
    groups = {name: group_of(name) for name in metrics}
    write_events(folder.path / "tensorboard", of_cells, groups, sparse=DEAR)


class Watcher:
    """What the command line shows; the base class shows nothing."""

    def computing(self) -> None:
        """The checks of an experiment that trains nothing begin."""

    def compiling(self, programs: int) -> None:
        """So many programs are being compiled."""

    def job(self, job: Job, number: int) -> None:
        """A job begins."""

    def progress(self, progress: Progress) -> None:
        """A chunk of it is done."""

    def job_done(self, job: Job, resumed: bool) -> None:
        """A job is complete, or was complete already."""

    def note(self, line: str) -> None:
        """Something that a person should know."""


def describe(
    experiment: Experiment, preset_name: str, preset: Any, corpus: Corpus | None, changed: list[str]
) -> dict[str, Any]:
    """run.json as it stands before the first step; without a corpus nothing is trained, and nothing is said of it."""
    about = {
        "schema": SCHEMA, "experiment": experiment.name, "title": experiment.title, "preset_name": preset_name,
        "preset": dataclasses.asdict(preset), "changed": changed, "rule_hash": rule_hash(experiment, preset),
        "versions": versions(), "hardware": hardware(), "started": datetime.date.today().isoformat(),
    }  # fmt: skip
    return about if corpus is None else about | _describe_training(experiment, preset, corpus)


def _describe_training(experiment: Experiment, preset: Sweep, corpus: Corpus) -> dict[str, Any]:
    first = experiment.arms[0]
    evidence = {
        "baseline": f"every arm against {' or '.join(arm.label for arm in experiment.arms[:2])}, paired by seed",
        "seeds": f"{len(preset.test_seeds)} for the test, {len(getattr(preset, 'tuning_seeds', ()))} others for tuning",
        "budget": f"{preset.train.steps} steps for every arm",
    }
    size = preset.sizes[0]
    per_arm = {
        arm.name: ledgers(with_settings(preset.config(size), dict(arm.settings)), evidence) for arm in experiment.arms
    }
    return {
        "corpus": {
            "name": corpus.name, "sha256": corpus.sha256, "hash_scope": corpus.hash_scope,
            "provenance": corpus.provenance, "tokens": len(corpus.tokens), "entropy_floor": corpus.entropy_floor,
        },
        "configs": {s: dataclasses.asdict(preset.config(s)) for s in preset.all_sizes()},
        "ledgers": per_arm[first.name], "ledgers_by_arm": per_arm,
    }  # fmt: skip


def execute(
    experiment: Experiment,
    preset_name: str,
    preset: Any,
    folder: RunFolder,
    *,
    changed: list[str] = [],
    watcher: Watcher | None = None,
    signals: Signals | None = None,
    accept_differences: bool = False,
    keep_checkpoints: bool = False,
    checkpoint_seconds: float | None = None,
) -> tuple[Verdict, ...]:
    """Runs, or continues, everything that `folder` does not hold yet, and seals it with the verdicts.

    An experiment without a plan only computes: its table of curves has no rows, and its preset may be any frozen
    dataclass. One with a plan takes a `repro.train.preset.Sweep`. What a folder was begun with decides; other versions
    or another platform are refused unless `accept_differences`, which run.json then records. `keep_checkpoints` keeps
    those of every job, with its last state; a folder that was begun so goes on so. `checkpoint_seconds` is for `train`.
    Raises `ReproError` for what a user can mend, among it a full disk, and `Stopped` after a signal; what was finished
    stays and can be resumed.
    """
    watcher, signals = watcher or Watcher(), signals or Signals()
    experiment.check(preset)
    corpus = None if experiment.plan is None else _corpus_of(preset)
    mesh = None if corpus is None else lane_mesh()
    started = time.monotonic()
    curves: list[pl.DataFrame] = []
    number = 0

    def trained(job: Job, key: str) -> tuple[Runs, pl.DataFrame]:
        options = {"stop": signals, "accept_differences": accept_differences, "save_last": keep_checkpoints}
        if checkpoint_seconds is not None:
            options["checkpoint_seconds"] = checkpoint_seconds
        return _train_job(job, corpus, mesh, folder, key, watcher, **options)

    def run_cells(cells: list[Cell]) -> Runs:
        nonlocal number
        found = Runs()
        asked = {}
        for job in jobs(experiment, preset, cells, preset.lanes_per_device * mesh.shape["seed"]):
            number += 1
            asked[f"{number:03d}-{job.key(corpus)}"] = job
        missing = [(job.config, len(job.lanes)) for key, job in asked.items() if not folder.has_job(key)]
        prepare(missing, corpus, mesh, watcher.compiling)
        for key, job in asked.items():
            stored = folder.read_job(key)
            if stored is None:
                watcher.job(job, int(key[:3]))
                with signals.patient():
                    stored = trained(job, key)
                    curves.append(stored[1])
                    write_job_events(folder, curves)
                    folder.write_job(key, *stored)
                    if not keep_checkpoints:
                        folder.remove_checkpoints(key)
                watcher.job_done(job, resumed=False)
                if signals():
                    raise Stopped(job.config.steps, job.config.steps, saved=True)
            else:
                curves.append(stored[1])
                watcher.job_done(job, resumed=True)
            found += stored[0]
        return found

    try:
        if not (folder.path / "run.json").is_file():
            about = describe(experiment, preset_name, preset, corpus, changed)
            write_json(folder.path / "run.json", about | ({"keep_checkpoints": True} if keep_checkpoints else {}))
        else:
            record = folder.read("run.json")
            keep_checkpoints = bool(record.get("keep_checkpoints"))
            if found := check_origin(folder, record, accept_differences):
                _accept(folder, found)
        if corpus is None:
            watcher.computing()
        runs = gather(experiment, preset, run_cells)
        verdicts = decide_all(experiment.claims_for(preset), runs)
        table = pl.concat(curves, how="diagonal") if curves else no_curves()
        folder.write_results(runs, table)
        record = folder.read("run.json")
        if (events := folder.events()) is not None:
            record["events"] = events
        record["seconds"] = round(record.get("seconds", 0.0) + time.monotonic() - started, 1)
        write_json(folder.path / "run.json", record)
        figures = draw(experiment, table.drop("head_logits", strict=False), runs, verdicts, folder.path / "figures")
        write_report(folder.path / "report.md", experiment, preset, record, runs, verdicts, figures)
        folder.seal(
            {
                "experiment": experiment.name,
                "preset": preset_name,
                "evidence": getattr(preset, "evidence", not changed),
                "rule_hash": record["rule_hash"],
                "verdicts": [v.to_json() for v in verdicts],
            },
            keep_checkpoints,
        )  # fmt: skip
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise ReproError(
                f"the disk is full while writing to {folder.path}; free some space and continue with `repro resume {folder.path}`."
            ) from error
        raise
    return verdicts


def _corpus_of(preset: Sweep) -> Corpus:
    """The corpus of a preset, fit for all its sizes."""
    corpus = load_corpus(preset.data)
    for size in preset.all_sizes():
        check_corpus(preset.config(size), corpus)
    return corpus


def _accept(folder: RunFolder, found: Iterable[str]) -> None:
    """Records differences that were accepted, each once."""
    record = folder.read("run.json")
    record["accepted_differences"] = [*dict.fromkeys([*record.get("accepted_differences", ()), *found])]
    write_json(folder.path / "run.json", record)


def check_origin(folder: RunFolder, record: dict[str, Any], accept: bool) -> list[str]:
    """In words, the versions and the platform that are others than those that a folder was begun with. Raises
    `ReproError` if there are any that are not accepted."""
    then = {"versions": dict(record.get("versions") or {}), "platform": (record.get("hardware") or {}).get("platform")}
    then["versions"].pop("python", None)  # no bit depends on it
    found = differences(then, {"versions": package_versions(), "platform": jax.default_backend()})
    if found and not accept:
        raise ReproError(
            f"{folder.path} was begun with {', '.join(found)}; go on where it was begun, or with --accept-differences."
        )
    return found


def _train_job(
    job: Job, corpus: Corpus, mesh: jax.sharding.Mesh, folder: RunFolder, key: str, watcher: Watcher, **options: Any
) -> tuple[Runs, pl.DataFrame]:
    lanes = [Lane(config.numbers(), seed) for _, config, seed in job.lanes]

    def on_restore(restored: Restored) -> None:
        watcher.note(f"going on from the checkpoint of step {restored.step}")
        if restored.differences:
            _accept(folder, restored.differences)

    result = train(
        job.config, lanes, corpus, mesh=mesh, checkpoints=folder.checkpoints / key, on_note=watcher.note,
        on_restore=on_restore, on_chunk=watcher.progress, **options,
    )  # fmt: skip
    scalars = job.config.program_class().scalars(result, [config for _, config, _ in job.lanes])
    runs = Runs(
        Run(cell.arm, seed, metrics, point=cell.point, size=cell.size, rate=cell.rate, phase=cell.phase)
        for (cell, _, seed), metrics in zip(job.lanes, scalars, strict=True)
    )
    if job.config.guards:
        folder.write_events(key, [_placed(job, event) for event in result.events])
    return runs, curves_table(job, result.curves)


def _placed(job: Job, event: dict[str, Any]) -> dict[str, Any]:
    """An event with the run that it belongs to in place of the lane."""
    cell, _, seed = job.lanes[event["lane"]]
    run = {key: seed if key == "seed" else getattr(cell, key) for key in KEYS}
    return run | {name: value for name, value in event.items() if name != "lane"}
