"""What can only be seen on a GPU, in one go of under five minutes: a table of checks, ratios and peak memory."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from engine_overhead import EngineSteps, HandWritten, HandWrittenSteps, differences, lanes_of
from timing import interleaved, machine, ratios, spread

from repro.data import load_corpus
from repro.models import ModelConfig
from repro.train import TrainConfig, at_size, lane_mesh, train

# Products of float32 run as TF32 on a GPU, so two programs of one model agree less than on a CPU.
LOSS_TOLERANCE = 1e-2
START_NOTHING_AFTER = 200.0  # seconds; a section takes well under a hundred


class Checks:
    """The sections; each returns rows of (what, result)."""

    def __init__(self, *, tiny: bool, rounds: int) -> None:
        self.corpus, self.mesh, self.rounds = load_corpus("kjv"), lane_mesh(jax.devices()[:1]), rounds
        self.small = at_size(TrainConfig(steps=2 if tiny else 50, weight_decay=0.1, tau=3.0), "w32" if tiny else "xs")
        big = TrainConfig(steps=4, learning_rate=1e-3, model=ModelConfig(compute_dtype="bfloat16", remat=True))
        self.big = at_size(big, "w32" if tiny else "gpt2")
        self.big_name = "w32" if tiny else "gpt2"

    def steps(self, config: TrainConfig, seeds: int) -> EngineSteps:
        return EngineSteps(config, range(seeds), self.corpus, self.mesh, config.steps)

    def job(self) -> list[tuple[str, str]]:
        start = time.perf_counter()
        result = train(self.big, lanes_of(self.big, [0]), self.corpus, mesh=self.mesh)
        losses = result.curves["loss"][:, 0]
        if not np.isfinite(losses).all() or not np.isfinite(result.final["loss"]).all():
            raise ValueError(f"losses are not finite: {losses}")
        return [
            (f"losses of {self.big_name}, bfloat16, recomputed blocks", " ".join(f"{x:.3f}" for x in losses)),
            ("compilation and these steps", f"{time.perf_counter() - start:.1f} s"),
        ]

    def overhead(self, seeds: int, form: str) -> list[tuple[str, str]]:
        config = self.small
        peer = HandWritten(config, range(seeds), self.corpus, form, jax.devices()[:1], config.steps)
        losses, _, _ = differences(peer, self.mesh, min(10, config.steps))
        if not losses <= LOSS_TOLERANCE:
            raise ValueError(f"{form}: first losses differ by {losses:.1e}, so a ratio would mean nothing")
        sides = {"engine": self.steps(config, seeds), "hand": HandWrittenSteps(peer, config.steps)}
        seconds = interleaved(sides, self.rounds)
        label = f"{seeds} run(s), engine over hand-written {form}"
        return [
            (f"{seeds} run(s), first losses apart (allowed {LOSS_TOLERANCE:g})", f"{losses:.1e}"),
            (f"{seeds} run(s), engine", spread(seconds["engine"], "ms per step", 1e3 / config.steps, 3)),
            (f"{label} (target at most 1.05)", spread(ratios(seconds["engine"], seconds["hand"]))),
        ]

    def seeds(self) -> list[tuple[str, str]]:
        seconds = interleaved({"one": self.steps(self.small, 1), "eight": self.steps(self.small, 8)}, self.rounds)
        return [("8 seeds over 1 seed (target at most 7)", spread(ratios(seconds["eight"], seconds["one"])))]

    def types(self) -> list[tuple[str, str]]:
        full = dataclasses.replace(self.big, model=dataclasses.replace(self.big.model, compute_dtype="float32"))
        seconds = interleaved({"bf16": self.steps(self.big, 1), "fp32": self.steps(full, 1)}, min(self.rounds, 3))
        tokens = self.big.batch_size * self.big.length * self.big.steps
        rows = [(f"{self.big_name}, {n}", spread(s, "ms per step", 1e3 / self.big.steps)) for n, s in seconds.items()]
        return [
            *rows,
            (f"{self.big_name}, bf16", f"{tokens / min(seconds['bf16']):,.0f} tokens per second at best"),
            ("bfloat16 step over float32 step", spread(ratios(seconds["bf16"], seconds["fp32"]))),
        ]

    def sections(self) -> dict[str, Callable[[], list[tuple[str, str]]]]:
        """In the order of the memory they take, so that the peak after each is its own."""
        return {
            "engine overhead, one run": lambda: self.overhead(1, "scan"),
            "engine overhead, 8 runs": lambda: self.overhead(8, "vmap"),
            "seeds": self.seeds,
            "job": self.job,
            "number types": self.types,
        }


def peak_memory() -> str:
    found = jax.devices()[0].memory_stats() or {}
    return f"{found['peak_bytes_in_use'] / 2**30:.2f} GiB" if "peak_bytes_in_use" in found else "not reported here"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allow-cpu", action="store_true", help="without a GPU, run at a tiny size to try the script")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    args = parser.parse_args(argv)
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not args.allow_cpu:
        print(
            "These checks need a GPU that JAX can use (pip install 'repro[cuda]' on a machine with one), and JAX sees "
            f"only {jax.default_backend()}.",
            file=sys.stderr,
        )
        return 2
    began, incomplete = time.perf_counter(), False
    print(machine())
    for name, section in Checks(tiny=not on_gpu, rounds=args.rounds).sections().items():
        if on_gpu and time.perf_counter() - began > START_NOTHING_AFTER:
            incomplete, rows = True, [("", "skipped: no time left")]
        else:
            try:
                rows = section()
            except Exception as error:  # the other sections still say something
                incomplete, rows = True, [("", f"FAILED: {type(error).__name__}: {str(error)[:300]}")]
        rows.append(("peak memory so far", peak_memory()))
        print(f"\n{name} (at {time.perf_counter() - began:.0f} s)")
        for what, result in rows:
            print(f"  {what:<58} {result}", flush=True)
    return int(incomplete)


if __name__ == "__main__":
    raise SystemExit(main())
