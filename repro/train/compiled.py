"""The compiled programs of a structure: initialisation, chunks of steps, evaluation, each over all lanes at once."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from repro.data import Corpus
from repro.train.config import TrainConfig
from repro.train.mesh import Seats, batched, lane_mesh, over_lanes
from repro.train.step import Metrics, Periodic, TrainState

# Steps per chunk. On a CPU, where lanes run one after another, short chunks cost nothing and show progress.
_STEPS_BATCHED, _STEPS_ONE_BY_ONE = 50, 10


def chunk_length(steps: int, most: int) -> int:
    """The largest number of steps up to `most` that divides `steps`, or `most` itself (and a shorter last chunk, which
    costs one more compilation) where that would be under half of it."""
    most = min(most, steps)
    best = max(k for k in range(1, most + 1) if steps % k == 0)
    return best if 2 * best > most else most


_MONITORED_WINDOWS = 8
"""Windows of validation text that dear monitors see."""


def validation_shape(config: TrainConfig) -> tuple[int, int]:
    """Windows and tokens that dear monitors see."""
    return min(_MONITORED_WINDOWS, config.eval_windows), config.length + 1


def step_inputs(config: TrainConfig, token_type: Any) -> tuple[Any, ...]:
    """Shapes of what a step of one run takes beside its state."""
    window = jax.ShapeDtypeStruct((config.batch_size, config.length + 1), token_type)
    numbers = config.numbers_type()(*[jax.ShapeDtypeStruct((), np.float32)] * len(config.numeric))
    if not config.monitors.chosen(dear=True):
        return window, numbers
    watched = jax.ShapeDtypeStruct(validation_shape(config), token_type)
    return window, numbers, Periodic(jax.ShapeDtypeStruct((), bool), watched)


def steps_per_chunk(config: TrainConfig, mesh: jax.sharding.Mesh) -> int:
    return chunk_length(config.steps, _STEPS_BATCHED if batched(mesh) else _STEPS_ONE_BY_ONE)


class Compiled:
    """The compiled programs of one structure on one mesh: `init(counts, seeds)`, `chunk(steps)(counts, state, windows,
    numbers, periodic)` and `evaluate(counts, (params, buffers), windows)`, all over seats but `periodic`, which is for dear
    monitors (`Periodic` over steps; None without any). They are compiled in `pool`, each by itself."""

    def __init__(self, config: TrainConfig, seats: Seats, token_type: str, pool: Executor) -> None:
        self.program = config.program_class()(config)
        self._config, self._token_type, self._mesh = config, token_type, seats.mesh
        over = functools.partial(over_lanes, mesh=seats.mesh)
        by_seat = NamedSharding(seats.mesh, P("seed"))
        self._array = lambda shape, dtype: jax.ShapeDtypeStruct((seats.total, *shape), dtype, sharding=by_seat)
        self._counts = jax.ShapeDtypeStruct(seats.counts.shape, seats.counts.dtype, sharding=by_seat)
        like = lambda tree: jax.tree.map(lambda x: self._array(x.shape[1:], x.dtype), tree)
        seeds = self._array((), np.uint32)
        init = jax.jit(over(self.program.init))
        self.state = like(jax.eval_shape(init, self._counts, seeds))
        self._over: Callable[..., Any] = over
        self._chunks: dict[int, Future[Any]] = {}
        whole = NamedSharding(seats.mesh, P())
        self._common = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        windows = self._common((config.eval_windows, config.length + 1), token_type)
        steps = steps_per_chunk(config, seats.mesh)
        self._chunks[steps] = pool.submit(self._lowered(steps).compile)  # first, since it takes longest
        # Runs once, and random numbers take long to optimise: less than half the compile time, the same bits.
        quickly = {"xla_backend_optimization_level": 1}
        self._init = _shared(pool, init.lower(self._counts, seeds), seats.mesh, compiler_options=quickly)
        evaluate = jax.jit(over(self._evaluated, shared=1))
        model = self.state.params, self.state.buffers
        self._evaluate = _shared(pool, evaluate.lower(self._counts, model, windows), seats.mesh)

    @property
    def init(self) -> Callable[..., TrainState]:
        """`(counts, seeds)` to the state before the first step."""
        return self._init.result()

    @property
    def evaluate(self) -> Callable[..., Metrics]:
        """`(counts, (params, buffers), windows)` to the final metrics."""
        return self._evaluate.result()

    def _evaluated(self, model: tuple[Any, Any], windows_NT1: jax.Array) -> Metrics:
        params, buffers = model
        return self.program.evaluate(params, windows_NT1, **({"buffers": buffers} if buffers else {}))

    def _lowered(self, steps: int) -> jax.stages.Lowered:
        program, config = self.program, self._config

        def chunk(
            state: TrainState, windows_SBT1: jax.Array, numbers: Any, periodic: Periodic | None
        ) -> tuple[TrainState, Metrics]:
            if periodic is None:
                return jax.lax.scan(lambda s, window: program.step(s, window, numbers), state, windows_SBT1)

            def step(s: TrainState, given: tuple[jax.Array, jax.Array]) -> tuple[TrainState, Metrics]:
                window, due = given
                return program.step(s, window, numbers, Periodic(due, periodic.validation_NT1))

            return jax.lax.scan(step, state, (windows_SBT1, periodic.due))

        windows = self._array((steps, config.batch_size, config.length + 1), self._token_type)
        numbers = config.numbers_type()(*[self._array((), np.float32)] * len(config.numeric))
        periodic = None
        if config.monitors.chosen(dear=True):
            periodic = Periodic(self._common((steps,), bool), self._common(validation_shape(config), self._token_type))
        return jax.jit(self._over(chunk, shared=1, carried=True), donate_argnums=1).lower(
            self._counts, self.state, windows, numbers, periodic
        )

    def chunk(self, steps: int) -> Callable[..., tuple[TrainState, Metrics]]:
        """The program of `steps` steps, compiled at its first use."""
        if steps not in self._chunks:
            self._chunks[steps] = Future()
            self._chunks[steps].set_result(self._lowered(steps).compile())
        return self._chunks[steps].result()

    @functools.cached_property
    def step_hash(self) -> str:
        """SHA-256 of the StableHLO of one step of one run, without places in source files: the same in every process
        and for any number of runs and devices."""
        of_one = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
        inputs = step_inputs(self._config, self._token_type)
        traced = jax.jit(self.program.step).trace(of_one(self.state), *inputs)
        text = traced.lower(lowering_platforms=(self._mesh.devices.flat[0].platform,)).as_text()
        optimised = not jax.config.read("jax_disable_most_optimizations")  # the one flag that the text does not show
        return hashlib.sha256(f"{optimised} {text}".encode()).hexdigest()


_compiled: dict[Any, Compiled] = {}
_programs: dict[Any, Future[Any]] = {}


def _shared(pool: Executor, lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh, **options: Any) -> Future[Any]:
    """A program being compiled, once for all structures that differ in nothing that it contains."""
    text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    optimised = not jax.config.read("jax_disable_most_optimizations")  # the one flag that the text does not show
    key = text, lowered.in_tree, lowered.out_tree, mesh, str(options), optimised
    if key not in _programs:
        _programs[key] = pool.submit(lowered.compile, **options)
    return _programs[key]


def compiled(config: TrainConfig, seats: Seats, corpus: Corpus) -> Compiled:
    """One set of programs per structure, mesh and number of seats for the whole process."""
    if not is_compiled(config, seats, corpus):
        _compile([(config, seats)], corpus)
    return _compiled[_key(config, seats, corpus)]


def _compile(structures: Sequence[tuple[TrainConfig, Seats]], corpus: Corpus) -> None:
    """Compiles all programs of all `structures` side by side, since XLA leaves cores idle otherwise."""
    made = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for config, seats in structures:
            made[_key(config, seats, corpus)] = Compiled(config.structure(), seats, _token_type(corpus), pool)
    _compiled.update(made)


def is_compiled(config: TrainConfig, seats: Seats, corpus: Corpus) -> bool:
    """Whether `compiled` would return at once."""
    return _key(config, seats, corpus) in _compiled


def _token_type(corpus: Corpus) -> str:
    return "uint16" if corpus.vocab_size <= 2**16 else "uint32"


def _key(config: TrainConfig, seats: Seats, corpus: Corpus) -> tuple[Any, ...]:
    return config.structure(), seats.mesh, seats.total, _token_type(corpus)


def prepare(
    jobs: Sequence[tuple[TrainConfig, int]],
    corpus: Corpus,
    mesh: jax.sharding.Mesh | None = None,
    on_start: Callable[[int], None] = lambda programs: None,
) -> None:
    """Compiles the programs of several jobs, given as (config, lanes), side by side. `on_start` hears for how many
    structures, if there are any to compile."""
    mesh = lane_mesh() if mesh is None else mesh
    distinct = {
        config.structure(): Seats(lanes, mesh)
        for config, lanes in jobs
        if not is_compiled(config, Seats(lanes, mesh), corpus)
    }
    if distinct:
        on_start(len(distinct))
        _compile(list(distinct.items()), corpus)
