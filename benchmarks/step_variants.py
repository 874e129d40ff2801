"""Compiled training steps of one model in several variants, timed against the first."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

import jax
from engine_overhead import EngineSteps
from timing import interleaved, judged, machine, ratios, spread

from repro.data import load_corpus
from repro.models import SIZES
from repro.train import TrainConfig, lane_mesh


def compare(
    argv: Sequence[str] | None,
    description: str,
    config_of: Callable[[str, str], TrainConfig],
    base: str,
    variants: Sequence[str],
    targets: Mapping[str, float],
    name: str,
    steps: int = 10,
) -> int:
    """The command of such a benchmark: `config_of(size, variant)` is a run, `base` the variant that others are held
    against, `targets` the largest ratio allowed. Variants given as arguments, called `name`, replace `variants`.
    `steps` is the default number of steps of a timed call."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", choices=SIZES, default="s", help="model size (default: s, which the targets are for)")
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of one timed call (default: {steps})")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument(
        "--devices", type=int, default=os.cpu_count(), help="CPU devices, one run each (default: cores)"
    )
    parser.add_argument("variants", nargs="*", metavar=name, default=[*variants], help=f"default: {' '.join(variants)}")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh, corpus = lane_mesh(), load_corpus("kjv")
    print(machine())
    print(f"Size {args.size}, one run on each of {mesh.size} device(s), {args.steps} steps a call, AdamW")
    sides = {
        variant: EngineSteps(config_of(args.size, variant), range(mesh.size), corpus, mesh, args.steps)
        for variant in (base, *args.variants)
    }
    seconds = interleaved(sides, args.rounds)
    for variant, values in seconds.items():
        print(f"  {variant}: {spread(values, 'ms per step', 1e3 / args.steps)}")
    for variant in args.variants:
        found, target = ratios(seconds[variant], seconds[base]), targets.get(variant)
        label = f"{variant} over {base}"
        print("  " + (judged(label, found, at_most=target) if target else f"{label}: {spread(found)}"))
    return 0
