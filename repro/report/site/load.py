"""Run folders as the pages need them, and what is wrong with them when they cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import polars as pl

from repro import catalogue
from repro.claims import Claim, Experiment, Runs, Verdict, rule_hash
from repro.claims.ledger import ledger_row
from repro.claims.runs import parse_place
from repro.errors import ReproError
from repro.report.record import RunFolder, no_curves, runs_from_table, stored_verdicts


@dataclass(frozen=True)
class Result:
    """One run folder.

    Fields:
        slug: its name on the site, of letters, digits, '-', '_' and '.'.
        path: the folder.
        record: run.json.
        verdicts: of verdict.json; empty while the run is going.
        stored: verdict.json itself; empty while the run is going.
        runs: the scalars, of finished jobs only while the run is going.
        experiment, preset, claims: from the catalogue of this installation; None and empty where it has no such
            experiment, or none that judges the stored claims.
        rule_now: hash of the rule as it stands in this installation; empty where there is none.
        finished: whether there is a verdict.
    """

    slug: str
    path: Path
    record: dict[str, Any]
    verdicts: tuple[Verdict, ...]
    stored: dict[str, Any]
    runs: Runs
    experiment: Experiment | None
    preset: Any
    claims: dict[str, Claim] = field(default_factory=dict)
    rule_now: str = ""
    finished: bool = True

    @property
    def name(self) -> str:
        return str(self.record.get("experiment", ""))

    @property
    def preset_name(self) -> str:
        return str(self.record.get("preset_name", ""))

    @property
    def rule(self) -> str:
        """Hash of the rule under which it was judged."""
        return str(self.record.get("rule_hash", ""))

    @property
    def changed_after(self) -> bool:
        """Whether the rule in this installation is another one than the result's."""
        return bool(self.rule_now) and self.rule_now != self.rule

    @cached_property
    def curves(self) -> pl.DataFrame:
        """The table of curves; of a run that is going, those of its finished jobs."""
        if self.finished:
            return pl.read_parquet(self.path / "metrics.parquet")
        jobs = [pl.read_parquet(path) for path in sorted((self.path / "jobs").glob("*.metrics.parquet"))]
        table = pl.concat(jobs, how="diagonal") if jobs else no_curves()
        return table.drop([name for name, kind in table.schema.items() if kind.is_nested()])

    @property
    def evidence(self) -> bool:
        return bool(self.stored.get("evidence", False))

    def claim(self, verdict: Verdict) -> Claim | None:
        """The claim of a verdict, as the catalogue has it."""
        return self.claims.get(key(verdict))

    def sizes(self, verdict: Verdict) -> tuple[str, ...]:
        """The model sizes that a verdict rests on, smallest first; empty where nothing was trained."""
        configs = self.record.get("configs") or {}
        known = sorted(configs, key=lambda size: _width(configs[size]))
        claim = self.claim(verdict)
        if claim is None or claim.criterion is None:
            return tuple(known)
        rule = claim.criterion
        named = {parse_place(at).size for at in rule.reads()} | {name for name, _ in getattr(rule, "sizes", ())}
        arms = {arm.name for arm in self.experiment.arms}
        if not any(parse_place(at).arm in arms for at in rule.reads()):
            return ()
        return tuple(size for size in known if size in named) or tuple(known)

    def width(self, size: str) -> float | None:
        """The model width of a size."""
        found = _width((self.record.get("configs") or {}).get(size) or {})
        return found or None


def _width(config: dict) -> float:
    width = (config.get("model") or {}).get("width") if isinstance(config, dict) else None
    return float(width) if isinstance(width, int | float) else 0.0


def key(item: Claim | Verdict) -> str:
    """A claim's id and variant, which claims and verdicts share."""
    id = item.id if isinstance(item, Claim) else item.claim_id
    return f"{id} ({item.variant})" if item.variant else id


def style_sheet() -> bytes:
    """The style sheet of the pages."""
    return resources.files("repro.report.site").joinpath("assets/site.css").read_bytes()


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Run folders among the paths, and those directly inside a path that is none itself.

    ReproError for a path that does not exist, or that holds no run folder.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if _is_run(path):
            found.append(path)
            continue
        inside = [child for child in sorted(path.iterdir()) if _is_run(child)] if path.is_dir() else []
        if not inside:
            raise ReproError(f"{path} holds no run; give folders that `repro run` wrote, or a folder of such folders.")
        found += inside
    return list(dict.fromkeys(path.resolve() for path in found))


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("run.json", "verdict.json", "runs.parquet"))


