"""`python -m repro.report`: keeping results in a checkout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from repro.errors import ReproError
from repro.report.readme_table import renew
from repro.report.store import store


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m repro.report", description="Keeping results in a checkout.")
    commands = parser.add_subparsers(dest="command", required=True)
    keep = commands.add_parser("store", help="make of a finished run a small folder that can be committed")
    keep.add_argument("run", type=Path)
    keep.add_argument("out", type=Path, nargs="?", help="where to; without it the run's own folder is made small")
    readme = commands.add_parser("readme", help="renew the claims table of README.md from results/")
    readme.add_argument("--check", action="store_true", help="write nothing; exit 2 if the table is out of date")
    args = parser.parse_args()
    try:
        if args.command == "store":
            store(args.run, args.out)
        else:
            renew(Path("README.md"), Path("results"), check=args.check)
    except ReproError as error:
        print(f"repro: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
