import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import ReproError
from repro.optim import Layout, clip_by_global_norm, muon

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYOUTS = {"w": Layout("matrix", (0,), (1,)), "gain": Layout("norm")}


def clipped(tx, tree):
    return jax.jit(lambda g: tx.update(g, tx.init(g)))(tree)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(-25, 25), st.floats(-3, 3))
def test_against_optax_and_float64(seed, exponent, threshold):
    rng = np.random.default_rng(seed)
    tree = {"w": rng.normal(size=(3, 4)) * 2.0**exponent, "gain": rng.normal(size=3)}
    g, limit = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree), jnp.float32(2.0**threshold)
    ours, norm, theirs = _both(g, limit)
    exact = np.sqrt(sum(np.square(x).sum() for x in tree.values()))
    np.testing.assert_allclose(norm, exact, rtol=1e-5)
    for name, x in tree.items():
        np.testing.assert_allclose(ours[name], x * min(1, float(limit) / exact), rtol=1e-5)
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


@jax.jit
def _both(g, limit):
    tx, other = clip_by_global_norm(limit), optax.clip_by_global_norm(limit)
    u, state = tx.update(g, tx.init(g))
    return u, state.norm, other.update(g, other.init(g))[0]


def test_below_the_threshold_no_bit_changes_and_extremes_hold():
    g = {"w": jnp.array([[3.0, -0.0]]), "gain": jnp.array([4.0], jnp.bfloat16)}
    u, state = clipped(clip_by_global_norm(5.0), g)
    assert state.norm == 5 and state.factor == 1
    assert all(u[name].tobytes() == g[name].tobytes() and u[name].dtype == g[name].dtype for name in g)
    np.testing.assert_array_equal(clipped(clip_by_global_norm(1.0), jax.tree.map(jnp.zeros_like, g))[0]["w"], 0)
    large, state = clipped(clip_by_global_norm(1.0), {"w": jnp.array([3e30, 4e30])})
    np.testing.assert_allclose(large["w"], [0.6, 0.8], rtol=1e-6)
    assert np.isnan(clipped(clip_by_global_norm(1.0), {"w": jnp.array([jnp.inf, 1.0])})[0]["w"]).all()


def test_a_clip_behind_muon_divides_the_rate_by_the_width_and_ours_does_not():
    def first_step(g, *, before=None, after=None):
        inner = muon(1.0, layouts=LAYOUTS, weight_decay=0.0, schedule="hybrid10")
        tx = optax.chain(before or optax.identity(), inner, after or optax.identity())
        return tx.update(g, tx.init(g), g)[0]

    ours = clip_by_global_norm(1.0, layouts=LAYOUTS, except_roles=("matrix",))

    @jax.jit
    def steps(g):
        front, behind = clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)
        return (
            first_step(g), first_step(g, after=behind), first_step(g, after=ours), first_step(g, before=front)
        )  # fmt: skip

    for width in (8, 32):
        w = np.random.default_rng(width).normal(size=(width, width))
        plain, behind, spared, front = steps({"w": jnp.asarray(w, jnp.float32), "gain": jnp.ones(width)})
        size = np.linalg.norm(plain["w"])
        np.testing.assert_allclose(size, 0.2 * width, rtol=2e-3)  # rms * sqrt(A B), whatever the gradient
        np.testing.assert_allclose(
            size / np.linalg.norm(behind["w"]), (0.04 * width**2 + width) ** 0.5, rtol=5e-3
        )  # the norm of the matrix's update and of the gain's, whose entries are 1
        np.testing.assert_array_equal(spared["w"], plain["w"])
        np.testing.assert_allclose(np.linalg.norm(spared["gain"]), 1.0, rtol=1e-5)
        # In front it clips gradients, and a first orthogonalised step does not depend on their scale.
        np.testing.assert_allclose(front["w"], plain["w"], atol=2e-5)


def test_refusals():
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ReproError, match="max_norm is"):
            clip_by_global_norm(bad)
    with pytest.raises(ReproError, match="role 'matrices' is unknown"):
        clip_by_global_norm(1.0, layouts=LAYOUTS, except_roles=("matrices",))
    with pytest.raises(ReproError, match="needs layouts"):
        clip_by_global_norm(1.0, except_roles=("matrix",))
