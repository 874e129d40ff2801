"""The rules of z-loss, and what the loss does to log Z."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.claims import Run, Runs
from repro.train import with_settings
from repro.train.step import cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("z-loss")
CPU = EXPERIMENT.presets["cpu"]


def world(arm, point, seed):
    """One in which every claim holds."""
    log_z = {"none": 9.0, "z1e-4": 2.0, "z1e-3": 1.0, "z1e-2": 0.5}[arm]
    loss = 2.3 if point == "stress" else 1.9
    return {"loss": loss, "log_z_rms": log_z, "early_log_z_rms": 6.0}


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(EXPERIMENT, world)


def test_a_world_without_drift_and_with_harm(verdicts):
    def other(arm, point, seed):
        return world(arm, point, seed) | {"log_z_rms": 6.0, "loss": 1.9 + (0.1 if arm != "none" else 0.0)}

    assert {v.label for v in verdicts(EXPERIMENT, CPU, other)} <= {"contradicted", "not supported"}


def test_a_world_in_which_only_the_amplified_loss_acts(verdicts):
    def other(arm, point, seed):
        return world(arm, point, seed) | ({"log_z_rms": 8.0} if arm == "z1e-4" else {})

    labels = {v.variant: v.label for v in verdicts(EXPERIMENT, CPU, other)}
    for size in CPU.sizes:
        assert labels[f"stops drift, 1e-4, {size}"] == "contradicted"
        assert labels[f"stops drift, amplified, {size}"] == "supported"


def test_every_coefficient_is_one_program_and_the_stress_rate_ten_times_the_best():
    configs = [with_settings(CPU.config("xs"), dict(arm.settings)) for arm in EXPERIMENT.arms]
    assert len({config.structure() for config in configs}) == 1
    assert [config.z_loss for config in configs] == [0.0, 1e-4, 1e-3, 1e-2]
    plan, runs = EXPERIMENT.plan(CPU), Runs()
    cells = next(plan)
    while cells[0].phase == "tuning":
        assert {cell.arm for cell in cells} == {"none"}
        for cell in cells:
            loss = {"loss": 2 + abs(np.log(cell.rate / 0.00424))}
            runs += [Run(cell.arm, s, loss, cell.point, cell.size, cell.rate, "tuning") for s in cell.seeds]
        cells = plan.send(runs)
    of_xs = [cell for cell in cells if cell.size == "xs"]
    assert {(c.point, c.rate) for c in of_xs} == {("best", 0.00424), ("stress", 10 * 0.00424)}
    assert {c.arm: len(c.seeds) for c in of_xs if c.point == "stress"} == {
        "none": 8, "z1e-4": 8, "z1e-2": 8, "z1e-3": 4
    }  # fmt: skip


def test_only_the_z_loss_moves_log_z():
    """A common shift of a token's logits: the cross entropy has no slope along it, the z-loss 2 log Z per token."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(2, 3, 16)) * 3 + 5, jnp.float32)
    targets = jnp.asarray(rng.integers(0, 16, size=(2, 3)))
    by_ce, by_z = (jax.grad(lambda x, i=i: cross_entropy(x, targets)[i])(logits).sum(-1) * 6 for i in (0, 1))
    log_z = np.log(np.exp(np.float64(logits)).sum(-1))
    np.testing.assert_allclose(by_ce, 0, atol=1e-6)
    np.testing.assert_allclose(by_z, 2 * log_z, rtol=1e-5)


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "z-loss", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
