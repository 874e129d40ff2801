import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import ReproError
from repro.quant import FORMATS, RECIPES, QTensor, Recipe, fake_quantize, quantize

GOLDEN = np.load(Path(__file__).parent / "data" / "torchao_blocks.npz")
LARGEST = np.finfo(np.float32).max
COMPUTED = [name for name in RECIPES if name != "fp8_delayed"]
EXACT = [name for name in COMPUTED if name != "nf4"]  # the mean of double quantisation is a sum


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def same(ours, theirs):
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(bits(ours)[~nan], bits(theirs)[~nan])


def block_slices(shape, recipe, axis):
    """The index of every block, from the definition."""
    sizes = [1] * len(shape)
    if recipe.block_shape is None:
        sizes = list(shape)
    else:
        across, along = recipe.block_shape
        other = (-2 if axis == -1 else -1) % len(shape)
        sizes[axis] = along or shape[axis]
        if across != 1:
            sizes[other] = across or shape[other]
    starts = [range(0, n, size) for n, size in zip(shape, sizes, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(start, start + size) for start, size in zip(corner, sizes, strict=True))


def nearest(mag, fmt):
    """Magnitudes in float64 rounded to nearest even, saturated."""
    exponent = np.maximum(np.frexp(mag)[1] - 1, fmt.min_exponent)
    step = np.ldexp(1.0, exponent - fmt.mantissa_bits)
    return np.minimum(np.rint(mag / step) * step, fmt.max)


def floor_log2(x):
    return math.frexp(x)[1] - 1


def is_power(x):
    return math.frexp(x)[0] == 0.5


def exponent_of(amax, fmt, rule):
    if amax == 0:
        return -127
    amax = float(amax)
    if rule == "rceil":
        product = float(np.float32(amax) * np.float32(1 / fmt.max))
        exponent = -127 if product == 0 else floor_log2(product) + (not is_power(product))
    elif rule == "even":
        exponent = floor_log2(amax + 2.0 ** (floor_log2(amax) - fmt.mantissa_bits - 1)) - floor_log2(fmt.max)
    else:
        exponent = floor_log2(amax) - floor_log2(fmt.max) + (rule == "ceil" and not is_power(amax))
    return min(max(exponent, -127), 127)


def expected(x, recipe, axis):
    """x_hat by loops over blocks, in NumPy: float32 where the definition says so, float64 where it is exact."""
    fmt = FORMATS[recipe.element]
    x_hat = np.empty_like(x)
    six = np.float32(1 / fmt.max)
    if recipe.tensor_scale == "amax":
        encode = np.float32(448 * fmt.max) / max(np.abs(x).max(), np.float32(recipe.amax_floor))
        decode = np.float32(1) / encode
    for index in block_slices(x.shape, recipe, axis):
        mag = np.abs(x[index])
        amax = max(mag.max(), np.float32(recipe.amax_floor)) if recipe.tensor_scale is None else mag.max()
        if recipe.power_of_two:
            power = 2.0 ** exponent_of(amax, fmt, recipe.scale_rule)
            y = np.minimum(nearest(mag.astype(np.float64) / power, fmt) * power, LARGEST)
        else:
            if recipe.tensor_scale == "amax":
                inner = np.float32(nearest(np.float64(amax * (encode * six)), FORMATS["e4m3"]))
                scale = inner * decode
                ratio = mag * (np.float32(1) / scale if inner > 0 else np.float32(0))
            else:
                scale = amax / np.float32(fmt.max)
                ratio = mag / scale
            y = np.minimum((nearest(ratio.astype(np.float64), fmt).astype(np.float32) * scale), LARGEST)
        x_hat[index] = np.copysign(y, x[index])
    return np.where(x_hat == 0, np.float32(0), x_hat) if fmt.fixed_point else x_hat


def gaussian(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def hard(shape=(40, 300), spread=30):
    """Rows of very different size; zeros, exact powers of two, float32 subnormals, the largest float32."""
    rng = np.random.default_rng(7)
    x = np.ldexp(rng.normal(size=shape), rng.integers(-spread, spread, (shape[0], 1))).astype(np.float32)
    x[0], x[1] = 0, -0.0
    x[2] = np.where(rng.random(shape[1]) < 0.5, 1.0, -2.0)
    x[3, ::3] = 0
    x[4] = (np.arange(shape[1]) * 12345 + 1).astype(np.uint32).view(np.float32)
    x[5, 7] = 448 * 2.0**-3
    return x


def with_the_ends(x):
    x = x.copy()
    x[6] = LARGEST * np.where(np.arange(x.shape[1]) % 2, -1, 0.3).astype(np.float32)
    x[7] = np.ldexp(x[7], -140)
    x[8, 1:] = np.float32(2.0**127)
    return x


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", EXACT)
def test_every_recipe_is_its_definition_bit_for_bit(name, axis):
    recipe = RECIPES[name]
    for x in (hard(), with_the_ends(hard())):
        theirs = expected(x, recipe, axis)
        assert np.isfinite(theirs).all()
        same(fake_quantize(x, recipe, axis=axis), theirs)
        if axis == 0:
            continue
        q = quantize(x, recipe)
        same(q.dequantize(), theirs)
        same(jax.jit(lambda x: quantize(x, recipe).dequantize())(x), theirs)
        assert q.shape == x.shape and q.codes.dtype == FORMATS[recipe.element].dtype
        assert q.scale.dtype == FORMATS[recipe.scale_format].dtype
        assert q.axis == -1


RULES = [
    (element, rule) for element in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8")
    for rule in ("floor", "ceil", "rceil", "even")
]  # fmt: skip


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("element", "rule"), RULES)
def test_scale_rules(element, rule):
    recipe = Recipe(element, (1, 32), "e8m0", rule, None, 0.0, "nearest_even")
    fmt = FORMATS[element]
    # Each block is one number: around powers of two, around the largest element times powers of two, and in between.
    edges = np.float32([1, fmt.max, 1.5, 1.75, 1.9375, 150, 449, 511, 6.5, 7])
    amax = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(LARGEST))])
    amax = np.concatenate([np.ldexp(amax, k) for k in (-120, -3, 0, 60)]).astype(np.float32)
    x = np.zeros((amax.size, 32), np.float32)
    x[:, 5] = amax
    codes = np.asarray(quantize(x, recipe).scale).view(np.uint8)[:, 0]
    np.testing.assert_array_equal(codes, [exponent_of(a, fmt, rule) + 127 for a in amax])


