"""The program and the rules of norm-gains."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from repro import catalogue
from repro.errors import ReproError
from repro.quant import quantize

EXPERIMENT = catalogue.load("norm-gains")
M = sys.modules["repro.experiments.norm_gains"]


def world(arm, point, seed):
    return {"loss": 2.0 + 0.05 * arm.startswith("mx_gains"), "clamped_share": 0.3}


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(EXPERIMENT, world)


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.3])
def test_clamped_is_what_the_format_cannot_hold(spread):
    """By the scales that quantisation chooses."""
    gains = 0.96 + spread * np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    scale = np.asarray(quantize(gains, "mxfp8").scale).astype(np.float32)
    assert M.clamped_share(gains) == (np.abs(gains) > 448 * scale).mean()
    assert M.clamped_share(np.full(64, 0.97)) == 1 and M.clamped_share(np.ones(64)) == 0


@pytest.mark.usefixtures("quick_compile")
def test_gains_start_where_they_should():
    config = dataclasses.replace(EXPERIMENT.presets["smoke"].config("w32"), first_gain=0.97)
    params = M.GainsProgram(config).init(np.uint32(0)).params
    gains = M.gains_of(params)
    assert len(gains) == 3 and all((np.asarray(g) == np.float32(0.97)).all() for g in gains)
    plain = M.GainsProgram(EXPERIMENT.presets["smoke"].config("w32")).init(np.uint32(0)).params
    np.testing.assert_array_equal(params["head_DZ"], plain["head_DZ"])
    assert sum(g.size for g in gains) == sum(
        leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "gain"
    )


def test_what_is_refused():
    with pytest.raises(ReproError, match="first_gain"):
        M.GainsConfig(first_gain=0.0)
    with pytest.raises(ReproError, match="one size"):
        dataclasses.replace(EXPERIMENT.presets["cpu"], sizes=("xs", "w32"))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "norm-gains", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
