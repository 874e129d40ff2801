"""`repro compare RUN_A RUN_B`: what differs between two runs."""

from __future__ import annotations

import argparse
import html
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from repro.claims import Run, Runs, Verdict
from repro.claims.verdict import LABELS
from repro.errors import ReproError
from repro.report.numbers import NONE, effect_text, interval_text, verdict_name
from repro.report.record import RunFolder, runs_from_table, stored_verdicts


@dataclass(frozen=True)
class Side:
    """One of the two runs: its folder, run.json, scalars and verdicts (none while it is going)."""

    path: Path
    record: dict[str, Any]
    runs: Runs
    verdicts: tuple[Verdict, ...]

    @property
    def name(self) -> str:
        return f"{self.record.get('experiment')} ({self.record.get('preset_name')})"


@dataclass(frozen=True)
class Part:
    """One table of differences: a title, headings, and rows of text. `same` counts what does not differ; `note` names
    what only one run has."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    same: int
    note: str = ""


def read_side(path: Path) -> Side:
    """A finished run, or one that is going, with what it has. ReproError for anything else."""
    folder = RunFolder.existing(path)
    if folder.finished:
        record, stored, runs = folder.sealed()
        return Side(folder.path, record, runs, stored_verdicts(stored))
    import polars as pl

    tables = [pl.read_parquet(file) for file in sorted(folder.jobs.glob("*.runs.parquet"))]
    return Side(folder.path, folder.read("run.json"), Runs(r for t in tables for r in runs_from_table(t)), ())


def differences(a: Side, b: Side) -> list[Part]:
    """Configuration, versions and machine, metrics, verdicts; each with only what differs."""
    about = ("experiment", "preset_name", "rule_hash", "changed")
    config = [{name: side.record.get(name, "") for name in about} | {"preset": side.record.get("preset", {})} | {
        "corpus": side.record.get("corpus", {})} for side in (a, b)]  # fmt: skip
    cost = ("versions", "hardware", "started", "seconds")
    machine = [{name: side.record.get(name, "") for name in cost} for side in (a, b)]
    return [
        _settings("configuration", *config),
        _settings("versions, machine and cost", *machine),
        _metrics(a.runs, b.runs),
        _verdicts(a.verdicts, b.verdicts),
    ]


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of everything in a tree of mappings; lists stand in one line."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _settings(title: str, a: Mapping, b: Mapping) -> Part:
    left, right = dict(leaves(a)), dict(leaves(b))
    names = list(dict.fromkeys([*left, *right]))
    rows = [(name, left.get(name, NONE), right.get(name, NONE)) for name in names if left.get(name) != right.get(name)]
    return Part(title, ("setting", "A", "B"), tuple(rows), len(names) - len(rows))


def _by_place(runs: Runs, ladders: set[str]) -> dict[str, list[Run]]:
    """The test runs of each place; at a place with several rates, of each rate."""
    found: dict[str, list[Run]] = {}
    for run in runs.select():
        name = f"{run.place} at {run.rate:g}" if run.place in ladders else run.place
        found.setdefault(name, []).append(run)
    return found


def _ladders(runs: Runs) -> set[str]:
    rates: dict[str, set[str]] = {}
    for run in runs.select():
        rates.setdefault(run.place, set()).add(repr(run.rate))
    return {place for place, found in rates.items() if len(found) > 1}


def _metrics(a: Runs, b: Runs) -> Part:
    """Means over test seeds at the places that both runs have, and the places that only one has."""
    ladders = _ladders(a) | _ladders(b)
    left, right = _by_place(a, ladders), _by_place(b, ladders)
    rows, same = [], 0
    for place in (place for place in left if place in right):
        names = dict.fromkeys(name for run in (*left[place], *right[place]) for name in run.metrics)
        sides = [_values(side[place], list(names)) for side in (left, right)]
        for metric in ("rate", *names):
            one, other = (side.get(metric, []) for side in sides)
            if sorted(map(repr, one)) == sorted(map(repr, other)):
                same += 1
                continue
            means = [math.fsum(v) / len(v) if v and all(map(math.isfinite, v)) else math.nan for v in (one, other)]
            change = f"{means[1] - means[0]:+.4g}" if all(map(math.isfinite, means)) else NONE
            rows.append((place, metric, _mean(means[0], one), _mean(means[1], other), change))
    only = [
        f"{len(places)} only in {name}: {_some(places)}"
        for name, places in (("A", [p for p in left if p not in right]), ("B", [p for p in right if p not in left]))
        if places
    ]
    headings = ("place", "metric", "A, mean over test seeds", "B", "B - A")
    return Part("metrics", headings, tuple(rows), same, "Places " + "; ".join(only) + "." if only else "")


def _some(names: list[str], most: int = 8) -> str:
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join(names[:most] + more)


def _values(runs: list[Run], metrics: list[str]) -> dict[str, list[float]]:
    found = {name: [run.metrics[name] for run in runs if name in run.metrics] for name in metrics}
    return found | {"rate": sorted({run.rate for run in runs if not math.isnan(run.rate)})}


def _mean(mean: float, values: list[float]) -> str:
    if not values:
        return NONE
    lost = sum(not math.isfinite(value) for value in values)
    return f"{mean:.5g} (n = {len(values)})" if not lost else f"{lost} of {len(values)} not finite"


def _verdicts(a: tuple[Verdict, ...], b: tuple[Verdict, ...]) -> Part:
    left, right = ({verdict_name(verdict): verdict for verdict in side} for side in (a, b))
    names = list(dict.fromkeys([*left, *right]))
    rows = []
    for name in names:
        one, other = left.get(name), right.get(name)
        if one is None or other is None or one.to_json() != other.to_json():
            rows.append((name, _words(one), _words(other), _change(one, other)))
    return Part("verdicts", ("claim", "A", "B", "label"), tuple(rows), len(names) - len(rows))


def _words(verdict: Verdict | None) -> str:
    if verdict is None:
        return NONE
    return f"{verdict.label}: {effect_text(verdict)}" + (f" ({interval_text(verdict)})" if verdict.interval else "")


def _change(a: Verdict | None, b: Verdict | None) -> str:
    if a is None or b is None:
        return "only in " + ("A" if b is None else "B")
    return "the same" if a.label == b.label else "changed"


def compare(args: argparse.Namespace, console: Console) -> int:
    """Print what differs; with --out also write it as one page. Returns 0 whether or not something differs."""
    a, b = (read_side(path) for path in args.runs)
    found = differences(a, b)
    console.print(f"A: {a.name}, {a.path}\nB: {b.name}, {b.path}")
    for part in found:
        console.print(f"\n{part.title}: {_count(part)}" + (f"\n{part.note}" if part.note else ""))
        if not part.rows:
            continue
        table = Table()
        for heading in part.headings:
            table.add_column(heading, overflow="fold")
        for row in part.rows:
            table.add_row(*row)
        console.print(table)
    if args.out:
        path = write_page(args.out, a, b, found)
        console.print(f"\n{path}")
    return 0


def _count(part: Part) -> str:
    if not part.rows:
        return f"no difference, {part.same} compared" if part.same else "nothing to compare"
    return f"{len(part.rows)} differ, {part.same} are the same"


def write_page(out: Path, a: Side, b: Side, found: list[Part]) -> Path:
    """Write the differences as one page with its style beside it. ReproError if `out` is not a new or empty folder."""
    from repro.report.record import write_atomically
    from repro.report.site.load import style_sheet

    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ReproError(f"{out} is not an empty folder; choose another --out.")
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "assets" / "site.css", style_sheet())
        write_atomically(out / "index.html", _page(a, b, found).encode())
    except OSError as error:
        raise ReproError(f"{out} cannot be written ({error.strerror}); choose another --out.") from error
    return out / "index.html"


def _page(a: Side, b: Side, found: list[Part]) -> str:
    """The page. It needs no template engine: it is four tables, and every text in them is escaped here."""
    sections = []
    for number, part in enumerate(found):
        head = f'<section aria-labelledby="part-{number}"><h2 id="part-{number}">{text(part.title.capitalize())}</h2>'
        head += f'<p class="muted">{_count(part).capitalize()}. {text(part.note)}</p>'
        if not part.rows:
            sections.append(f"{head}</section>")
            continue
        headings = "".join(f'<th scope="col">{text(heading)}</th>' for heading in part.headings)
        rows = "\n".join(
            f'<tr><th scope="row">{text(row[0])}</th>'
            + "".join(f'<td class="free">{_cell(c)}</td>' for c in row[1:])
            + "</tr>"
            for row in part.rows
        )
        sections.append(
            f'{head}<div class="scroll" role="group" tabindex="0" aria-labelledby="part-{number}"><table>'
            f"<thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table></div></section>"
        )
    names = f"<p class='lead'>A is {text(a.name)} of {text(a.record.get('started', ''))}, B is {text(b.name)} of " + (
        f"{text(b.record.get('started', ''))}.</p>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<title>Two runs compared · repro</title><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="assets/site.css"></head><body>'
        '<a class="skip" href="#main">Skip to the content</a><main id="main"><h1>Two runs compared</h1>\n'
        f"{names}{''.join(sections)}</main></body></html>\n"
    )


def text(words: Any) -> str:
    """Words that HTML shows as they are."""
    return html.escape(str(words), quote=True)


def _cell(words: str) -> str:
    """A cell, with the colour of the label that it begins with."""
    label = next((label for label in LABELS if words.startswith(f"{label}:")), None)
    return f'<span class="{label.replace(" ", "-")}">{text(words)}</span>' if label else text(words)
