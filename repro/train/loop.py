"""The training loop: lanes of one structure, steps scanned in chunks, one transfer of metrics per chunk."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from repro.data import Corpus
from repro.errors import Stopped
from repro.train.checkpoint import Checkpoints, Curves, Restored, mean_loss
from repro.train.compiled import steps_per_chunk
from repro.train.config import TrainConfig
from repro.train.job import Job, Lane
from repro.train.mesh import lane_mesh
from repro.train.step import Metrics, TrainState
from repro.train.supervisor import Supervisor, numeric_events, structural_events


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a job is after a chunk. `metrics` has the axes [steps of the chunk, lanes, ...]."""

    step: int
    steps: int
    lanes: int
    tokens_per_second: float
    metrics: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class JobResult:
    """`curves`: per-step metrics [steps, lanes, ...]; `final`: evaluation after training [lanes]."""

    curves: dict[str, np.ndarray]
    final: dict[str, np.ndarray]
    params: Any
    """Parameters [lanes, ...] on the host."""
    buffers: Any = dataclasses.field(default_factory=dict)
    """What the model carries beside them, likewise."""
    events: tuple[dict[str, Any], ...] = ()
    """What guards did: lane, step, rule, signal, value, action, and what belongs to the action."""


def train(
    config: TrainConfig,
    lanes: Sequence[Lane],
    corpus: Corpus,
    *,
    mesh: jax.sharding.Mesh | None = None,
    checkpoints: Path | None = None,
    checkpoint_seconds: float = 60.0,
    save_last: bool = False,
    accept_differences: bool = False,
    start: Restored | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_note: Callable[[str], None] = lambda line: None,
    on_restore: Callable[[Restored], None] = lambda restored: None,
    on_chunk: Callable[[Progress], None] = lambda progress: None,
) -> JobResult:
    """Trains all lanes of one structure and evaluates them on the fixed validation windows.

    The next chunk is dispatched before the metrics of the last one are read, so devices do not wait for the host.

    With `checkpoints` a job saves itself there about every `checkpoint_seconds` at a chunk boundary while it goes on
    (0: at every boundary, waiting for the save before), and continues from the newest intact save with the bits of an
    uninterrupted job; without, from `start` if given. With `save_last` the state after the last step is saved too.
    `stop` is asked at every boundary. `on_note` hears of damaged saves in one line, `on_restore` of what was restored.

    Raises `ReproError` for tokens beyond the model's vocabulary, a text that is too short, or a save of another
    configuration, program or package version; `Stopped` when `stop` says so, after saving; OSError where the disk is
    full, at the next boundary: the save before stands.
    """
    job = Job(config, lanes, corpus, lane_mesh() if mesh is None else mesh)
    with contextlib.ExitStack() as stack:
        saves = None
        if checkpoints is not None:
            saves = stack.enter_context(Checkpoints(checkpoints, job.origin, on_note=on_note))
            start = restored(saves, job, accept_differences=accept_differences)
        if start is not None:
            on_restore(start)
        end = advance(
            job, config.steps, start, saves=saves, save_seconds=checkpoint_seconds, save_last=save_last, stop=stop,
            on_chunk=on_chunk,
        )  # fmt: skip
        final = job.evaluate(end.state)
    state, curves, take = end.state, end.curves, job.seats.take
    events = [*structural_events(end.supervisor, curves), *numeric_events(job.config.rules, curves)]
    events.sort(key=lambda event: (event["lane"], event["step"]))
    return JobResult(curves, final, take(state.params), take(state.buffers), tuple(events))


@dataclasses.dataclass(frozen=True)
class Reached:
    """A job after `step` steps: its state over seats, and its curves until then."""

    step: int
    state: TrainState
    curves: Curves
    supervisor: Supervisor


def advance(
    job: Job,
    last: int,
    start: Restored | None = None,
    *,
    saves: Checkpoints | None = None,
    save_seconds: float = 60.0,
    save_last: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_chunk: Callable[[Progress], None] = lambda progress: None,
) -> Reached:
    """The steps of a job from `start` to the first chunk boundary at or after `last`; see `train`."""
    config, state, done, curves, supervisor = job.config, job.start(), 0, [], Supervisor(job)
    if start is not None:
        own, snapshots = start.state if supervisor.needed else (start.state, ())
        state, done, curves = job.seats.put(own), start.step, [start.curves]
        if supervisor.needed:
            supervisor.recall(start.notes, snapshots)

    length = steps_per_chunk(config, job.mesh)
    tokens = config.batch_size * config.length * len(job.lanes)
    clock = saved_at = time.monotonic()
    saved = done
    pending: list[tuple[int, int, Metrics]] = []

    def collect() -> None:
        nonlocal clock
        first, end, metrics = pending.pop(0)
        curves.append(job.take(metrics))
        now = time.monotonic()
        rate = tokens * (end - first) / max(now - clock, 1e-9)
        on_chunk(Progress(end, config.steps, len(job.lanes), rate, curves[-1]))
        clock = now

    def save() -> None:
        nonlocal saved, saved_at
        while pending:
            collect()
        loss = mean_loss(curves[-1])
        if supervisor.needed:  # which may rewrite what was measured before the last save
            tree, notes = whole_state(job, state, supervisor), supervisor.notes()
            saves.save(done, tree, [_joined(curves)], loss, notes=notes, rewritten=True)
        else:
            saves.save(done, whole_state(job, state, supervisor), _since(curves, done - saved), loss)
        saved, saved_at = done, time.monotonic()

    while done < last:
        if stop() and supervisor.settled:
            if saves is not None:
                if saved < done:
                    save()
                saves.wait()
            raise Stopped(done, config.steps, saves is not None)
        end = min(done + length, config.steps)
        if supervisor.needed:
            supervisor.remember(done, job.seats.take(state))
        state, metrics = job.advance(state, done, end)
        pending.append((done, end, metrics))
        begun, done = done, end
        if len(pending) > 1 or supervisor.needed:
            collect()
        if supervisor.needed and supervisor.look(begun, done, own := job.seats.take(state), curves):
            state = job.seats.put(own)
        if saves is not None:
            saves.check()
            due = time.monotonic() - saved_at >= save_seconds and supervisor.settled
            if done < config.steps and due and not (saves.busy and save_seconds):
                save()
    while pending:
        collect()
    if saves is not None and save_last and saved < done:
        save()
    return Reached(done, state, _joined(curves), supervisor)


def whole_state(job: Job, state: TrainState, supervisor: Supervisor) -> Any:
    """What a save holds, on the host: the state, and the snapshots of a supervised job."""
    own = job.seats.take(state)
    if not supervisor.needed:
        return own
    return own, tuple(jax.tree.map(np.array, snapshot) for _, snapshot in supervisor.snapshots)


def restored(saves: Checkpoints, job: Job, **options: Any) -> Restored | None:
    """The newest intact save of a job; `options` as `Checkpoints.restore`."""
    own = job.shapes(job.programs.state)
    like = lambda notes: (own, (own,) * len(notes["snapshots"])) if "snapshots" in notes else own
    return saves.restore(like, **options)


def _since(parts: list[Curves], steps: int) -> list[Curves]:
    """The last parts, which together have so many steps."""
    count = 0
    for start in range(len(parts) - 1, -1, -1):
        count += len(parts[start]["loss"])
        if count == steps:
            return parts[start:]
    return []


def _joined(parts: list[Curves]) -> Curves:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
