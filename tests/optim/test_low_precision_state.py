import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import ReproError
from repro.optim import OPTIMIZERS, Layout, optimizer, with_low_precision_state
from repro.optim.dynamic_code import dynamic_levels, encode_dynamic
from repro.optim.low_precision_state import pack, unpack

pytestmark = pytest.mark.usefixtures("quick_compile")

FORMATS = ("bf16", "e4m3", "e5m2", "int8", "dynamic8", "dynamic8_unsigned")
N = 600


def test_a_state_takes_the_bytes_of_its_format():
    params = {"w": jnp.zeros((20, 30)), "bias": jnp.zeros(30)}
    scales = 4 * (3 + 1)

    def inner(fmt):
        return jax.eval_shape(with_low_precision_state(optax.scale_by_adam(), fmt).init, params).inner

    for fmt in FORMATS:
        moment = 2 * 630 if fmt == "bf16" else 630 + scales
        leaves = jax.tree.leaves(inner(fmt))
        assert sum(x.size * x.dtype.itemsize for x in leaves) == 2 * moment + 4  # and the counter
        assert inner(fmt).count.dtype == jnp.int32
    assert with_low_precision_state(optax.scale_by_adam(), "bf16").init(params["w"]).inner.nu.nbytes == 2 * 600
    mixed = inner({"mu": "e4m3", "nu": "bf16"})
    assert mixed.mu["w"].data.codes.dtype == jnp.float8_e4m3fn and mixed.nu["w"].dtype == jnp.bfloat16
    only = inner({"nu": "e5m2"})
    assert only.mu["w"].dtype == jnp.float32 and only.nu["w"].data.codes.dtype == jnp.float8_e5m2


def test_one_tree_structure_for_all_steps():
    params = {"w": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}
    layouts = {"w": Layout("matrix", (0,), (1,)), "bias": Layout("bias")}
    for name, fmt in zip(OPTIMIZERS, itertools.cycle(FORMATS), strict=False):
        inner = optimizer(name, 0.1, layouts=layouts)
        tx = with_low_precision_state(inner, fmt, rounding="stochastic", block=8)
        first = jax.eval_shape(tx.init, params)
        assert jax.eval_shape(tx.update, params, first, params)[1] == first, (name, fmt)


def adam_by_hand(grads, b1=0.9, b2=0.95, wrong=""):
    """Updates of Adam with moments in bfloat16 between steps, rounded by ml_dtypes."""
    m = v = np.float32(0)
    history = []
    for t, g in enumerate(grads, 1):
        m, v = (np.float32(b * x + (1 - b) * y) for b, x, y in ((b1, m, g), (b2, v, g * g)))
        short = (np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32) for x in (m, v))
        if wrong == "rounded before use":
            m, v = short
        history.append(m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8))
        if wrong == "":
            m, v = short
    return history


def test_steps_in_bfloat16_by_hand():
    grads = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    tx = with_low_precision_state(optax.scale_by_adam(b2=0.95), "bf16")
    _, got = jax.jit(lambda g: jax.lax.scan(lambda s, x: tx.update(x, s)[::-1], tx.init(g[0]), g))(jnp.asarray(grads))
    np.testing.assert_allclose(got, adam_by_hand(grads), rtol=1e-4, atol=1e-6)
    for wrong in ("rounded before use", "not rounded"):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(got, adam_by_hand(grads, wrong=wrong), rtol=1e-4, atol=1e-6)


def test_a_second_moment_in_bfloat16_never_falls_unless_rounding_is_stochastic():
    """b2 = 0.999: a step shrinks it by 0.001, less than half a spacing. Stochastic rounding keeps the mean 0.999^t."""
    first = jnp.concatenate([jnp.ones((1, 4096)), jnp.zeros((300, 4096))])

    def nu(fmt, **options):
        tx = optax.scale_by_adam(b2=0.999)
        tx = with_low_precision_state(tx, fmt, **options) if fmt else tx
        state = jax.lax.scan(lambda s, g: (tx.update(g, s)[1], None), tx.init(first[0]), first)[0]
        return (state.inner if fmt else state).nu

    nearest, noisy, exact = jax.jit(lambda: (nu("bf16"), nu("bf16", rounding="stochastic", seed=0), nu(None)))()
    start = np.float32(1e-3).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(nearest.astype(jnp.float32), start)
    np.testing.assert_allclose(exact, 1e-3 * 0.999**300, rtol=1e-4)
    sample = np.asarray(noisy.astype(jnp.float32))
    assert sample.std() > 0
    assert abs(sample.mean() - exact[0]) < 4 * sample.std() / 64


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(-30, 30), st.integers(1, N))
def test_packing_errs_by_half_a_step_at_most(seed, exponent, size):
    rng = np.random.default_rng(seed)
    x = np.zeros(N, np.float32)
    x[:size] = rng.standard_cauchy(size) * 2.0**exponent
    got = np.stack(_round_trip(jnp.asarray(x)))
    starts = np.arange(0, N, 64)
    amax = np.repeat(np.maximum.reduceat(np.abs(x), starts), 64)[:N]
    # Half a step: relative for floats, above their smallest normal number; of the largest of the block for integers.
    bounds = {
        "bf16": 2.0**-8 * np.abs(x),
        "e4m3": np.maximum(2.0**-4 * np.abs(x), amax / 448 * 2.0**-10),
        "e5m2": np.maximum(2.0**-3 * np.abs(x), amax / 57344 * 2.0**-17),
        "int8": amax / 254,
        "dynamic8": np.maximum(0.05 * np.abs(x), amax * 0.0071),
        "dynamic8_unsigned": np.maximum(0.05 * np.abs(x), amax * 0.0036),
    }
    for fmt, back in zip(FORMATS, got, strict=True):
        want = np.maximum(x, 0) if fmt == "dynamic8_unsigned" else x
        assert (np.abs(back - want) <= bounds[fmt] * 1.001 + 1e-30).all(), fmt
        if fmt != "bf16":  # one scale for all would fail
            assert (np.abs(back - want)[x == 0] == 0).all()


