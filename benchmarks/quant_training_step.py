"""What emulated formats cost in training: the engine's compiled steps of one model, per precision, against float32."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence

import jax
from engine_overhead import EngineSteps
from timing import interleaved, judged, machine, ratios, spread

from repro.data import load_corpus
from repro.models import SIZES
from repro.train import TrainConfig, at_size, lane_mesh

TARGETS = {"v3": 1.6, "attention=mxfp4,ffn=mxfp4": 2.0}


def config_of(size: str, precision: str) -> TrainConfig:
    config = at_size(TrainConfig(optimizer="adamw", learning_rate=1e-3), size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, precision=precision))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="s", help="model size (default: s, which the targets are for)")
    parser.add_argument("--steps", type=int, default=10, help="steps of one timed call (default: 10)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument(
        "--devices", type=int, default=os.cpu_count(), help="CPU devices, one run each (default: cores)"
    )
    parser.add_argument("precisions", nargs="*", default=[*TARGETS], help="default: the two with a target")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh, corpus = lane_mesh(), load_corpus("kjv")
    print(machine())
    print(f"Size {args.size}, one run on each of {mesh.size} device(s), {args.steps} steps a call, AdamW")
    sides = {
        precision: EngineSteps(config_of(args.size, precision), range(mesh.size), corpus, mesh, args.steps)
        for precision in ("plain", *args.precisions)
    }
    seconds = interleaved(sides, args.rounds)
    for name, values in seconds.items():
        print(f"  {name}: {spread(values, 'ms per step', 1e3 / args.steps)}")
    for name in args.precisions:
        found = ratios(seconds[name], seconds["plain"])
        target = TARGETS.get(name)
        print(
            "  "
            + (judged(f"{name} over plain", found, at_most=target) if target else f"{name} over plain: {spread(found)}")
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
