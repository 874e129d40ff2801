"""The decay of weight-decay against a loop in NumPy, and its rules against other optimizers."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.claims import decide_all, gather
from repro.errors import ReproError

pytestmark = pytest.mark.usefixtures("quick_compile_module")

EXPERIMENT = catalogue.load("weight-decay")
M = sys.modules["repro.experiments.weight_decay"]
SMOKE = EXPERIMENT.presets["smoke"]


@pytest.fixture(scope="module")
def runs():
    return gather(EXPERIMENT, SMOKE, None)


def test_verdicts(runs):
    verdicts = decide_all(EXPERIMENT.claims_for(SMOKE), runs)
    assert {v.label for v in verdicts} == {"supported"}, [v.reason for v in verdicts if v.label != "supported"]
    assert {v.control_label for v in verdicts} == {"contradicted"}


def test_the_size_of_the_decay_and_not_only_its_ratio(runs):
    for arm, expected in (("adamw", 1.0), ("independent", 1.0), ("adam_l2", 0.01)):
        for value in runs.values("relative_decay", f"{arm}@sd100").values():
            assert value == pytest.approx(expected, rel=0.05)
    assert max(runs.values("relative_decay", "adam_l2@sd1000").values()) < 0.0011
    for value in runs.values("decay_per_step", "adamw@lr0.01").values():
        assert value == pytest.approx(1e-3, rel=0.05)


def by_hand(g, arm, rate, decay, b1=0.9, b2=0.95):
    """Weights after training on gradients g [steps, n] from 1; decay is per unit of the rate."""
    w = np.ones(g.shape[1])
    m = v = np.zeros_like(w)
    for t, noise in enumerate(g, 1):
        x = noise + decay * w if arm in ("adam_l2", "sgd_l2") else noise
        m, v = b1 * m + (1 - b1) * x, b2 * v + (1 - b2) * x**2
        step = x if arm.startswith("sgd") else m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
        kept = {"adamw": 1 - rate * decay, "sgd_decoupled": 1 - rate * decay, "independent": 1 - M.RATE * decay}
        w = kept.get(arm, 1.0) * w - rate * step
    return w


def test_optimizers_by_hand():
    g = np.random.default_rng(0).normal(size=(20, 6)) * [1, 1, 1, 100, 100, 100]
    for arm in (arm.name for arm in M.ARMS):
        rule = M.optimizer(arm, jnp.float32(1e-2), jnp.float32(0.5))
        w = jnp.ones(6)
        state = rule.init(w)
        for noise in g:
            updates, state = rule.update(jnp.asarray(noise, jnp.float32), state, w)
            w = w + updates
        np.testing.assert_allclose(w, by_hand(g, arm, 1e-2, 0.5), rtol=2e-5, err_msg=arm)
        # Another arm's formula is told apart, but for SGD's two forms, which are one algorithm.
        other = {"adamw": "adam_l2", "independent": "adamw", "adam_l2": "adamw"}.get(arm, "adamw")
        assert np.abs(np.asarray(w) - by_hand(g, other, 1e-2, 0.5)).max() > 1e-3


def test_the_noise_is_shared_by_lanes_and_not_by_draws():
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    w = np.asarray(M.trained(keys, jnp.ones(1), jnp.array([1e-3, 2e-3]), arm="sgd_l2", steps=3, weights=4))
    assert w.shape == (2, 2, 2, 1, 4)
    moved = w[:, :, 0] - 1  # without decay: minus the rate times the sum of the noise
    np.testing.assert_allclose(moved[:, 1], 2 * moved[:, 0], rtol=1e-3)
    assert np.abs(moved[0] - moved[1]).min() > 0


def test_decay_per_step_by_hand():
    plain = np.full((1, 3), 2.0)
    w = np.stack([plain, plain * 0.99**7])
    assert M.decay_per_step(w, 7) == pytest.approx(-np.log(0.99))
    assert M.slope(np.array([1.0, 10, 100]), np.array([5.0, 0.5, 0.05])) == pytest.approx(-1)


def test_presets_without_a_meaning():
    assert EXPERIMENT.presets["cpu"].evidence and not SMOKE.evidence
    for change in ({"deviations": (1.0, 100.0)}, {"rates": (1e-3,)}, {"steps": 10}, {"draws": 0}):
        with pytest.raises(ReproError):
            dataclasses.replace(SMOKE, **change)
