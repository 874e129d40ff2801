"""The rules of residual-gain; the schemes themselves are tested in tests/models."""

import dataclasses
import sys

import pytest

from repro import catalogue
from repro.claims import Run, Runs
from repro.errors import ReproError
from repro.train import with_settings

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("residual-gain")
MODULE = sys.modules[EXPERIMENT.plan.__module__]
CPU = EXPERIMENT.presets["cpu"]
GAINS = {"L6": 8.0, "L12": 30.0, "L24": 80.0, "low": 1.5, "high": 5000.0}
LOSSES = {"plain": 2.10, "gain": 2.075, "hyper": 2.08, "manifold": 2.07, "symmetric": 2.072}


def world(arm, point, seed):
    """One in which every claim holds."""
    wild = arm == "hyper"
    return {
        "loss": LOSSES[arm] + 0.2 * (point == "high"),
        "peak_gain_backward_max": GAINS.get(point, 20.0) if wild else 1.2,
        "least_gain_backward_min": 0.1 if wild else 0.85, "stream_spread": 1e-8 if arm == "symmetric" else 0.2,
    }  # fmt: skip


@pytest.fixture(scope="module")
def checked(quick_compile_module):
    return EXPERIMENT.checks(CPU)


@pytest.fixture
def experiment(checked):
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def labels(verdicts):
    return {v.variant: v.label for v in verdicts}


def test_claims_and_controls(check_that_claims_can_hold, experiment):
    check_that_claims_can_hold(experiment, world)


def test_a_world_in_which_streams_are_needed(verdicts, experiment):
    """The write gain does nothing."""
    other = lambda arm, point, seed: world(arm, point, seed) | (
        {"loss": 2.1} if arm in ("gain", "symmetric") else {}
    )  # fmt: skip
    found = labels(verdicts(experiment, CPU, other))
    assert found["loss"] == "supported"
    for name in ("explained by a write gain", "explained without different streams"):
        assert found[name] in ("contradicted", "not supported"), name


def test_a_world_in_which_hyper_connections_behave(verdicts, experiment):
    other = lambda arm, point, seed: world("manifold" if arm == "hyper" else arm, point, seed)
    found = labels(verdicts(experiment, CPU, other))
    for name in ("apart", "attenuation", "over depth", "over rates"):
        assert found[name] in ("contradicted", "not supported"), name


def test_a_world_in_which_mhc_is_no_better(verdicts, experiment):
    """Nothing is then left to explain."""
    found = labels(verdicts(experiment, CPU, lambda arm, point, seed: world(arm, point, seed) | {"loss": 2.1}))
    assert "supported" not in (found["loss"], found["explained by a write gain"])


def test_products_of_matrices(checked):
    found = {run.arm: run.metrics for run in checked}
    assert abs(found["sinkhorn"]["log_gain_slope"]) < 1e-3 < 0.05 < found["unconstrained"]["log_gain_slope"]
    assert found["sinkhorn"]["contrast"] < 1e-3 < 0.3 < found["near_identity"]["contrast"]


def test_gains_are_compared_at_one_rate_over_depth_and_at_one_depth_over_rates():
    plan, runs = EXPERIMENT.plan(CPU), Runs()
    cells = next(plan)
    while True:
        for cell in cells:
            rows = [world(cell.arm, cell.point, s) | {"loss": abs(cell.rate - 0.01)} for s in cell.seeds]
            runs += [
                Run(cell.arm, s, row, cell.point, cell.size, cell.rate, cell.phase)
                for s, row in zip(cell.seeds, rows, strict=True)
            ]
        asked = cells
        try:
            cells = plan.send(runs)
        except StopIteration:
            break
    streams = {(c.point, c.rate, c.settings["model.layers"]) for c in asked if c.point != "best"}
    assert streams == {
        ("L6", 0.01, 6), ("L12", 0.01, 12), ("L24", 0.01, 24), ("low", 0.003, 12), ("high", 0.03, 12),
    }  # fmt: skip
    best = {c.arm: (c.rate, c.settings["model.layers"]) for c in asked if c.point == "best"}
    assert best == dict.fromkeys(LOSSES, (0.01, 12))


def test_the_arms_differ_in_the_residual_alone():
    for arm in EXPERIMENT.arms:
        config = with_settings(CPU.config("custom"), dict(arm.settings))
        plain = dataclasses.replace(config.model, residual=CPU.train.model.residual)
        assert dataclasses.replace(config, model=plain) == CPU.config("custom")


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(depths=(2, 4)), "one or three numbers of layers"),
        (dict(depths=(4, 2, 8)), "ascending"),
        (dict(rates=(0.01, 0.02)), "one or three rates"),
        (dict(arms=("plain", "hyper")), "hyper, manifold"),
        (dict(sizes=("xs", "s")), "takes one size"),
    ],
    ids=str,
)
def test_refused(wrong, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU, **wrong)


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "residual-gain", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