def load_results(paths: Sequence[Path], *, unfinished: bool = False) -> list[Result]:
    """Read run folders; with `unfinished`, runs that are still going are shown with what they have.

    ReproError, naming the file, for a folder that is incomplete, edited, of an unknown version, or judges claims that
    the ledger does not have.
    """
    results, slugs = [], set()
    for path in run_folders(paths):
        result = _load(path, _slug(path.name, slugs), unfinished)
        results.append(result)
    return results


def _slug(name: str, used: set[str]) -> str:
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    slug, number = plain, 1
    while slug.lower() in used:  # some file systems do not tell case
        number += 1
        slug = f"{plain}-{number}"
    used.add(slug.lower())
    return slug


def _load(path: Path, slug: str, unfinished: bool) -> Result:
    folder = RunFolder(path)
    if not folder.finished and unfinished and (path / "run.json").is_file():
        record, stored, verdicts, finished = folder.read("run.json"), {}, (), False
        tables = [pl.read_parquet(file) for file in sorted((path / "jobs").glob("*.runs.parquet"))]
        runs = Runs(run for table in tables for run in runs_from_table(table))
    else:
        record, stored, runs = folder.sealed()
        verdicts, finished = stored_verdicts(stored), True
        if any(stored.get(name) != record.get(name) for name in ("experiment", "rule_hash")):
            raise ReproError(f"{path}: verdict.json and run.json are not of one run; one of them was edited.")
    for verdict in verdicts:
        ledger_row(verdict.claim_id)
    experiment, preset, claims, rule_now = _from_catalogue(record, verdicts, path)
    return Result(slug, path, record, verdicts, stored, runs, experiment, preset, claims, rule_now, finished)


def _from_catalogue(record: dict, verdicts: Sequence[Verdict], path: Path):
    """The experiment behind a run, the preset as stored, its claims by key, and the hash of today's rule."""
    name = str(record.get("experiment", ""))
    if name.replace("_", "-") not in catalogue.modules():
        return None, None, {}, ""
    experiment = catalogue.load(name)
    try:
        preset = catalogue.stored_preset(experiment, record, path)
        claims = {key(claim): claim for claim in experiment.claims_for(preset)}
        return experiment, preset, claims, rule_hash(experiment, preset, record["preset"])
    except (ReproError, KeyError, TypeError, AttributeError):
        # The settings of another version: its texts may still be those of a claim of the same name.
        known = {key(c): c for p in experiment.presets.values() for c in experiment.claims_for(p)}
        return experiment, None, {k: c for k, c in known.items() if k in {key(v) for v in verdicts}}, "unknown"


def conflicts(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """(claim with variant, experiment) -> the results that judge it, where their rule hashes differ."""
    judged: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        for verdict in result.verdicts:
            judged.setdefault((key(verdict), result.name), []).append(result)
    return {place: found for place, found in judged.items() if len({result.rule for result in found}) > 1}


JUDGED = ("tier", "family", "statement", "criterion", "control")


def installed_claims(name: str, results: Sequence[Result]) -> list[Claim]:
    """A claim as this installation states it for each of the results; empty if it does not hold the rules under which
    all of them were judged."""
    claims = [result.claims.get(name) for result in results]
    known = None not in claims and all(result.rule_now == result.rule for result in results)
    return claims if known else []


def one_rule(name: str, results: Sequence[Result]) -> bool:
    """Whether results with different hashes judge a claim by one rule, so that only their presets differ: this
    installation holds the rules under which they were judged, and what it says of the claim is the same for all."""
    claims = installed_claims(name, results)
    if not claims:
        return False
    # p-values are adjusted over the claims of a family, which a preset may make larger.
    families = [
        sorted(k for k, c in result.claims.items() if c.tier == claim.tier == "D" and c.family == claim.family)
        for result, claim in zip(results, claims, strict=True)
    ]
    alike = all(getattr(claim, part) == getattr(claims[0], part) for claim in claims for part in JUDGED)
    return alike and all(family == families[0] for family in families)


def settings_apart(results: Sequence[Result]) -> dict[str, list[str]]:
    """The settings of the presets that are not the same in all results -> their values, in the order of the results."""
    presets = [dict(leaves(result.record.get("preset"))) for result in results]
    names = dict.fromkeys(name for preset in presets for name in preset)
    found = {name: [preset.get(name, "not set") for preset in presets] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def leaves(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, text) of everything in a tree of mappings."""
    rows: list[tuple[str, str]] = []
    for name, value in (tree or {}).items():
        if isinstance(value, dict):
            rows += leaves(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows
