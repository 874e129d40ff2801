"""From results to a folder of pages that opens without a server and asks no other host for anything."""

from __future__ import annotations

import collections
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import repro
from repro.claims import LABELS, LEDGER, All, Criterion, Verdict
from repro.claims.canonical import number_to_json
from repro.claims.runs import parse_place
from repro.errors import ReproError
from repro.report.ledger_tables import in_order, ledgers_by_arm
from repro.report.numbers import NONE, count_text, effect_text, interval_text, mde_text, p_text
from repro.report.record import write_atomically
from repro.report.rule_words import rule_words
from repro.report.site import claim_plots, matrix, words
from repro.report.site.definitions import definitions
from repro.report.site.load import Result, conflicts, key, leaves, load_results, one_rule
from repro.report.site.plot import Plot
from repro.report.site.spec_plots import plots
from repro.report.specs import Effects, Heatmap
from repro.report.summary import summarise

NOT_RUN = "not run"
MOST_CONTEXT = 4
MARKER = "evidence-pages.txt"


def build_site(paths: Sequence[Path], out: Path, *, unfinished: bool = False, live: bool = False) -> list[Path]:
    """Write the evidence pages of run folders into `out`, and return the pages.

    Args:
        paths: run folders, or folders of them.
        out: a new or empty folder, or one that this function wrote before, whose files are then replaced.
        unfinished: show runs that are still going with what they have; otherwise they are refused.
        live: pages ask their server whether there is something new. Only for `repro report --serve`.

    ReproError for a missing package, results that cannot be read (the file is named), or an `out` that holds
    something else.
    """
    library = _plotly()
    environment = _environment()
    results = load_results(paths, unfinished=unfinished)
    _prepare(out)
    site = _Site(out, environment, results, live)
    assets = resources.files("repro.report.site").joinpath("assets")
    for name in ("site.css", "site.js", "figures.js"):
        write_atomically(out / "assets" / name, assets.joinpath(name).read_bytes())
    if not (out / "assets" / "plotly.min.js").is_file():
        (out / "assets").mkdir(exist_ok=True)
        shutil.copyfile(library, out / "assets" / "plotly.min.js")
    pages = [site.run_page(result) for result in results]
    pages += [site.claim_page(id) for id in LEDGER]
    pages.append(site.overview())
    return pages


def _plotly() -> Path:
    """Plotly's library as one file, from the Python package that carries it."""
    spec = find_spec("plotly")
    if spec is None or find_spec("jinja2") is None:
        raise ReproError("the pages need plotly and jinja2; install repro[pages].")
    file = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    if not file.is_file():
        raise ReproError("the installed plotly carries no plotly.min.js; install repro[pages] again.")
    return file


