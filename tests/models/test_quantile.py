"""Quantiles against NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.models.quantile import quantile

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 0.999, 1.0])
def test_interpolates_between_order_statistics(q):
    x = np.random.default_rng(0).normal(size=(3, 497)).astype(np.float32)
    x[1] = np.round(x[1])  # ties
    x[2] *= -1e-30
    found = jax.jit(lambda x: quantile(x, q))(x)
    np.testing.assert_allclose(found, np.quantile(x.astype(np.float64), q, axis=1), rtol=1e-5, atol=1e-37)
    if q == 0.9:
        assert not np.allclose(found, np.quantile(x, q, axis=1, method="lower"), rtol=1e-4), "not interpolated"


def test_what_is_masked_has_no_say():
    x = np.random.default_rng(0).normal(size=(2, 40)).astype(np.float32)
    mask = np.arange(40) % 3 == 0
    hidden = np.where(mask, x, np.nan)
    hidden[:, 1] = np.inf
    found = quantile(jnp.asarray(hidden), 0.9, mask)
    np.testing.assert_allclose(found, np.quantile(x[:, mask].astype(np.float64), 0.9, axis=1), rtol=1e-5)


def test_zeros_infinities_and_nan():
    x = jnp.array([[-0.0, 0.0, -1.0, 1.0, 2.0], [-jnp.inf, -1, 0, 3, jnp.inf], [0, 1, jnp.nan, 2, 3]])
    np.testing.assert_array_equal(quantile(x, 0.5), [0.0, 0.0, np.nan])
    np.testing.assert_array_equal(quantile(x, 1.0), [2.0, np.inf, np.nan])
    np.testing.assert_array_equal(quantile(x, 0.0), [-1.0, -np.inf, np.nan])
    np.testing.assert_array_equal(quantile(jnp.full((1, 1), 3.5), 0.3), [3.5])
