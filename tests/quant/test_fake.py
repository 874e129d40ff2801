import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.quant import RECIPES, fake_quantize, quantize

pytestmark = pytest.mark.usefixtures("quick_compile")

X = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
HUGE = np.linspace(-3e30, 3e30, 256, dtype=np.float32).reshape(4, 64)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp8_delayed"])
def test_the_gradient_goes_straight_through(name):
    _, back = jax.vjp(lambda x: fake_quantize(x, name), X)
    np.testing.assert_array_equal(back(HUGE)[0], HUGE)
    _, forward = jax.jvp(lambda x: fake_quantize(x, name), (X,), (HUGE,))
    np.testing.assert_array_equal(forward, HUGE)


def test_the_gradient_never_passes_through_a_cast():
    # A cast to E4M3 would make 300 of it 288 and 1000 NaN.
    cotangent = np.full(X.shape, 1000.3, np.float32)
    _, wrong = jax.vjp(lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), X)
    assert np.isnan(wrong(cotangent)[0]).all()
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(X, dtype)
        y, back = jax.vjp(lambda x: fake_quantize(x, "fp8_tensor"), x)
        (gradient,) = back(jnp.asarray(cotangent))
        assert y.dtype == jnp.float32 and gradient.dtype == dtype
        np.testing.assert_array_equal(gradient, jnp.asarray(cotangent).astype(dtype))


def test_the_gradient_is_zero_where_clipped_if_asked():
    x = X * 3
    scale = 0.01  # of E4M3, so that 4.48 is the largest
    kept = np.abs(x) <= np.float32(448) * np.float32(scale)
    assert 0 < (~kept).sum() < kept.size

    def loss(x, clip):
        return fake_quantize(x, "fp8_delayed", scale=scale, clip_gradient=clip).sum()

    np.testing.assert_array_equal(jax.grad(loss)(x, True), kept)
    np.testing.assert_array_equal(jax.grad(loss)(x, False), np.ones_like(x))
    # The floor rule clips the top quarter of an octave of E2M1.
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 7.9, 6.0, 6.1, -7.0
    mask = jax.grad(lambda x: fake_quantize(x, "mxfp4", clip_gradient=True).sum())(x)
    np.testing.assert_array_equal(mask[0, :5], [0, 1, 0, 0, 1])


def test_works_under_jit_grad_vmap_and_remat():
    def loss(x):
        return (fake_quantize(x, "mxfp8") ** 2).sum()

    expected = 2 * np.asarray(quantize(X, "mxfp8").dequantize())
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(X), expected)
    np.testing.assert_array_equal(jax.grad(jax.checkpoint(loss))(X), expected)
    np.testing.assert_array_equal(jax.vmap(jax.grad(lambda x: loss(x[None])))(X), expected)
