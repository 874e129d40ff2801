"""Every criterion: its number per seed, its effect, and each label it can give."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from repro.claims import (
    All,
    AtLeast,
    AtMost,
    Claim,
    Control,
    Equivalent,
    Exact,
    Greater,
    NonInferior,
    Ratio,
    Run,
    Runs,
    Trend,
    Within,
    decide,
    paired_t_interval,
    swapped,
)
from repro.errors import ReproError

WIGGLE = np.array([-0.03, 0.02, 0.01, -0.02, 0.03, -0.01, 0.015, -0.015])
NOISY = 40 * WIGGLE
SIZES = (("s", 1.0), ("m", 2.0), ("l", 4.0))
REFUSED = Control("never passes", Within("one", "constant", 5.0, 6.0))


def runs_of(**arms):
    """Runs of one metric "x"; a mapping size -> values gives an arm several sizes."""
    rows = [Run("constant", 0, {"one": 1.0})]
    for arm, values in arms.items():
        by_size = values if isinstance(values, dict) else {"": values}
        rows += [Run(arm, seed, {"x": v}, size=size) for size, vs in by_size.items() for seed, v in enumerate(vs)]
    return Runs(rows)


def verdict_of(criterion, **arms):
    tier = "M" if criterion.deterministic else "D"
    return decide(Claim("K2-1", "source", "statement", "", "", tier, criterion, REFUSED), runs_of(**arms))


def ratio(r, noise=WIGGLE):
    """Arms a and b with a / b = r up to noise."""
    return {"a": r * np.exp(noise), "b": np.ones(8)}


def difference(d, noise=WIGGLE):
    return {"a": 3 + d + noise, "b": np.full(8, 3.0)}


def over_sizes(factor, noise=WIGGLE):
    """Arms whose ratio grows by `factor` per doubling of size."""
    a = {size: factor ** np.log2(value) * np.exp(noise * np.log2(value)) for size, value in SIZES}
    return {"a": a, "b": {size: np.ones(8) for size, _ in SIZES}}


TREND = Trend("x", "a", "b", sizes=SIZES)
GREATER = Greater("x", "a", "b", smallest=1.5)
BY_DIFFERENCE = Greater("x", "a", "b", log=False, smallest=0.5)

CASES = [
    (GREATER, ratio(2), "supported"),
    (GREATER, ratio(0.9), "contradicted"),
    (GREATER, ratio(1.2), "not supported"),
    (GREATER, ratio(1.55, NOISY / 4), "supported"),
    (GREATER, ratio(1.45, NOISY / 4), "inconclusive"),
    (Greater("x", "a", "b"), ratio(1.0), "inconclusive"),
    (Greater("x", "a", "b"), {"a": [0.9, 0.91, 0.9], "b": [1.0] * 3}, "not supported"),
    (BY_DIFFERENCE, difference(1), "supported"),
    (BY_DIFFERENCE, difference(-1), "contradicted"),
    (BY_DIFFERENCE, difference(0.1), "not supported"),
    (BY_DIFFERENCE, difference(0.3, NOISY), "inconclusive"),
    (Ratio("x", "a", "b", at_least=2), ratio(2.2), "supported"),
    (Ratio("x", "a", "b", at_least=2), ratio(1.8), "contradicted"),
    (Ratio("x", "a", "b", at_least=2), {"a": [1.8, 1.81, 1.79], "b": [1.0] * 3}, "not supported"),
    (Ratio("x", "a", "b", at_least=2), ratio(2), "inconclusive"),
    (AtLeast("x", "a", 3.0), {"a": 3.5 + WIGGLE}, "supported"),
    (AtLeast("x", "a", 3.0), {"a": 2.5 + WIGGLE}, "contradicted"),
    (AtLeast("x", "a", 3.0), {"a": 3.0 + WIGGLE}, "inconclusive"),
    (AtLeast("x", "a", 3.0), {"a": [2.5, 2.501, 2.499]}, "not supported"),
    (AtLeast("x", "a", 3.0, log=True), {"a": 3.5 * np.exp(WIGGLE)}, "supported"),
    (AtMost("x", "a", 3.0), {"a": 2.5 + WIGGLE}, "supported"),
    (AtMost("x", "a", 3.0), {"a": 3.5 + WIGGLE}, "contradicted"),
    (AtMost("x", "a", 3.0), {"a": [3.5, 3.501, 3.499]}, "not supported"),
    (AtMost("x", "a", 3.0), {"a": np.full(8, 3.0)}, "inconclusive"),
    (AtMost("x", "a", 3.0, log=True), {"a": 2.5 * np.exp(WIGGLE)}, "supported"),
    (NonInferior("x", "a", "b", margin=0.1), difference(0.05), "supported"),
    (NonInferior("x", "a", "b", margin=0.1), difference(0.15), "contradicted"),
    (NonInferior("x", "a", "b", margin=0.1), difference(0.1, NOISY), "inconclusive"),
    (Equivalent("x", "a", "b", margin=0.1), difference(0.05), "supported"),
    (Equivalent("x", "a", "b", margin=0.1), difference(0.2), "contradicted"),
    (Equivalent("x", "a", "b", margin=0.1), difference(-0.2), "contradicted"),
    (Equivalent("x", "a", "b", margin=0.1), difference(0.0, NOISY), "inconclusive"),
    (Equivalent("x", "a", "b", margin=0.02, relative=True), difference(0.03), "supported"),
    (Equivalent("x", "a", "b", margin=0.02, relative=True), difference(0.12), "contradicted"),
    (TREND, over_sizes(1.2), "supported"),
    (TREND, over_sizes(0.8), "contradicted"),
    (TREND, over_sizes(1.0), "inconclusive"),
    (dataclasses.replace(TREND, rising=False), over_sizes(0.8), "supported"),
    (dataclasses.replace(TREND, log=False), over_sizes(1.2), "supported"),
    (All((GREATER, AtLeast("x", "a", 1.0))), ratio(2), "supported"),
    (All((GREATER, AtLeast("x", "a", 3.0))), ratio(2), "contradicted"),
    (All((AtLeast("x", "a", 1.0), GREATER)), ratio(1.2), "not supported"),
    (All((GREATER, AtLeast("x", "a", 2.0, log=True))), ratio(2), "inconclusive"),
    (All((GREATER, Within("x", "a", 1.0, 3.0))), ratio(2), "supported"),
    (All((GREATER, Within("x", "a", 1.0, 2.0))), ratio(2), "contradicted"),
    (All((Exact("x", "a", 1.0), Within("x", "b", 0.0, 3.0))), {"a": [1.0], "b": [2.0]}, "supported"),
    (Exact("x", "a", 2.0), {"a": [2.0, 2.0]}, "supported"),
    (Exact("x", "a", 2.0), {"a": [2.0, np.nextafter(2.0, 3.0)]}, "contradicted"),
    (Exact("x", "a", 2.0, tolerance=0.1), {"a": [2.05, 1.95]}, "supported"),
    (Exact("x", "a", 2.0), {"a": [2.0, math.nan]}, "contradicted"),
    (Within("x", "a", 1.0, math.inf), {"a": [1.0, math.inf]}, "supported"),
    (Within("x", "a", 1.0, 2.0), {"a": [1.5, 2.5, 0.9]}, "contradicted"),
]


@pytest.mark.parametrize(("criterion", "arms", "label"), CASES)
def test_label(criterion, arms, label):
    verdict = verdict_of(criterion, **arms)
    assert verdict.label == label, verdict.reason


STATISTICAL = [case for case in CASES if not case[0].deterministic and case[2] == "supported"]


@pytest.mark.parametrize(("criterion", "arms", "label"), STATISTICAL)
def test_one_seed_and_diverged_runs_are_inconclusive(criterion, arms, label):
    def changed(change):
        return {
            arm: {s: change(v) for s, v in values.items()} if isinstance(values, dict) else change(values)
            for arm, values in arms.items()
        }

    parts = getattr(criterion, "criteria", ())
    one = verdict_of(criterion, **changed(lambda values: values[:1]))
    assert one.label == "inconclusive" and one.n == 1 and "one seed says nothing" in one.reason
    if not any(part.deterministic for part in parts):
        broken = verdict_of(criterion, **changed(lambda values: np.array([math.nan, *values[1:]])))
        assert broken.label == "inconclusive" and broken.effect is None and broken.p is None
        assert "is nan at seed 0" in broken.reason


@pytest.mark.parametrize(("criterion", "arms", "label"), CASES)
def test_a_criterion_is_plain_data(criterion, arms, label):
    fields = dataclasses.asdict(criterion)
    assert fields["kind"] and json.dumps(fields)
    assert hash(criterion) == hash(dataclasses.replace(criterion))


def test_effects_are_reported_on_their_scale():
    greater = verdict_of(Greater("x", "a", "b"), **ratio(2))
    assert greater.effect == pytest.approx(2) and greater.scale == "ratio"
    assert greater.interval[0] < 2 < greater.interval[1] and 1 < greater.mde < 1.05
    assert greater.per_seed[0] == pytest.approx(2 * np.exp(-0.03))
    assert greater.p == 2**-8 and greater.n == 8
    times = verdict_of(Ratio("x", "a", "b", at_least=1.5), **ratio(2))
    assert (times.effect, *times.interval, times.mde) == pytest.approx((2, *greater.interval, greater.mde))

    harm = verdict_of(NonInferior("x", "a", "b", margin=0.1), **difference(0.05))
    assert harm.effect == pytest.approx(0.05) and harm.scale == "difference"
    assert harm.interval[0] < 0.05 < harm.interval[1]
    assert harm.per_seed[1] == pytest.approx(0.07)

    level = verdict_of(AtMost("x", "a", 3.0, log=True), a=2.5 * np.exp(WIGGLE))
    assert level.effect == pytest.approx(2.5) and level.scale == "value"
    assert level.interval[0] < 2.5 < level.interval[1] and 0 < level.mde < 0.1

    assert verdict_of(TREND, **over_sizes(1.2)).effect == pytest.approx(1.2)
    falling = verdict_of(dataclasses.replace(TREND, rising=False), **over_sizes(0.8))
    assert falling.effect == pytest.approx(0.8) and falling.interval[0] < 0.8 < falling.interval[1]
    same = verdict_of(Equivalent("x", "a", "b", margin=0.02, relative=True), **difference(0.03))
    assert same.effect == pytest.approx(0.01)
    assert verdict_of(Within("x", "a", 1.0, 2.0), a=[1.5, 2.5, 0.9]).effect == 2.5


def test_one_outlier_is_not_enough():
    # Unanimous signs pass the sign flip at 2^-8, but the interval holds the bound.
    outlier = np.array([1.0, 1, 1, 1, 1, 1, 1, 100])
    for sign in (1, -1):
        verdict = verdict_of(Greater("x", "a", "b", log=False), a=sign * outlier, b=np.zeros(8))
        assert verdict.label == "inconclusive" and verdict.interval[0] < 0 < verdict.interval[1]


def test_intervals_are_paired_t_at_one_minus_alpha():
    runs, d = runs_of(**difference(0.05)), 0.05 + WIGGLE
    for alpha in (0.05, 0.2):
        for rule in (
            Greater("x", "a", "b", log=False),
            NonInferior("x", "a", "b", margin=0.1),
            Equivalent("x", "a", "b", margin=0.1),
        ):
            assert rule.find(runs, alpha).interval == pytest.approx(paired_t_interval(d, 1 - alpha))


def test_equivalence_is_two_one_sided_tests():
    found, d = Equivalent("x", "a", "b", margin=0.07).find(runs_of(**difference(0.05)), 0.05), 0.05 + WIGGLE
    assert found.p == pytest.approx(stats.ttest_1samp(d, 0.07, alternative="less").pvalue)
    found = Equivalent("x", "a", "b", margin=0.04).find(runs_of(**difference(0.05)), 0.05)
    assert found.p_opposite == pytest.approx(2 * stats.ttest_1samp(d, 0.04, alternative="greater").pvalue)


def test_non_inferiority_is_a_one_sided_test():
    found, d = NonInferior("x", "a", "b", margin=0.07).find(runs_of(**difference(0.05)), 0.05), 0.05 + WIGGLE
    assert found.p == pytest.approx(stats.ttest_1samp(d, 0.07, alternative="less").pvalue)
    assert found.p + found.p_opposite == pytest.approx(1)


def test_a_conjunction_divides_alpha_over_the_parts_that_may_contradict_it():
    low = {"a": np.exp([-0.9, -1, -1.1, -1, -0.95]), "b": np.ones(5)}
    greater, bounded = Greater("x", "a", "b"), AtMost("x", "b", 2.0)
    assert verdict_of(greater, **low).label == "contradicted"  # p = 1 / 32
    assert verdict_of(All((greater, bounded)), **low).label == "not supported"  # 2 / 32
    assert verdict_of(All((greater, Within("x", "b", 0.0, 2.0))), **low).label == "contradicted"
    found = All((greater, bounded)).find(runs_of(**low), 0.05)
    assert (found.p, found.p_opposite) == (1.0, 2 / 32)


def test_the_reason_names_the_deciding_part():
    verdict = verdict_of(All((GREATER, AtLeast("x", "a", 3.0))), **ratio(2))
    assert verdict.reason.startswith("part 2 of 2 decides: x of a is 2") and "above 3" in verdict.reason
    verdict = verdict_of(All((GREATER, Exact("x", "b", 2.0))), **ratio(2))
    assert verdict.reason.startswith("part 2 of 2 decides: x of b is 1 in the run furthest off")


def test_identical_arms_are_no_difference():
    same = verdict_of(Greater("x", "a", "b"), a=WIGGLE + 1, b=WIGGLE + 1)
    assert same.label == "inconclusive" and same.p == 1.0 and same.interval == (1.0, 1.0)
    assert verdict_of(Equivalent("x", "a", "b", margin=0.1), a=WIGGLE, b=WIGGLE).label == "supported"


def test_zero_on_a_log_scale_is_named():
    verdict = verdict_of(Greater("x", "a", "b"), a=[1.0, 0.0], b=[1.0, 1.0])
    assert verdict.label == "inconclusive" and "x of a is 0 at seed 1" in verdict.reason


def test_swapped_arms_contradict():
    times = Ratio("x", "a", "b", at_least=2)
    for criterion, arms in ((GREATER, ratio(2)), (TREND, over_sizes(1.2)), (times, ratio(3))):
        assert verdict_of(criterion, **arms).label == "supported"
        assert verdict_of(swapped(criterion), **arms).label == "contradicted"
        assert swapped(swapped(criterion)) == criterion
    with pytest.raises(ReproError, match="NonInferior"):
        swapped(NonInferior("x", "a", "b", margin=1.0))


def test_unpaired_arms_are_refused():
    with pytest.raises(ReproError, match="paired by seed"):
        verdict_of(Greater("x", "a", "b"), a=[1.0, 2.0], b=[1.0])


@pytest.mark.parametrize(
    "build",
    [
        lambda: Greater("x", "a", "a"),
        lambda: Greater("x", "a", "b", smallest=1.0),
        lambda: Greater("x", "a", "b", log=False, smallest=0.0),
        lambda: Ratio("x", "a", "b", at_least=0.0),
        lambda: AtLeast("x", "a", math.inf),
        lambda: AtMost("x", "a", 0.0, log=True),
        lambda: NonInferior("x", "a", "a", margin=0.1),
        lambda: NonInferior("x", "a", "b", margin=0.0),
        lambda: Equivalent("x", "a", "b", margin=-1.0),
        lambda: Trend("x", "a", "b", sizes=SIZES[:2]),
        lambda: Trend("x", "a", "b", sizes=(*SIZES[:2], ("s", 9.0))),
        lambda: Trend("x", "a", "b", sizes=(*SIZES[:2], ("l", 0.0))),
        lambda: Trend("x", "a/s", "b", sizes=SIZES),
        lambda: All((GREATER,)),
        lambda: All((GREATER, GREATER)),
        lambda: All((GREATER, All((GREATER, TREND)))),
        lambda: Exact("x", "a", math.nan),
        lambda: Exact("x", "a", 1.0, tolerance=-1.0),
        lambda: Within("x", "a", 2.0, 1.0),
        lambda: Within("x", "a", -math.inf, math.inf),
        lambda: Within("x", "a@", 0.0, 1.0),
    ],
)
def test_rules_that_make_no_sense_are_refused(build):
    with pytest.raises(ReproError):
        build()