@jax.jit
def _round_trip(x):
    return [unpack(pack(x.reshape(20, 30), fmt, 64, None)).ravel() for fmt in FORMATS]


def test_stochastic_packing_is_right_on_average():
    x = jnp.asarray(np.random.default_rng(0).uniform(0, 1, 64), jnp.float32)
    formats = ("int8", "dynamic8")
    many = jax.jit(jax.vmap(lambda k: [unpack(pack(x, fmt, 64, k)) for fmt in formats]))
    for fmt, sample in zip(formats, map(np.asarray, many(jax.random.split(jax.random.key(0), 2000))), strict=True):
        error = np.abs(sample.mean(0) - np.asarray(x))
        assert (error <= 5 * sample.std(0) / np.sqrt(2000) + 1e-3 * np.asarray(x)).all(), fmt
        assert sample.std(0).max() > 0
        nearest = np.abs(np.asarray(unpack(pack(x, fmt, 64, None))) - np.asarray(x))
        assert nearest.max() > error.max()


def test_dynamic_levels():
    for signed in (True, False):
        levels = dynamic_levels(signed)
        assert len(np.unique(levels)) == 256 and levels.dtype == np.float32 and levels.max() == 1 and 0 in levels
        positive = levels[(levels > 0) & (levels < 1)]
        decades = [np.sum((positive >= 10.0**-k) & (positive < 10.0 ** (1 - k))) for k in range(7, 0, -1)]
        assert decades == [2**i for i in range(7)] if signed else [2 ** (i + 1) for i in range(7)]
        assert (levels < 0).sum() == (127 if signed else 0)
    np.testing.assert_allclose(dynamic_levels(True)[[128, -2]], [5.5e-7, 1 - 0.9 / 128], rtol=1e-6)
    twice = jax.jit(lambda x: encode_dynamic(x, signed=True, block=2).dequantize())
    np.testing.assert_array_equal(twice(jnp.array([jnp.nan, 1.0, 0.0, 0.0, 2.0])), [np.nan, np.nan, 0, 0, 2])


def test_linear_codes_lose_small_second_moments_and_dynamic_codes_do_not():
    """g of 1 beside 0.01: in a block, v of 1 beside 1e-4, which is below half a step of 1/127."""
    g = jnp.array([1.0, 0.01])

    def second_update(fmt):
        tx = with_low_precision_state(optax.scale_by_adam(b1=0.0, b2=0.95), {"nu": fmt})
        state = tx.update(g, tx.init(g))[1]
        return jnp.abs(tx.update(1e-8 * g, state)[0]), unpack(state.inner.nu)

    (linear, lost), (dynamic, kept) = jax.jit(lambda: [second_update(f) for f in ("int8", "dynamic8_unsigned")])()
    assert lost[1] == 0 and linear[1] > 10 * linear[0]
    np.testing.assert_allclose(kept, 0.05 * g**2, rtol=0.06)
    np.testing.assert_allclose(dynamic[0], dynamic[1], rtol=0.1)


def test_refusals():
    adam = optax.scale_by_adam()
    with pytest.raises(ReproError, match="format 'int4' is unknown; known are bf16, e4m3"):
        with_low_precision_state(adam, "int4")
    with pytest.raises(ReproError, match="format 'fp8' is unknown"):
        with_low_precision_state(adam, {"mu": "fp8"})
    with pytest.raises(ReproError, match="rounding 'up' is unknown"):
        with_low_precision_state(adam, "bf16", rounding="up")
    for block in (0, 2.5, True):
        with pytest.raises(ReproError, match="block is"):
            with_low_precision_state(adam, "int8", block=block)
    with pytest.raises(ReproError, match="has no field 'v' to store in e4m3"):
        with_low_precision_state(adam, {"v": "e4m3"}).init(jnp.zeros(3))
