"""What checkpoints cost while training goes on, and how soon a resumed job takes its first step."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from engine_overhead import config_of, lanes_of, settings
from timing import interleaved, judged, machine, ratios, spread

from repro.data import load_corpus
from repro.errors import Stopped
from repro.train import lane_mesh, train

DEFAULT = 60.0
"""Seconds from one checkpoint to the next, where a run does not say otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    settings(parser, steps=100)
    parser.add_argument("--seeds", type=int, default=4, help="runs of the job (default: 4)")
    parser.add_argument("--interval", type=float, default=3.0, help="seconds between checkpoints here (default: 3)")
    parser.add_argument("--devices", type=int, default=os.cpu_count(), help="CPU devices (default: one per core)")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    config, corpus, mesh = config_of(args), load_corpus("kjv"), lane_mesh()
    lanes = lanes_of(config, range(args.seeds))
    print(machine())
    print(f"Size {args.size}, {args.seeds} runs of {config.steps} steps, {mesh.size} device(s)")
    saves: list[int] = []

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "saves"

        def job(**options: Any) -> Any:
            return train(config, lanes, corpus, mesh=mesh, **options)

        def saving() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            job(checkpoints=folder, checkpoint_seconds=args.interval)
            saves.append(len([*(folder / "curves").glob("*.npz")]))  # each adds one

        seconds = interleaved({"without": job, "with": saving}, args.rounds)
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        for name, values in seconds.items():
            print(f"  {name} checkpoints: {spread(values, 'ms per step', 1e3 / config.steps)}")
        print(
            f"  {min(saves[1:])} to {max(saves[1:])} checkpoints a job, {size / 2**20:.1f} MiB in the folder at the end"
        )
        if not min(saves[1:]):
            print("  no checkpoint fell into the job; ask for more --steps or a shorter --interval")
            return 1
        raw = ratios(seconds["with"], seconds["without"])
        # The cost is that of a checkpoint, so its share falls as they are further apart.
        each = [(a - b) / n for a, b, n in zip(seconds["with"], seconds["without"], saves[1:], strict=True)]
        print(f"  with over without, a checkpoint every {args.interval:g} s: {spread(raw)}")
        print(f"  a checkpoint: {spread(each, 'ms', 1e3)}")
        print(
            "  " + judged(f"share at one every {DEFAULT:g} s", [1 + e / DEFAULT for e in each], at_most=1.03, digits=4)
        )

        firsts = [_first_step(job, folder) for _ in range(args.rounds)]
        print("  " + judged("seconds from a stopped job to its first chunk", firsts, at_most=10))
    return 0


def _first_step(job: Any, folder: Path) -> float:
    """Seconds until a resumed job has done its first chunk, with compiled programs; what a checkpoint is compared with
    is lowered anew."""
    shutil.rmtree(folder, ignore_errors=True)
    asked = itertools.count()
    try:
        job(checkpoints=folder, stop=lambda: next(asked) == 1)
    except Stopped:
        pass
    from repro.train import compiled

    for programs in compiled._compiled.values():
        programs.__dict__.pop("step_hash", None)
    start, seen = time.perf_counter(), []
    try:
        job(checkpoints=folder, on_chunk=lambda p: seen.append(time.perf_counter()), stop=lambda: bool(seen))
    except Stopped:
        pass
    return seen[0] - start


if __name__ == "__main__":
    raise SystemExit(main())
