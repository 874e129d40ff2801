"""What eight runs cost in the time of one: whole jobs of the engine, which lays runs over all devices."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import jax
from engine_overhead import config_of, lanes_of, settings
from timing import interleaved, judged, machine, ratios, spread

from repro.data import load_corpus
from repro.train import lane_mesh, train


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    settings(parser, steps=100)
    parser.add_argument("--seeds", type=int, default=8, help="runs in the larger job (default: 8)")
    parser.add_argument("--devices", type=int, default=os.cpu_count(), help="CPU devices (default: one per core)")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    config, corpus, mesh = config_of(args), load_corpus("kjv"), lane_mesh()
    print(machine())
    print(f"Size {args.size}, {config.steps} steps a job, {mesh.size} device(s)")
    one, many = "1 seed", f"{args.seeds} seeds"
    jobs = {
        one: lambda: train(config, lanes_of(config, [0]), corpus, mesh=mesh),
        many: lambda: train(config, lanes_of(config, range(args.seeds)), corpus, mesh=mesh),
    }
    seconds = interleaved(jobs, args.rounds)
    for name, values in seconds.items():
        print(f"  {name}: {spread(values, 'ms per step', 1e3 / config.steps)}")
    print("  " + judged(f"{many} over {one}", ratios(seconds[many], seconds[one]), at_most=7 * args.seeds / 8))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
