"""`repro replay`: steps of a run executed again, and whether they give the bits that it recorded."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rich.console import Console

from repro.errors import ReproError


def replay(args: argparse.Namespace, experiment: Any, preset: Any, folder: Any, console: Console) -> int:
    """Prints what a replay of one step found. Returns 0 if all bits are those that were recorded, else 1."""
    from repro.progress import job_title
    from repro.runner import check_origin
    from repro.signals import Signals
    from repro.train import Lane, lane_mesh
    from repro.train import replay as steps
    from repro.train.checkpoint import Checkpoints
    from repro.train.job import Job

    if experiment.plan is None:
        raise ReproError(f"{experiment.name} trains nothing, so there is no step to replay.")
    record = folder.read("run.json")
    accepted = check_origin(folder, record, args.accept_differences)
    mesh = lane_mesh()
    with Signals(), folder.locked():
        found = _jobs(experiment, preset, folder, mesh)
        chosen = _chosen(found, args.job)
        job = chosen.job
        lanes = [Lane(config.numbers(), seed) for _, config, seed in job.lanes]
        console.print(f"{chosen.number}. {job_title(job)} ({len(lanes)} runs)")
        own = Job(job.config, lanes, chosen.corpus, mesh)
        say = lambda line: console.print(line, soft_wrap=True)
        begin = lambda start: say(f"from {'step 0' if start is None else f'the checkpoint of step {start.step}'}")
        with Checkpoints(folder.checkpoints / chosen.key, own.origin, on_note=say) as saves:
            recorded = chosen.recorded() or saves.recorded()
            options = {"accept_differences": args.accept_differences, "on_start": begin}
            result = steps.replay(own, args.step, recorded, saves, **options)
    result = dataclasses.replace(result, accepted=tuple(dict.fromkeys((*accepted, *result.accepted))))
    compared = f"{len(result.metrics)} metrics of {len(lanes)} runs at steps {result.start} to {result.step}"
    if result.equal:
        state = f", and so is the state after step {result.end}" if result.state_equal else ""
        say(f"Bit-equal to what was recorded: {compared}{state}.")
        return 0
    for item in result.differences[:5]:
        cell, _, seed = job.lanes[item.run]
        where = f"step {item.step}, {cell.arm} at rate {cell.rate:g}, seed {seed}"
        say(f"{where}: {item.metric} was {item.recorded!r}, replayed {item.replayed!r}")
    if not result.differences:
        say(f"{compared} are bit-equal, but the state after step {result.end} is not that of the checkpoint.")
    elif len(result.differences) > 5:
        say(f"... and {len(result.differences) - 5} more at this step")
    say(f"Not what was recorded: {result.cause}.")
    return 1


@dataclasses.dataclass(frozen=True)
class _Found:
    """A job of a run folder."""

    number: int
    key: str
    job: Any
    corpus: Any
    table: Any
    """Its curves, or those of the whole run; None where it has not finished."""

    def recorded(self) -> dict:
        from repro.runner import curves_of

        return {} if self.table is None else curves_of(self.job, self.table)


class _Unfinished(Exception):
    pass


def _jobs(experiment: Any, preset: Any, folder: Any, mesh: Any) -> list[_Found]:
    """All jobs that a run folder knows of, in order: of a finished run all, else up to the first without a result."""
    import polars as pl

    from repro.claims import Runs, gather
    from repro.data import load_corpus
    from repro.runner import jobs

    corpus, found = load_corpus(preset.data), []
    whole = runs = None
    if folder.finished:
        _, verdict, runs = folder.sealed()
        if "thinned" in verdict:
            raise ReproError(f"the curves of {folder.path} were thinned when it was stored, so no step is there whole.")
        whole = pl.read_parquet(folder.path / "metrics.parquet")

    def results(cells: list) -> Runs:
        asked = Runs()
        for job in jobs(experiment, preset, cells, preset.lanes_per_device * mesh.shape["seed"]):
            number = len(found) + 1
            key = f"{number:03d}-{job.key(corpus)}"
            stored = (_of(job, runs), whole) if whole is not None else folder.read_job(key)
            found.append(_Found(number, key, job, corpus, None if stored is None else stored[1]))
            if stored is None:
                raise _Unfinished
            asked += stored[0]
        return asked

    try:
        gather(dataclasses.replace(experiment, checks=None, derive=None), preset, results)
    except _Unfinished:
        pass
    return found


def _of(job: Any, runs: Any) -> Any:
    """The runs of a job."""
    own = {(c.arm, c.size, c.point, c.phase, c.rate, seed) for c, _, seed in job.lanes}
    return type(runs)(r for r in runs if (r.arm, r.size, r.point, r.phase, r.rate, r.seed) in own)


def _chosen(found: list[_Found], number: int | None) -> _Found:
    """The job of that number, or the newest."""
    if number is None:
        return found[-1]
    if not 1 <= number <= len(found):
        raise ReproError(f"there is no job {number}; there are 1 to {len(found)}.")
    return found[number - 1]
