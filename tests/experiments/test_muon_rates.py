"""The rules of muon-vs-adamw and hybrid-newton-schulz, which compare tuned arms of the engine's own program."""

import pytest

from repro import catalogue

pytestmark = pytest.mark.usefixtures("quick_compile")

AGAINST_ADAMW, HYBRID = catalogue.load("muon-vs-adamw"), catalogue.load("hybrid-newton-schulz")


def fast_muon(arm, point, seed):
    return {"loss": {"adamw": 2.0, "muon": 1.9, "adamw_75": 2.05, "muon_75": 1.95, "muon_52": 1.99}[arm]}


def better_hybrid(arm, point, seed):
    return {"loss": {"muon5": 2.0, "placebo": 2.0, "hybrid10": 1.98, "hybrid10_harm": 2.2}[arm]}


@pytest.mark.parametrize(("experiment", "world"), [(AGAINST_ADAMW, fast_muon), (HYBRID, better_hybrid)])
def test_claims_and_controls(check_that_claims_can_hold, experiment, world):
    check_that_claims_can_hold(experiment, world)


def test_worlds_without_an_effect(verdicts):
    equal = verdicts(AGAINST_ADAMW, AGAINST_ADAMW.presets["cpu"], lambda *_: {"loss": 2.0})
    assert not {v.label for v in equal} & {"supported", "contradicted"}
    worse = lambda arm, *_: {"loss": 2.1 if arm.startswith("hybrid") else 2.0}
    labels = {v.variant: v.label for v in verdicts(HYBRID, HYBRID.presets["cpu"], worse)}
    assert labels["as well, xs"] == labels["better, xs"] == "contradicted"


def test_shorter_arms_have_their_own_steps():
    preset = AGAINST_ADAMW.presets["cpu"]
    cells = next(AGAINST_ADAMW.plan(preset))
    steps = {cell.arm: cell.settings.get("steps", preset.train.steps) for cell in cells}
    assert steps == {"adamw": 400, "muon": 400, "adamw_75": 300, "muon_75": 300, "muon_52": 208}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon-vs-adamw", "hybrid-newton-schulz"])
def test_the_smoke_presets(command, tmp_path, name):
    code, _, err = command("run", name, "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
