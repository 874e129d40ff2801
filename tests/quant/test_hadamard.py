import jax
import numpy as np
import pytest
import scipy.linalg

from repro.errors import ReproError
from repro.quant import fake_quantize, hadamard
from repro.quant.hadamard import TRANSFORMER_ENGINE_SIGNS

pytestmark = pytest.mark.usefixtures("quick_compile")

X = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)


@pytest.mark.parametrize("signs", [TRANSFORMER_ENGINE_SIGNS, (1, -1, 1, 1)])
def test_it_is_the_product_with_a_signed_hadamard_matrix(signs):
    n = len(signs)
    matrix = np.diag(signs) @ scipy.linalg.hadamard(n) / np.sqrt(n)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)
    theirs = (X.reshape(6, -1, n).astype(np.float64) @ matrix).reshape(X.shape)
    np.testing.assert_allclose(hadamard(X, signs=signs), theirs, atol=1e-6)
    np.testing.assert_allclose(hadamard(X.T, axis=0, signs=signs), theirs.T, atol=1e-6)
    np.testing.assert_array_equal(jax.jit(lambda x: hadamard(x, signs=signs))(X), hadamard(X, signs=signs))


def test_it_cancels_in_a_product_and_spreads_an_outlier():
    w = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(hadamard(X)) @ np.asarray(hadamard(w)).T, X @ w.T, atol=2e-5)
    x = np.ones((1, 16), np.float32)
    x[0, 3] = 100
    plain = np.asarray(fake_quantize(x, "mxfp4"))
    spread = np.asarray(hadamard(x))
    assert (plain == 0).sum() == 15 and np.abs(spread).max() / np.abs(spread).min() < 2
    # The wrong variant: without signs a constant group becomes an outlier instead of losing one.
    assert np.count_nonzero(np.asarray(hadamard(np.ones((1, 16)), signs=(1,) * 16))) == 1


def test_what_is_refused():
    with pytest.raises(ReproError, match="does not divide"):
        hadamard(X[:, :20])
    with pytest.raises(ReproError, match="power of four"):
        hadamard(X, signs=(1, 1))
    with pytest.raises(ReproError, match="power of four"):
        hadamard(X, signs=(1, 2, 1, 1))
