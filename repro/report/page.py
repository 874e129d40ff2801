"""The report of one run: what was claimed, what was run, what came out, and how far it reaches."""

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from repro.claims import Claim, Experiment, Runs, Verdict, rule_hash
from repro.claims.canonical import plain
from repro.report import markdown
from repro.report.ledger_tables import in_order, ledgers_by_arm
from repro.report.markdown import escape
from repro.report.numbers import INTERVAL, count_text, effect_text, interval_text, mde_text, p_text
from repro.report.rule_words import rule_words
from repro.report.summary import summarise
from repro.report.tables import check_order


def write_report(
    path: Path,
    experiment: Experiment,
    preset: Any,
    record: Mapping[str, Any],
    runs: Runs,
    verdicts: Sequence[Verdict],
    figures: Sequence[Path],
):
    """Write a Markdown page; the same input gives the same bytes.

    Args:
        path: the file.
        experiment, preset: what was run; the preset is the dataclass itself, changes by hand included.
        record: of the run, as it is stored beside it. Used where present: `preset_name`, `rule_hash`, `version`,
            `corpus`, `hardware`, `versions`, `seconds`, `ledgers` (name -> title and rows) and `ledgers_by_arm`
            (arm -> ledgers; an arm's text is added where it differs).
        runs: the scalars.
        verdicts: of `experiment.claims_for(preset)`, in that order.
        figures: files named after the experiment's figure specs, linked relative to the page.

    ReproError if the verdicts are not those of the claims.
    """
    claims = experiment.claims_for(preset)
    check_order(claims, verdicts)
    path = Path(path)
    parts = [
        f"# {escape(experiment.title)}\n",
        _at_a_glance(preset, record),
        "## Verdicts\n",
        _verdict_table(claims, verdicts),
        *_figures(experiment, path, figures),
        "## Claim by claim\n",
        *(_claim(claim, verdict) for claim, verdict in zip(claims, verdicts, strict=True)),
        *_arms(experiment, runs),
        *_events(record),
        *_what_was_run(experiment, preset, record),
        *_ledgers(record),
        *_reproduce(experiment, preset, record),
    ]
    path.write_text("\n".join(parts), encoding="utf-8", newline="\n")


def _at_a_glance(preset: Any, record: Mapping) -> str:
    """One paragraph: on what, how large, how often, and whether it counts."""
    corpus, hardware = _mapping(record.get("corpus")), _mapping(record.get("hardware"))
    said = [f"Preset {escape(record['preset_name'])}."] if record.get("preset_name") else []
    if corpus.get("name"):
        said.append(f"Corpus: {escape(corpus['name'])} ({escape(corpus.get('provenance', ''))}).")
    sizes = {name: _mapping(config) for name, config in _mapping(record.get("configs")).items()}
    for name, config in sizes.items():
        model = _mapping(config.get("model"))
        said.append(
            f"Size {escape(name)}: {model.get('layers')} layers, width {model.get('width')}, {model.get('heads')} heads, "
            f"{config.get('steps')} steps of {config.get('batch_size')} x {config.get('length')} tokens."
        )
    if hasattr(preset, "test_seeds") and hasattr(preset, "tuning_seeds"):
        said.append(f"{len(preset.test_seeds)} test seeds, {len(preset.tuning_seeds)} other seeds for tuning.")
    if hardware.get("platform"):
        said.append(f"Run on {escape(hardware['platform'])}.")
    if not getattr(preset, "evidence", not record.get("changed")):
        said.append("**These verdicts do not count as evidence**: the preset is a quick look, or was changed by hand.")
    if accepted := record.get("accepted_differences"):
        said.append(f"Resumed although what was written before had {escape('; '.join(map(str, accepted)))}.")
    return " ".join(said) + "\n" if said else ""


def _what_was_run(experiment: Experiment, preset: Any, record: Mapping) -> Iterator[str]:
    yield "## What was run\n"
    yield markdown.table(("setting", "value"), _leaves({"preset": record.get("preset_name", ""), **plain(preset)}))
    corpus = _leaves({f"corpus {key}": value for key, value in (record.get("corpus") or {}).items()})
    machine = _leaves({f"hardware {key}": value for key, value in _mapping(record.get("hardware")).items()})
    versions = _leaves({f"version of {key}": value for key, value in _mapping(record.get("versions")).items()})
    own = [("version of repro", record["version"])] if record.get("version") else []
    seconds = [("seconds", f"{record['seconds']:.1f}")] if isinstance(record.get("seconds"), int | float) else []
    rows = [*corpus, *machine, *own, *versions, *seconds]
    if rows:
        yield markdown.table(("corpus and machine", "value"), rows)
    arms = [(arm.name, arm.label, ", ".join(f"{k} = {v}" for k, v in arm.settings.items())) for arm in experiment.arms]
    yield markdown.table(("arm", "label", "settings"), arms)


_MOST_EVENTS = 40


def _events(record: Mapping) -> Iterator[str]:
    """What guards did, where there were any."""
    if "events" not in record:
        return
    yield "## What guards did\n"
    events = record["events"]
    if not events:
        yield "No rule tripped.\n"
        return
    rows = [
        (
            event.get("arm", ""), event.get("seed", ""), event.get("step", ""), event.get("rule", ""),
            f"{event['value']:.4g}" if isinstance(event.get("value"), int | float) else event.get("value", ""),
            f"back to step {event['back_to']}" if event.get("back_to") is not None
            else f"{event['times']} steps in a row" if event.get("times", 1) > 1 else "",
        )
        for event in events[:_MOST_EVENTS]
    ]  # fmt: skip
    yield markdown.table(("arm", "seed", "step", "rule", "value", "so"), rows)
    if len(events) > _MOST_EVENTS:
        yield f"And {len(events) - _MOST_EVENTS} more; run.json holds all.\n"


