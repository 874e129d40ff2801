import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import ReproError
from repro.optim import with_master_weights

pytestmark = pytest.mark.usefixtures("quick_compile")

KINDS = ("fp32", "bf16", "bf16_stochastic", "bf16_kahan")


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.fixture(scope="module")
def walks(quick_compile_module):
    """Weights after 500 and 1000 updates of +0.001 and of -0.001 from 1, float32: kind -> [2 times, 2 signs, n]."""

    def walk(kind):
        signs = jnp.array([[1.0], [-1.0]]) * jnp.ones((2, 4096 if kind == "bf16_stochastic" else 1))
        tx = with_master_weights(optax.sgd(1e-3), kind, seed=3)

        def step(carry, _):
            w, state = carry
            updates, state = tx.update(-signs, state, w)
            return (optax.apply_updates(w, updates), state), None

        start = jnp.ones(signs.shape, jnp.bfloat16)
        half, _ = jax.lax.scan(step, (start, tx.init(start)), None, 500)
        end, _ = jax.lax.scan(step, half, None, 500)
        assert end[0].dtype == jnp.bfloat16
        return jnp.stack([half[0], end[0]]).astype(jnp.float32)

    return jax.tree.map(np.asarray, jax.jit(lambda: {kind: walk(kind) for kind in KINDS})())


def test_small_updates_are_lost_in_bfloat16_alone(walks):
    np.testing.assert_array_equal(walks["bf16"], 1.0)
    exact = [np.float32(1)] * 2
    for _ in range(500):
        exact = [exact[0] + np.float32(1e-3), exact[1] - np.float32(1e-3)]
    np.testing.assert_array_equal(walks["fp32"][0, :, 0], bf16(exact))
    for _ in range(500):
        exact = [exact[0] + np.float32(1e-3), exact[1] - np.float32(1e-3)]
    np.testing.assert_array_equal(walks["fp32"][1, :, 0], bf16(exact))


def test_kahan_is_within_one_spacing_of_float32(walks):
    for kahan, want in zip(walks["bf16_kahan"][:, :, 0].ravel(), [1.5, 0.5, 2.0, 0.0], strict=True):
        assert abs(kahan - want) <= 2.0**-7 * max(want, 0.5)
    assert abs(walks["bf16"][0, 0, 0] - 1.5) > 2.0**-7 * 1.5


def test_stochastic_rounding_keeps_the_mean_and_has_the_closed_spread(walks):
    """Above 1 the spacing is 2^-7: every step moves by it with probability p = 0.001 * 2^7, so that t steps have a
    standard deviation of 2^-7 sqrt(t p (1 - p))."""
    up = walks["bf16_stochastic"][0, 0]
    p = 1e-3 * 2**7
    spread = 2.0**-7 * np.sqrt(500 * p * (1 - p))
    assert abs(up.mean() - 1.5) < 4 * spread / 64
    assert abs(up.std() / spread - 1) < 4 / np.sqrt(2 * 4096)
    assert abs(walks["bf16_stochastic"][1, 1].mean()) < 4 * 0.041 / 64  # down to 0, through ever finer spacings


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_what_is_written_is_the_rounded_sum(seed):
    rng = np.random.default_rng(seed)
    w = bf16(rng.normal(size=16) * 2.0 ** rng.integers(-20, 20, 16))
    u = (w * rng.normal(size=16) * 2.0 ** rng.integers(-12, 3, 16)).astype(np.float32)
    got = {kind: np.asarray(x) for kind, x in _written(jnp.asarray(w), jnp.asarray(u)).items()}
    want = bf16(w + u)
    ordinary = np.abs(want) >= 2.0**-16 * np.abs(w)
    for kind in ("fp32", "bf16", "bf16_kahan"):
        np.testing.assert_array_equal(got[kind][ordinary], want[ordinary])
        assert (np.abs(got[kind] - want) <= 2.0**-24 * np.abs(w)).all()
    assert (np.abs(got["bf16_stochastic"] - (w + u)) <= 2.0**-7 * np.abs(w + u) + 2.0**-24 * np.abs(w)).all()


@jax.jit
def _written(w, u):
    def one(kind):
        tx = with_master_weights(optax.identity(), kind)
        short = w.astype(jnp.bfloat16)
        updates, _ = tx.update(u, tx.init(short), short)
        return optax.apply_updates(short, updates).astype(jnp.float32)

    return {kind: one(kind) for kind in KINDS}


def test_other_types_pass_and_inner_state_is_float32():
    params = {"w": jnp.ones(4, jnp.bfloat16), "gain": jnp.ones(3)}
    bytes_kept = {"fp32": 16, "bf16": 0, "bf16_stochastic": 0, "bf16_kahan": 8}
    plain = optax.adamw(0.01, weight_decay=0.1)
    for kind in KINDS:
        tx = with_master_weights(plain, kind)
        state = jax.eval_shape(tx.init, params)
        assert {x.dtype for x in jax.tree.leaves(state.inner)} == {jnp.dtype("int32"), jnp.dtype("float32")}
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.kept)) == bytes_kept[kind]
        assert jax.eval_shape(tx.update, params, state, params)[1] == state
    grads = jax.tree.map(jnp.ones_like, params)
    got = jax.jit(lambda g: tx.update(g, tx.init(params), params)[0])(grads)["gain"]
    want = jax.jit(lambda g: plain.update(g, plain.init(g), params["gain"])[0])(grads["gain"])
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_refusals():
    with pytest.raises(ReproError, match="weights 'fp16' is unknown; known are fp32, bf16"):
        with_master_weights(optax.sgd(0.1), "fp16")
    with pytest.raises(ReproError, match="no parameter is bfloat16"):
        with_master_weights(optax.sgd(0.1), "fp32").init({"w": jnp.zeros(2)})
