"""The table of claims that a README shows, from stored results."""

import json
from collections.abc import Sequence
from pathlib import Path

from repro.claims import LEDGER, Verdict, ledger_row
from repro.errors import ReproError
from repro.report import markdown
from repro.report.markdown import escape
from repro.report.numbers import INTERVAL, count_text, effect_text, interval_text, p_text, verdict_name

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"


def claims_markdown(results: Sequence[Path]) -> str:
    """A Markdown table of the verdicts in result folders, in the order of the ledger.

    Args:
        results: folders that hold a `verdict.json` with the keys `experiment`, `preset` and `verdicts`. Where a
            relative folder also holds a `report.md`, the experiment is linked to it, so give folders relative to the
            page that will show the table.

    ReproError if a file is missing or malformed, a claim is not in the ledger, or one claim has two verdicts from the
    same experiment and preset.
    """
    rows, seen = [], {}
    for folder in map(Path, results):
        experiment, preset, verdicts = _read(folder)
        for verdict in verdicts:
            ledger_row(verdict.claim_id)
            key = (verdict.claim_id, verdict.variant, experiment, preset)
            if key in seen:
                where = f"{seen[key]} and {folder}"
                raise ReproError(f"{verdict_name(verdict)} is judged by {experiment} ({preset}) in both {where}")
            seen[key] = folder
            rows.append((key, verdict, _experiment_cell(folder, experiment, preset)))
    order = {id: index for index, id in enumerate(LEDGER)}
    rows.sort(key=lambda row: (order[row[0][0]], row[0]))
    headings = ("claim", "what is claimed", "verdict", "effect", INTERVAL, "n", "p (Holm)", "experiment")
    return markdown.raw_table(
        headings,
        [
            (
                escape(verdict_name(verdict)),
                escape(LEDGER[verdict.claim_id].claim),
                f"**{escape(verdict.label)}**",
                escape(effect_text(verdict)),
                escape(interval_text(verdict)),
                count_text(verdict.n),
                p_text(verdict.p_holm),
                experiment,
            )
            for _, verdict, experiment in rows
        ],
    )


def replace_between_markers(readme_text: str, table: str) -> str:
    """The text with everything between the two marker lines replaced by the table.

    ReproError unless each marker is there once, the beginning first.
    """
    once = readme_text.count(BEGIN) == readme_text.count(END) == 1
    if not once or readme_text.index(BEGIN) > readme_text.index(END):
        raise ReproError(f"the text needs one {BEGIN} and, after it, one {END}")
    before, rest = readme_text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{table.strip()}\n\n{END}{after}"


def _read(folder: Path) -> tuple[str, str, list[Verdict]]:
    path = folder / "verdict.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReproError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ReproError(f"{path} is not JSON") from None
    shape = isinstance(stored, dict) and {"experiment", "preset", "verdicts"} <= set(stored)
    if not shape or not isinstance(stored["verdicts"], list):
        raise ReproError(f"{path} has no experiment, preset and list of verdicts")
    verdicts = [Verdict.from_json(fields) for fields in stored["verdicts"]]
    return str(stored["experiment"]), str(stored["preset"]), verdicts


def _experiment_cell(folder: Path, experiment: str, preset: str) -> str:
    report = folder / "report.md"
    linked = not folder.is_absolute() and report.is_file()
    name = f"[{escape(experiment)}]({markdown.link_target(report)})" if linked else escape(experiment)
    return f"{name} ({escape(preset)})"


def renew(readme: Path, results: Path, *, check: bool) -> None:
    """Puts the table of all stored results into a README. With `check` nothing is written, and `ReproError` says if it
    is out of date."""
    folders = sorted(path.parent for path in results.glob("*/verdict.json"))
    text = readme.read_text(encoding="utf-8")
    fresh = replace_between_markers(text, claims_markdown(folders))
    if check and fresh != text:
        raise ReproError(f"{readme} does not show the stored results; run `python -m repro.report readme`.")
    if not check:
        readme.write_text(fresh, encoding="utf-8", newline="\n")
