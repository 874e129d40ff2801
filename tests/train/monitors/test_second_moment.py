"""RMS_t of every optimizer that has a second moment, against moments that are kept by hand."""

import dataclasses
import math
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.optim import Layout
from repro.train import Numbers, TrainConfig
from repro.train.monitors import MONITORS, MonitorConfig
from repro.train.optimizer import OptimizerConfig, build

pytestmark = pytest.mark.usefixtures("quick_compile")

catalogue.load("second-moment-lag")
rms_of = sys.modules["repro.experiments.second_moment_lag"].rms_of

LAYOUTS = {"gain": Layout("norm", layer=0), "w": Layout("matrix", inputs=(1,), outputs=(2,), layer=0)}
SHAPES = {"gain": (2, 3), "w": (2, 3, 4)}
STEPS, B2 = 4, 0.9
# A quiet start, then a large gradient: a second moment that is out of date underestimates it.
SIZES = (0.1, 0.1, 0.1, 3.0)


def gradients(step):
    rng = np.random.default_rng(step)
    return {name: (SIZES[step] * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def run(optimizer, **settings):
    """The observation of the last step."""
    optim = settings.pop("optim", {})
    config = TrainConfig(optimizer=optimizer, optim=OptimizerConfig(b2=B2, **optim), **settings)
    params = {name: jnp.full(shape, 0.5) for name, shape in SHAPES.items()}
    tx = build(optimizer, config.optim, LAYOUTS, 0.01, 0.2, config.decay)
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(STEPS):
        grads = jax.tree.map(jnp.asarray, gradients(step))
        before = params
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return SimpleNamespace(
        config=config, grads=grads, updates=updates, params=before, opt_state=state, layouts=LAYOUTS,
        numbers=Numbers(0.01, 0.2, math.inf, 0.0),
    )  # fmt: skip


def measured(seen):
    found = jax.jit(lambda: MONITORS["staleness"].measure(MonitorConfig(), seen))()
    return {name: np.asarray(value) for name, value in found.items()}


def reference(change=lambda g, step: g, b2=B2, debias=True, current=True):
    """RMS_t [P] of the last step from its definition; `debias` or `current` off are wrong variants."""
    found = []
    for name in SHAPES:
        v = np.zeros(SHAPES[name])
        for step in range(STEPS):
            g = change(gradients(step)[name].astype(np.float64), step)
            old, v = v, b2 * v + (1 - b2) * g**2
        used, t = (v, STEPS) if current else (old, STEPS - 1)
        used = used / (1 - b2**t) if debias else used
        found += [np.sqrt(np.mean(g[i] ** 2 / np.maximum(used[i], 1e-16))) for i in range(2)]
    return np.array(found)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("adamw", {}),
        ("adamw", {"optim": {"state": "bf16"}}),
        ("adam", {"decay": "l2"}),
        ("adamw", {"optim": {"gradient_clip": 0.3}}),
        ("stable_adamw", {}),
    ],
)
def test_adam_and_its_kin(optimizer, settings):
    found = measured(run(optimizer, **settings))
    change = lambda g, step: g
    if settings.get("decay") == "l2":  # the parameters hardly move
        change = lambda g, step: g + 0.2 * 0.5
    if "gradient_clip" in settings.get("optim", {}):
        norm = [math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients(s).values())) for s in range(STEPS)]
        change = lambda g, step: g * min(1, 0.3 / norm[step])
    loose = 0.05 if settings.get("decay") == "l2" or "state" in settings.get("optim", {}) else 1e-4
    np.testing.assert_allclose(found["staleness"], reference(change), rtol=loose)
    assert found["staleness_max"] == found["staleness"].max()
    for wrong in (reference(change, debias=False), reference(change, current=False)):
        assert np.abs(wrong / found["staleness"] - 1).max() > 0.3


def test_it_is_the_statistic_of_the_experiment_on_lag():
    second = jnp.zeros(SHAPES["w"][1:])
    for step in range(STEPS):
        second, rms = rms_of(second, jnp.asarray(gradients(step)["w"][0]), step + 1, B2)
    assert float(rms) == pytest.approx(float(measured(run("adamw"))["staleness"][2]), rel=1e-5)


