import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.optim.geometry import participation, svd_entropy, top_direction, top_share

pytestmark = pytest.mark.usefixtures("quick_compile")


def with_values(values, rows=12, columns=8, seed=0):
    rng = np.random.default_rng(seed)
    n = len(values)
    u = np.linalg.qr(rng.normal(size=(rows, n)))[0]
    v = np.linalg.qr(rng.normal(size=(columns, n)))[0]
    return (u * values) @ v.T, u, v


def test_entropy_of_known_spectra():
    equal, one = with_values(np.full(8, 3.0))[0], with_values([2.0])[0]
    np.testing.assert_allclose(svd_entropy(np.stack([equal, one])), [1.0, 0.0], atol=1e-12)
    assert svd_entropy(np.zeros((3, 2))) == 0 and svd_entropy(np.ones((3, 1))) == 0
    values = np.array([3.0, 2.0, 1.0] + [0.0] * 5)
    p = values[:3] ** 2 / 14
    np.testing.assert_allclose(svd_entropy(with_values(values)[0]), -(p * np.log(p)).sum() / np.log(8))
    # Shares of s instead of s^2 are another number.
    q = values[:3] / 6
    assert abs(svd_entropy(with_values(values)[0]) + (q * np.log(q)).sum() / np.log(8)) > 0.05


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_participation_of_known_spectra(scale):
    values = np.array([3.0, 2.0, 1.0] + [0.0] * 5)
    x = np.stack([with_values(v)[0] * scale for v in (np.full(8, 3.0), np.array([2.0]), values)]).astype(np.float32)
    np.testing.assert_allclose(participation(x), [8, 1, 14**2 / (81 + 16 + 1)], rtol=1e-4)
    np.testing.assert_allclose(participation(np.swapaxes(x, 1, 2)), participation(x), rtol=1e-5)
    assert participation(jnp.zeros((4, 3))) == 0


def test_top_share_of_a_change():
    x, u, v = with_values(np.array([5.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.01]))
    found_u, found_v = jax.jit(top_direction)(x.astype(np.float32))
    np.testing.assert_allclose(abs(found_u @ u[:, 0]), 1, atol=1e-5)
    np.testing.assert_allclose(abs(found_v @ v[:, 0]), 1, atol=1e-5)
    outer, second = np.outer(u[:, 0], v[:, 0]), np.outer(u[:, 1], v[:, 1])
    share = lambda change: float(top_share(jnp.asarray(x, jnp.float32), jnp.asarray(change, jnp.float32)))
    np.testing.assert_allclose(
        [share(3 * outer), share(-outer), share(outer + second), share(u @ v.T), share(0 * outer)],
        [1, -1, 0.5**0.5, 8**-0.5, 0],
        atol=1e-4,
    )
