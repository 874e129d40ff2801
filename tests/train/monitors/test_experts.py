"""Experts by their routes, and channels of activations."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from repro.models import ModelConfig, MoEConfig
from repro.train.monitors import MONITORS, MonitorConfig
from repro.train.monitors.activation import channel_outliers

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = dataclasses.replace(ModelConfig(), moe=MoEConfig(experts=4, active=2, ffn=8))


def measured(routes, **output):
    output = SimpleNamespace(**({"stats": SimpleNamespace(moe=None), "buffers": {}} | output), routes=routes)
    seen = SimpleNamespace(output=output, config=SimpleNamespace(model=MODEL))
    return MONITORS["experts"].measure(MonitorConfig(), seen)


def test_load_and_violation_by_hand():
    routes = jnp.array([[[[0, 1], [0, 2], [0, 1]]], [[[0, 1], [2, 3], [1, 2]]]])  # two layers of three tokens
    found = measured(routes)
    np.testing.assert_allclose(found["expert_loads"], np.array([[3, 2, 1, 0], [1, 2, 2, 1]]) / 6)
    np.testing.assert_allclose(found["expert_violations"], [3 / 1.5 - 1, 2 / 1.5 - 1], rtol=1e-6)
    assert float(found["expert_drop"]) == 0 and "expert_bias_range" not in found
    dropped = measured(routes.at[1, 0, 0].set(jnp.array([-1, 7])))
    assert float(dropped["expert_drop"]) == pytest.approx(2 / 6), "pairs that name no expert"
    assert measured(None) == {}


def test_bias_range_and_activations():
    buffers = {"blocks": {"ffn": {"bias_E": jnp.array([[0.0, 0.1, 0, 0], [0.2, -0.3, 0, 0]])}}}
    hidden = jnp.arange(8.0).reshape(2, 4)
    found = measured(
        jnp.zeros((2, 1, 1, 2), jnp.int32),
        buffers=buffers,
        stats=SimpleNamespace(moe=SimpleNamespace(expert_hidden_max=hidden)),
    )
    assert float(found["expert_bias_range"]) == pytest.approx(0.5)
    np.testing.assert_array_equal(found["expert_hidden"], hidden)


def test_channels_that_stand_out():
    x = np.random.default_rng(0).normal(size=(2, 400, 16)).astype(np.float32)
    x[1, :, 3] *= 20
    ratio, count = channel_outliers(jnp.asarray(x))
    rms = np.sqrt((x.astype(np.float64) ** 2).mean(1))
    np.testing.assert_allclose(ratio, rms.max(1) / np.median(rms, 1), rtol=1e-5)
    assert count.tolist() == [0, 1] and channel_outliers(jnp.zeros((1, 4, 4)))[0].tolist() == [0.0]


def test_percentiles_of_magnitudes():
    states = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 50, 8)), jnp.float32)
    found = MONITORS["channels"].measure(MonitorConfig(), SimpleNamespace(probe=SimpleNamespace(hidden=states)))
    for name, q in (("activation_p50", 0.5), ("activation_p99", 0.99), ("activation_p999", 0.999)):
        wanted = np.quantile(np.abs(np.asarray(states, np.float64)).reshape(3, -1), q, axis=1)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4)
    assert float(found["activation_p999_max"]) == pytest.approx(float(found["activation_p999"].max()))