def test_stable_adamw_keeps_the_same_number():
    seen = run("stable_adamw")
    (state,) = [s for s in jax.tree.leaves(seen.opt_state, is_leaf=lambda x: hasattr(x, "rms")) if hasattr(s, "rms")]
    np.testing.assert_allclose(measured(seen)["staleness"][2:], np.asarray(state.rms["w"]).ravel(), rtol=1e-6)


@pytest.mark.parametrize(("optimizer", "b2"), [("muon", B2), ("shampoo", 0.95)])
def test_matrices_without_a_second_moment(optimizer, b2):
    found = measured(run(optimizer))["staleness"]
    np.testing.assert_allclose(found[:2], reference(b2=b2)[:2], rtol=1e-4)
    assert found[2:].tolist() == [-1, -1]


def test_one_second_moment_per_tensor():
    found = measured(run("adalayer"))["staleness"]
    for i in range(2):
        v = 0.0
        for step in range(STEPS):
            g = gradients(step)["w"][i].astype(np.float64)
            v = B2 * v + (1 - B2) * (g**2).mean()
        assert found[2 + i] == pytest.approx(np.sqrt((g**2).mean() / (v / (1 - B2**STEPS))), rel=1e-4)


def test_adafactor_from_its_rows_and_columns():
    found = measured(run("adafactor"))["staleness"]
    for i in range(2):
        r, c = np.zeros(3), np.zeros(4)
        for step in range(STEPS):
            kept, square = 1 - (step + 1.0) ** -0.8, gradients(step)["w"][i].astype(np.float64) ** 2
            r, c = kept * r + (1 - kept) * square.mean(1), kept * c + (1 - kept) * square.mean(0)
        assert found[2 + i] == pytest.approx(np.sqrt((square * r.mean() / np.outer(r, c)).mean()), rel=1e-4)


def test_soap_in_its_own_basis():
    found = measured(run("soap"))["staleness"]
    np.testing.assert_allclose(found[:2], reference(b2=0.95)[:2], rtol=1e-4)
    for i in range(2):
        g = gradients(0)["w"][i].astype(np.float64)  # the first step sets the basis and changes nothing else
        left, right = np.linalg.eigh(g @ g.T)[1], np.linalg.eigh(g.T @ g)[1]
        v = np.zeros((3, 4))
        for step in range(1, STEPS):
            p = left.T @ gradients(step)["w"][i] @ right
            v = B2 * v + (1 - B2) * p**2
        wanted = np.sqrt((p**2 / (v / (1 - B2 ** (STEPS - 1)))).mean())
        # Beside the diagonal the basis of a rank that is not full is free, so only about.
        assert found[2 + i] == pytest.approx(wanted, rel=0.2)


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "signum"])
def test_no_second_moment_no_metric(optimizer):
    seen = run(optimizer, decay="none")
    assert measured(seen) == {}
    sizes = MONITORS["optimizer_state"].measure(MonitorConfig(), seen)
    assert set(sizes) == {"first_moment_max", "first_moment_rms"} and float(sizes["first_moment_max"]) > 0


def test_sizes_of_moments_as_they_are_stored():
    exact = MONITORS["optimizer_state"].measure(MonitorConfig(), run("adamw"))
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        for name, g in gradients(step).items():
            m[name], v[name] = 0.9 * m[name] + 0.1 * g, B2 * v[name] + (1 - B2) * g.astype(np.float64) ** 2
    every_m, every_v = (np.concatenate([x.ravel() for x in tree.values()]) for tree in (m, v))
    wanted = {
        "first_moment_max": np.abs(every_m).max(), "first_moment_rms": np.sqrt((every_m**2).mean()),
        "second_moment_max": every_v.max(), "second_moment_min": every_v.min(), "second_moment_zeros": 0.0,
    }  # fmt: skip
    assert set(exact) == set(wanted)
    for name, value in wanted.items():
        assert float(exact[name]) == pytest.approx(value, rel=1e-5), name
    seen = run("adamw", optim={"state": "int8"})
    found = MONITORS["optimizer_state"].measure(MonitorConfig(), seen)
    assert float(found["second_moment_zeros"]) > 0, "linear codes lose what is below 1/254 of the largest"
    assert 0 < float(found["state_scale_min"]) < float(found["state_scale_max"])
    assert dataclasses.asdict(seen.config)["optim"]["state"] == "int8"
