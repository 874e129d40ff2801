"""Errors of short sums: their definitions, and that the rules refuse other accumulators."""

import sys

import numpy as np
import pytest

from repro import catalogue
from repro.claims import decide_all, gather
from repro.errors import ReproError
from repro.quant import Accumulator, accumulate

EXPERIMENT = catalogue.load("accumulation")
MODULE = sys.modules["repro.experiments.accumulation"]
SMOKE = EXPERIMENT.presets["smoke"]
pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def runs():
    return gather(EXPERIMENT, SMOKE, list)


def test_every_control_fails(runs):
    for verdict in decide_all(EXPERIMENT.claims_for(SMOKE), runs):
        assert verdict.label in ("supported", "contradicted") and verdict.control_label == "contradicted"


def test_the_two_definitions_of_an_error():
    exact = np.array([[10.0, -0.1], [2.0, 4.0]])
    found = MODULE.errors((exact + np.array([[0.1, 0.01], [0, -0.2]])).astype(np.float32), exact)
    assert found["elementwise"] == pytest.approx(0.1, rel=1e-5) and found["normwise"] == pytest.approx(0.02, rel=1e-5)


def test_operands_are_on_the_grid_and_differ_between_seeds():
    for data in MODULE.DATA:
        a, b = MODULE.operands(data, 0, 4, 64)
        assert a.shape == (4, 64) and b.shape == (64, 4)
        assert (a == a.astype("float8_e4m3fn").astype(np.float32)).all()
        assert (a >= 0).all() == (data == "uniform") and abs(a.mean()) < (0.7 if data == "uniform" else 0.3)
        assert not np.array_equal(a, MODULE.operands(data, 1, 4, 64)[0])


@pytest.mark.parametrize("arm", MODULE.ACCUMULATORS)
def test_zeros_at_the_end_add_nothing(arm):
    a, b = MODULE.operands("normal", 0, 4, 256)
    short = accumulate(a[:, :160], b[:160], MODULE.ACCUMULATORS[arm])
    long = accumulate(*MODULE.padded(a, b, 160, 256), MODULE.ACCUMULATORS[arm])
    np.testing.assert_array_equal(short, long)


def test_promotion_at_the_end_alone_is_no_promotion(runs):
    a, b = MODULE.operands("uniform", 0, 4, 256)
    whole = accumulate(a, b, Accumulator(14, 32, 256))
    np.testing.assert_array_equal(whole, accumulate(a, b, MODULE.ACCUMULATORS["bits14"]))
    assert not np.array_equal(whole, accumulate(a, b, MODULE.ACCUMULATORS["bits14_promoted"]))


def test_fewer_bits_are_worse_and_every_set_of_operands_is_judged(runs):
    at = {arm: runs.values("uniform_elementwise", f"{arm}@k4096") for arm in MODULE.ACCUMULATORS}
    for seed in range(SMOKE.trials):
        assert at["bits13"][seed] > at["bits14"][seed] > at["bits14_promoted"][seed] > at["bits23"][seed] > 0
    assert len(set(at["bits14"].values())) == SMOKE.trials


def test_intervals_are_measured_where_asked():
    preset = MODULE.Preset(ks=(256, 4096), intervals=(128, 4096), outputs=2, trials=1)
    found = gather(EXPERIMENT, preset, list)
    metric = "uniform_elementwise"
    for point, arm in (("n128", "bits14_promoted"), ("n4096", "bits14")):
        assert found.values(metric, f"bits14_every@{point}") == found.values(metric, f"{arm}@k4096")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ks": (256,)}, "must hold 256 and 4096"),
        ({"intervals": (100,)}, "multiples of 32"),
        ({"trials": 0}, "at least 1"),
        ({"outputs": 0}, "at least 1"),
    ],
)
def test_presets_without_a_meaning(change, message):
    with pytest.raises(ReproError, match=message):
        MODULE.Preset(**change)
