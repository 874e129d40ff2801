"""The rules of attn-res; the scheme itself is tested in tests/models/test_attention_residual.py."""

import dataclasses
import sys

import pytest

from repro import catalogue
from repro.claims import Run, Runs
from repro.errors import ReproError
from repro.models import ModelConfig, ResidualConfig
from repro.train import with_settings

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("attn-res")
MODULE = sys.modules[EXPERIMENT.plan.__module__]
CPU = EXPERIMENT.presets["cpu"]
LOSSES = {"plain": {"best": 2.0, "longer": 1.96}, "attention": {"best": 1.955}, "random": {"best": 1.98}}


def world(arm, point, seed):
    """One in which every claim holds."""
    return {"loss": LOSSES[arm].get(point, 2.0)}


@pytest.fixture(scope="module")
def checked(quick_compile_module):
    return EXPERIMENT.checks(CPU)


@pytest.fixture
def experiment(checked):
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def test_claims_and_controls(check_that_claims_can_hold, experiment):
    check_that_claims_can_hold(experiment, world)


def test_a_world_in_which_it_does_nothing(verdicts, experiment):
    other = lambda arm, point, seed: {"loss": 1.96 if point == "longer" else 2.0}
    found = {v.variant: v.label for v in verdicts(experiment, CPU, other)}
    assert found.pop("starts as the plain residual") == "supported"
    assert "supported" not in found.values() and found["1.25 times the compute"] == "contradicted"


def test_zero_queries_start_as_the_plain_model_and_random_ones_do_not(checked):
    found = {run.arm: run.metrics["from_plain"] for run in checked}
    assert found["zero"] < 1e-5 and found["drawn"] > 0.1


def test_the_plain_model_trains_longer_at_the_rate_of_the_shorter_run():
    plan, runs = EXPERIMENT.plan(CPU), Runs()
    cells = next(plan)
    while True:
        for cell in cells:
            runs += [
                Run(cell.arm, s, {"loss": abs(cell.rate - 0.02)}, cell.point, cell.size, cell.rate, cell.phase)
                for s in cell.seeds
            ]
        asked = cells
        try:
            cells = plan.send(runs)
        except StopIteration:
            break
    assert {(c.arm, c.point, c.rate, c.settings.get("steps")) for c in asked} == {
        ("plain", "best", 0.02, None), ("attention", "best", 0.02, None), ("random", "best", 0.02, None),
        ("plain", "longer", 0.02, 300),
    }  # fmt: skip
    assert CPU.train.steps == 240


def test_operations_that_are_added():
    """One layer in one block: a site sees 1 source, the next 2, and the output site 2."""
    config = ModelConfig(
        vocab_size=8, layers=1, width=4, heads=2, ffn=6, residual=ResidualConfig(kind="block_attention")
    )
    assert MODULE.added_operations(config, 10) == pytest.approx(3 * 4 * 5 / (4 * 16 + 3 * 24 + 40 + 32))
    model = with_settings(CPU.config("custom"), dict(EXPERIMENT.arm("attention").settings)).model
    assert MODULE.added_operations(model, 64) < 0.03


@pytest.mark.parametrize(
    "wrong, said",
    [(dict(arms=("attention",)), "take plain, attention"), (dict(sizes=("xs", "s")), "takes one size")],
    ids=str,
)
def test_refused(wrong, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU, **wrong)


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "attn-res", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
