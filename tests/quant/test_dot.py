from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.quant import POLICIES, RECIPES, Accumulator, GemmPolicy, Recipe, dot, fake_quantize, hadamard, round_to

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


def test_fp32_and_bf16_are_the_products_and_their_gradients():
    close(results("fp32"), (product(X, W), product(DY, W.T), product(X.T, DY)))
    x, w, dy = (round_to(a, "bf16", overflow="ieee") for a in (X, W, DY))
    close(results("bf16"), (product(x, w), product(dy, w.T), product(x.T, dy)))
    with pytest.raises(AssertionError):  # operands rounded twice, by way of a shorter format
        x, w, dy = (round_to(a, "e5m6") for a in (x, w, dy))
        close(results("bf16"), (product(x, w), product(dy, w.T), product(x.T, dy)))


def test_half_precision_overflows_as_the_standard_says():
    x = np.float32([[1e5, 1.0]])
    assert np.isinf(dot(x, np.eye(2, dtype=np.float32)[:, :1], GemmPolicy(fprop_x="fp16", fprop_w="fp16"))).all()
    assert np.isinf(dot(x * np.float32(3.4e33), np.ones((2, 1), np.float32), "bf16")).all()


def plain(dtype):
    """What a linear layer costs that knows nothing of policies."""

    @jax.custom_vjp
    def layer(x, w):
        return forward(x, w)[0]

    def matmul(a, b):
        return jnp.matmul(a.astype(dtype), b.astype(dtype), precision="highest", preferred_element_type=jnp.float32)

    def forward(x, w):
        return matmul(x, w), (x.astype(dtype), w)

    layer.defvjp(forward, lambda saved, dy: (matmul(dy, saved[1].T), matmul(saved[0].T, dy)))
    return layer


@pytest.mark.parametrize(("name", "dtype"), [("fp32", jnp.float32), ("bf16", jnp.bfloat16)])
def test_policies_without_scales_cost_what_a_plain_product_costs(name, dtype):
    def costs(layer, *operands):
        def step(x, w, dy):
            y, back = jax.vjp(layer, x, w)
            return y, back(dy)

        found = jax.jit(step).lower(*operands).compile().cost_analysis()
        return {name: found.get(name, 0.0) for name in ("flops", "bytes accessed", "transcendentals")}

    own = costs(lambda x, w: dot(x, w, name), X, W, DY)
    assert own == costs(plain(dtype), X, W, DY)
    assert own != costs(lambda x, w: dot(x, w, "mxfp8"), X, W, DY)


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


@pytest.mark.parametrize("name", ["v3_fp8", "v3_fp8_e5m2_grads", "fp8_tensor", "dgrad_e2m1_block"])
def test_small_gradients_are_not_floored(name):
    _, back = jax.vjp(lambda x, w: dot(x, w, name), X, W)
    large, small = back(DY), back(DY * np.float32(2.0**-40))
    for a, b in zip(large, small, strict=True):
        np.testing.assert_array_equal(np.asarray(a) * np.float32(2.0**-40), b)


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
@pytest.mark.parametrize(("kind", "shape"), [("tile", (1, 128)), ("block", (128, 128))])
def test_the_dgrad_policies_quantise_one_operand_of_one_product(element, kind, shape):
    y, dx, dw = results(f"dgrad_{element}_{kind}")
    recipe = Recipe(element, shape, "fp32", "amax", None, 2.0**-80, "nearest_even")
    close([y, dx, dw], (product(X, W), product(fake_quantize(DY, recipe), W.T), product(X.T, DY)))
    with pytest.raises(AssertionError):
        close([dx], [product(DY, W.T)])


def test_what_other_named_policies_quantise():
    """Written out operand by operand: (element, blocks) or a name, in the order of the fields."""

    def said(operand):
        if operand in (None, "bf16", "fprop"):
            return operand
        recipe = RECIPES[operand] if isinstance(operand, str) else operand
        return recipe.element, recipe.block_shape, recipe.scale_format

    tile, block, mx = ("e4m3", (1, 128), "fp32"), ("e4m3", (128, 128), "fp32"), (1, 32)
    e5m2_tile, tensor, e5m2_tensor = ("e5m2", (1, 128), "fp32"), ("e4m3", None, "fp32"), ("e5m2", None, "fp32")
    table = {
        "v3_fp8": (tile, block, tile, block, tile, tile),
        "v3_fp8_block_dgrad": (tile, block, block, block, tile, tile),
        "v3_fp8_e5m2_grads": (tile, block, e5m2_tile, block, tile, e5m2_tile),
        "fp8_tensor": (tensor,) * 6,
        "fp8_hybrid_tensor": (tensor, tensor, e5m2_tensor, tensor, tensor, e5m2_tensor),
        "mxfp4_w": ("bf16", ("e2m1", mx, "e8m0"), "bf16", "fprop", "bf16", "bf16"),
        "k3_qat": (("e4m3", mx, "e8m0"), ("e2m1", mx, "e8m0"), "bf16", "fprop", "fprop", "bf16"),
    }
    for name, operands in table.items():
        p = POLICIES[name]
        fields = (p.fprop_x, p.fprop_w, p.dgrad_dy, p.dgrad_w, p.wgrad_x, p.wgrad_dy)
        assert tuple(said(o) for o in fields) == operands, name


