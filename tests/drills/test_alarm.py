"""Scores, limits, alarms, spikes and leads against closed forms."""

import numpy as np
import pytest

from repro.drills.alarm import WINDOW, alarm_step, lead, limit, peak, scores, spike_step
from repro.errors import ReproError

STEPS, SINCE, GROWTH = 200, 100, 1.1


def growing(growth=GROWTH, steps=STEPS, since=SINCE):
    """3 up to `since`, and from that step on larger by the factor `growth` per step."""
    return 3.0 * growth ** np.maximum(np.arange(steps) - since + 1, 0)


def test_score_of_exponential_growth():
    values = 5.0 * GROWTH ** np.arange(STEPS)
    found = scores(values)
    assert np.isnan(found[:WINDOW]).all()
    np.testing.assert_allclose(found[WINDOW:], np.log(GROWTH) * (WINDOW + 1) / 2, rtol=1e-9)
    # Shrinking counts as much as growing, and the unit does not matter.
    np.testing.assert_allclose(scores(1 / values)[WINDOW:], found[WINDOW:], rtol=1e-9)
    np.testing.assert_allclose(scores(-1e6 * values)[WINDOW:], found[WINDOW:], rtol=1e-9)
    # A score without the logarithm would see the unit.
    plain = lambda x: np.abs(x[WINDOW:] - [x[t - WINDOW : t].mean() for t in range(WINDOW, STEPS)])
    assert not np.allclose(plain(1e6 * values), plain(values))


def test_score_of_a_step_fades_over_the_window():
    values = np.where(np.arange(STEPS) < SINCE, 2.0, 14.0)
    expected = np.log(7) * (1 - np.arange(WINDOW) / WINDOW)
    np.testing.assert_allclose(scores(values)[SINCE : SINCE + WINDOW], expected, rtol=1e-9)


def test_alarm_of_growth_that_begins():
    k = np.arange(1, WINDOW + 1)
    expected = np.log(GROWTH) * (k - k * (k - 1) / (2 * WINDOW))  # the window holds k - 1 steps of growth
    found = scores(growing())
    np.testing.assert_allclose(found[SINCE : SINCE + WINDOW], expected, rtol=1e-9)
    for bound in (0.05, 0.3, 1.0):
        assert alarm_step(found, bound, SINCE) == SINCE + int(np.argmax(expected > bound))
    assert alarm_step(found, 2.0, SINCE) is None  # growth of 10 % never has a score above ln(1.1) 16.5
    assert alarm_step(found, 0.3, SINCE, SINCE + 2) is None


def test_several_entries_have_the_score_of_the_loudest():
    quiet = np.ones(STEPS)
    both = np.stack([[quiet, growing()], [quiet, quiet]]).transpose(2, 0, 1)
    np.testing.assert_array_equal(scores(both), scores(growing()))


def test_what_is_not_finite_is_an_alarm_under_any_limit():
    values = np.ones(STEPS)
    values[SINCE] = np.nan
    found = scores(values)
    assert found[SINCE] == np.inf and alarm_step(found, 1e300, SINCE - 10) == SINCE
    assert scores(np.where(np.arange(STEPS) == SINCE, np.inf, 1.0))[SINCE] == np.inf
    assert peak(found, SINCE) == np.inf and peak(found, SINCE + 1, SINCE + WINDOW) == 0.0


def test_a_count_that_leaves_zero_is_an_alarm():
    count = np.zeros(STEPS, np.int32)
    count[SINCE] = 5
    found = scores(count)
    assert found[SINCE - 1] == 0.0
    assert alarm_step(found, limit([peak(scores(np.zeros(STEPS)), 50)]), 50) == SINCE


def test_limits_keep_the_budget_of_false_alarms():
    rng = np.random.default_rng(0)
    n, trials = 15, 4000
    peaks = rng.standard_cauchy((trials, n + 1))  # whatever the distribution
    rate = np.mean([row[-1] > limit(row[:-1]) for row in peaks])
    assert rate == pytest.approx(1 / (n + 1), abs=3 * (1 / 16 * 15 / 16 / trials) ** 0.5)
    with pytest.raises(ReproError, match="calibration"):
        limit([])
    with pytest.raises(ReproError, match="at least one step"):
        scores(np.ones(3), 0)


def test_spikes():
    loss = np.full(STEPS, 2.0)
    loss[:60] = np.linspace(4.0, 2.0, 60)
    assert spike_step(loss, 0) is None
    loss[150] = 2.4
    assert spike_step(loss, SINCE) is None
    loss[160] = 2.6
    assert spike_step(loss, SINCE) == 160
    assert spike_step(loss, 161) is None
    loss[120] = np.nan
    assert spike_step(loss, SINCE) == 120
    # Slow drift is no spike: 0.5 nats within the 26 steps to the median are needed.
    drift = lambda per_step: 2.0 + per_step * np.maximum(np.arange(STEPS) - SINCE, 0)
    assert spike_step(drift(0.5 / 27), SINCE) is None
    assert spike_step(drift(0.5 / 25), SINCE) is not None


def test_leads():
    assert lead(110, 117) == 7
    assert lead(117, 117) == lead(130, 117) == lead(None, 117) == 0
