"""The regression of second-moment-lag against a loop in NumPy, its closed forms, and its rules in made-up worlds."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.claims import Run, Runs, decide_all, gather
from repro.errors import ReproError

pytestmark = pytest.mark.usefixtures("quick_compile_module")

EXPERIMENT = catalogue.load("second-moment-lag")
M = sys.modules["repro.experiments.second_moment_lag"]
SMOKE = EXPERIMENT.presets["smoke"]


@pytest.fixture(scope="module")
def runs():
    return gather(EXPERIMENT, SMOKE, None)


def test_verdicts(runs):
    claims = EXPERIMENT.claims_for(SMOKE)
    for claim, verdict in zip(claims, decide_all(claims, runs), strict=True):
        assert verdict.control_label != "supported", verdict.control_reason
        if claim.tier == "M":
            assert verdict.label == "supported" and verdict.control_label == "contradicted", verdict.reason
        else:  # two seeds support nothing
            assert verdict.label in ("inconclusive", "not supported"), verdict.reason


def by_hand(seed, arm, preset, width, rate, b1=0.9, b2=0.999):
    """Excess risk before every step of Adam, `clip_update` included, in float64; data drawn as the experiment does."""
    key, steps = jax.random.key(seed), preset.quiet + preset.after

    def draw(i):
        return jax.random.normal(jax.random.fold_in(key, i), (preset.batch, 2 * width + 1))

    x_TBK = np.asarray(jax.vmap(draw)(jnp.arange(steps)), np.float64)
    side = round(width**0.5)
    w_a = np.asarray(jax.random.normal(jax.random.fold_in(key, steps), (side, side)), np.float64).ravel() / side
    w = np.concatenate([w_a, np.zeros(width)])
    m, v, excess = np.zeros_like(w), np.zeros_like(w), []
    for t, x in enumerate(x_TBK, 1):
        excess.append((w**2).sum())
        inputs = x[:, :-1] * (np.arange(2 * width) < width if t <= preset.quiet else 1)
        g = inputs.T @ (inputs @ w - 0.3 * x[:, -1]) / len(x)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
        if arm == "clip_update":
            u = np.concatenate([part / max(1, np.sqrt((part**2).mean())) for part in np.split(u, 2)])
        w = w - rate * u
    return np.array(excess)


@pytest.mark.parametrize("arm", ["b0.999", "clip_update"])
def test_the_regression_by_hand(runs, arm):
    excess = by_hand(1, arm, SMOKE, 64, 1e-2)
    place = f"{arm}@lr0.01/d64"
    after = excess[SMOKE.quiet :]
    assert runs.values("peak_excess", place)[1] == pytest.approx(after.max(), rel=1e-3)
    assert runs.values("lag", place)[1] == after.argmax()
    assert runs.values("excess_before", place)[1] == pytest.approx(excess[200:300].mean(), rel=1e-3)
    other = by_hand(1, "b0.999" if arm == "clip_update" else "clip_update", SMOKE, 64, 1e-2)
    assert other[SMOKE.quiet :].argmax() != after.argmax()


def test_the_share_removed(runs):
    for seed in SMOKE.test_seeds:
        over = {}
        for arm in ("b0.999", "stable", "adafactor_plain", "adafactor_update"):
            peak, before = (runs.values(m, f"{arm}@lr0.01/d64")[seed] for m in ("peak_excess", "excess_before"))
            over[arm] = peak - before
        for arm, base in (("stable", "b0.999"), ("adafactor_update", "adafactor_plain")):
            assert runs.values("removed", f"{arm}@lr0.01/d64")[seed] == pytest.approx(1 - over[arm] / over[base])
            assert runs.values("removed", f"{base}@lr0.01/d64")[seed] == 0


def test_rms_by_hand():
    g, second, moments = np.array([[3.0, -4.0]]), jnp.zeros((1, 2)), []
    for t in range(1, 4):
        second, rms = M.rms_of(second, jnp.asarray(g * t), t, 0.9)
        moments.append((g * t) ** 2)
        u = sum(0.1 * 0.9 ** (t - 1 - i) * square for i, square in enumerate(moments)) / (1 - 0.9**t)
        assert float(rms) == pytest.approx(float(np.sqrt((moments[-1] / u).mean())), rel=1e-5)
    assert float(M.rms_of(jnp.zeros((1, 2)), jnp.zeros((1, 2)), 5, 0.9)[1]) == 0  # a silent tensor has no RMS_t


@pytest.mark.parametrize(("arm", "b2"), [("b0.95", 0.95), ("b0.999", 0.999), ("clip_tight", 0.999)])
def test_the_closed_form_for_a_constant_gradient(runs, arm, b2):
    k = np.arange(1, M.CONSTANT_STEPS + 1)
    found = [runs.values("constant_update", f"{arm}@c{i}")[0] for i in k]
    np.testing.assert_allclose(found, (1 - 0.9**k) / np.sqrt(1 - b2**k), rtol=2e-4)
    assert np.abs(found / ((1 - 0.9**k) / (1 - b2**k)) - 1).max() > 0.3  # without the root


PEAKS = {"b0.9": 1.0, "b0.95": 1.1, "b0.99": 2.0, "b0.999": 5.0, "stable": 1.0}
SHARES = {"clip_gradient": 0.05, "clip_tight": 0.05, "stable": 0.9, "clip_update": 0.8}
SHARES |= {"adafactor_update": 0.9, "adafactor_gradient": 0.1}


def world(preset, peaks, shares):
    """Runs of every arm, rate and size with these peaks and shares, and a little noise of their own."""
    for width in preset.widths:
        for rate in preset.rates:
            for arm in (arm.name for arm in EXPERIMENT.arms):
                for seed in preset.test_seeds:
                    noise = 1 + 1e-3 * np.random.default_rng([seed, width, *map(ord, arm)]).normal()
                    metrics = {"removed": shares.get(arm, 0.0) * noise, "peak_excess": peaks.get(arm, 1.0) * noise}
                    metrics |= {"lag": 10, "rms_lag": 0, "rms_over_formula": 1.0, "rms_over_undebiased": 0.8}
                    yield Run(arm, seed, metrics, point=f"lr{rate:g}", size=f"d{width}")


def judged(name, runs, peaks, shares):
    preset = EXPERIMENT.presets[name]
    exact = [run for run in runs if run.point in ("constant", "state")]
    claims = EXPERIMENT.claims_for(preset)
    return [v for v in decide_all(claims, Runs([*exact, *world(preset, peaks, shares)])) if v.n is not None]


@pytest.mark.parametrize("name", ["cpu", "cpu-sizes"])
def test_claims_can_hold_and_can_fail(runs, name):
    for verdict in judged(name, runs, PEAKS, SHARES):
        assert verdict.label == "supported", (verdict.variant, verdict.reason)
        assert verdict.control_label != "supported", (verdict.variant, verdict.control_reason)
    # A world in which nothing overshoots and every remedy does what the claims deny it.
    flipped = {"b0.9": 1.3, "b0.95": 1.2, "b0.99": 1.1, "b0.999": 1.0, "stable": 2.0}
    other = judged(name, runs, flipped, {arm: 1 - share for arm, share in SHARES.items()})
    assert not any(verdict.label == "supported" for verdict in other)


def test_presets_without_a_meaning():
    assert EXPERIMENT.presets["cpu"].evidence and not SMOKE.evidence
    for change in ({"widths": (60,)}, {"rates": ()}, {"after": 10}, {"quiet": 10}, {"test_seeds": ()}):
        with pytest.raises(ReproError):
            dataclasses.replace(SMOKE, **change)
