"""The command line: `repro --help` lists what there is."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from repro.errors import ReproError

# Nothing here imports JAX at the top: `repro list` should not wait for it, and devices are set up before it starts.


class _Parser(argparse.ArgumentParser):
    """argparse with one-sentence errors."""

    def error(self, message: str) -> NoReturn:
        raise ReproError(f"{self.prog}: {message}; `{self.prog} --help` shows what there is.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="repro", description="Published claims as experiments with verdicts.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    commands.add_parser("list", help="all claims of the ledger, and which experiment runs them")
    show = commands.add_parser("show", help="one claim of the ledger, or one experiment")
    show.add_argument("id", metavar="ID", help="a claim such as K2-1, or an experiment such as logit-explosion")
    run = commands.add_parser("run", help="run an experiment", add_help=False)
    _run_arguments(run)
    run.add_argument("name", metavar="NAME", nargs="?", help="the experiment")
    resume = commands.add_parser("resume", help="continue a run that was interrupted")
    resume.add_argument("folder", metavar="DIR", type=Path)
    resume.add_argument(
        "--accept-differences", action="store_true",
        help="go on although versions, platform or program are others than before, and record it",
    )  # fmt: skip
    replay = commands.add_parser("replay", help="execute a step again, and compare it with what was recorded")
    replay.add_argument("folder", metavar="DIR", type=Path)
    replay.add_argument("--step", type=int, required=True, help="the step, from 0 on")
    replay.add_argument("--job", type=int, metavar="N", help="of which job, as a run counts them (default: the last)")
    replay.add_argument("--accept-differences", action="store_true", help="replay with other versions than before")
    drill = commands.add_parser("drill", help="a fault on purpose: who sees it, and what ends it (no NAME: the list)")
    drill.add_argument("name", metavar="NAME", nargs="?", help="the fault, such as nan-gradient or kill")
    drill.add_argument("--n", type=int, help="kills of `repro drill kill` (default: 3)")
    drill.add_argument("--out", type=Path, metavar="FILE", help="write what was found, as JSON")
    verdict = commands.add_parser("verdict", help="print the verdicts of a run folder")
    verdict.add_argument("folders", metavar="DIR", type=Path, nargs="+")
    verdict.add_argument("--check", action="store_true", help="derive the verdicts again and compare")
    report = commands.add_parser(
        "report", help="write the evidence pages of runs (--out, --serve), or draw a run's figures and report.md again"
    )
    report.add_argument(
        "folders", metavar="RESULTS", type=Path, nargs="*",
        help="run folders, or folders of them (for pages by default: results/ of this checkout)",
    )  # fmt: skip
    report.add_argument("--out", type=Path, metavar="SITE", help="write the pages there; they open without a server")
    report.add_argument("--serve", action="store_true", help="serve the pages on this machine, and follow running runs")
    report.add_argument("--port", type=int, default=8000, help="of --serve; 0 for any free one (default: 8000)")
    compare = commands.add_parser(
        "compare", help="what differs between two runs: settings, versions, metrics, verdicts"
    )
    compare.add_argument("runs", metavar="RUN", type=Path, nargs=2)
    compare.add_argument("--out", type=Path, metavar="DIR", help="write it as a page, too")
    ledger = commands.add_parser("ledger", help="bytes of a training state, by role and policy")
    ledger.add_argument("--parameters", metavar="N", help="number of parameters")
    ledger.add_argument("--size", help="count the parameters of this model size")
    ledger.add_argument("--policy", help="one policy, role by role (default: all)")
    ledger.add_argument(
        "--role", metavar="ROLE=FORMAT", action="append", default=[], help="change one; FORMAT may be none"
    )
    scale = commands.add_parser("scale-down", help="a small model with the proportions of a released one")
    scale.add_argument("config", metavar="CONFIG", help="a Hugging Face config.json, or a name such as deepseek_v3")
    scale.add_argument("--width", type=int, required=True, help="the small model's width")
    scale.add_argument("--layers", type=int, help="its depth (default: in proportion to the width, at least 4)")
    scale.add_argument("--experts", type=int, help="its routed experts, with active ones in proportion (default: all)")
    scale.add_argument("--vocab-size", type=int, help="its vocabulary (default: 256, bytes)")
    scale.add_argument("--out", type=Path, metavar="FILE", help="write it as JSON")
    commands.add_parser("doctor", help="what this machine can run")
    return parser


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="cpu", help="scale of the run (default: cpu)")
    parser.add_argument("--seeds", type=int, help="number of test seeds")
    parser.add_argument("--out", type=Path, help="folder to write (default: runs/NAME-PRESET)")
    parser.add_argument("--keep-checkpoints", action="store_true", help="keep the last and best states of every job")
    parser.add_argument("-h", "--help", action="store_true", help="show this, and every field that can be overridden")


def main(argv: list[str] | None = None) -> int:
    """The `repro` command. Returns the exit code: 0, 2 for what a user can mend, 130 or 143 when interrupted
    by SIGINT or SIGTERM."""
    return _guarded(lambda: _dispatch(sys.argv[1:] if argv is None else argv))


def run_script(experiment: object) -> None:
    """`python experiments/NAME.py ...`: the same as `repro run NAME ...`."""
    raise SystemExit(main(["run", experiment.name, *sys.argv[1:]]))


def _guarded(action) -> int:
    try:
        return action()
    except ReproError as error:
        print(f"repro: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"repro: {error or 'interrupted.'}", file=sys.stderr)
        return getattr(error, "code", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(argv: list[str]) -> int:
    parser = _parser()
    args, overrides = parser.parse_known_args(argv)
    if overrides and args.command != "run":
        raise ReproError(f"repro: unrecognized arguments: {' '.join(overrides)}; `repro --help` shows what there is.")
    if args.version:
        import repro

        print(repro.__version__)
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    from repro import commands

    if args.command == "run":
        return commands.run(args, overrides)
    return commands.COMMANDS[args.command](args)


if __name__ == "__main__":
    raise SystemExit(main())
