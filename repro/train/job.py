"""Lanes of one structure on a mesh: all of a training job that does not change while it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from repro.data import Corpus
from repro.errors import ReproError
from repro.train.compiled import compiled, step_inputs, validation_shape
from repro.train.config import TrainConfig
from repro.train.guards import check_signals
from repro.train.mesh import Seats, place
from repro.train.origin import compiler_flags, package_versions
from repro.train.step import Metrics, Periodic, TrainState


@dataclasses.dataclass(frozen=True)
class Lane:
    """One run inside a job: its numbers and its seed (of initialisation and of data order)."""

    numbers: Any
    seed: int


def check_corpus(config: TrainConfig, corpus: Corpus) -> None:
    """Raises `ReproError` for tokens beyond the model's vocabulary, a text that is too short, or a guard on a signal that
    the run does not have."""
    if corpus.vocab_size > config.model.vocab_size:
        raise ReproError(
            f"corpus {corpus.name} has {corpus.vocab_size} token ids and the model {config.model.vocab_size}; "
            f"set train.model.vocab-size to at least {corpus.vocab_size}."
        )
    corpus.batch(0, 0, batch_size=config.batch_size, length=config.length)
    corpus.validation(config.eval_windows, config.length)
    if config.guards:
        check_signals(config.rules, signals(config.structure()))


@functools.cache
def signals(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Name and shape of every metric of a step."""
    program = config.program_class()(config)
    state = jax.eval_shape(program.init, jax.ShapeDtypeStruct((), np.uint32))
    return jax.eval_shape(program.step, state, *step_inputs(config, np.int32))[1]


class Job:
    """`lanes` of one structure: their programs, numbers and batches.

    `replaced` says for each lane which steps do not get their own batch, and the data step of the one they get
    (a quarantined batch). Raises `ReproError` for tokens beyond the model's vocabulary or a text that is too short.
    """

    def __init__(
        self,
        config: TrainConfig,
        lanes: Sequence[Lane],
        corpus: Corpus,
        mesh: jax.sharding.Mesh,
        replaced: Sequence[Mapping[int, int]] = (),
    ) -> None:
        check_corpus(config, corpus)
        self.config, self.lanes, self.corpus, self.mesh = config, tuple(lanes), corpus, mesh
        self.replaced = replaced
        self.seats = Seats(len(lanes), mesh)
        self.programs = compiled(config, self.seats, corpus)
        columns = zip(*(lane.numbers for lane in lanes), strict=True)
        self._numbers = self.seats.put(config.numbers_type()(*(np.array(c, np.float32) for c in columns)))
        self._watched: jax.Array | None = None
        if config.monitors.chosen(dear=True):
            count = validation_shape(config)[0]
            self._watched = place(corpus.validation(config.eval_windows, config.length)[:count], mesh, lanes=False)
        self._seeds, self._seed_of = np.unique([lane.seed for lane in lanes], return_inverse=True)

    def origin(self) -> dict[str, Any]:
        """What the bits of this job depend on, for `repro.train.origin.differences`."""
        return {
            "versions": package_versions(),
            "platform": self.mesh.devices.flat[0].platform,
            "flags": compiler_flags(),
            "config": dataclasses.asdict(self.config.structure()),
            "lanes": [{**lane.numbers._asdict(), "seed": lane.seed} for lane in self.lanes],
            "corpus": self.corpus.sha256,
            "program": self.programs.step_hash,
        }

    def start(self) -> TrainState:
        """The state of all seats before the first step."""
        seeds = np.array([lane.seed for lane in self.lanes], np.uint32)
        return self.programs.init(self.seats.counts, self.seats.put(seeds))

    def shapes(self, state: TrainState) -> TrainState:
        """What `seats.take(state)` would be, without the values."""
        lanes = len(self.lanes)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((lanes, *x.shape[1:]), x.dtype), state)

    def advance(self, state: TrainState, start: int, stop: int) -> tuple[TrainState, Metrics]:
        """The state after the steps from `start` up to `stop` and their metrics, over seats, both still on their way.
        The memory of `state` is taken."""
        program = self.programs.chunk(stop - start)
        return program(self.seats.counts, state, self._batches(start, stop), self._numbers, self._periodic(start, stop))

    def _periodic(self, start: int, stop: int) -> Periodic | None:
        if self._watched is None:
            return None
        due = np.arange(start, stop) % self.config.monitors.interval == 0
        return Periodic(place(due, self.mesh, lanes=False), self._watched)

    def _batches(self, start: int, stop: int) -> jax.Array:
        shape = {"batch_size": self.config.batch_size, "length": self.config.length}
        of_seeds = self.corpus.batches(self._seeds.tolist(), range(start, stop), **shape)
        of_lanes = np.moveaxis(of_seeds[:, self._seed_of], 1, 0)
        for lane, steps in enumerate(self.replaced):
            for step in steps.keys() & set(range(start, stop)):
                of_lanes[lane, step - start] = self.corpus.batch(self.lanes[lane].seed, steps[step], **shape)
        return self.seats.put(of_lanes)

    def take(self, metrics: Metrics) -> dict[str, np.ndarray]:
        """Metrics of a chunk on the host, [steps, lanes, ...]."""
        return {name: np.moveaxis(values, 1, 0) for name, values in self.seats.take(metrics).items()}

    def evaluate(self, state: TrainState) -> dict[str, np.ndarray]:
        """The final metrics [lanes], on the fixed validation windows."""
        windows = self.corpus.validation(self.config.eval_windows, self.config.length)
        placed = place(windows, self.mesh, lanes=False)
        return self.seats.take(self.programs.evaluate(self.seats.counts, (state.params, state.buffers), placed))