def _verdict_table(claims: Sequence[Claim], verdicts: Sequence[Verdict]) -> str:
    rows = [
        (
            claim.name,
            claim.statement,
            verdict.label,
            effect_text(verdict),
            interval_text(verdict),
            count_text(verdict.n),
            p_text(verdict.p_holm),
            verdict.control_label or "none",
        )
        for claim, verdict in zip(claims, verdicts, strict=True)
    ]
    return markdown.table(("claim", "statement", "label", "effect", INTERVAL, "n", "p (Holm)", "control"), rows)


def _claim(claim: Claim, verdict: Verdict) -> str:
    lines = [
        ("Statement", claim.statement),
        ("Source", claim.source),
        ("Reported there", claim.reported),
        ("Boundary", claim.boundary),
        ("Tier", claim.tier),
    ]
    if claim.criterion is not None:
        lines += [
            ("Rule", rule_words(claim.criterion)),
            ("Measured", verdict.quantity.rstrip(",")),
            ("Effect", effect_text(verdict)),
        ]
    if claim.tier == "D":
        lines += [
            (INTERVAL, interval_text(verdict)),
            ("n", count_text(verdict.n)),
            ("p, before and after Holm", f"{p_text(verdict.p)}, {p_text(verdict.p_holm)}"),
            ("Minimum detectable effect", mde_text(verdict)),
        ]
    if claim.control is not None:
        lines += [
            ("Control", f"{claim.control.description}: {rule_words(claim.control.criterion)}"),
            ("Verdict on the control", f"{verdict.control_label}: {verdict.control_reason}"),
        ]
    lines.append(("Reason", verdict.reason))
    seeds = [(f"seed {seed}", f"{value:.6g}") for seed, value in sorted(verdict.per_seed.items())]
    text = "\n".join(f"- **{name}**: {escape(value)}" for name, value in lines if value)
    heading = f"### {escape(claim.name)}: {escape(verdict.label)}\n"
    per_seed = markdown.table([seed for seed, _ in seeds], [[value for _, value in seeds]]) if seeds else ""
    return "\n".join(part for part in (heading, text + "\n", per_seed) if part)


def _figures(experiment: Experiment, path: Path, figures: Sequence[Path]) -> Iterator[str]:
    specs = {spec.name: spec for spec in experiment.figures}
    if figures:
        yield "## Figures\n"
    for figure in map(Path, figures):
        target = markdown.link_target(os.path.relpath(figure, path.parent))
        spec = specs.get(figure.stem)
        title, caption = (spec.title, spec.caption) if spec else (figure.stem, figure.stem)
        yield f"![{escape(title)}]({target})\n\n{escape(caption)}\n"


def _arms(experiment: Experiment, runs: Runs) -> Iterator[str]:
    summary = summarise(experiment, runs, every_metric=True)
    if summary.rows:
        trained = any(not math.isnan(run.rate) for run in runs)
        yield f"## {'Test runs' if trained else 'What was computed'}\n"
        yield markdown.table(summary.headings, summary.rows)


def _ledgers(record: Mapping) -> Iterator[str]:
    ledgers, by_arm = record.get("ledgers") or {}, ledgers_by_arm(record)
    if ledgers:
        yield "## Ledgers\n"
    for name in sorted(ledgers, key=in_order):
        title = ledgers[name].get("title", "")
        yield f"### {escape(name)}{': ' if title else ''}{escape(title)}\n"
        rows = []
        for entry, value in _leaves(ledgers[name].get("rows") or {}):
            rows.append((entry, "", value))
            for arm, own in by_arm.items():
                other = dict(_leaves(own.get(name, {}).get("rows") or {})).get(entry, value)
                if other != value:
                    rows.append((entry, arm, other))
        yield markdown.table(("entry", "arm, where it differs", "value"), rows)


def _reproduce(experiment: Experiment, preset: Any, record: Mapping) -> Iterator[str]:
    equal = (name for name, stored in experiment.presets.items() if stored == preset)
    name = record.get("preset_name") or next(equal, "")
    stored = experiment.presets.get(name)
    yield "## To run it again\n"
    command = ["repro", "run", experiment.name] + (["--preset", name] if name else [])
    yield markdown.code_block(shlex.join(command))
    before, now = dict(_leaves(plain(stored))) if stored is not None else {}, dict(_leaves(plain(preset)))
    changed = [(key, now.get(key, ""), before.get(key, "")) for key in now | before if now.get(key) != before.get(key)]
    if stored is None:
        yield "The preset is not one that the experiment stores; its settings are in the first table.\n"
    elif changed:
        yield "with these settings changed by hand:\n"
        yield markdown.table(("setting", "this run", "preset"), changed)
    yield f"Rule hash (SHA-256 of claims, arms, preset and label rule): `{rule_hash(experiment, preset)}`\n"
    recorded = record.get("rule_hash")
    if recorded and recorded != rule_hash(experiment, preset):
        yield f"**The rule was changed after the data**: the run was recorded under {escape(recorded)}.\n"


def _mapping(value: Any) -> Mapping:
    return value if isinstance(value, Mapping) else {"": value} if value else {}


def _leaves(tree: Mapping, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, text) of everything in a tree of mappings; lists stand in one line."""
    rows = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            rows += _leaves(value, f"{prefix}{key}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            rows.append((f"{prefix}{key}", text))
    return rows
