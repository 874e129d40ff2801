"""The rules of glu-outliers; the forms themselves are tested in tests/models/test_glu.py."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.claims import Run, Runs
from repro.errors import ReproError
from repro.models import ModelConfig, ResidualConfig
from repro.quant import fake_quantize

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("glu-outliers")
MODULE = sys.modules["repro.experiments.glu_outliers"]
CPU = EXPERIMENT.presets["cpu"]


def world(arm, point, seed):
    """One in which every claim holds."""
    stress = point == "stress"
    largest = {"swiglu": 1000.0, "situ": 85.0, "clamped": 99.0, "powlu": 260.0}[arm] if stress else 20.0
    flushed = {"swiglu": 0.1, "situ": 0.06, "clamped": 0.03, "powlu": 0.07}[arm] if stress else 0.001
    return {
        "loss": 2.3 if stress else 1.9, "hidden_max": largest, "growth": largest / 7,
        "flushed_tensor": 0.01 if arm == "powlu" and not stress else flushed, "flushed_tile": flushed,
    }  # fmt: skip


@pytest.fixture(scope="module")
def checked(quick_compile_module):
    return EXPERIMENT.checks(CPU)


@pytest.fixture
def experiment(checked):
    """The experiment with its forms computed once for all worlds."""
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def test_claims_and_controls(verdicts, experiment):
    *judged, stated = verdicts(experiment, CPU, world)
    assert stated.label == "not testable at this scale"
    for verdict in judged:
        assert verdict.label == "supported", (verdict.variant, verdict.reason)
        assert verdict.control_label != "supported", (verdict.variant, verdict.control_reason)


def test_a_world_without_outliers_and_with_a_cost(verdicts, experiment):
    def other(arm, point, seed):
        row = world(arm, "best", seed) | {"growth": 3.0}
        return row | ({} if arm == "swiglu" else {"loss": row["loss"] + 0.1, "flushed_tensor": 0.001})

    labels = {v.variant: v.label for v in verdicts(experiment, CPU, other)}
    for size in CPU.sizes:
        for variant in (
            "SwiGLU grows", "stops growth", "no harm", "removes outliers", "no loss", "no loss where it acts",
            "slows growth", "trains like SwiGLU", "flushes more at the best rate", "outliers cost small units",
        ):  # fmt: skip
            assert labels[f"{variant}, {size}"] in ("contradicted", "not supported"), variant


def test_every_wrong_form_fails_where_it_is_wrong(checked):
    found = {run.arm: run.metrics for run in checked}
    assert abs(found["capped_sigmoid"]["at_3_5"] - 11.62) < 0.01
    assert found["gate_alone"]["largest"] > 1e4 and found["soft_sign"]["order"] < 1.1
    assert found["clamped_below"]["wrong_slopes"] > 0 and found["unsafe_power"]["nan_slopes"] > 0
    assert found["clamp_form"]["slope_at_20"] == 0


def test_the_stress_rate_is_ten_times_the_best_of_swiglu_for_every_form():
    plan, runs = EXPERIMENT.plan(CPU), Runs()
    best = {"swiglu": 0.00424, "situ": 0.003, "powlu": 0.006}
    cells = next(plan)
    while cells[0].phase == "tuning":
        assert {cell.arm for cell in cells} <= set(best)  # the clamp takes SwiGLU's rate
        for cell in cells:
            loss = 2 + abs(np.log(cell.rate / best[cell.arm]))
            runs += [Run(cell.arm, s, {"loss": loss}, cell.point, cell.size, cell.rate, "tuning") for s in cell.seeds]
        cells = plan.send(runs)
    rates = {(cell.arm, cell.point): cell.rate for cell in cells if cell.size == "xs"}
    assert {arm: rate for (arm, point), rate in rates.items() if point == "best"} == best | {"clamped": 0.00424}
    assert {rate for (_, point), rate in rates.items() if point == "stress"} == {10 * 0.00424}


def test_fewer_arms_mean_fewer_claims():
    found = {c.id for c in EXPERIMENT.claims_for(dataclasses.replace(CPU, arms=("swiglu", "situ"))) if c.tier == "D"}
    assert found == {"K3-2", "FP-7"}
    with pytest.raises(ReproError, match="arms"):
        dataclasses.replace(CPU, arms=("situ",))


def test_the_units_that_are_quantised_are_those_of_the_model():
    """Their largest is the model's own statistic, and flushing finds what lies below half of the least E4M3."""
    program = MODULE.GluProgram(CPU.config("tiny"))
    windows = np.random.default_rng(0).integers(0, 256, size=(3, program.config.length + 1))
    params = program.init(0).params
    blocks = params["blocks"]["ffn"]
    blocks["up_DF"] = blocks["up_DF"].at[:, :, 5].multiply(3e4)  # one channel that hides the others

    @jax.jit
    def looked_at(params):
        tokens = windows[:, :-1]
        return (
            program.hidden_units(params, tokens),
            program.apply(params, tokens).stats,
            program.evaluate(params, windows),
        )

    h, stats, found = jax.tree.map(np.asarray, looked_at(params))
    np.testing.assert_allclose(np.abs(h).max((1, 2, 3)), stats.hidden_max, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(np.square(h).mean((1, 2, 3))), stats.hidden_rms, rtol=1e-5)
    for name in ("tensor", "tile"):
        low = np.asarray(fake_quantize(jnp.asarray(h.reshape(-1, h.shape[-1])), f"fp8_{name}")).reshape(h.shape)
        share = float(((low == 0) & (h != 0)).mean())  # there is one layer
        assert share > 0.01 and abs(found[f"flushed_{name}"] - share) < 1e-4, name
    assert found["flushed_tile"] < found["flushed_tensor"]


def test_what_is_refused():
    with pytest.raises(ReproError, match="pre-norm"):
        MODULE.GluConfig(model=ModelConfig(residual=ResidualConfig(kind="post_norm")))


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "glu-outliers", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
