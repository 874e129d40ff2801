"""`repro drill`: a fault on purpose, who noticed it, and what ended it."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from repro.errors import ReproError

STORAGE: Mapping[str, str] = MappingProxyType(
    {
        "truncated-checkpoint": "the newest checkpoint is cut short",
        "flipped-byte": "one bit of the newest checkpoint flips",
        "missing-file": "a file of the newest checkpoint is gone",
        "full-disk": "the disk is full from some checkpoint on",
        "kill": "kill -9 at random moments, each run continued and compared",
    }
)
_KILLS = 3
_ROWS = 12
"""Signals that a terminal shows of those that saw a fault."""


def drill(args: argparse.Namespace, console: Console) -> int:
    """Lists the drills, or runs one, prints what it found and writes it where the arguments ask for it. The exit code
    is 1 where something did not hold that must hold."""
    from repro.drills.training import DRILLS

    known = {name: drill.about for name, drill in DRILLS.items()} | dict(STORAGE)
    if args.name is None:
        for name, about in known.items():
            console.print(f"{name:22}{about}")
        return 0
    if args.name not in known:
        raise ReproError(f"drill {args.name!r} is unknown; known are {', '.join(known)}.")
    if args.n is not None and (args.name != "kill" or args.n < 1):
        raise ReproError("--n is the number of kills, at least 1; it belongs to `repro drill kill`.")
    if args.out is not None and args.out.exists():
        raise ReproError(f"{args.out} exists; name a new file.")
    console.print(f"{args.name}: {known[args.name]}")
    if args.name in DRILLS:
        from repro.drills import training

        found = training.run(args.name)
        _show_training(found, console)
        held = found["off_equals_engine"]
    else:
        found = _storage(args.name, args.n or _KILLS, console)
        held = all(case["equal"] for case in found["cases"])
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"Written to {args.out}.")
    return 0 if held else 1


def _storage(name: str, kills: int, console: Console) -> dict[str, Any]:
    """What a drill of storage finds, as it is stored."""
    from repro.drills import storage
    from repro.drills.training import SCHEMA, versions

    with tempfile.TemporaryDirectory(prefix="repro-drill-") as folder:
        place = lambda case: Path(folder) / case
        if name == "kill":
            say = lambda count: console.is_terminal and console.print(f"killed {count} of {kills}", end="\r")
            cases = [storage.kill(kills, place("kill"), on_kill=say)]
        elif name == "full-disk":
            cases = [storage.full_disk(place(how), how=how) for how in ("limit", "device")]
        else:
            cases = [getattr(storage, name.replace("-", "_"))(place("case"))]
    for case in cases:
        for word, value in case.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            if text not in ("", []):
                console.print(f"  {word.replace('_', ' ')}: {_said(text)}")
    return {
        "schema": SCHEMA, "drill": name, "about": STORAGE[name], "kind": "storage", "cases": cases,
        "versions": versions(), "platform": "cpu", "system": platform.system(),
    }  # fmt: skip


def _said(value: Any) -> str:
    return {True: "yes", False: "NO"}[value] if isinstance(value, bool) else str(value)


def _show_training(found: dict[str, Any], console: Console) -> None:
    runs = len(found["seeds"]["test"])
    console.print(
        f"Struck at step {found['fault_step']} of {found['steps']}, in {runs} runs. Without a fault the program gives "
        f"the engine's own bits: {_said(found['off_equals_engine'])}. {found['rule']} False alarms per signal and run "
        f"without a fault: {100 * found['false_alarms']:.1f} % (budget {100 * found['budget']:.1f} %)."
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("seen by", "group", "steps after the fault, by run"):
        table.add_column(heading, overflow="fold")
    for row in found["seen"][:_ROWS]:
        table.add_row(row["signal"], row["group"], " ".join("-" if s is None else str(s) for s in row["steps"]))
    console.print(table)
    console.print(
        f"{len(found['seen'])} of {found['signals']} signals see it in most runs"
        + (f"; the first {_ROWS} are shown." if len(found["seen"]) > _ROWS else ".")
    )
    for name, words in (("unguarded", "Without guards"), ("guarded", "With guards")):
        became = found[name]
        again = [step for step in became["recovered"] if step is not None]
        console.print(
            f"{words}: at worst {_span(became['worst'])} nats above the run without the fault, at the end "
            f"{_span(became['end'])}; {len(again)} of {runs} recover"
            + (f", after {min(again)} to {max(again)} steps." if again else ".")
        )
    console.print(f"Guards: {'; '.join(found['guards'])}.")
    for row in found["guarded"]["ended_by"]:
        acted = [step for step in row["steps"] if step is not None]
        when = f"{min(acted)} to {max(acted)} steps after the fault" if acted else "never after the fault"
        early = f", and {row['before_the_fault']} times before it" if row["before_the_fault"] else ""
        console.print(f"  {row['rule']}: in {len(acted)} of {runs} runs, {when}{early}.")


def _span(values: list[float | str]) -> str:
    numbers = sorted(float(value) for value in values)
    return f"{numbers[0]:.3g}" if numbers[0] == numbers[-1] else f"{numbers[0]:.3g} to {numbers[-1]:.3g}"
