"""The window of clamping, the clusters of gains, and the rules of layernorm-clamp."""

import dataclasses
import math
import sys

import numpy as np
import pytest
from scipy import integrate, stats

from repro import catalogue
from repro.claims import decide_all, gather
from repro.errors import ReproError
from repro.quant import FORMATS

pytestmark = pytest.mark.usefixtures("quick_compile_module")

EXPERIMENT = catalogue.load("layernorm-clamp")
M = sys.modules["repro.experiments.layernorm_clamp"]
SMOKE = EXPERIMENT.presets["smoke"]


@pytest.fixture(scope="module")
def runs():
    return gather(EXPERIMENT, SMOKE, None)


@pytest.fixture(scope="module")
def verdicts(runs):
    return {v.variant: v for v in decide_all(EXPERIMENT.claims_for(SMOKE), runs)}


def by_hand(gains, rule, bump=0):
    """E4M3 in one block, in float64, from the text of OCP MX v1.0, section 6.3; shares no code with the package."""
    amax = np.abs(gains).max()
    if rule == "rceil":
        exponent = math.ceil(math.log2(amax / 448))
    elif rule == "ceil":
        exponent = math.ceil(math.log2(amax)) - 8
    else:
        mantissa, exponent = math.frexp(amax)  # mantissa in [1/2, 1)
        exponent -= 1 + 8 - (rule == "even" and 2 * mantissa + 1 / 16 >= 2)
    scale = 2.0 ** (exponent + bump)
    u = np.minimum(np.abs(gains) / scale, 448)
    step = 2.0 ** (np.maximum(np.floor(np.log2(u)), -6) - 3)
    return np.minimum(np.rint(u / step) * step, 448) * scale


@pytest.mark.parametrize("arm", [arm.name for arm in EXPERIMENT.arms])
def test_blocks_are_quantised_as_the_standard_says(arm):
    gains = np.concatenate([M.cluster(3, mean, 64) for mean in (0.88, 0.93, 0.95, 0.97, 0.99, 1.0, 1.02)])
    rule, bump = ("floor", 1) if arm == "bump" else (arm, 0)
    expected = np.stack([by_hand(row.astype(np.float64), rule, bump) for row in gains])
    np.testing.assert_array_equal(M.quantised(gains, arm), expected)


def test_the_windows_in_numbers():
    assert M.window(FORMATS["e4m3"], "floor") == (1.75, 2.0)
    assert M.window(FORMATS["e4m3"], "even") == (1.75, 1.9375)
    assert M.window(FORMATS["e2m1"], "floor") == (1.5, 2.0)
    assert M.window(FORMATS["e2m1"], "even") == (1.5, 1.75)
    for rule in ("ceil", "rceil"):
        low, high = M.window(FORMATS["e4m3"], rule)
        assert low >= high  # empty


def test_the_ends_of_the_collapse_are_ties():
    row = np.full((1, 32), 0.9)
    row[0, 0] = 0.84375  # 432 = midway between 416 and 448; the latter is even
    assert set(M.quantised(row, "floor")[0]) == {0.875}
    row[0, 0] = 0.84375 - 2.0**-20
    assert set(M.quantised(row, "floor")[0]) == {0.875, 0.8125}
    row[0, 1] = 1.0  # one gain that is not below the power of two sets all free
    assert 0.875 in M.quantised(row, "floor")[0] and 1.0 in M.quantised(row, "floor")[0]


def test_the_error_of_a_clamped_cluster_has_a_closed_form():
    gains = M.cluster(0, 0.95, 8192)  # five deviations below 1
    metrics = M.cluster_metrics(gains, M.quantised(gains, "floor"))
    expected = math.hypot(0.95 - 0.875, 0.01) / math.hypot(0.95, 0.01)
    assert metrics["error"] == pytest.approx(expected, rel=5e-3)
    assert metrics["bias"] == pytest.approx(0.875 / 0.95 - 1, abs=2e-4) and metrics["single_share"] == 1
    # Without the clamp it is that of two levels, 15/16 and 1.
    density = stats.norm(0.97, 0.01).pdf
    square = integrate.quad(lambda x: density(x) * (x - 0.9375) ** 2, 0.9, 0.96875)[0]
    square += integrate.quad(lambda x: density(x) * (x - 1) ** 2, 0.96875, 1.05)[0]
    gains = M.cluster(0, 0.97, 8192)
    for arm in ("rceil", "ceil", "bump", "even"):
        error = M.cluster_metrics(gains, M.quantised(gains, arm))["error"]
        assert error == pytest.approx(math.sqrt(square) / math.hypot(0.97, 0.01), rel=0.03), arm


def test_verdicts(verdicts):
    supported = {"which gains", "one value", "9.8 % in clamped blocks", "remedy", "rule even"}
    supported.add("bias in clamped blocks")
    for variant in supported:
        assert verdicts[variant].label == "supported", verdicts[variant].reason
    assert verdicts["differences between gains"].label == "contradicted"
    # Whether all draws escape depends on the draws; the control must be refused in any case.
    assert all(v.control_label == "contradicted" for v in verdicts.values())


def test_half_of_the_vectors_hold_a_gain_of_one_or_more():
    escaped = np.mean([M.cluster(draw, 0.97, 512).max() >= 1 for draw in range(60)])
    assert abs(escaped - (1 - stats.norm.cdf(3) ** 512)) < 3 * 0.5 / math.sqrt(60)


def test_without_the_mechanism_nothing_is_supported(monkeypatch):
    monkeypatch.setattr(M, "recipe", lambda rule, element="e4m3": real("rceil", element))
    runs = gather(EXPERIMENT, SMOKE, None)
    labels = {v.variant: v.label for v in decide_all(EXPERIMENT.claims_for(SMOKE), runs)}
    assert not {
        labels[v] for v in ("which gains", "one value", "9.8 % in clamped blocks", "remedy", "bias in clamped blocks")
    } & {"supported"}


real = M.recipe


def test_presets_are_checked():
    assert EXPERIMENT.presets["cpu"].evidence and not SMOKE.evidence
    for change in ({"means": (0.97,)}, {"gains": 500}, {"draws": 0}, {"significant_bits": 8}):
        with pytest.raises(ReproError):
            dataclasses.replace(SMOKE, **change)
