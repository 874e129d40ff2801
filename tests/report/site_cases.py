"""Results for the tests of the pages: stored ones, and made-up ones with everything that can go wrong in a name."""

import json
from pathlib import Path

from repro.claims import LEDGER, Run, Runs
from repro.report.record import RunFolder, no_curves, write_json

RESULTS = Path(__file__).parents[2] / "results"
STORED = ("logit-explosion-cpu", "logit-explosion-cpu-sizes", "accumulation-cpu")
HOSTILE = '<img src=x onerror="window.pwned=1"></script><script>window.pwned=1</script>\'"&amp;{{ 7*7 }}'
VERDICT = {
    "label": "supported", "effect": 1.5, "interval": [1.25, 1.75], "n": 8, "p": 0.00390625, "mde": 0.2,
    "reason": "made up", "scale": "difference", "p_holm": 0.0078125, "per_seed": {"0": 1.4, "1": 1.6},
    "control_label": "contradicted", "control_reason": "made up", "claim_id": "K2-1", "variant": "made up",
    "quantity": "loss of a minus b",
}  # fmt: skip


def make_run(folder: Path, *, experiment="elsewhere", preset="cpu", rule_hash="0" * 64, verdicts=(VERDICT,), **record):
    """A finished run folder of an experiment that this installation does not have."""
    made = RunFolder.create(folder)
    about = {
        "schema": 1, "experiment": experiment, "title": "Made up", "preset_name": preset, "preset": {"steps": 3},
        "changed": [], "rule_hash": rule_hash, "versions": {"repro": "0.1.0"}, "started": "2026-01-02", "seconds": 5,
        "hardware": {"platform": "cpu", "cpu_cores": 2, "machine": "x86_64"},
    }  # fmt: skip
    write_json(made.path / "run.json", about | record)
    made.write_results(Runs([Run("a", seed, {"loss": 1.0}) for seed in (0, 1)]), no_curves())
    (made.path / "report.md").write_text("# made up\n")
    made.seal(
        {
            "experiment": experiment,
            "preset": preset,
            "evidence": True,
            "rule_hash": rule_hash,
            "verdicts": list(verdicts),
        }
    )
    return folder


def many_runs(folder: Path, count: int) -> list[Path]:
    """So many runs, which together judge every claim of the ledger."""
    ids = list(LEDGER)
    labels = ("supported", "contradicted", "not supported", "inconclusive")
    runs = []
    for number in range(count):
        verdict = VERDICT | {"claim_id": ids[number % len(ids)], "label": labels[number % 4], "effect": number / 7}
        runs.append(make_run(folder / f"run-{number:03d}", experiment=f"elsewhere-{number}", verdicts=[verdict]))
    return runs


def conflicting(folder: Path) -> list[Path]:
    """Two runs that judge one claim under two rules."""
    return [make_run(folder / name, preset=name, rule_hash=name[0] * 64) for name in ("first", "second")]


def hostile(folder: Path) -> Path:
    """A run whose names are markup and scripts."""
    verdict = VERDICT | {"variant": HOSTILE, "reason": HOSTILE, "quantity": HOSTILE, "claim_id": "S-9", "per_seed": {}}
    more = {"title": HOSTILE, "changed": [HOSTILE], "corpus": {HOSTILE: HOSTILE}}
    more["configs"] = {HOSTILE: {"model": {"width": 8}}}
    return make_run(folder / "<b onclick=x>", experiment=HOSTILE, preset=HOSTILE, verdicts=[verdict], **more)


def stored_verdicts(name: str) -> list[dict]:
    return json.loads((RESULTS / name / "verdict.json").read_text())["verdicts"]
