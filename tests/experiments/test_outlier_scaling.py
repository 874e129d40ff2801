"""The numbers of outlier-scaling, each by hand or by another route, and its rules."""

import dataclasses
import math
import sys

import ml_dtypes
import numpy as np
import pytest

from repro import catalogue
from repro.claims import decide_all, gather
from repro.errors import ReproError
from repro.quant import FORMATS, RECIPES, quantize

pytestmark = pytest.mark.usefixtures("quick_compile_module")

EXPERIMENT = catalogue.load("outlier-scaling")
M = sys.modules["repro.experiments.outlier_scaling"]
SMOKE = EXPERIMENT.presets["smoke"]


@pytest.fixture(scope="module")
def runs():
    return gather(EXPERIMENT, SMOKE, None)


@pytest.fixture(scope="module")
def verdicts(runs):
    return {(v.claim_id, v.variant): v for v in decide_all(EXPERIMENT.claims_for(SMOKE), runs)}


def test_the_four_numbers_by_hand():
    found = {run.arm: run.metrics["error_of_0.01"] for run in M.four_numbers()}
    # One scale: 0.01 * 0.448 = 0.00448 = 2.29 steps of 2^-9, rounded to 2.
    assert found["four_in_tensor"] == pytest.approx(1 - 2 * 2.0**-9 / 0.448 / 0.01, rel=1e-4)
    assert found["four_in_tile"] == found["four_in_tensor"]
    # Apart: 0.01 * 896 = 8.96, in the octave 8 .. 16 of step 1, rounded to 9.
    assert found["four_apart"] == pytest.approx(9 / 8.96 - 1, rel=1e-4)


def test_the_ranges_by_definition():
    assert M.ranges("e4m3") == {"normal_range": 448 / 2.0**-6, "zero_range": 448 / 2.0**-10}
    assert M.ranges("e5m2") == {"normal_range": 57344 / 2.0**-14, "zero_range": 57344 / 2.0**-17}


@pytest.mark.parametrize("arm", M.GRAINS)
def test_below_the_line_is_what_the_scales_show(arm):
    x = M.channels(0, 1e4)
    scale = np.asarray(quantize(x, M.RECIPE_OF[arm]).scale, np.float64)
    scale = np.kron(scale, np.ones([n // count for n, count in zip(x.shape, scale.shape, strict=True)]))
    below = np.abs(x) / scale < FORMATS["e4m3"].min_normal
    assert (M.below_line(x, arm) != below).sum() == 0 and below.any()


def test_blocks_agree_with_a_cast_by_ml_dtypes():
    x = M.channels(1, 1e4)
    amax = np.abs(x.reshape(8, 2, 128)).max(-1, keepdims=True)
    scale = (amax / np.float32(448)).astype(np.float32)
    cast = (x.reshape(8, 2, 128) / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_array_equal(M.dequantised(x, "tile"), cast.reshape(8, 256))


def test_channels_outside():
    assert M.outside(RECIPES["fp8_tile"]).tolist() == [False] * 128 + [True] * 128
    assert np.flatnonzero(~M.outside(M.RECIPE_OF["tile32"])).tolist() == [*range(32), *range(64, 96)]
    assert (~M.outside(RECIPES["fp8_tensor"])).nonzero()[0].tolist() == [17, 90]


def test_scales_that_follow_the_whole_tensor_fail_the_claim_of_confinement(monkeypatch):
    monkeypatch.setitem(M.RECIPE_OF, "tile", dataclasses.replace(RECIPES["fp8_tile"], block_shape=None))
    monkeypatch.setattr(M, "outside", lambda recipe: np.arange(256) >= 128)
    found = {run.arm: run.metrics for run in M.outlier_runs(SMOKE) if not run.point}
    assert found["tile"]["changed_outside"] > 0 and found["tile32"]["changed_outside"] == 0


def test_the_prediction_of_a_token_error():
    # Far inside the range the error is that of a significand: steps of 2^-m, uniformly distributed within.
    error = M.predicted_token_error(0.0, 5.0, FORMATS["e4m3"])
    assert error == pytest.approx(0.0265, abs=0.001)
    assert M.predicted_token_error(0.0, 5.0, FORMATS["e5m2"]) == pytest.approx(2 * error, rel=0.02)
    # A token far below the range is lost altogether.
    assert M.predicted_token_error(0.0, 1e9, FORMATS["e4m3"]) == pytest.approx(1, abs=1e-6)
    # Flushing subnormals can only make it worse.
    at = [M.predicted_token_error(3.0, 1e4, FORMATS["e4m3"], flush=flush) for flush in (False, True)]
    assert at[0] < at[1]


def test_crossing_interpolates():
    assert M.crossing((0.0, 1.0, 2.0), [2.0, 2.0, 0.5]) == pytest.approx(1.5)
    assert M.crossing((0.0, 1.0), [2.0, 1.5]) == math.inf


def test_grids_are_nested():
    e4m3 = FORMATS["e4m3"].values().astype(np.float64)
    e5m2 = FORMATS["e5m2"].values().astype(np.float64) / 128  # both to the largest magnitude 448
    assert set(e5m2[np.abs(e5m2) >= 2.0**-7]) <= set(e4m3)
    assert {v for v in e4m3 if abs(v) < 2.0**-7} <= set(e5m2)
    octave = [{v for v in grid if 2.0**-7 <= v < 2.0**-6} for grid in (e4m3, e5m2)]
    assert octave[0] == octave[1]


def test_verdicts(verdicts):
    labels = {key: v.label for key, v in verdicts.items()}
    contradicted = {key for key, label in labels.items() if label == "contradicted"}
    assert contradicted == {
        ("FP-5", "four numbers, as they stand"),
        ("FP-5", "small factors"),
        ("FP-5", "small factors, reason"),
        ("FP-4", "gradients, error of the whole tensor"),
    }
    assert set(labels.values()) == {"supported", "contradicted"}, labels
    assert {v.control_label for v in verdicts.values()} == {"contradicted"}


def test_the_heat_map_shows_the_left_half():
    one, tile, _ = M.heat().values()
    assert one.shape == (8, 256)
    assert np.median(tile[:, 128:]) < 0.04 < 0.1 < np.median(tile[:, :128])
    assert np.median(one[:, 128:]) > 0.1


def test_presets_are_checked():
    assert EXPERIMENT.presets["cpu"].evidence and not SMOKE.evidence
    for change in ({"factors": (1.0,)}, {"sigmas": (0.0, 1.0)}, {"width": 256}, {"draws": 0}):
        with pytest.raises(ReproError):
            dataclasses.replace(SMOKE, **change)
