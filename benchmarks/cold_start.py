"""Wall time and peak memory of `repro run` in a fresh process, against 60 s and 2 GiB."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SECONDS, GIB = 60.0, 2.0
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="smoke", help="preset (default: smoke, which the limits are for)")
    parser.add_argument("--experiment", default="logit-explosion")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "repro.cli", "run", args.experiment, "--preset", args.preset]
        start = time.perf_counter()
        done = subprocess.run([*command, "--out", str(Path(folder) / "run")], capture_output=True, text=True)
        seconds = time.perf_counter() - start
    if done.returncode:
        print(f"the run ended with exit code {done.returncode}: {done.stderr.strip()}", file=sys.stderr)
        return 1
    # The largest of the finished children, which is the run itself.
    gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * _MAXRSS_UNIT / 2**30
    print(f"repro run {args.experiment} --preset {args.preset}")
    for what, value, limit, unit in (("wall time", seconds, SECONDS, "s"), ("peak resident memory", gib, GIB, "GiB")):
        met = "met" if value <= limit else "missed"
        print(f"  {what}: {value:.2f} {unit}; limit {limit:g} {unit}, ratio {value / limit:.2f}: {met}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
