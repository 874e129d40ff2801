"""The rules of qk-clip-mla; the clip itself is tested in tests/optim/test_qk_clip_shared_keys.py."""

import dataclasses

import pytest

from repro import catalogue
from repro.claims import Run, Runs
from repro.train import with_settings

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("qk-clip-mla")
CPU = EXPERIMENT.presets["cpu"]
PEAKS = {"muon": 50.0, "constant": 100.0, "constant_decay": 80.0, "constant_strong": 40.0}


def world(arm, point, seed):
    """One in which every claim holds."""
    clipped = {"constant": (0.4, 0.4, 0.9), "clip_harm": (0.9, 0.9, 1.0)}.get(arm, (0.2, 0.001, 0.1))
    peak = {"clip_low": 34.0, "clip_harm": 4.0}.get(arm, PEAKS.get(arm))
    return {
        "loss": 2.0 + {"clip_low": 0.002, "clip_harm": 0.3}.get(arm, 0.0), "peak_max_logit": peak,
        "max_logit": 0.9 * peak, "clipped_share_peak": clipped[0], "clipped_share_last": clipped[1],
        "clipped_heads_ever": clipped[2],
    }  # fmt: skip


@pytest.fixture(scope="module")
def checked(quick_compile_module):
    return EXPERIMENT.checks(CPU)


@pytest.fixture
def experiment(checked):
    """The experiment with its layer computed once for all worlds."""
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def test_claims_and_controls(check_that_claims_can_hold, experiment):
    check_that_claims_can_hold(experiment, world)


def test_a_world_in_which_nothing_is_held_and_clipping_goes_on(verdicts, experiment):
    def other(arm, point, seed):
        return world(arm, point, seed) | {"max_logit": 60.0, "clipped_share_last": 0.3, "clipped_heads_ever": 1.0}

    labels = {v.variant: v.label for v in verdicts(experiment, CPU, other)}
    for size in CPU.sizes:
        for variant in ("held in training", "switches itself off, decay 0.1", "switches itself off, decay 0.5", "rare"):
            assert labels[f"{variant}, {size}"] in ("contradicted", "not supported"), variant


def test_each_wrong_rule_fails_where_it_is_wrong(checked):
    found = {run.arm: run.metrics for run in checked}
    assert found["qk_clip"]["scale_error"] < 1e-6 < 0.01 < found["sqrt_rotary"]["scale_error"]
    assert found["qk_clip"]["others_changed"] == found["sqrt_rotary"]["others_changed"] == 0
    wrong = found["scaled_shared_key"]  # right for the clipped head, at the cost of the others
    assert wrong["scale_error"] < 1e-6 and wrong["others_moved"] > 1e-3 and wrong["others_changed"] > 0


def test_each_threshold_comes_from_the_peak_of_the_same_runs_without_a_clip():
    plan, runs, asked = EXPERIMENT.plan(CPU), Runs(), None
    cells = next(plan)
    while True:
        asked = cells
        for cell in cells:
            away = abs(cell.rate - 0.02828)  # the best rate
            rows = [world(cell.arm, cell.point, s) | {"loss": 2 + away} for s in cell.seeds]
            rows = [row | {"peak_max_logit": row["peak_max_logit"] * (1 + 100 * away)} for row in rows]
            runs += [
                Run(cell.arm, s, row, cell.point, cell.size, cell.rate, cell.phase)
                for s, row in zip(cell.seeds, rows, strict=True)
            ]
            assert "tau" not in cell.settings or cell.phase == "test"
        try:
            cells = plan.send(runs)
        except StopIteration:
            break
    for size in CPU.sizes:
        taus = {cell.arm: cell.settings.get("tau") for cell in asked if cell.size == size}
        assert taus == {
            "muon": None, "clip_low": pytest.approx(30.0), "clip_harm": pytest.approx(2.5),
            "constant": pytest.approx(60.0), "constant_decay": pytest.approx(48.0),
            "constant_strong": pytest.approx(24.0),
        }  # fmt: skip
    assert {cell.rate for cell in asked} == {0.02828}
    derived = {(run.arm, run.size): run.metrics for run in EXPERIMENT.derive(runs)}
    assert derived["muon", "xs"]["over_tau"] == pytest.approx(45 / 30)
    assert derived["clip_low", "w32"]["peak_over_tau"] == pytest.approx(34 / 30)


def test_all_arms_of_a_size_share_two_programs():
    for size in CPU.sizes:
        assert len({with_settings(CPU.config(size), dict(arm.settings)).structure() for arm in EXPERIMENT.arms}) == 2


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "qk-clip-mla", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