def test_scale_rules_of_the_published_table():
    table = {
        ("e4m3", 150): (126, 127, 126, 126),
        ("e4m3", 449): (127, 128, 128, 127),
        ("e4m3", 511): (127, 128, 128, 128),
        ("e2m1", 6.5): (127, 128, 128, 127),
        ("e2m1", 7.0): (127, 128, 128, 128),
    }
    for (element, amax), codes in table.items():
        for rule, code in zip(("floor", "ceil", "rceil", "even"), codes, strict=True):
            assert exponent_of(amax, FORMATS[element], rule) + 127 == code


MX = {"e4m3": "mxfp8", "e5m2": "mxfp8_e5m2", "e2m1": "mxfp4"}


def agrees_with_torchao(element, rule, recipe, axis=-1):
    """Values and, element by element, the codes of scales: a wrong power of two need not show in values."""
    x = GOLDEN["x"]
    q = quantize(x, recipe, axis=axis)
    same(q.dequantize(), GOLDEN[f"mx/{element}/{rule}"])
    ours = np.asarray(q.scale).view(np.uint8)
    for along in (0, 1):
        ours = np.repeat(ours, -(-x.shape[along] // ours.shape[along]), along)
    np.testing.assert_array_equal(ours, np.repeat(GOLDEN[f"mx/{element}/{rule}/scale_code"], 32, 1))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("rule", ["FLOOR", "RCEIL"])
@pytest.mark.parametrize("element", MX)
def test_mx_equals_torchao(element, rule):
    recipe = replace(RECIPES[MX[element]], scale_rule=rule.lower())
    agrees_with_torchao(element, rule, recipe)
    same(fake_quantize(GOLDEN["x"], recipe), GOLDEN[f"mx/{element}/{rule}"])
    wrong = {
        "other rule": replace(recipe, scale_rule="ceil"),
        "one scale for two blocks": replace(recipe, block_shape=(1, 64)),
        "half a block": replace(recipe, block_shape=(1, 16)),
        "toward zero": replace(recipe, rounding="toward_zero"),
    }
    for variant in wrong.values():
        with pytest.raises(AssertionError):
            agrees_with_torchao(element, rule, variant)
    with pytest.raises(AssertionError):
        agrees_with_torchao(element, rule, recipe, axis=0)


def test_nvfp4_equals_torchao():
    x = GOLDEN["nvfp4/x"]
    q = quantize(x, "nvfp4")
    assert np.asarray(q.scale, np.float32).min() > 2**-6
    same(q.tensor_scale.reshape(()), GOLDEN["nvfp4/tensor_scale"])
    same(q.dequantize(), GOLDEN["nvfp4/dequantized"])
    wrong = [
        replace(RECIPES["nvfp4"], block_shape=(1, 32)),
        replace(RECIPES["nvfp4"], block_shape=(16, 16)),
        replace(RECIPES["nvfp4"], amax_floor=100.0),
        replace(RECIPES["nvfp4"], scale_format="fp32", tensor_scale=None),
        replace(RECIPES["mxfp4"], block_shape=(1, 16)),
    ]
    for variant in wrong:
        with pytest.raises(AssertionError):
            same(fake_quantize(x, variant), GOLDEN["nvfp4/dequantized"])


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tile", "fp8_block", "mxfp4", "nvfp4", "int8_channel"])
def test_vmap_is_a_loop(name):
    x = hard().reshape(4, 10, 300)
    recipe = RECIPES[name]
    one_by_one = np.stack([fake_quantize(part, recipe) for part in x])
    same(jax.vmap(lambda x: fake_quantize(x, recipe))(x), one_by_one)
    mapped = jax.vmap(lambda x: quantize(x, recipe))(x)
    same(mapped.dequantize(), one_by_one)
    same(jax.vmap(QTensor.dequantize)(mapped), one_by_one)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", ["fp8_tile", "mxfp4", "mxint8", "nvfp4", "fp8_tensor", "int8_channel", "nf4"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_bad_number_spoils_its_block_and_no_other(name, bad):
    recipe = RECIPES[name]
    x = gaussian((4, 300))
    good = np.asarray(fake_quantize(x, recipe))
    x[2, 40] = bad
    spoilt = np.zeros(x.shape, bool)
    for index in block_slices(x.shape, recipe, -1):
        spoilt[index] = recipe.tensor_scale is not None or not np.isfinite(x[index]).all()
    for ours in (fake_quantize(x, recipe), quantize(x, recipe).dequantize()):
        np.testing.assert_array_equal(np.isnan(ours), spoilt)
        same(np.asarray(ours)[~spoilt], good[~spoilt])


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", COMPUTED)
def test_zeros_stay_zeros(name):
    recipe = RECIPES[name]
    zeros = np.zeros((3, 70), np.float32)
    zeros[1] = -0.0
    fmt = FORMATS[recipe.element]
    kept = np.abs(zeros) if fmt.fixed_point or fmt.codebook else zeros
    same(fake_quantize(zeros, recipe), kept)
    same(quantize(zeros, recipe).dequantize(), kept)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_block", "mxfp4", "nvfp4", "nf4"])
def test_empty_arrays_have_no_blocks(name):
    assert fake_quantize(np.zeros((0, 70)), name).shape == (0, 70)
    assert quantize(np.zeros((3, 0)), name).dequantize().shape == (3, 0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(-40, 40), st.sampled_from(["mxfp8", "mxfp6_e2m3", "mxfp4", "mxint8", "int8_channel", "nvfp4"]),
       st.integers(0, 9))  # fmt: skip
def test_equivariance(exponent, name, seed):
    x = gaussian((4, 64), seed)
    call = functools.partial(fake_quantize, recipe=RECIPES[name])
    y = np.asarray(call(x))
    same(call(np.ldexp(x, exponent)), np.ldexp(y, exponent))
    same(call(-x) + 0.0, -y + 0.0)
    order = np.random.default_rng(seed).permutation(16)
    order = np.concatenate([order + 16 * k for k in range(4)])
    same(call(x[:, order]), y[:, order])
    assert np.abs(y - x).max() <= np.abs(x).max() / 4


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_block", "nvfp4_2d"])
def test_transpose_is_the_quantised_transpose(name):
    x = hard((40, 300), spread=3)
    q = quantize(x, name)
    t = q.transpose()
    assert t.shape == (300, 40) and t.axis == q.axis
    same(t.dequantize(), q.dequantize().T)
    again = quantize(x.T, name)
    same(t.dequantize(), again.dequantize())
    np.testing.assert_array_equal(np.asarray(t.scale, np.float32), np.asarray(again.scale, np.float32))


@pytest.mark.usefixtures("quick_compile")
def test_transpose_is_refused_where_it_would_need_another_quantisation():
    for name in ("fp8_tile", "mxfp4", "nvfp4", "int8_channel", "nf4"):
        with pytest.raises(ReproError, match="from its source"):
            quantize(gaussian((32, 64)), name).transpose()
    with pytest.raises(ReproError, match="no two axes"):
        quantize(gaussian(64), "fp8_tensor").transpose()
    # The wrong variant: blocks of the transposed tensor run along the other axis, and are other numbers.
    x = gaussian((64, 64)) * 2.0 ** np.arange(64)[:, None].astype(np.float32)
    before, after = fake_quantize(x, "mxfp4"), fake_quantize(x.T, "mxfp4")
    assert (np.asarray(after) != np.asarray(before).T).any()


def relative_error(y, x):
    return np.linalg.norm(np.asarray(y, np.float64) - x) / np.linalg.norm(x)


def test_requantising_along_the_other_axis_costs_nothing_only_with_powers_of_two():
    """DeepSeek-V3, arXiv 2412.19437, section 3.3.3: why its cached activations have integral powers of two."""
    x = gaussian((128, 128))
    for name, grows in (("fp8_tile", True), ("fp8_tile_pow2", False)):
        once = np.asarray(fake_quantize(x, name, axis=1))
        twice = np.asarray(fake_quantize(once, name, axis=0))
        assert 0.024 < relative_error(once, x) < 0.028
        assert (relative_error(twice, x) > 1.3 * relative_error(once, x)) == grows
        assert np.mean(twice != once) > 0.9 if grows else np.mean(twice != once) < 0.01


@pytest.mark.usefixtures("quick_compile")
def test_three_axes():
    x = gaussian((3, 40, 70))
    for axis in (0, 1, 2, -3):
        recipe = RECIPES["mxfp8"]
        same(fake_quantize(x, recipe, axis=axis), expected(x, recipe, axis % 3 - 3))
    for axis in (-1, -2):
        recipe = replace(RECIPES["fp8_block"], block_shape=(16, 16))
        same(fake_quantize(x, recipe, axis=axis), np.stack([expected(part, recipe, axis) for part in x]))


def test_stochastic_blocks_are_unbiased_and_keyed():
    recipe = replace(RECIPES["mxfp4"], rounding="stochastic")
    x = np.concatenate([np.float32([6.0]), np.full(31, 2.25, np.float32)])
    draw = jax.jit(jax.vmap(lambda key: fake_quantize(x, recipe, key=key)))
    y = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
    assert set(np.unique(y[:, 1:])) == {2.0, 3.0} and (y[:, 0] == 6).all()
    assert abs(y[:, 1:].mean() - 2.25) < 4 * 0.433 / (31 * 2000) ** 0.5
    q = quantize(x, recipe, key=jax.random.key(3))
    same(q.dequantize(), fake_quantize(x, recipe, key=jax.random.key(3)))
    with pytest.raises(ReproError, match="needs key="):
        quantize(x, recipe)
    with pytest.raises(ReproError, match="leave out key="):
        quantize(x, "mxfp4", key=jax.random.key(0))


def test_a_quantised_tensor_is_a_pytree():
    q = quantize(gaussian((4, 64)), "nvfp4")
    assert len(jax.tree.leaves(q)) == 3
    same(jax.jit(QTensor.dequantize)(q), q.dequantize())
    same(jax.jit(lambda q: q)(q).dequantize(), q.dequantize())


def test_half_precision_inputs_are_taken_as_they_are():
    x = jnp.asarray(gaussian((4, 64))).astype(jnp.bfloat16)
    same(fake_quantize(x, "mxfp8"), fake_quantize(x.astype(jnp.float32), "mxfp8"))
    assert fake_quantize(x, "mxfp8").dtype == jnp.float32


def test_what_is_refused():
    x = gaussian((4, 64))
    cases = [
        (lambda: quantize(x, "mxfp5"), "known are fp8_tensor"),
        (lambda: quantize(x, "mxfp4", axis=2), "Axis 2 does not exist"),
        (lambda: quantize(x[0], "fp8_block"), "at least two axes"),
        (lambda: quantize(x[0, 0], "mxfp4"), "no blocks"),
        (lambda: quantize(x, "fp8_delayed"), "pass scale="),
        (lambda: quantize(x, "mxfp4", scale=1.0), "leave out scale="),
        (lambda: quantize(x, "fp8_delayed", scale=np.ones(4)), "one number"),
        (lambda: replace(RECIPES["mxfp4"], element="bf16"), "elements are e4m3"),
        (lambda: replace(RECIPES["mxfp4"], scale_rule="round"), "known are amax"),
        (lambda: replace(RECIPES["mxfp4"], scale_rule="amax"), "has no meaning"),
        (lambda: replace(RECIPES["mxfp4"], tensor_scale="amax"), "has no meaning"),
        (lambda: replace(RECIPES["mxfp4"], tensor_scale="sum"), "known are None"),
        (lambda: replace(RECIPES["mxfp4"], rounding="up"), "known are nearest_even"),
        (lambda: replace(RECIPES["mxfp4"], block_shape=(32,)), "pair of positive"),
        (lambda: replace(RECIPES["mxfp4"], block_shape=(1, 0)), "pair of positive"),
        (lambda: replace(RECIPES["mxfp4"], amax_floor=-1.0), "finite number"),
        (lambda: replace(RECIPES["fp8_tile"], amax_floor=0.0), "at least 2"),
        (lambda: replace(RECIPES["fp8_delayed"], amax_floor=1.0), "block_shape None"),
        (lambda: replace(RECIPES["nf4"], rounding="stochastic"), "is a table"),
        (lambda: replace(RECIPES["nvfp4"], element="int4"), "must reach 4"),
        (lambda: quantize(x, replace(RECIPES["fp8_delayed"], element="e2m1"), scale=1.0), "has no NaN"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises(ReproError, match=message):
            call()
