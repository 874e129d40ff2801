"""Tokens per second of the engine against the same model in eager PyTorch, on CPU."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from engine_overhead import config_of, engine_weights, lanes_of, settings
from timing import fastest, interleaved, judged, machine, ratios

from repro.data import Corpus, load_corpus
from repro.train import TrainConfig, lane_mesh, train

LOSS_TOLERANCE = 1e-3


def differences(config: TrainConfig, corpus: Corpus, steps: int) -> tuple[float, float]:
    """Largest difference of the losses (absolute) and of all other statistics (relative to the larger of the value and
    one) over the first `steps` steps of one run from the same weights."""
    from torch_model import job

    mesh = lane_mesh(jax.devices()[:1])
    own, _ = job(config, 0, engine_weights(config, [0], corpus, mesh)[0], corpus)
    engine = train(config, lanes_of(config, [0]), corpus, mesh=mesh).curves
    if set(own) != set(engine):
        raise SystemExit(f"the two sides compute different statistics: {sorted(set(own) ^ set(engine))}")
    theirs = {name: values[:steps, 0] for name, values in engine.items()}
    apart = {name: np.abs(own[name][:steps] - values) for name, values in theirs.items()}
    others = [(apart[n] / np.maximum(np.abs(v), 1)).max() for n, v in theirs.items() if n != "loss"]
    return float(apart["loss"].max()), float(max(others))


@contextlib.contextmanager
def torch_processes(config: TrainConfig, seeds: Sequence[int], weights: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """A call that trains all seeds once: one waiting process per core, each with one thread and its share of seeds."""
    from torch_model import work

    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    count = min(os.cpu_count() or 1, len(seeds))
    for i in range(count):
        here, there = context.Pipe()
        share = (there, config, list(seeds)[i::count], list(weights)[i::count])
        processes.append(context.Process(target=work, args=share, daemon=True))
        processes[-1].start()
        pipes.append(here)

    def run() -> None:
        for pipe in pipes:
            pipe.send(True)
        for pipe in pipes:
            pipe.recv()

    try:
        yield run
    finally:
        for pipe in pipes:
            pipe.send(False)
        for process in processes:
            process.join()


def report(title: str, seconds: dict[str, list[float]], tokens: int) -> None:
    print(f"  {title}")
    for name, values in seconds.items():
        middle, low, high = (tokens / f(values) for f in (statistics.median, max, min))
        print(f"    {name}: {middle:,.0f} tokens per second ({low:,.0f} to {high:,.0f})")
    best = fastest({name: values for name, values in seconds.items() if name != "engine"})
    print("    " + judged(f"engine over {best}", ratios(seconds[best], seconds["engine"]), at_least=1.0))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    settings(parser, steps=50)
    parser.add_argument("--seeds", type=int, default=8, help="runs of the second comparison (default: 8)")
    parser.add_argument("--check-steps", type=int, default=10, help="steps that both sides must agree on (default: 10)")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        print("This comparison needs PyTorch, which is not installed: pip install 'repro[peers]'.")
        return 0
    import torch
    from torch_model import job

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    corpus, mesh, seeds = load_corpus("kjv"), lane_mesh(), range(args.seeds)
    print(f"torch {torch.__version__}, {machine()}")
    for optimizer in ("muon", "adamw"):
        config = config_of(args, optimizer)
        print(f"\n{args.size}, {optimizer}, {config.steps} steps a job")
        losses, others = differences(config, corpus, args.check_steps)
        print(f"  check: first {args.check_steps} losses differ by {losses:.1e}, statistics by {others:.1e}")
        if not losses <= LOSS_TOLERANCE:
            raise SystemExit("PyTorch and the engine do not compute the same thing; a ratio would mean nothing.")
        weights = engine_weights(config, seeds, corpus, mesh)

        def eager(threads: int, config: TrainConfig = config, own: Any = weights[0]) -> None:
            torch.set_num_threads(threads)
            job(config, 0, own, corpus)

        tokens = config.steps * config.batch_size * config.length
        one = {"engine": lambda c=config: train(c, lanes_of(c, [0]), corpus, mesh=lane_mesh(jax.devices()[:1]))}
        one |= {f"torch, {n} thread(s)": lambda n=n: eager(n) for n in sorted({1, os.cpu_count() or 1})}
        report("one run", interleaved(one, args.rounds), tokens)
        with torch_processes(config, seeds, weights) as run:
            many = {"engine": lambda c=config: train(c, lanes_of(c, seeds), corpus, mesh=mesh)}
            many["torch, one process per core"] = run
            report(f"{args.seeds} runs", interleaved(many, args.rounds), tokens * args.seeds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
