"""Singular values against NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.models import ModelConfig
from repro.optim import Layout
from repro.train.monitors.spectrum import matrix_entries, spectra
from repro.train.monitors.spectrum import spectrum as eager_spectrum

pytestmark = pytest.mark.usefixtures("quick_compile")

spectrum = jax.jit(eager_spectrum)


def expected(w):
    sigma = np.linalg.svd(np.asarray(w, np.float64), compute_uv=False)
    p = sigma**2 / (sigma**2).sum()
    p = p[p > 0]
    return sigma[0], (sigma**2).sum() / sigma[0] ** 2, -(p * np.log(p)).sum() / np.log(len(sigma))


def of_sigmas(sigmas, rows=6, columns=9):
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (rows, columns))
    return (u[:, : len(sigmas)] * sigmas) @ v[: len(sigmas)]


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_spectrum_equals_the_singular_value_decomposition(scale):
    wide = np.stack([of_sigmas([3, 2, 1, 1, 0.5, 0.1]), np.random.default_rng(0).normal(size=(6, 9))]) * scale
    for w in (wide, np.swapaxes(wide, 1, 2)):  # one program each
        found = spectrum(jnp.asarray(w, jnp.float32))
        for i in range(2):
            for value, wanted in zip(found, expected(w[i]), strict=True):
                assert float(value[i]) == pytest.approx(wanted, rel=2e-5)
    sigma = np.array([3, 2, 1, 1, 0.5, 0.1])
    wrong = sigma / sigma.sum()  # p of sigma in place of sigma^2
    assert abs(-(wrong * np.log(wrong)).sum() / np.log(6) - float(spectrum(jnp.asarray(wide[0])).entropy)) > 0.1


def test_ends_of_the_scale():
    orthogonal, one = spectrum(jnp.asarray(of_sigmas([2.0] * 6))), spectrum(jnp.asarray(of_sigmas([2.0])))
    np.testing.assert_allclose([*orthogonal], [2.0, 6.0, 1.0], rtol=1e-5)
    np.testing.assert_allclose([*one], [2.0, 1.0, 0.0], atol=2e-5)
    np.testing.assert_array_equal([*spectrum(jnp.zeros((3, 4)))], [0.0, 0.0, 0.0])
    np.testing.assert_allclose([*spectrum(jnp.array([[3.0], [4.0]]))], [5.0, 1.0, 1.0], rtol=1e-6)
    assert np.isnan([*spectrum(jnp.full((3, 4), jnp.nan))]).all()
    assert np.isnan([*spectrum(jnp.full((3, 4), jnp.inf))]).all()


def test_spectra_of_a_tree_take_the_worst_expert_of_each_layer():
    rng = np.random.default_rng(2)
    heads, experts, gain = rng.normal(size=(2, 3, 2, 4)), rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3))
    tree = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32),
        {"blocks": {"q_DHK": heads, "up_EDF": experts, "gain": gain}, "head_DZ": rng.normal(size=(4, 6))},
    )
    layouts = {
        "blocks": {
            "q_DHK": Layout("matrix", inputs=(1,), outputs=(2, 3), head=2, layer=0),
            "up_EDF": Layout("matrix", inputs=(2,), outputs=(3,), expert=1, layer=0),
            "gain": Layout("norm", layer=0),
        },
        "head_DZ": Layout("head"),
    }
    found = jax.jit(lambda: spectra(tree, layouts))()
    entries = matrix_entries(ModelConfig(layers=2), tree, layouts)
    assert [e.name for e in entries] == [
        "blocks/q_DHK[0]",
        "blocks/q_DHK[1]",
        "blocks/up_EDF[0]",
        "blocks/up_EDF[1]",
        "head_DZ",
    ]
    whole = [expected(w.reshape(3, 8)) for w in heads]
    of_experts = [np.array([expected(w) for w in layer]) for layer in experts]
    worst = [(e[:, 0].max(), e[:, 1].min(), e[:, 2].min()) for e in of_experts]
    wanted = np.array([*whole, *worst, expected(np.asarray(tree["head_DZ"]))])
    for i, values in enumerate(found):
        np.testing.assert_allclose(values, wanted[:, i], rtol=2e-5)