def _environment():
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("repro.report.site"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["whole"] = whole
    return environment


def whole(words: str):
    """A heading in which no line ends inside "2-D" or "Post-LN"."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\b\w{1,5}-[A-Z]{1,2}\b", r'<span class="whole">\g<0></span>', str(escape(words))))


def _prepare(out: Path) -> None:
    """An empty folder, or one that was written here before, emptied of pages and data."""
    try:
        if out.exists() and not out.is_dir():
            raise ReproError(f"{out} is not a folder; choose another --out.")
        if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
            raise ReproError(f"{out} holds something other than evidence pages; choose another --out.")
        for name in ("claims", "runs", "data"):
            shutil.rmtree(out / name, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReproError(f"{out} cannot be written ({error.strerror}); choose another --out.") from error
    write_atomically(out / MARKER, b"Written by `repro report`; it will be replaced by the next one.\n")


@dataclass(frozen=True)
class Judged:
    """One verdict with the run it is from, as the templates need it."""

    result: Result
    verdict: Verdict
    conflict: tuple[Result, ...]

    @property
    def claim(self):
        return self.result.claim(self.verdict)

    @property
    def anchor(self) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", f"{self.verdict.variant or 'verdict'}-{self.result.slug}".lower())
        return plain.strip("-")

    @property
    def effect(self) -> str:
        return effect_text(self.verdict)

    @property
    def interval(self) -> str:
        return interval_text(self.verdict)

    @property
    def n(self) -> str:
        return count_text(self.verdict.n)

    @property
    def p(self) -> str:
        return p_text(self.verdict.p_holm)

    @property
    def mde(self) -> str:
        return mde_text(self.verdict)

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The numbers that there are, with their names."""
        names = ("effect", "95 % interval", "n", "p (Holm)", "minimum detectable")
        return [
            (name, number)
            for name, number in zip(names, (self.effect, self.interval, self.n, self.p, self.mde), strict=True)
            if number != NONE
        ]

    @property
    def size_words(self) -> str:
        """The sizes run, with their widths."""
        widths = {size: self.result.width(size) for size in self.result.sizes(self.verdict)}
        return ", ".join(f"{size} (width {width:g})" if width else size for size, width in widths.items()) or (
            "computed" if self.result.experiment else "not recorded"
        )

    @property
    def tier(self) -> str:
        return self.claim.tier if self.claim else LEDGER[self.verdict.claim_id].tier

    @property
    def rule(self) -> list[str]:
        """The comparisons of which all must hold."""
        return _comparisons(self.claim.criterion) if self.claim and self.claim.criterion else []

    @property
    def control_rule(self) -> list[str]:
        return _comparisons(self.claim.control.criterion) if self.claim and self.claim.control else []

    @property
    def one_rule(self) -> bool:
        """Whether the results in conflict have one rule, so that only their presets differ."""
        return one_rule(key(self.verdict), self.conflict)

    @property
    def why(self) -> str:
        """In what the results in conflict differ."""
        return words.why_in_conflict(key(self.verdict), self.conflict)

    @property
    def changes(self) -> list[str]:
        return words.what_would_change(self.claim, self.verdict)

    @property
    def stored(self) -> list[tuple[str, str]]:
        """Every number of the verdict with all its digits."""
        verdict = self.verdict
        low, high = verdict.interval or (None, None)
        found = {
            "effect": verdict.effect, "interval_low": low, "interval_high": high, "n": verdict.n, "p": verdict.p,
            "p_holm": verdict.p_holm, "mde": verdict.mde,
        }  # fmt: skip
        rows = [(name, _exact(value)) for name, value in found.items()]
        return rows + [(f"seed {seed}", _exact(value)) for seed, value in sorted(verdict.per_seed.items())]


def _comparisons(rule: Criterion) -> list[str]:
    return [rule_words(part) for part in (rule.criteria if isinstance(rule, All) else (rule,))]


def _exact(value: float | int | None) -> str:
    return "null" if value is None else str(number_to_json(value))


class _Site:
    """The pages of one set of results."""

    def __init__(self, out: Path, environment, results: list[Result], live: bool) -> None:
        self.out, self.environment, self.results, self.live = out, environment, results, live
        self.conflicts = conflicts(results)
        self.by_claim: dict[str, list[Judged]] = {id: [] for id in LEDGER}
        for result in results:
            for verdict in result.verdicts:
                other = self.conflicts.get((key(verdict), result.name), ())
                self.by_claim[verdict.claim_id].append(Judged(result, verdict, tuple(other)))

    def overview(self) -> Path:
        """The ledger, a matrix, the counts by label, and the runs."""
        judged = [item for found in self.by_claim.values() for item in found]
        counts = collections.Counter(item.verdict.label for item in judged)
        not_run = [id for id, found in self.by_claim.items() if not found]
        systems = list(dict.fromkeys(row.system for row in LEDGER.values()))
        return self._write(
            "index.html", "overview.html", "",
            judged=judged, not_run=not_run, ledger=LEDGER, meaning=words.MEANING, systems=systems,
            counts=[(label, counts[label]) for label in LABELS if counts[label]] + [(NOT_RUN, len(not_run))],
            columns=list(matrix.COLUMNS.values()), matrix=matrix.rows(), labels_of=self._labels_of,
            results=self.results,
            others=[(s, ids) for s in systems if (ids := [i for i in matrix.outside(LEDGER) if LEDGER[i].system == s])],
            conflicts=self.conflicts, conflict_groups=self._conflict_groups(), duration=words.duration, counts_of=_counts,
        )  # fmt: skip

    def _conflict_groups(self) -> list[dict[str, Any]]:
        """The conflicts, those together that the same results have for the same reason."""
        groups: dict[tuple, dict[str, Any]] = {}
        for (name, experiment), found in self.conflicts.items():
            why = words.why_in_conflict(name, found)
            place = (experiment, why, *(result.slug for result in found))
            group = groups.setdefault(place, {"names": [], "experiment": experiment, "results": found, "why": why})
            group["names"].append(name)
        return list(groups.values())

    def claim_page(self, id: str) -> Path:
        """One claim of the ledger, with everything that judges it."""
        found, row = self.by_claim[id], LEDGER[id]
        of_run: dict[str, list[Judged]] = {}
        for item in found:
            of_run.setdefault(item.result.slug, []).append(item)
        groups = [self._group(id, items) for items in of_run.values()]
        trend = list(claim_plots.by_size([(item.result, item.verdict) for item in found]))
        trend = self._save_plots(f"claim-{id}", trend)
        order = list(LEDGER)
        place = order.index(id)
        return self._write(
            f"claims/{id}.html", "claim.html", "../",
            id=id, row=row, judged=found, counts=self._labels_of(id), groups=groups, trend=trend,
            definition=definitions().get(id), meaning=words.MEANING, not_run=NOT_RUN,
            before=order[place - 1] if place else None, after=order[place + 1] if place + 1 < len(order) else None,
            figures=[plot for plot in trend] + [plot for group in groups for plot in group["plots"]],
        )  # fmt: skip

    def _group(self, id: str, items: list[Judged]) -> dict[str, Any]:
        """What one run has to say on a claim."""
        result = items[0].result
        verdicts = [item.verdict for item in items]
        found = [
            *claim_plots.effects(result, verdicts, ids=False),
            *claim_plots.by_step(result, verdicts),
            *claim_plots.of_experiment(result, verdicts),
        ]
        if not found and result.experiment is not None:
            # A rule may read what no figure shows, such as a slope; then the run's own first figures give the picture.
            drawn = (spec for spec in result.experiment.figures if not isinstance(spec, Effects | Heatmap))
            found = [plot for spec in drawn for plot in _plots_that_can_be_drawn(spec, result)][:MOST_CONTEXT]
        arms = _arms(result, items)
        return {
            "result": result, "items": items, "plots": self._save_plots(f"{id}-{result.slug}", found),
            "arms": [arm for arm in (result.experiment.labelled() if result.experiment else ()) if arm.name in arms],
            "ledgers": _ledgers(result, arms), "command": words.command(result.record),
            "duration": words.duration(result.record.get("seconds")), "hardware": words.hardware_words(result.record),
        }  # fmt: skip

    def run_page(self, result: Result) -> Path:
        """One run: settings, verdicts, figures and scalars."""
        found: list[Plot] = []
        if result.experiment is not None:
            for spec in result.experiment.figures:
                if isinstance(spec, Effects):
                    found += claim_plots.effects(result, result.verdicts)
                else:
                    found += _plots_that_can_be_drawn(spec, result)
        table = (
            summarise(result.experiment, result.runs, every_metric=True)
            if result.experiment and len(result.runs)
            else None
        )
        items = [item for found in self.by_claim.values() for item in found if item.result is result]
        shown = self._save_plots(f"run-{result.slug}", found)
        return self._write(
            f"runs/{result.slug}.html", "run.html", "../",
            result=result, items=items, figures=shown, table=table, leaves=leaves,
            command=words.command(result.record), duration=words.duration(result.record.get("seconds")),
            hardware=words.hardware_words(result.record),
            ledgers=_ledgers(result, [arm.name for arm in result.experiment.arms] if result.experiment else []),
        )  # fmt: skip

    def _save_plots(self, folder: str, found: Iterable[Plot]) -> list[dict[str, Any]]:
        """Data files of figures; what a page needs to show them."""
        shown = []
        for number, plot in enumerate(found):
            id = f"{folder}/{number:02d}-{plot.name}"
            named = Plot(id, plot.title, plot.caption, plot.summary, plot.data, plot.layout, plot.headings, plot.rows)
            _write_file(self.out / "data" / f"{id}.js", named.script())
            _write_file(self.out / "data" / f"{id}.csv", named.csv())
            height = plot.layout.get("height", 420)
            shown.append(
                {
                    "id": id,
                    "title": plot.title,
                    "caption": plot.caption,
                    "summary": plot.summary,
                    "height": height,
                    "file": id.replace("/", "-"),
                }
            )
        return shown

    def _labels_of(self, id: str) -> list[tuple[str, int]]:
        return _counts(item.verdict for item in self.by_claim[id]) or [(NOT_RUN, 1)]

    def _write(self, name: str, template: str, root: str, **values: Any) -> Path:
        page = self.environment.get_template(template)
        html = page.render(root=root, version=repro.__version__, live=self.live, **values)
        path = self.out / name
        _write_file(path, html)
        return path


def _write_file(path: Path, text: str) -> None:
    # Not `write_atomically`: a thousand files that can be written again need not each wait for the disk.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def _counts(verdicts: Iterable[Verdict]) -> list[tuple[str, int]]:
    """Labels with how often they occur, in the order of the labels."""
    counts = collections.Counter(verdict.label for verdict in verdicts)
    return [(label, counts[label]) for label in LABELS if counts[label]]


def _plots_that_can_be_drawn(spec, result: Result) -> list[Plot]:
    """The figures of a spec; none where the result is of a version whose arms or points are others."""
    try:
        return list(plots(spec, result.experiment, result.curves, result.runs))
    except ReproError:
        if result.changed_after or not result.finished:
            return []
        raise


def _arms(result: Result, items: Sequence[Judged]) -> list[str]:
    """The arms that the rules and controls of some verdicts read, in the experiment's order."""
    claims = [item.claim for item in items if item.claim is not None and item.claim.criterion is not None]
    read = {parse_place(at).arm for c in claims for rule in (c.criterion, c.control.criterion) for at in rule.reads()}
    return [arm.name for arm in result.experiment.labelled() if arm.name in read] if result.experiment else []


def _ledgers(result: Result, arms: Sequence[str]) -> list[dict[str, Any]]:
    """The ledgers N1-N10, each with one row per entry: a value for all arms, or one for each where they differ."""
    by_arm = {arm: found for arm, found in ledgers_by_arm(result.record).items() if arm in arms}
    if not by_arm:
        return []
    labels = {arm.name: arm.label for arm in result.experiment.arms} if result.experiment else {}
    names = sorted({name for found in by_arm.values() for name in found}, key=in_order)
    ledgers = []
    for name in names:
        tables = {arm: found.get(name) or {} for arm, found in by_arm.items()}
        entries = dict.fromkeys(entry for table in tables.values() for entry in table.get("rows") or {})
        rows = []
        for entry in entries:
            values = [str((table.get("rows") or {}).get(entry, "–")) for table in tables.values()]
            rows.append({"entry": entry, "values": values, "same": len(set(values)) == 1})
        title = next((table.get("title") for table in tables.values() if table.get("title")), "")
        ledgers.append({"name": name, "title": title, "rows": rows, "arms": [labels.get(arm, arm) for arm in tables]})
    return ledgers
