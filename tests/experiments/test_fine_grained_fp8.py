"""The rules and the mechanism of fine-grained-fp8; its policies are tested in tests/quant and tests/models."""

import dataclasses
import sys

import jax.numpy as jnp
import pytest

from repro import catalogue
from repro.claims import Runs, decide
from repro.errors import ReproError
from repro.train import with_settings

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("fine-grained-fp8")
M = sys.modules["repro.experiments.fine_grained_fp8"]


def world(arm, point, seed):
    return {"loss": 2.0 + 0.1 * (arm == "mxfp4")}


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(EXPERIMENT, world)


def test_half_a_percent_is_too_much(verdicts):
    worse = lambda arm, point, seed: {"loss": 2.0 + 0.01 * (arm == "v3")}
    labels = {v.variant: v.label for v in verdicts(EXPERIMENT, EXPERIMENT.presets["cpu"], worse)}
    assert labels["FP8 against BF16, xs"] == "contradicted" and labels["gradients in E4M3, xs"] != "supported"


def test_errors_of_one_size_are_those_of_the_mantissa():
    """Without a spread one more bit of mantissa halves the error, with a scale per tile and per tensor."""
    for kind in ("tile", "tensor"):
        ratio = float(M.relative_error(jnp.float32(0), "e4m3", kind) / M.relative_error(jnp.float32(0), "e5m2", kind))
        assert ratio == pytest.approx(0.5, abs=0.06)


def test_one_scale_per_tensor_flushes_what_tiles_keep():
    lost = float(M.relative_error(jnp.float32(24), "e4m3", "tensor"))
    kept = float(M.relative_error(jnp.float32(24), "e4m3", "tile"))
    assert kept < 0.03 and lost > 0.3


def test_the_mechanism_and_its_control():
    verdict = decide(M.MECHANISM, Runs(M.checks(EXPERIMENT.presets["cpu"])))
    assert verdict.label == "supported" and verdict.control_label == "contradicted"
    assert not list(M.checks(EXPERIMENT.presets["cpu-sizes"]))


def test_arms_differ_in_the_blocks_alone():
    config = EXPERIMENT.presets["cpu"].config("xs")
    for arm in EXPERIMENT.arms:
        dots = with_settings(config, dict(arm.settings)).model.dots
        assert dots.attention == dots.ffn != "plain" and dots.head == dots.embedding == dots.norm == "plain"
    with pytest.raises(ReproError, match="set by the arms"):
        changed = dataclasses.replace(config, model=dataclasses.replace(config.model, precision="v3"))
        dataclasses.replace(EXPERIMENT.presets["cpu"], train=changed)


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "fine-grained-fp8", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
