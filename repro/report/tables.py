"""Tables for a terminal, as renderables of rich."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from rich import box
from rich.table import Table
from rich.text import Text

from repro.claims import LEDGER, Claim, Experiment, Runs, Verdict, ledger_row
from repro.errors import ReproError
from repro.report.numbers import INTERVAL, count_text, effect_text, interval_text, p_text, verdict_name
from repro.report.summary import summarise

LABEL_STYLES = {
    "supported": "bold green",
    "contradicted": "bold red",
    "not supported": "bold yellow",
    "inconclusive": "bold",
    "not testable at this scale": "dim",
}


def check_order(claims: Sequence[Claim], verdicts: Sequence[Verdict]):
    """ReproError unless the verdicts are those of the claims, in the same order."""
    expected, found = [claim.name for claim in claims], [verdict_name(verdict) for verdict in verdicts]
    if expected != found:
        raise ReproError(f"the verdicts are those of {', '.join(found) or 'nothing'}, not of {', '.join(expected)}")


def claims_table(claims: Sequence[Claim], verdicts: Sequence[Verdict]) -> Table:
    """One row per claim: its name and label, its numbers one below the other, and the statement with the reason.

    Stays readable from about 60 columns. ReproError if the verdicts are not those of the claims, in order.
    """
    check_order(claims, verdicts)
    table = _table()
    table.add_column("claim", width=16)
    table.add_column("result", min_width=24, no_wrap=True)
    table.add_column("statement and reason", ratio=1, overflow="fold")
    for claim, verdict in zip(claims, verdicts, strict=True):
        name = Text(claim.name, style="bold").append(f"\n{verdict.label}", style=LABEL_STYLES[verdict.label])
        why = Text(claim.statement, style="italic").append(f"\n{verdict.reason}", style="not italic")
        table.add_row(name, _numbers(verdict), why)
    return table


def arms_table(experiment: Experiment, runs: Runs) -> Table:
    """One row per (size, arm, point, rate) of the test runs, with the metrics that were recorded."""
    summary = summarise(experiment, runs, every_metric=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for heading in summary.headings:
        justify = "left" if heading in ("size", "arm", "point") else "right"
        short = heading in ("size", "point", "rate", "seeds")
        # Rich narrows only columns without a fixed width, and its minimum widths can push columns off the edge.
        width = 14 if heading == "arm" else None
        table.add_column(Text(heading), overflow="fold", justify=justify, no_wrap=short, width=width)
    for row, following in zip_longest(summary.rows, summary.rows[1:]):
        # In a narrow terminal cells take several lines, so sizes are set apart by a rule.
        table.add_row(*(Text(cell) for cell in row), end_section=following is not None and following[0] != row[0])
    return table


def ledger_table(experiments: Mapping[str, Sequence[str]], labels: Mapping[str, Sequence[str]]) -> Table:
    """Every published claim of the ledger, and where it stands.

    Args:
        experiments: claim id -> names of the experiments that judge it; ids may be absent.
        labels: claim id -> labels of its stored verdicts; ids may be absent.

    ReproError for an id that is not in the ledger.
    """
    for id in (*experiments, *labels):
        ledger_row(id)
    table = _table()
    table.add_column("claim", no_wrap=True)
    table.add_column("tier", width=6)
    table.add_column("what is claimed", ratio=1, overflow="fold")
    table.add_column("experiment", width=16, overflow="fold")
    table.add_column("verdicts", width=14, overflow="fold")
    for row in LEDGER.values():
        names = Text("\n".join(experiments.get(row.id, ())))
        found = Text("\n").join(Text(label, style=LABEL_STYLES.get(label, "")) for label in labels.get(row.id, ()))
        table.add_row(Text(row.id), Text(row.tier), Text(row.claim), names or Text("not run", style="dim"), found)
    return table


def _table() -> Table:
    return Table(box=box.HORIZONTALS, show_lines=True, pad_edge=False, expand=True, header_style="bold")


def _numbers(verdict: Verdict) -> Text:
    lines = []
    if verdict.effect is not None:
        lines.append(f"effect {effect_text(verdict)}")
    if verdict.interval is not None:
        lines.append(f"{INTERVAL}\n  {interval_text(verdict)}")
    if verdict.n is not None:
        lines.append(f"n = {count_text(verdict.n)}")
    if verdict.p_holm is not None:
        lines.append(f"p (Holm) = {p_text(verdict.p_holm)}")
    if verdict.control_label:
        lines.append(f"control:\n  {verdict.control_label}")
    return Text("\n".join(lines))
