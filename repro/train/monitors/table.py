"""The table of monitors for a page, from the monitors themselves."""

from __future__ import annotations

from collections.abc import Iterator

from repro.train.monitors.registry import MONITORS


def table() -> str:
    """Markdown: what each monitor can suggest and what it cannot prove, then the definition of every metric."""
    return "\n".join([*_monitors(), "", *_metrics()])


def _monitors() -> Iterator[str]:
    yield "| monitor | group | measured | can suggest | cannot prove |"
    yield "|---|---|---|---|---|"
    for name, monitor in MONITORS.items():
        when = "at times" if monitor.dear else "every step"
        yield f"| `{name}` | {monitor.group} | {when} | {_cell(monitor.sees)} | {_cell(monitor.cannot_prove)} |"


def _metrics() -> Iterator[str]:
    yield "| metric | monitor | definition |"
    yield "|---|---|---|"
    for name, monitor in MONITORS.items():
        for metric, definition in monitor.metrics.items():
            yield f"| `{metric}` | `{name}` | {_cell(definition)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(table())
