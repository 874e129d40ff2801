from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.quant import POLICIES, Accumulator, GemmPolicy, dot, fake_quantize, hadamard, round_to

pytestmark = pytest.mark.usefixtures("quick_compile")

RNG = np.random.default_rng(0)
T, D, F = 96, 160, 144  # ragged for blocks of 128, and for none of 16


def sample(*shape):
    return (RNG.normal(size=shape) * 2.0 ** RNG.integers(-3, 4, (shape[0], 1))).astype(np.float32)


X, W, DY = sample(T, D), sample(D, F), sample(T, F)


def product(a, b):
    return jnp.matmul(a, b, precision="highest")


def results(policy, key=None):
    y, back = jax.vjp(lambda x, w: dot(x, w, policy, key=key), X, W)
    return y, *back(DY)


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-5 * np.abs(np.asarray(other)).max())


def by_hand(policy, x_axis=-1, w_axis=0, dy_axis=-1, wt_axis=1, token_axis=0):
    """The three products written out, for policies of deterministic recipes."""
    y = product(fake_quantize(X, policy.fprop_x, axis=x_axis), fake_quantize(W, policy.fprop_w, axis=w_axis))
    dx = product(fake_quantize(DY, policy.dgrad_dy, axis=dy_axis), fake_quantize(W, policy.dgrad_w, axis=wt_axis).T)
    dw = product(
        fake_quantize(X, policy.wgrad_x, axis=token_axis).T, fake_quantize(DY, policy.wgrad_dy, axis=token_axis)
    )
    return y, dx, dw


def test_fp32_is_the_product_and_its_gradients():
    close(results("fp32"), (product(X, W), product(DY, W.T), product(X.T, DY)))
    rounded = [round_to(a, "bf16") for a in (X, W, DY)]
    close(results("bf16"), (product(rounded[0], rounded[1]), product(rounded[2], rounded[1].T),
                            product(rounded[0].T, rounded[2])))  # fmt: skip


@pytest.mark.parametrize("name", ["v3_fp8", "v3_fp8_block_dgrad", "mxfp8", "mxfp4"])
def test_every_operand_is_quantised_from_its_source_along_the_summed_axis(name):
    policy = POLICIES[name]
    close(results(name), by_hand(policy))
    for wrong in (dict(x_axis=0), dict(dy_axis=0), dict(token_axis=-1)):
        if "dy_axis" in wrong and name == "v3_fp8_block_dgrad":  # square blocks do not see the axis
            continue
        with pytest.raises(AssertionError):
            close(results(name), by_hand(policy, **wrong))
    if name.startswith("mx"):  # nor do the weights of the others
        for wrong in (dict(w_axis=1), dict(wt_axis=0)):
            with pytest.raises(AssertionError):
                close(results(name), by_hand(policy, **wrong))


def test_block_dgrad_differs_in_the_gradient_of_x_alone():
    tile, block = results("v3_fp8"), results("v3_fp8_block_dgrad")
    np.testing.assert_array_equal(tile[0], block[0])
    np.testing.assert_array_equal(tile[2], block[2])
    assert (np.asarray(tile[1]) != np.asarray(block[1])).any()


def test_small_gradients_are_not_floored():
    _, back = jax.vjp(lambda x, w: dot(x, w, "v3_fp8"), X, W)
    large, small = back(DY), back(DY * np.float32(2.0**-40))
    for a, b in zip(large, small, strict=True):
        np.testing.assert_array_equal(np.asarray(a) * np.float32(2.0**-40), b)


def test_nvfp4_follows_its_recipe():
    key = jax.random.key(3)
    y, dx, dw = results("nvfp4", key)
    close([y], [product(fake_quantize(X, "nvfp4"), fake_quantize(W, "nvfp4_2d", axis=0))])

    calm = replace(POLICIES["nvfp4"], dgrad_dy="nvfp4", wgrad_dy="nvfp4")
    _, dx_calm, dw_calm = results(calm)
    close([dx_calm], [product(fake_quantize(DY, "nvfp4"), fake_quantize(W, "nvfp4_2d", axis=1).T)])
    left, right = hadamard(X, axis=0), hadamard(DY, axis=0)
    close([dw_calm], [product(fake_quantize(left, "nvfp4", axis=0).T, fake_quantize(right, "nvfp4", axis=0))])

    # Noise: a function of the key, different in the two products, without bias.
    np.testing.assert_array_equal(results("nvfp4", key)[1], dx)
    gradient = jax.jit(lambda key: results("nvfp4", key)[1:])
    mean = np.mean([gradient(k)[0] for k in jax.random.split(key, 32)], axis=0)
    exact = product(DY, fake_quantize(W, "nvfp4_2d", axis=1).T)
    assert np.linalg.norm(mean - exact) < 0.3 * np.linalg.norm(np.asarray(dx) - exact)
    assert np.linalg.norm(np.asarray(dw) - product(X.T, DY)) < 0.3 * np.linalg.norm(product(X.T, DY))


def test_axes_and_types():
    x, w = X.reshape(4, 24, D), W.reshape(D, 12, 12)
    y = dot(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), "mxfp8")
    assert y.shape == (4, 24, 12, 12) and y.dtype == jnp.float32
    np.testing.assert_array_equal(dot(x, w, "mxfp8").reshape(T, F), dot(X, W, "mxfp8"))
    assert dot(X[0], W, "mxfp8").shape == (F,)
    gradients = jax.grad(lambda x, w: dot(x, w, "mxfp8").sum(), (0, 1))(
        jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float16)
    )
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float16]
    stacked = jax.vmap(lambda x: dot(x, W, "v3_fp8"))(x)
    close([stacked.reshape(T, F)], [np.concatenate([dot(part, W, "v3_fp8") for part in x])])


def test_what_is_refused():
    cases = [
        (lambda: dot(X, W.T, "fp32"), "do not match"),
        (lambda: dot(X, W, "fp8"), "known are fp32"),
        (lambda: dot(X, W, "nvfp4"), "needs key="),
        (lambda: dot(X, W, "mxfp8", key=jax.random.key(0)), "leave out key="),
        (lambda: GemmPolicy(fprop_x="e4m3"), "has no scales"),
        (lambda: GemmPolicy(fprop_x="fp8"), "known are fp8_tensor"),
        (lambda: GemmPolicy(fprop_x="fp8_delayed"), "cannot give a scale"),
        (lambda: dot(X, W, GemmPolicy(accumulator=Accumulator(14, 32, 128))), "exact products"),
        (lambda: dot(X, W, replace(POLICIES["v3_fp8"], accumulator=Accumulator(14, 32, 96))), "does not divide"),
    ]
    for call, message in cases:
        with pytest.raises(ReproError, match=message):
            call()


def error(ours, exact):
    return np.linalg.norm(np.asarray(ours) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["v3_fp8", "mxfp8", "nvfp4"])
def test_the_accumulator_applies_scales_where_a_tensor_core_does(name):
    policy = replace(POLICIES[name], dgrad_dy=None, wgrad_dy=None)  # the forward pass alone, and without noise
    exact = dot(X, W, policy)
    assert 0 < error(dot(X, W, replace(policy, accumulator=Accumulator(14, 32, 128))), exact) < 2e-3
    assert error(dot(X, W, replace(policy, accumulator=Accumulator(23, 32, 128))), exact) < 3e-6


def test_the_accumulator_serves_the_backward_pass_too():
    few = results(replace(POLICIES["v3_fp8"], accumulator=Accumulator(14, 32, 128)))
    for ours, exact in zip(few, results("v3_fp8"), strict=True):
        assert 0 < error(ours, exact) < 2e-3
