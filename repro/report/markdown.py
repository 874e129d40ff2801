"""Text that stays text in Markdown."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from urllib.parse import quote

_SPECIAL = re.compile(r"([\\`*\[\]|~$#])|(?<![0-9A-Za-z])(_)|(_)(?![0-9A-Za-z])")


def escape(text: object) -> str:
    """One line that Markdown (GitHub's, tables and mathematics included) shows as it is.

    It is meant for the inside of a line: marks that only count at its start are left alone.
    """
    line = " ".join(str(text).split())
    line = _SPECIAL.sub(lambda match: "\\" + match.group(0), line)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table whose cells are escaped here; it ends with a newline."""
    escaped = [[escape(cell) for cell in row] for row in rows]
    return raw_table([escape(heading) for heading in headings], escaped)


def raw_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already; it ends with a newline."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code_block(text: str) -> str:
    """A fenced block; its fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}\n"


def link_target(path: PurePath | str) -> str:
    """A relative path for the inside of a link."""
    return quote(Path(path).as_posix())
