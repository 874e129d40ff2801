import numpy as np
import pytest

from repro.quant import FORMATS, RECIPES, Recipe, decode, fake_quantize, quantize

pytestmark = pytest.mark.usefixtures("quick_compile")

PLAIN = Recipe("nf4", (1, 64), "fp32", "amax", None, 2.0**-80, "nearest_even")
X = (np.random.default_rng(0).normal(size=(50, 1000)) * np.exp(np.random.default_rng(1).normal(size=(50, 1)))).astype(
    np.float32
)


def blocks(x):
    return np.pad(x, ((0, 0), (0, 24))).reshape(50, 16, 64)


def test_codes_are_the_nearest_entries_of_x_over_its_largest():
    q = quantize(X, PLAIN)
    largest = np.abs(blocks(X)).max(-1)
    np.testing.assert_array_equal(q.scale, largest)
    ratio = (blocks(X) / largest[..., None]).reshape(50, 1024)[:, :1000]
    nearest = np.abs(ratio[..., None].astype(np.float64) - FORMATS["nf4"].values()).argmin(-1)
    assert np.mean(np.asarray(q.codes) == nearest) == 1.0
    np.testing.assert_array_equal(quantize(X, "nf4").codes, q.codes)
    extremes = np.abs(blocks(X)) == largest[..., None]
    assert np.isin(np.asarray(q.codes)[extremes.reshape(50, 1024)[:, :1000]], [0, 15]).all()


def test_double_quantisation_stores_a_scale_in_eight_bits_and_a_little():
    q = quantize(X, "nf4")
    mean, second = q.tensor_scale
    assert q.scale.dtype == FORMATS["e4m3"].dtype and second.shape == (-(-50 * 16 // 256),)
    bits_per_number = (8 * q.scale.size + 32 * second.size + 32) / (q.scale.size * 64)
    assert abs(bits_per_number - 0.127) < 0.002  # QLoRA, section 3
    largest = np.abs(blocks(X)).max(-1)
    np.testing.assert_allclose(mean, largest.astype(np.float64).mean(), rtol=1e-5)
    centred = np.pad((largest - np.asarray(mean)).ravel(), (0, 224)).reshape(-1, 256)
    np.testing.assert_allclose(second, np.abs(centred).max(1) / 448, rtol=1e-5)
    stored = np.asarray(decode(q.scale, "e4m3")).ravel() * np.repeat(second, 256)[:800] + np.asarray(mean)
    stored = np.maximum(stored, 0)
    error = np.abs(stored.reshape(50, 16) - largest)
    assert (error <= np.repeat(np.abs(centred).max(1), 256)[:800].reshape(50, 16) / 16).all()
    np.testing.assert_allclose(
        q.dequantize(),
        np.asarray(decode(q.codes, "nf4")) * np.repeat(stored.reshape(50, 16), 64, 1)[:, :1000],
        rtol=1e-6,
    )
    np.testing.assert_allclose(fake_quantize(X, "nf4"), q.dequantize(), rtol=1e-6)


def test_double_quantisation_costs_little_and_huge_and_zero_blocks_are_finite():
    def error(recipe):
        return np.linalg.norm(np.asarray(fake_quantize(X, recipe)) - X) / np.linalg.norm(X)

    assert error(PLAIN) < error("nf4") < 1.1 * error(PLAIN)
    assert 0.08 < error(PLAIN) < 0.11
    x = np.zeros((4, 128), np.float32)
    x[0, :64] = 3e38
    x[1, 64:] = -3e38
    assert np.isfinite(fake_quantize(x, RECIPES["nf4"])).all()
    codes = np.asarray(quantize(x, "nf4").codes)
    assert (codes[2:] == 7).all() and (codes[0, :64] == 15).all()
