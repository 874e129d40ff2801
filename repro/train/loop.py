"""The training loop: lanes of one structure, steps scanned in chunks, one transfer of metrics per chunk."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from repro.data import Corpus
from repro.train.checkpoint import Checkpoints
from repro.train.compiled import steps_per_chunk
from repro.train.config import TrainConfig
from repro.train.job import Job, Lane
from repro.train.mesh import lane_mesh
from repro.train.step import Metrics


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


def train(
    config: TrainConfig,
    lanes: Sequence[Lane],
    corpus: Corpus,
    *,
    mesh: jax.sharding.Mesh | None = None,
    checkpoints: Path | None = None,
    checkpoint_seconds: float = 60.0,
    on_chunk: Callable[[Progress], None] = lambda progress: None,
) -> JobResult:
    """Trains all lanes of one structure and evaluates them on the fixed validation windows.

    The next chunk is dispatched before the metrics of the last one are read, so devices do not wait for the host. With
    `checkpoints` a job saves itself there about every `checkpoint_seconds` at a chunk boundary, and continues from the
    newest save with the bits of an uninterrupted job. Raises `ReproError` for tokens beyond the model's vocabulary, a
    text that is too short, or a checkpoint of another configuration.
    """
    job = Job(config, lanes, corpus, lane_mesh() if mesh is None else mesh)
    state, done, curves = job.start(), 0, []
    saves = None if checkpoints is None else Checkpoints(checkpoints)
    if saves is not None and (latest := saves.latest()) is not None:
        state, past = saves.restore(latest, job.name, state, job.programs.metrics_like(latest, len(lanes)))
        done, curves = latest, [past]

    length = steps_per_chunk(config, job.mesh)
    tokens = config.batch_size * config.length * len(lanes)
    clock = saved_at = time.monotonic()
    pending: list[tuple[int, int, Metrics]] = []

    def collect() -> None:
        nonlocal clock
        start, stop, metrics = pending.pop(0)
        curves.append(job.take(metrics))
        now = time.monotonic()
        rate = tokens * (stop - start) / max(now - clock, 1e-9)
        on_chunk(Progress(stop, config.steps, len(lanes), rate, curves[-1]))
        clock = now

    while done < config.steps:
        stop = min(done + length, config.steps)
        state, metrics = job.advance(state, done, stop)
        pending.append((done, stop, metrics))
        done = stop
        if len(pending) > 1:
            collect()
        if saves is not None and done < config.steps and time.monotonic() - saved_at >= checkpoint_seconds:
            while pending:
                collect()
            saves.save(done, job.name, state, _joined(curves))
            saved_at = time.monotonic()
    while pending:
        collect()
    final = job.evaluate(state)
    if saves is not None:
        saves.close()
    return JobResult(_joined(curves), final, job.seats.take(state.params), job.seats.take(state.buffers))


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
