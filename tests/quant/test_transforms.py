"""Equal bits however a quantiser is called: on all recipes, through every transformation of JAX."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.quant import POLICIES, RECIPES, QTensor, dot, fake_quantize, quantize, round_to

pytestmark = pytest.mark.usefixtures("quick_compile")

FAST = ["fp8_tile", "fp8_block", "fp8_tensor", "mxfp4", "nvfp4", "int8_channel"]
RNG = np.random.default_rng(0)


def sample(*shape):
    """Rows of very different size, with zeros of both signs and subnormals of float32."""
    x = np.ldexp(RNG.normal(size=shape), RNG.integers(-30, 30, (*shape[:-1], 1))).astype(np.float32)
    x.flat[:4] = 0.0, -0.0, 2.0**-149, -(2.0**-130)
    return x


def same(ours, theirs):
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", FAST)
def test_scan_vmap_of_any_axis_and_jit_are_a_loop(name):
    x = sample(3, 5, 20, 70)
    call = functools.partial(fake_quantize, recipe=name)
    loop = np.stack([[call(x[i, j]) for j in range(5)] for i in range(3)])
    same(jax.vmap(jax.vmap(call))(x), loop)
    moved = jax.vmap(jax.vmap(call, in_axes=2, out_axes=2), in_axes=1, out_axes=1)(x.transpose(2, 0, 3, 1))
    same(moved, loop.transpose(2, 0, 3, 1))
    scanned = jax.lax.scan(lambda carry, part: (carry, jax.vmap(call)(part)), 0, x)[1]
    same(scanned, loop)
    same(jax.lax.map(jax.vmap(call), x), loop)
    same(jax.jit(jax.vmap(jax.vmap(lambda x: quantize(x, name).dequantize())))(x), loop)


@pytest.mark.parametrize("name", ["fp8_tile", "fp8_tile_pow2", "mxint8", "nvfp4_2d"])
def test_bits_do_not_depend_on_sixty_four_bit_mode(name):
    x = sample(40, 70)
    expected, codes = fake_quantize(x, name, axis=0), quantize(x, name, axis=0).codes
    with jax.enable_x64(True):
        for wide in (x, x.astype(np.float64), jnp.asarray(x.astype(np.float64))):
            y = fake_quantize(wide, name, axis=0)
            assert y.dtype == jnp.float32
            same(y, expected)
            assert (quantize(wide, name, axis=0).codes == codes).all()
        gradient = jax.grad(lambda x: (fake_quantize(x, name) * 300.3).sum())(jnp.asarray(x.astype(np.float64)))
        assert gradient.dtype == jnp.float64 and (gradient == np.float32(300.3)).all()


def test_rounding_and_dots_in_sixty_four_bit_mode():
    x, key = sample(50, 8), jax.random.key(0)
    names = ("bf16", "e4m3", "e8m0", "int8", "nf4")
    expected = {name: round_to(x, name) for name in names}
    noise = round_to(x, "e2m1", rounding="stochastic", key=key)
    policies = ("bf16", "v3_fp8_cached")

    def gradients(name):
        keyed = {"key": key} if POLICIES[name].stochastic else {}
        return jax.value_and_grad(lambda w: dot(small, w, name, **keyed).sum())(w)

    small, w = x[:, :4] / 1e6, jnp.asarray(RNG.normal(size=(4, 6)), jnp.float32)
    before = [gradients(name) for name in policies]
    with jax.enable_x64(True):
        for name, y in expected.items():
            np.testing.assert_array_equal(round_to(x, name), y)
        same(round_to(x, "e2m1", rounding="stochastic", key=key), noise)
        for name, (value, gradient) in zip(policies, before, strict=True):
            again = gradients(name)
            assert again[0].dtype == again[1].dtype == jnp.float32
            np.testing.assert_allclose(again[0], value, rtol=1e-5)
            np.testing.assert_allclose(again[1], gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max())


@pytest.mark.parametrize("axis", (-7, -2))
def test_many_axes(axis):
    x = sample(2, 1, 3, 2, 1, 5, 40)
    for name in ("mxfp4", "fp8_block", "nvfp4"):
        y = fake_quantize(x, name, axis=axis)
        flat = np.moveaxis(x, (axis, -1), (-1, -2))
        if name != "nvfp4":  # whose tensor scale is one for all of x
            parts = np.stack([fake_quantize(part, name) for part in flat.reshape(-1, *flat.shape[-2:])])
            same(np.moveaxis(parts.reshape(flat.shape), (-1, -2), (axis, -1)), y)
        same(quantize(x, name, axis=axis).dequantize(), y)


@pytest.mark.parametrize("name", ["fp8_tile_pow2", "fp8_block", "fp8_tensor", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", [(1,), (1, 129), (127, 257)])
def test_odd_shapes(name, shape):
    x = sample(*shape) if np.prod(shape) > 8 else np.ones(shape, np.float32)
    across = (RECIPES[name].block_shape or (1, 1))[0]
    if len(shape) == 1 and across != 1:
        with pytest.raises(ReproError, match="at least two axes"):
            fake_quantize(x, name)
        return
    y = fake_quantize(x, name)
    assert y.shape == shape and y.dtype == jnp.float32 and np.isfinite(y).all()
    same(quantize(x, name).dequantize(), y)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["fp8_tile", "mxfp4", "nvfp4"])
def test_all_half_precision_inputs(name, dtype):
    """Every finite pattern of bfloat16 and of float16, as blocks of neighbours and as blocks of strangers."""
    x = np.arange(2**16).astype(np.uint16).view(dtype).astype(np.float32)
    x = np.where(np.isfinite(x), x, 0).astype(np.float32)
    for order in (np.arange(2**16), RNG.permutation(2**16)):
        wide = x[order].reshape(256, 256)
        narrow = jnp.asarray(wide).astype(dtype)
        same(narrow.astype(jnp.float32), wide)
        y = np.asarray(fake_quantize(narrow, name))
        same(y, fake_quantize(wide, name))
        assert np.isfinite(y).all() and (np.sign(y) * np.sign(wide) >= 0).all()


def test_arrays_that_are_not_contiguous_lists_and_integers():
    x = sample(70, 40)
    same(fake_quantize(x.T[::2], "mxfp8"), fake_quantize(np.ascontiguousarray(x.T[::2]), "mxfp8"))
    same(fake_quantize([[1.0, 2.5, -7.0]], "mxfp4"), np.float32([[1.0, 2.0, -6.0]]))
    same(fake_quantize(np.int32([[1, 5, -7]]), "mxfp4"), np.float32([[1.0, 4.0, -6.0]]))
    same(round_to(True, "e4m3"), np.float32(1.0))
    assert dot([[1.0, 2.0]], [[3.0], [4.0]], "fp32").shape == (1, 1)


def test_sharded_arrays_give_the_same_bits():
    mesh = jax.make_mesh((2,), ("rows",))
    x = sample(64, 96)
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows")))
    for name in FAST:
        same(jax.jit(lambda x, name=name: fake_quantize(x, name))(split), fake_quantize(x, name))


def test_derivatives_of_derivatives_and_linear_maps():
    x = sample(4, 40)
    x[:, :4] = 1

    def loss(x):
        return (fake_quantize(x, "mxfp8") ** 3).sum()

    x_hat = np.asarray(fake_quantize(x, "mxfp8"))
    np.testing.assert_allclose(jax.grad(loss)(x), 3 * x_hat**2, rtol=1e-6)
    product = jax.jvp(jax.grad(loss), (x,), (np.ones_like(x),))[1]
    np.testing.assert_allclose(product, 6 * x_hat, rtol=1e-6)
    y, linear = jax.linearize(lambda x: fake_quantize(x, "nvfp4"), x)
    same(linear(x * 7), x * 7)
    (transposed,) = jax.linear_transpose(linear, x)(x)
    same(transposed, x)


def test_noise_is_one_stream_under_every_transformation():
    recipe = replace(RECIPES["mxfp4"], rounding="stochastic")
    x, keys = sample(3, 4, 40), jax.random.split(jax.random.key(0), 3)
    loop = np.stack([fake_quantize(part, recipe, key=key) for part, key in zip(x, keys, strict=True)])
    call = lambda x, key: fake_quantize(x, recipe, key=key)
    same(jax.vmap(call)(x, keys), loop)
    same(jax.jit(jax.vmap(call))(x, keys), loop)
    same(jax.lax.map(lambda pair: call(*pair), (x, keys)), loop)
    old_style = jax.random.PRNGKey(0)
    same(call(x[0], old_style), call(x[0], jax.random.wrap_key_data(old_style)))


def test_dots_of_nothing_and_of_one_number():
    for name in ("v3_fp8_cached", "k3_qat"):
        for rows, inner, columns in ((0, 40, 3), (5, 0, 3), (1, 1, 1)):
            x, w = np.ones((rows, inner), np.float32), np.ones((inner, columns), np.float32)
            y, back = jax.vjp(lambda x, w, name=name: dot(x, w, name), x, w)
            assert y.shape == (rows, columns) and (y == inner).all()
            assert [g.shape for g in back(y)] == [x.shape, w.shape]


def test_a_dot_under_scan_vmap_and_remat_is_a_loop():
    x, w = sample(3, 6, 40) / 1e6, sample(3, 40, 8) / 1e6

    def loss(x, w):
        return (dot(x, w, "v3_fp8_cached") ** 2).sum()

    loop = [jax.grad(loss, (0, 1))(x[i], w[i]) for i in range(3)]
    expected = [np.stack(parts) for parts in zip(*loop, strict=True)]
    for wrapped in (loss, jax.checkpoint(loss)):
        gradient = jax.grad(wrapped, (0, 1))
        for ours in (jax.vmap(gradient)(x, w), jax.lax.map(lambda pair, f=gradient: f(*pair), (x, w))):
            for one, other in zip(ours, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_scales_of_another_format_are_refused():
    q = quantize(sample(4, 64), "mxfp4")
    wrong = replace(q, scale=jnp.full(q.scale.shape, 1.5, jnp.float32))
    with pytest.raises(ReproError, match="stores its scales as float8_e8m0fnu"):
        wrong.dequantize()
    with pytest.raises(ReproError, match="pass the source"):
        dot(q, np.ones((64, 2), np.float32), "mxfp4")
    same(jax.jit(QTensor.dequantize)(q), q.dequantize())
