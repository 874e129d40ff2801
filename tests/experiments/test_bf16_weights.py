"""The rules of bf16-weights; what the weights do is tested in tests/train/test_weights.py."""

import dataclasses

import pytest

from repro import catalogue
from repro.errors import ReproError

EXPERIMENT = catalogue.load("bf16-weights")
CPU = EXPERIMENT.presets["cpu"]


def world(arm, point, seed):
    lost = arm == "nearest" and point == "low"
    return {"loss": 2.0 + 0.2 * lost, "retained": 0.2 if lost else 0.95}


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(EXPERIMENT, world)


def test_a_world_without_loss_contradicts_what_it_should(verdicts):
    labels = {v.variant: v.label for v in verdicts(EXPERIMENT, CPU, lambda *_: {"loss": 2.0, "retained": 1.0})}
    assert labels["small updates are swallowed"] == "contradicted"
    assert labels["swallowed updates cost loss"] == "not supported"


@pytest.mark.parametrize(
    ("change", "said"), [({"rates": (1e-2, 1e-3, 1e-1)}, "ascending"), ({"sizes": ("xs", "w32")}, "one size")]
)
def test_what_a_preset_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU, **change)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "bf16-weights", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
