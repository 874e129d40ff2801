"""The rules of expert-balance; routing and balancing are tested in tests/models/test_routing.py."""

import dataclasses

import pytest

from repro import catalogue
from repro.errors import ReproError
from repro.train import with_settings

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("expert-balance")
CPU = EXPERIMENT.presets["cpu"]
BALANCED = {"none": 2.5, "sign_published": 0.2, "sign": 0.2, "quantile": 0.2}
EARLY = {"none": 1.5, "sign": 0.6, "quantile": 0.3}
LOG_Z = {"z_loss": 1.0, "z_strong": 0.5}


def world(arm, point, seed):
    """One in which every claim holds."""
    violation = BALANCED.get(arm, 1.5)
    return {
        "loss": 2.0 + (0.3 if point == "high" else 0.005 if arm == "sign" else 0.0),
        "max_violation": violation, "least_load": 0.8 if violation < 0.3 else 0.05,
        "early_violation": EARLY.get(arm, 1.0), "router_log_z": LOG_Z.get(arm, 4.0),
        "router_logit_max": 2 * LOG_Z.get(arm, 4.0),
    }  # fmt: skip


@pytest.fixture(scope="module")
def checked(quick_compile_module):
    return EXPERIMENT.checks(CPU)


@pytest.fixture
def experiment(checked):
    """The experiment with its checks computed once for all worlds."""
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def test_claims_and_controls(check_that_claims_can_hold, experiment):
    check_that_claims_can_hold(experiment, world)


def test_a_world_in_which_nothing_balances_and_balancing_hurts(verdicts, experiment):
    def other(arm, point, seed):
        loss = 2.1 if arm in ("sign", "quantile", "z_loss") else 2.0
        return world("none", point, seed) | {"loss": loss}

    labels = {(v.claim_id, v.variant): v.label for v in verdicts(experiment, CPU, other) if "xs" in v.variant}
    assert len(labels) == 10 and "supported" not in labels.values()


def test_a_model_that_balances_by_itself_shows_nothing(verdicts, experiment):
    even = lambda arm, point, seed: world(arm, point, seed) | {"max_violation": 0.2, "least_load": 0.8}
    labels = {v.variant: v.label for v in verdicts(experiment, CPU, even)}
    for variant in ("gamma 0.001, xs", "gamma 0.01, xs", "balance, xs"):
        assert labels[variant] in ("contradicted", "not supported", "inconclusive"), variant


def test_each_wrong_rule_fails_where_it_is_wrong(checked):
    found = {run.arm: run.metrics for run in checked}
    assert found["selected_only"]["gate_error"] < 1e-6 < 0.01 < found["biased_gates"]["gate_error"]
    assert found["selected_only"]["bias_gradient"] == 0 != found["biased_gates"]["bias_gradient"]
    assert found["sign_rule"]["violation_after"] < 0.05 < 1 < found["sign_reversed"]["violation_after"]
    assert found["margins"]["choosers_off"] <= 1 < 100 < found["biased_margins"]["choosers_off"]
    assert found["bins_1000"]["bins_off"] < 1 < 10 < found["bins_10"]["bins_off"]


def test_every_arm_is_the_model_that_its_name_says():
    found = {arm.name: with_settings(CPU.config("xs"), dict(arm.settings)).model.moe for arm in EXPERIMENT.arms}
    assert {(m.experts, m.active, m.ffn, m.shared) for m in found.values()} == {(8, 2, 32, 2)}
    rates = {name: m.balance_rate for name, m in found.items() if m.balance == "sign"}
    assert rates == {"sign_published": 0.001, "sign": 0.01}
    assert [name for name, m in found.items() if m.balance == "quantile"] == ["quantile"]
    assert {n: m.router_z_loss for n, m in found.items() if m.affinity == "softmax"} == {
        "softmax": 0.0, "z_loss": 0.001, "z_strong": 0.01,
    }  # fmt: skip
    assert found["auxiliary"].sequence_loss == 0.01 and found["none"].balance == "none"


def test_arms_that_are_left_out_take_their_claims_with_them():
    few = dataclasses.replace(CPU, arms=("none", "quantile"))
    assert {c.variant for c in EXPERIMENT.claims_for(few) if c.tier == "D"} == {"balance, xs", "no harm, xs"}
    with pytest.raises(ReproError, match="none"):
        dataclasses.replace(CPU, arms=("quantile",))


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "expert-balance", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
