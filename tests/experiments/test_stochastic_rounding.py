"""The closed forms of stochastic-rounding against simulation in NumPy and against each other."""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from repro import catalogue
from repro.claims import decide_all, gather
from repro.errors import ReproError

pytestmark = pytest.mark.usefixtures("quick_compile_module")

EXPERIMENT = catalogue.load("stochastic-rounding")
M = sys.modules["repro.experiments.stochastic_rounding"]
SMOKE = EXPERIMENT.presets["smoke"]


@pytest.fixture(scope="module")
def runs():
    return gather(EXPERIMENT, SMOKE, None)


def test_verdicts(runs):
    verdicts = decide_all(EXPERIMENT.claims_for(SMOKE), runs)
    assert {v.label for v in verdicts} == {"supported"}, [v.reason for v in verdicts if v.label != "supported"]
    assert {v.control_label for v in verdicts} == {"contradicted"}


def test_the_sum_over_the_grid_is_the_binomial_law_within_an_octave():
    values, probabilities = M.exact_distribution(2.0**-10, 40)
    np.testing.assert_array_equal(values, 1 + np.arange(len(values)) / 128)
    expected = stats.binom.pmf(np.arange(len(values)), 40, 1 / 8)
    np.testing.assert_allclose(probabilities, expected, atol=1e-13)


def test_the_sum_over_the_grid_keeps_the_mean_across_octaves():
    values, probabilities = M.exact_distribution(-1e-3, 1000)
    assert probabilities.sum() == pytest.approx(1, abs=1e-9)
    # The sums are rounded to float32 first, below 1 by at most 2^-25 each.
    end = 1 - 1000 * float(np.float32(1e-3))
    assert (values * probabilities).sum() == pytest.approx(end, abs=1000 * 2.0**-25)
    # Below 1 a step is 2^-8 and halves with every octave; while it is much larger than the update, the variance grows
    # by update * step each time, so the first half of the way, 500 updates, gives 500 * u * (2^-8 - u).
    values, probabilities = M.exact_distribution(-1e-3, 400)
    variance = (values**2 * probabilities).sum() - (values * probabilities).sum() ** 2
    assert variance == pytest.approx(400 * 1e-3 * (2.0**-8 - 1e-3), rel=0.02)


def test_a_walk_in_numpy_agrees():
    generator = np.random.default_rng(0)
    w = np.ones(4096)
    for _ in range(64):
        w = np.floor((w + 2.0**-10) * 128 + generator.random(4096)) / 128
    walked = np.asarray(M.walk(jnp.float32(2.0**-10), jnp.int32(64), jax.random.key(5), fmt="bf16",
                               rounding="stochastic", walkers=4096))  # fmt: skip
    assert stats.ks_2samp(w, walked).pvalue > 1e-3
    assert set(np.unique(walked * 128 % 1)) == {0}


def test_nearest_stalls_in_numpy_too():
    w = jnp.bfloat16(1)
    for _ in range(50):
        w = (w.astype(jnp.float32) + jnp.float32(2.0**-8)).astype(jnp.bfloat16)
    assert w == 1  # half a step exactly, and 1 is even
    odd = jnp.float32(1 + 2.0**-7)
    assert jnp.bfloat16(odd + 2.0**-8) == 1 + 2.0**-6  # half a step from an odd significand goes up


def test_the_coin_rounds_to_both_neighbours():
    for fmt, x, low, high in (("e2m1", 0.1, 0, 0.5), ("e2m1", -3.9, -4, -3), ("e4m3", 0.004, 2.0**-9 * 2, 2.0**-9 * 3),
                              ("bf16", 1.999, 1.9921875, 2.0)):  # fmt: skip
        y = np.asarray(M.coin(jnp.full(2000, x), fmt, jax.random.key(0)))
        assert set(y) == {low, high}
        assert abs((y == high).mean() - 0.5) < 4 * 0.5 / math.sqrt(2000)
    grid = jnp.asarray([0.0, 0.5, 1.0, 6.0, -3.0])
    np.testing.assert_array_equal(M.coin(grid, "e2m1", jax.random.key(1)), grid)


def test_metrics_of_an_ideal_and_of_a_shifted_walk():
    h = 2.0**-7
    w = 1 + h * stats.binom.rvs(64, 0.125, size=20000, random_state=1)
    metrics = M.walk_metrics(w, 64, 0.125, "bf16")
    assert metrics["walk_z"] < 4 and metrics["kolmogorov"] < 1.7 and metrics["deviation_off"] < 0.03
    assert metrics["kept"] == pytest.approx(1, abs=0.02)
    shifted = M.walk_metrics(w + h, 64, 0.125, "bf16")
    assert shifted["walk_z"] > 40 and shifted["kolmogorov"] > 10


def test_no_walker_can_leave_the_octave():
    for fmt in EXPERIMENT.presets["cpu"].formats:
        h = M.spacing(fmt)
        for p in M.FRACTIONS:
            count = M.updates_at(p, fmt, 1024)
            assert count * p * h <= 0.4 + p * h
            assert stats.binom.sf(1 / h - 1, count, p) < 1e-9


def test_presets_are_checked():
    assert EXPERIMENT.presets["cpu"].evidence and not SMOKE.evidence
    for change in ({"formats": ("fp16",)}, {"formats": ("bf16", "e4m3")}, {"walkers": 10}, {"most_updates": 100}):
        with pytest.raises(ReproError):
            dataclasses.replace(SMOKE, **change)
