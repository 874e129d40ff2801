"""Closed forms: the gated unit, the norms and the soft-cap, each beside mistakes that the same check finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from repro.models import RMSNorm, layer_norm, rms_norm, soft_cap, swiglu

pytestmark = pytest.mark.usefixtures("quick_compile")

EPS = 1e-6
numbers = hnp.arrays(np.float32, (3, 6), elements=st.floats(-8, 8, width=32))
GAIN = np.float32([1.0, 0.5, -2.0, 0.0, 3.0, 1.0])
fixed = settings(deadline=None, derandomize=True, max_examples=60)


def close(got, want, tolerance=2e-6):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


def swiglu64(g, u):
    g, u = np.float64(g), np.float64(u)
    return g / (1 + np.exp(-g)) * u


@given(numbers, numbers)
@fixed
def test_swiglu(g, u):
    close(swiglu(g, u), swiglu64(g, u), 4e-6)


def test_swiglu_mistakes():
    g, u = np.float32([[-2.0, 0.5, 3.0], [1.0, -1.0, 0.0]]), np.float32([[1.0, -2.0, 0.5], [3.0, 2.0, 1.0]])
    for wrong in [swiglu64(u, g), g / (1 + np.exp(-g)), np.asarray(jax.nn.gelu(g)) * u, u / (1 + np.exp(-g))]:
        with pytest.raises(AssertionError):
            close(swiglu(g, u), wrong)


def rms64(x, gain, eps=EPS):
    x = np.float64(x)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def layer64(x, gain, eps=EPS, ddof=0):
    x = np.float64(x)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True, ddof=ddof) + eps) * gain


@given(numbers)
@fixed
def test_rms_norm(x):
    close(rms_norm(x, GAIN, EPS), rms64(x, GAIN))


@given(numbers)
@fixed
def test_layer_norm(x):
    # The difference from the mean is rounded, which eps = 1e-2 keeps from being blown up.
    close(layer_norm(x, GAIN, 1e-2), layer64(x, GAIN, 1e-2), 2e-5)


def test_norm_mistakes():
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32) * 1e-3 + 1e-3  # so small that eps counts
    close(rms_norm(x, GAIN, EPS), rms64(x, GAIN))
    close(layer_norm(x, GAIN, EPS), layer64(x, GAIN), 1e-5)
    x64 = np.float64(x)
    outside = x64 / (np.sqrt((x64 * x64).mean(-1, keepdims=True)) + EPS) * GAIN
    summed = x64 / np.sqrt((x64 * x64).sum(-1, keepdims=True) + EPS) * GAIN
    for wrong in [outside, summed, rms64(x, GAIN, 0), rms64(x, 1 + GAIN), layer64(x, GAIN)]:
        with pytest.raises(AssertionError):
            close(rms_norm(x, GAIN, EPS), wrong)
    for wrong in [layer64(x, GAIN, 0), layer64(x, GAIN, ddof=1), rms64(x, GAIN)]:
        with pytest.raises(AssertionError):
            close(layer_norm(x, GAIN, EPS), wrong, 1e-5)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_norms_compute_in_float32_and_keep_the_type(norm):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6)) * 300, jnp.bfloat16)
    got = norm(x, GAIN, EPS)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, norm(x.astype(jnp.float32), GAIN, EPS).astype(jnp.bfloat16))


def test_norms_of_zero_are_zero_with_a_finite_gradient():
    for norm in [rms_norm, layer_norm]:
        value, slope = jax.value_and_grad(lambda x, norm=norm: norm(x, jnp.ones(6), EPS).sum())(jnp.zeros(6))
        assert value == 0 and np.isfinite(slope).all()


def test_the_module_applies_its_gain():
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    module = RMSNorm(6, EPS)
    close(module(x), rms64(x, 1.0))
    module.gain[...] = jnp.asarray(GAIN)
    close(module(x), rms64(x, GAIN))


def test_soft_cap():
    z = np.linspace(-200, 200, 101).astype(np.float32)
    got = soft_cap(z, 50.0)
    close(got, 50 * np.tanh(np.float64(z) / 50))
    assert np.abs(got).max() <= 50
    slope = jax.vmap(jax.grad(lambda v: soft_cap(v, 50.0)))(jnp.asarray(z))
    close(slope, 1 - np.tanh(np.float64(z) / 50) ** 2)
    for wrong in [np.clip(z, -50, 50), 50 * np.tanh(np.float64(z)), np.tanh(np.float64(z) / 50)]:
        with pytest.raises(AssertionError):
            close(got, wrong)
