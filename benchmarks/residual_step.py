"""What residual schemes cost: the engine's compiled steps of one model, per scheme, against pre-norm."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence

import jax
from engine_overhead import EngineSteps
from timing import interleaved, judged, machine, ratios, spread

from repro.data import load_corpus
from repro.models import SIZES, ResidualConfig
from repro.train import TrainConfig, at_size, lane_mesh

TARGETS = {"manifold": 2.0}
KINDS = ("hyper", "manifold", "manifold_lite", "block_attention")


def config_of(size: str, kind: str) -> TrainConfig:
    config = at_size(TrainConfig(optimizer="adamw", learning_rate=1e-3), size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, residual=ResidualConfig(kind=kind)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="s", help="model size (default: s, which the target is for)")
    parser.add_argument("--steps", type=int, default=10, help="steps of one timed call (default: 10)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument(
        "--devices", type=int, default=os.cpu_count(), help="CPU devices, one run each (default: cores)"
    )
    parser.add_argument("kinds", nargs="*", default=[*KINDS], help="residual schemes (default: the four)")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh, corpus = lane_mesh(), load_corpus("kjv")
    print(machine())
    print(f"Size {args.size}, one run on each of {mesh.size} device(s), {args.steps} steps a call, AdamW")
    sides = {
        kind: EngineSteps(config_of(args.size, kind), range(mesh.size), corpus, mesh, args.steps)
        for kind in ("pre_norm", *args.kinds)
    }
    seconds = interleaved(sides, args.rounds)
    for name, values in seconds.items():
        print(f"  {name}: {spread(values, 'ms per step', 1e3 / args.steps)}")
    for name in args.kinds:
        found, target = ratios(seconds[name], seconds["pre_norm"]), TARGETS.get(name)
        label = f"{name} over pre_norm"
        print("  " + (judged(label, found, at_most=target) if target else f"{label}: {spread(found)}"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