def test_fprop_operands_are_those_of_the_forward_pass():
    y, dx, dw = results("k3_qat")
    x, w, dy = fake_quantize(X, "mxfp8"), fake_quantize(W, "mxfp4", axis=0), round_to(DY, "bf16")
    close([y, dx, dw], (product(x, w), product(dy, w.T), product(x.T, dy)))
    close(results("mxfp4_w"), [product(round_to(X, "bf16"), w), dx, product(round_to(X, "bf16").T, dy)])
    requantised = replace(POLICIES["k3_qat"], dgrad_w="mxfp4", wgrad_x="mxfp8")
    for shared, own in zip((dx, dw), results(requantised)[1:], strict=True):
        with pytest.raises(AssertionError):  # the wrong variant: other blocks than those of the forward pass
            close([own], [shared])

    # The derivative of the fake-quantised layer, as autodiff has it.
    def layer(x, w):
        return product(fake_quantize(x, "mxfp8"), fake_quantize(w, "mxfp4", axis=0))

    exact_gradients = replace(POLICIES["k3_qat"], dgrad_dy=None, wgrad_dy=None)
    close(results(exact_gradients)[1:], jax.vjp(layer, X, W)[1](DY))
    # The noise is that of the forward pass too: the unit matrix shows the weights of both.
    noisy = GemmPolicy(fprop_w=replace(RECIPES["mxfp4"], rounding="stochastic"), dgrad_w="fprop")
    y, back = jax.vjp(lambda x: dot(x, W[:F], noisy, key=jax.random.key(1)), jnp.eye(F))
    np.testing.assert_array_equal(back(jnp.eye(F))[0], y.T)


def kept_bytes(policy):
    """What a layer keeps between its passes besides w."""
    saved = jax.eval_shape(lambda x, w: jax.vjp(lambda x, w: dot(x, w, policy), x, w)[1], X, W)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved)) - W.nbytes


def test_a_cache_keeps_codes_and_is_quantised_again():
    """DeepSeek-V3, section 3.3.3: FP8 tiles of x are kept, and made tiles of the other direction for Wgrad."""
    source, cached = results("v3_fp8"), results("v3_fp8_cached")
    close(cached[:2], source[:2])
    tiles = fake_quantize(X, "fp8_tile")
    dy = fake_quantize(DY, POLICIES["v3_fp8"].wgrad_dy, axis=0)
    close(cached[2:], [product(fake_quantize(tiles, "fp8_tile", axis=0).T, dy)])
    with pytest.raises(AssertionError):  # the wrong variant: the source is quantised
        close(cached[2:], source[2:])
    own = replace(POLICIES["v3_fp8"], cache_x="mxfp8")
    close(results(own), [*source[:2], product(fake_quantize(fake_quantize(X, "mxfp8"), "fp8_tile", axis=0).T, dy)])
    block_cache = replace(
        POLICIES["bf16"], cache_x=replace(RECIPES["fp8_block"])
    )  # stored in FP8, not multiplied in it
    close(results(block_cache)[:2], results("bf16")[:2])
    close(results(block_cache)[2:], [product(round_to(fake_quantize(X, "fp8_block"), "bf16").T, round_to(DY, "bf16"))])
    small = 64  # bytes of scales of a few numbers and of what stands for a type
    assert kept_bytes("v3_fp8") - X.nbytes < small
    assert kept_bytes("v3_fp8_cached") - X.size - 4 * T * 2 < small
    assert kept_bytes("bf16") - 2 * X.size < small


def test_the_error_of_quantising_a_cache_again():
    """Of normal numbers 2.56 % become 3.61 % (in one sample) with float32 scales; powers of two change nothing."""
    x = np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32)
    eye = jnp.eye(128)

    def wgrad_x(recipe, cache_x):
        policy = GemmPolicy(fprop_x=recipe, wgrad_x=recipe, cache_x=cache_x)
        return jax.grad(lambda w: (dot(x, w, policy) * eye).sum())(eye).T  # of the unit matrix: x as Wgrad sees it

    for recipe, once, again in (("fp8_tile", 0.0256, 0.0361), ("fp8_tile_pow2", 0.0263, 0.0263)):
        assert error(wgrad_x(recipe, None), x) == pytest.approx(once, abs=1e-3)
        assert error(wgrad_x(recipe, "fprop"), x) == pytest.approx(again, abs=1e-3)
    np.testing.assert_array_equal(wgrad_x("fp8_tile_pow2", "fprop"), fake_quantize(x, "fp8_tile_pow2"))


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
        (
            lambda: GemmPolicy(wgrad_x=replace(RECIPES["fp8_tile"], block_shape=(128, 1))),
            "across the axis that a product",
        ),
        (lambda: GemmPolicy(fprop_w="fprop"), "counterpart in the forward pass"),
        (lambda: GemmPolicy(cache_x="fprop"), "leave out cache_x"),
        (lambda: GemmPolicy(fprop_x="mxfp8", wgrad_x="fprop", cache_x="bf16"), "lost to wgrad_x"),
        (lambda: replace(POLICIES["nvfp4"], wgrad_x="fprop"), "Hadamard transform comes before"),
        (
            lambda: replace(POLICIES["k3_qat"], accumulator=Accumulator(14, 32, 128)),
            "cannot take operands from 'fprop'",
        ),
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


def test_promotion_brings_the_sums_of_fourteen_bits_back_to_float32():
    """Over 1024 products of like sign 14 bits lose what a float32 sum keeps; promoted every 128 they lose an eighth."""
    x, w = (jnp.abs(jax.random.normal(jax.random.key(i), shape)) for i, shape in ((0, (4, 1024)), (1, (1024, 4))))
    exact, cut, promoted = (
        dot(x, w, POLICIES[f"fp8_tensor{end}"]) for end in ("", "_14bit", "_14bit_promoted")
    )  # fmt: skip
    error = lambda y: float(jnp.abs(y / exact - 1).max())
    assert 4 * error(promoted) < error(cut) < 1e-2 and error(promoted) > 0
