"""Labels over claims: control, Holm families, calibration, and the stored form."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest

from repro.claims import (
    ALPHA,
    AtLeast,
    Claim,
    Control,
    Equivalent,
    Exact,
    Greater,
    NonInferior,
    Run,
    Runs,
    Verdict,
    Within,
    decide,
    decide_all,
    swapped,
)
from repro.claims.verdict import label_of
from repro.errors import ReproError

RNG = np.random.default_rng(7)
NOISE = np.array([-0.03, 0.02, 0.01, -0.02, 0.03, -0.01, 0.015, -0.015])
GREATER = Greater("x", "a", "b")


def claim(criterion=GREATER, control=None, tier="D", **fields):
    control = control or Control("arms exchanged", swapped(criterion))
    return Claim("K2-1", "source", "a has more than b", "", "", tier, criterion, control, **fields)


def runs_of(**arms):
    return Runs(Run(arm, seed, {"x": v}) for arm, values in arms.items() for seed, v in enumerate(values))


DOUBLE = runs_of(a=2 * np.exp(NOISE), b=np.ones(8), c=np.exp(NOISE))


def test_reason_has_the_numbers():
    verdict = decide(claim(), DOUBLE)
    assert verdict.label == "supported"
    numbers = (
        "x of a over b is 2 times",
        "(95 % interval 1.9",
        "over 8 seeds",
        "above 1",
        "p = 0.00391",
        "is 1.021 times",
    )
    for text in numbers:
        assert text in verdict.reason, verdict.reason
    assert (verdict.claim_id, verdict.variant, verdict.control_label) == ("K2-1", "", "contradicted")
    assert "the opposite passes" in verdict.control_reason


def test_small_effects_keep_their_digits():
    verdict = decide(claim(), runs_of(a=1.0004 * np.exp(NOISE / 1000), b=np.ones(8)))
    assert "is 1.0004 times" in verdict.reason


def test_a_control_that_passes_withdraws_support():
    control = Control("mechanism switched off", Greater("x", "a", "c"))
    verdict = decide(claim(control=control), DOUBLE)
    assert verdict.label == "inconclusive" and verdict.control_label == "supported"
    assert "but the control (mechanism switched off) passed too" in verdict.reason


def test_a_supported_control_does_not_hide_a_contradiction():
    verdict = decide(claim(Greater("x", "b", "a")), DOUBLE)
    assert (verdict.label, verdict.control_label) == ("contradicted", "supported")


def test_control_of_another_tier():
    harmful = Control("harmful arm", NonInferior("x", "a", "b", margin=0.1))
    verdict = decide(claim(NonInferior("x", "c", "b", margin=0.1), harmful), DOUBLE)
    assert (verdict.label, verdict.control_label) == ("supported", "contradicted")


def test_mechanism_claims_have_no_p():
    checks = Runs([Run("right", 0, {"error": 0.0}), Run("wrong", 0, {"error": 0.3})])
    wrong = Control("wrong formula", Exact("error", "wrong", 0.0))
    verdict = decide(claim(Exact("error", "right", 0.0), wrong, tier="M"), checks)
    assert verdict.label == "supported" and verdict.control_label == "contradicted"
    assert verdict.n is verdict.p is verdict.p_holm is verdict.mde is verdict.interval is None
    assert "holds in the one run" in verdict.reason and "0 exactly" in verdict.reason


def test_scale_claims_are_only_stated():
    stated = Claim("K2-1", "s", "statement", "", "", "S", None, None, reason_untestable="needs a trillion tokens")
    verdict = decide(stated, Runs())
    assert verdict.label == "not testable at this scale" and verdict.reason == "needs a trillion tokens"


def test_holm_runs_over_the_d_claims_of_a_family():
    # Seven of eight signs agree and the odd one is smallest: p = 2 / 256; three times that passes, seven do not.
    d = np.array([-0.1, 1, 1.1, 1.2, 0.9, 1.3, 1, 1.1])
    runs = runs_of(a=np.exp(d), b=np.ones(8)) + runs_of(c=np.exp(NOISE))
    weak = [claim(Greater("x", "c", "b"), variant=str(i), family="one") for i in range(6)]
    alone = decide(claim(family="one"), runs)
    assert alone.label == "supported" and alone.p == alone.p_holm == 2 / 256
    three = decide_all([claim(family="one"), *weak[:2]], runs)
    assert three[0].label == "supported" and three[0].p_holm == pytest.approx(6 / 256)
    seven = decide_all([claim(family="one"), *weak], runs)
    assert seven[0].label == "inconclusive" and seven[0].p_holm == pytest.approx(14 / 256)
    assert "after Holm" in seven[0].reason and [v.variant for v in seven[1:]] == [str(i) for i in range(6)]
    others = [dataclasses.replace(c, family="two") for c in weak]
    assert decide_all([claim(family="one"), *others], runs)[0].p_holm == 2 / 256


def test_holm_adjusts_the_opposite_too():
    d = -np.array([-0.1, 1, 1.1, 1.2, 0.9, 1.3, 1, 1.1])
    runs = runs_of(a=np.exp(d), b=np.ones(8), c=np.exp(NOISE))
    weak = [claim(Greater("x", "c", "b"), variant=str(i)) for i in range(6)]
    assert decide(claim(), runs).label == "contradicted"
    assert decide_all([claim(), *weak], runs)[0].label == "not supported"


def test_an_unusable_claim_counts_in_its_family():
    runs = runs_of(a=2 * np.exp(NOISE), b=np.ones(8), c=[math.nan] * 8)
    good, bad = decide_all([claim(), claim(Greater("x", "c", "b"), variant="nan")], runs)
    assert good.p_holm == 2 / 256 and bad.label == "inconclusive" and bad.p_holm is None


NULLS = [
    (AtLeast("x", "a", 0.0), lambda n: RNG.normal(size=(n, 8))),
    (AtLeast("x", "a", 0.0), lambda n: RNG.standard_t(2, size=(n, 8))),
    (NonInferior("x", "a", "b", margin=0.5), lambda n: 0.5 + RNG.normal(size=(n, 8))),
    (Equivalent("x", "a", "b", margin=0.5), lambda n: 0.5 + 0.1 * RNG.normal(size=(n, 8))),
]


@pytest.mark.parametrize(("criterion", "draw"), NULLS)
def test_calibration_at_the_bound(criterion, draw):
    """With symmetric noise around the bound itself, neither label comes more often than alpha."""
    trials, counts = 1000, Counter()
    for noise in draw(trials):
        finding = criterion.find(runs_of(a=noise, b=np.zeros(8)), ALPHA)
        counts[label_of(finding, finding.p, finding.p_opposite, ALPHA)] += 1
    for label in ("supported", "contradicted"):
        assert counts[label] / trials <= ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / trials)


def test_absent_runs_are_an_error():
    with pytest.raises(ReproError, match="'b'"):
        decide(claim(), runs_of(a=[1.0, 2.0]))
    with pytest.raises(ReproError, match="alpha"):
        decide(claim(), DOUBLE, alpha=1.0)


EXTREMES = [
    decide(claim(), DOUBLE),
    decide(claim(), runs_of(a=[2.0], b=[1.0])),
    decide(claim(), runs_of(a=[math.nan, 1.0], b=[1.0, 1.0])),
    decide(
        claim(Within("x", "a", 0.0, 1.0), Control("empty range", Within("x", "a", 8.0, 9.0)), tier="M"),
        runs_of(a=[math.inf, -math.inf]),
    ),
]


@pytest.mark.parametrize("verdict", EXTREMES)
def test_json_round_trip(verdict):
    text = json.dumps(verdict.to_json(), allow_nan=False)
    assert Verdict.from_json(json.loads(text)) == verdict


def test_the_last_bit_of_a_logarithm_is_no_difference():
    verdict = EXTREMES[0]
    low, high = verdict.interval
    up = dataclasses.replace(
        verdict, effect=math.nextafter(verdict.effect, 9), interval=(low, math.nextafter(high, 9)),
        per_seed={seed: math.nextafter(value, 9) for seed, value in verdict.per_seed.items()},
    )  # fmt: skip
    assert up != verdict and verdict.differences(up) == []
    for change in ({"effect": verdict.effect * (1 + 1e-11)}, {"label": "inconclusive"}, {"n": 3}, {"p": None},
                   {"interval": None}, {"interval": (low, high + 1e-9)}, {"per_seed": {}}, {"reason": "none"}):  # fmt: skip
        assert verdict.differences(dataclasses.replace(verdict, **change)) == list(change)
    unknown = dataclasses.replace(verdict, effect=math.nan)
    assert unknown.differences(unknown) == [] and unknown.differences(verdict) == ["effect"]


def test_json_keeps_nan_and_refuses_strangers():
    fields = dataclasses.replace(EXTREMES[0], effect=math.nan).to_json()
    assert fields["effect"] == "nan" and math.isnan(Verdict.from_json(fields).effect)
    for bad in ({**fields, "extra": 1}, {**fields, "label": "proved"}, {**fields, "p": "small"}, {}):
        with pytest.raises(ReproError):
            Verdict.from_json(bad)


@pytest.mark.parametrize(
    "fields",
    [
        {"tier": "X"},
        {"statement": ""},
        {"criterion": None},
        {"control": None},
        {"control": Control("itself", GREATER)},
        {"tier": "M"},
        {"criterion": Exact("x", "a", 1.0)},
        {"reason_untestable": "too large"},
        {"tier": "S"},
        {"tier": "S", "criterion": None, "control": None},
    ],
)
def test_claims_that_do_not_fit_together(fields):
    with pytest.raises(ReproError):
        dataclasses.replace(claim(), **fields)
