"""The rules of attention-norm, without training; what it measures is tested in tests/models."""

import dataclasses

import pytest

from repro import catalogue
from repro.claims import Run, Runs, decide
from repro.errors import ReproError
from repro.train import with_settings

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("attention-norm")
MODULE = __import__("sys").modules[EXPERIMENT.plan.__module__]
CPU = EXPERIMENT.presets["cpu"]
LOGITS = {
    "muon": {"best": 60.0, "stress": 3000.0}, "muon_norm": {"best": 12.0, "stress": 25.0},
    "muon_harm": {"best": 2.0}, "muon_cap": {"stress": 2500.0}, "mha_muon": {"stress": 5000.0},
    "mha_muon_norm": {"stress": 25.0}, "adamw": {"low": 40.0, "mid": 500.0, "stress": 8000.0},
    "adamw_norm": {"low": 11.0, "mid": 17.0, "stress": 26.0},
}  # fmt: skip
LOSSES = {
    "adamw": {"low": 1.8, "mid": 1.9, "stress": 2.1}, "adamw_norm": {"low": 1.8, "mid": 1.79, "stress": 1.83},
    "muon_harm": {"best": 2.0}, "mha_adamw": {"stress": 2.1},
}  # fmt: skip


def world(arm, point, seed):
    """One in which every claim holds."""
    logit = LOGITS.get(arm, {}).get(point, 30.0)
    return {
        "loss": LOSSES.get(arm, {}).get(point, 1.8), "initial_loss": 6.0, "max_logit": logit,
        "peak_max_logit": 1.2 * logit, "max_capped_logit": 49.9 if arm == "muon_cap" else logit,
        "entropy_min": {"adamw": 0.01, "mha_adamw": 0.01}.get(arm, 0.5),
    }  # fmt: skip


@pytest.fixture(scope="module")
def checked(quick_compile_module):
    return EXPERIMENT.checks(CPU)


@pytest.fixture
def experiment(checked):
    """The experiment with its layers computed once for all worlds."""
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def test_claims_and_controls(check_that_claims_can_hold, experiment):
    check_that_claims_can_hold(experiment, world)


def test_a_world_in_which_nothing_helps(verdicts, experiment):
    """Arms with a norm, a cap or a reparametrisation are as those without."""
    plain = {"muon_norm": "muon", "muon_cap": "muon", "mha_muon_norm": "mha_muon", "adamw_norm": "adamw"}

    def other(arm, point, seed):
        arm = plain.get(arm, arm.removesuffix("_sigma"))
        return world(arm, point, seed)

    labels = {v.variant: v for v in verdicts(experiment, CPU, other)}
    for variant in ("bounded in training, mla, xs", "bounded in training, mha, xs", "capped, xs"):
        assert labels[variant].label == "contradicted", variant
    for variant in ("entropy, mla, xs", "entropy, mha, xs"):
        assert labels[variant].label == "contradicted", variant
    for variant in ("sensitivity, xs", "loss, mla, xs", "loss, mha, xs"):
        assert labels[variant].label == "not supported", variant
    # Entropy does fall, and so it does in the control: nothing was shown.
    for variant in ("collapse without it, mla, xs", "growth with the rate, xs", "raw, xs"):
        assert labels[variant].control_label == "supported" and labels[variant].label == "inconclusive", variant


def test_each_wrong_form_fails(checked):
    found = {run.arm: run.metrics for run in checked}
    for kind in ("mla", "mha"):
        assert 0.1 < found["norm"][f"over_bound_{kind}"] <= 1 and found["no_norm"][f"over_bound_{kind}"] > 1e5
    assert found["bound"]["violations"] == 0 and found["bound"]["extremal_error"] < 1e-12
    assert found["wrong_bound"]["violations"] > 1000 and found["wrong_bound"]["extremal_error"] > 0.1
    assert found["sigma"]["norm_error"] < 1e-5 and found["frobenius"]["norm_error"] > 0.5
    for claim in MODULE._mechanism():
        verdict = decide(claim, Runs(checked))
        assert (verdict.label, verdict.control_label) == ("supported", "contradicted"), claim.name


def follow(preset, optimum=0.02828):
    """The lists of cells that the plan asks for, in a world where this is the best rate of Muon without the norm, and
    the next one with it."""
    plan, runs, asked = EXPERIMENT.plan(preset), Runs(), []
    cells = next(plan)
    while True:
        asked.append(cells)
        for cell in cells:
            best = optimum * (2**0.5 if cell.arm == "muon_norm" else 1)
            rows = [world(cell.arm, cell.point, s) | {"loss": 2 + abs(cell.rate - best)} for s in cell.seeds]
            runs += [
                Run(cell.arm, s, row, cell.point, cell.size, cell.rate, cell.phase)
                for s, row in zip(cell.seeds, rows, strict=True)
            ]
        try:
            cells = plan.send(runs)
        except StopIteration:
            return asked, runs


def test_rates_are_chosen_on_tuning_seeds_for_each_arm():
    (*tuning, test), runs = follow(CPU)
    assert {(c.arm, c.seeds) for cells in tuning for c in cells} == {
        (arm, CPU.tuning_seeds) for arm in ("muon", "muon_norm")
    }
    assert {c.seeds for c in test} == {CPU.test_seeds} and not set(CPU.test_seeds) & set(CPU.tuning_seeds)
    best = {c.arm: c.rate for c in test if c.point == "best"}
    assert best == {"muon": 0.02828, "muon_norm": pytest.approx(0.04), "muon_harm": 0.02828}
    assert {c.rate for c in test if c.point == "stress"} == {CPU.rates[-1]}
    assert len([c for c in test if c.arm.startswith("mha_")]) == 4
    places = [(c.arm, c.point) for c in test]
    assert len(set(places)) == len(places)
    part = {c.arm for c in follow(dataclasses.replace(CPU, complete=False))[0][-1]}
    assert part == {"muon", "muon_norm", "muon_harm"}
    assert {c.arm for c in test} == {arm.name for arm in EXPERIMENT.arms}
    found = {(r.arm, r.seed): r.metrics["lr_sensitivity"] for r in EXPERIMENT.derive(runs)}
    away = [abs(rate - 0.02828) for rate in CPU.rates]
    assert found["adamw", 0] == pytest.approx(sum(away) / 3 - min(away)) and len(found) == 2 * len(CPU.test_seeds)


def test_arms_are_what_they_are_called():
    configs = {arm.name: with_settings(CPU.config("xs"), dict(arm.settings)) for arm in EXPERIMENT.arms}
    assert {name: c.model.attention for name, c in configs.items()} == {
        name: "mha" if name.startswith("mha_") else "mla" for name in configs
    }
    assert {name for name, c in configs.items() if c.model.qk_norm == "v4"} == {"muon_norm", "mha_muon_norm"}
    assert {name for name, c in configs.items() if c.model.sigma_reparam} == {"adamw_sigma", "mha_adamw_sigma"}
    assert all((c.optimizer == "adamw") == ("adamw" in name) for name, c in configs.items())
    # A clip is a number: ten programs for eleven arms.
    assert len({c.structure() for c in configs.values()}) == 10


def test_refuses_another_ladder():
    with pytest.raises(ReproError, match="rates is"):
        dataclasses.replace(CPU, rates=(0.01, 0.1))


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "attention-norm", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
