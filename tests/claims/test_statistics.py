"""The statistics against brute force, SciPy and hand-worked numbers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from repro.claims import holm, minimum_detectable_effect, paired_t_interval, sign_flip_p, slope, t_p
from repro.errors import ReproError

EXAMPLE = np.array([0.31, -0.12, 0.55, 0.2, 0.41, -0.05, 0.73, 0.18])


def brute_force(d):
    signs = itertools.product((1, -1), repeat=len(d))
    return sum(sum(s * x for s, x in zip(sign, d, strict=True)) >= sum(d) for sign in signs) / 2 ** len(d)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=1, max_size=9))
def test_sign_flip_is_the_brute_force_count(d):
    # Integers add without rounding, so the naive count is exact, ties included.
    assert sign_flip_p(d) == brute_force(d)
    assert sign_flip_p(d, "less") == brute_force([-x for x in d])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=9), st.sampled_from([0.1, 1 / 3, 1e-9, 7e12]))
def test_sign_flip_keeps_ties_under_rounding_and_scale(d, unit):
    assert sign_flip_p([x * unit for x in d]) == sign_flip_p(d)


@pytest.mark.parametrize("alternative", ["greater", "less"])
def test_sign_flip_agrees_with_scipy(alternative):
    peer = stats.permutation_test(
        (EXAMPLE,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative=alternative, vectorized=True
    )
    assert sign_flip_p(EXAMPLE, alternative) == pytest.approx(peer.pvalue, abs=1e-15)


def test_sign_flip_counts_the_observed_signs():
    for n in (1, 2, 8, 20, 33):
        assert sign_flip_p(np.ones(n)) == 2.0**-n
    assert sign_flip_p(np.zeros(8)) == 1.0


@pytest.mark.parametrize("bad", [[], np.ones(41), [1.0, math.nan], np.ones((2, 2))])
def test_sign_flip_refuses(bad):
    with pytest.raises(ReproError):
        sign_flip_p(bad)
    with pytest.raises(ReproError, match="alternative"):
        sign_flip_p([1.0], "two-sided")


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_t_interval_agrees_with_scipy(confidence):
    peer = stats.ttest_1samp(EXAMPLE, 0).confidence_interval(confidence)
    assert paired_t_interval(EXAMPLE, confidence) == pytest.approx((peer.low, peer.high), rel=1e-9)


def test_t_interval_at_its_edges():
    assert paired_t_interval([0.3]) == (-math.inf, math.inf)
    assert paired_t_interval([0.1] * 7) == (0.1, 0.1)


@pytest.mark.parametrize("alternative", ["greater", "less"])
def test_t_p_agrees_with_scipy(alternative):
    assert t_p(EXAMPLE, alternative) == pytest.approx(stats.ttest_1samp(EXAMPLE, 0, alternative=alternative).pvalue)


def test_t_p_at_its_edges():
    assert t_p([5.0]) == t_p([5.0], "less") == 1.0
    assert (t_p([0.1] * 3), t_p([-0.1] * 3), t_p([0.0] * 3)) == (0.0, 1.0, 0.5)
    assert t_p([0.1] * 3, "less") == 1.0


def test_holm_by_hand():
    # Sorted .005 .01 .03 .04 times 4 3 2 1 = .02 .03 .06 .04, made monotone: .02 .03 .06 .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_monotone_and_between_p_and_bonferroni(p):
    adjusted = holm(p)
    for raw, a in zip(p, adjusted, strict=True):
        assert raw <= a <= min(1.0, len(p) * raw) or a == raw
    order = sorted(range(len(p)), key=lambda i: p[i])
    assert all(adjusted[i] <= adjusted[j] for i, j in itertools.pairwise(order))


def test_minimum_detectable_effect():
    n, sd = len(EXAMPLE), EXAMPLE.std(ddof=1)
    closed = (stats.t.ppf(0.95, n - 1) + stats.t.ppf(0.8, n - 1)) * sd / math.sqrt(n)
    mde = minimum_detectable_effect(EXAMPLE)
    assert mde == pytest.approx(closed, rel=1e-9)
    power = stats.nct.sf(stats.t.ppf(0.95, n - 1), n - 1, mde * math.sqrt(n) / sd)
    assert power == pytest.approx(0.8, abs=0.03)
    assert minimum_detectable_effect([1.0]) == math.inf
    assert minimum_detectable_effect([1.0, 1.0]) == 0.0


def test_slope_agrees_with_polyfit():
    x, y = np.array([1.0, 2.0, 4.0, 5.0]), np.random.default_rng(0).normal(size=(3, 4))
    assert slope(x, y) == pytest.approx(np.polyfit(x, y.T, 1)[0])
    assert slope([0, 1, 2], [5, 7, 9]) == pytest.approx(2.0)
    for bad in (([1, 1], [1, 2]), ([1, 2, 3], [1, 2]), ([], [])):
        with pytest.raises(ReproError):
            slope(*bad)
