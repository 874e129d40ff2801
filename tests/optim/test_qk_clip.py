import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from repro.errors import ReproError
from repro.optim import Layout, qk_clip, qk_clip_factor

pytestmark = pytest.mark.usefixtures("quick_compile")

factor = jax.jit(qk_clip_factor)


def the_published_example(f):
    np.testing.assert_allclose(f(jnp.array([150.0, -3.0, 50.0, 0.0]), 100.0), [2 / 3, 1, 1, 1], rtol=1e-6)


def test_factor():
    the_published_example(qk_clip_factor)
    np.testing.assert_array_equal(qk_clip_factor(jnp.array([100.0, 101.0]), 100.0)[0], 1.0)
    with pytest.raises(AssertionError):
        the_published_example(lambda s, tau: jnp.minimum(1.0, tau / s))
    with pytest.raises(AssertionError):
        the_published_example(lambda s, tau: tau / s)


def clips_to_tau_and_leaves_the_rest(f, s, tau):
    gamma = np.asarray(f(s, tau))
    assert not np.isnan(gamma).any() and not np.isnan(np.sqrt(gamma)).any()
    over = (s > tau) & np.isfinite(s)
    assert (gamma[~over] == 1).all()
    np.testing.assert_allclose(gamma[over].astype(np.float64) * s[over], tau, rtol=1e-6)
    assert (gamma[over] < 1 + 1e-6).all()


normal_floats = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False) | st.sampled_from([np.inf, -np.inf])


@given(hnp.arrays(np.float32, 8, elements=normal_floats), st.floats(2.0**-20, 2.0**20, width=32))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_factor_of_any_maximum(s, tau):
    clips_to_tau_and_leaves_the_rest(factor, s, np.float32(tau))


any_floats = st.floats(width=32, allow_nan=False)


@given(hnp.arrays(np.float32, 8, elements=any_floats), st.floats(0, width=32, exclude_min=True))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_factor_is_never_nan(s, tau):
    gamma = np.asarray(factor(s, np.float32(tau)))
    assert ((gamma >= 0) & (gamma <= 1)).all()


def test_the_usual_shape_of_the_formula_gives_nan():
    s = np.float32([150, -3, 50, 0])
    with pytest.raises(AssertionError), np.errstate(all="ignore"):
        clips_to_tau_and_leaves_the_rest(lambda s, tau: np.minimum(1, tau / s), s, np.float32(100))


def test_overflow_and_nan_are_not_clipped_to_zero():
    np.testing.assert_array_equal(qk_clip_factor(jnp.array([jnp.inf, -jnp.inf, jnp.nan]), 100.0), 1.0)


L, H, D, K = 2, 3, 5, 4
QK = {
    "q": Layout("matrix", (1,), (2, 3), head=2, layer=0, qk="q"),
    "k": Layout("matrix", (1,), (2, 3), head=2, layer=0, qk="k"),
    "v": Layout("matrix", (1,), (2, 3), head=2, layer=0),
}


def weights(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=(L, D, H, K)), dtype) for name in QK}


LOGITS = jnp.asarray([[150.0, -3.0, 50.0], [0.0, 1000.0, 100.5]])


def test_each_head_of_each_layer_has_its_own_factor():
    before, after = weights(), qk_clip(weights(), LOGITS, tau=100.0, layouts=QK)
    gamma = np.asarray(qk_clip_factor(LOGITS, 100.0))[:, None, :, None]
    for name in "qk":
        np.testing.assert_allclose(after[name], before[name] * np.sqrt(gamma), rtol=1e-6)
        for wrong in [gamma, np.sqrt(gamma.min(2, keepdims=True)), np.sqrt(gamma.transpose(0, 2, 1, 3)[:, :1])]:
            assert np.abs(after[name] - before[name] * wrong).max() > 0.01
    np.testing.assert_array_equal(after["v"], before["v"])
    kept = np.asarray(LOGITS) <= 100
    for name in "qk":
        np.testing.assert_array_equal(
            np.asarray(after[name]).transpose(0, 2, 1, 3)[kept], np.asarray(before[name]).transpose(0, 2, 1, 3)[kept]
        )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("alpha", [0.5, 0.3])
def test_tau_infinity_is_off_bit_for_bit(alpha, dtype):
    before = weights(dtype=dtype)
    after = qk_clip(before, LOGITS.at[0, 0].set(jnp.inf), tau=jnp.inf, layouts=QK, alpha=alpha)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype(dtype)}
    on = qk_clip(before, LOGITS, tau=100.0, layouts=QK, alpha=alpha)
    assert (np.asarray(on["q"] != before["q"])).any()


def splits_gamma(clip):
    """W_q carries gamma^0.3 and W_k gamma^0.7."""
    before, after = weights(), clip(weights())
    gamma = np.asarray(qk_clip_factor(LOGITS, 100.0), np.float64)[:, None, :, None]
    np.testing.assert_allclose(after["q"], before["q"] * gamma**0.3, rtol=1e-6)
    np.testing.assert_allclose(after["k"], before["k"] * gamma**0.7, rtol=1e-6)


def test_alpha():
    clip = lambda alpha: lambda p: qk_clip(p, LOGITS, tau=100.0, layouts=QK, alpha=alpha)
    splits_gamma(clip(0.3))
    for wrong in [0.7, 0.5, 0.0, 1.0]:
        with pytest.raises(AssertionError):
            splits_gamma(clip(wrong))
    queries = clip(1.0)(weights())  # alpha = 1: queries alone
    np.testing.assert_array_equal(queries["k"], weights()["k"])
    np.testing.assert_allclose(queries["q"][1, :, 1], weights()["q"][1, :, 1] * 0.1, rtol=1e-6)


def test_axes_may_come_in_any_order():
    swapped = {name: Layout("matrix", (0,), (1,), head=2, layer=3, qk=name) for name in "qk"}
    move = lambda tree: {name: jnp.transpose(tree[name], (1, 3, 2, 0)) for name in "qk"}
    got = qk_clip(move(weights()), LOGITS, tau=100.0, layouts=swapped)
    want = move(qk_clip(weights(), LOGITS, tau=100.0, layouts=QK))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_inside_jit_and_vmap_with_a_traced_tau():
    taus = jnp.array([10.0, 100.0, jnp.inf])
    clip = jax.jit(jax.vmap(lambda tau: qk_clip(weights(), LOGITS, tau=tau, layouts=QK)))
    for got, tau in zip(clip(taus)["q"], taus, strict=True):
        np.testing.assert_allclose(got, qk_clip(weights(), LOGITS, tau=tau, layouts=QK)["q"], rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, H), (L, 1), (H, L), (H,), (L, H, 1), ()])
def test_maxima_of_another_shape_are_refused(shape):
    with pytest.raises(ReproError, match="QK-Clip got max_logits of shape"):
        jax.eval_shape(lambda s: qk_clip(weights(), s, tau=100.0, layouts=QK), np.zeros(shape, np.float32))


def test_undeclared_projections_are_refused():
    plain = Layout("matrix", (1,), (2, 3), head=2, layer=0)
    for layouts in [{n: plain for n in QK}, QK | {"k": plain}, QK | {"q": plain}]:
        with pytest.raises(ReproError, match="found no query and key projection"):
            qk_clip(weights(), LOGITS, tau=100.0, layouts=layouts)
    headless = Layout("matrix", inputs=(1,), outputs=(2, 3), layer=0, qk="q")
    with pytest.raises(ReproError, match="needs a head axis in the layout of q"):
        qk_clip(weights(), LOGITS, tau=100.0, layouts=QK | {"q": headless})


def test_beside_a_norm_of_queries_or_keys_it_is_refused():
    layouts = QK | {"gain": Layout("norm", layer=0, qk="q")}
    with pytest.raises(ReproError, match="refused beside a norm on queries or keys, gain"):
        qk_clip(weights() | {"gain": jnp.ones((L, K))}, LOGITS, tau=100.0, layouts=layouts)


@pytest.mark.parametrize(
    "wrong", [{"tau": t} for t in (0.0, -1, float("nan"), np.float32(0))] + [{"alpha": 1.5}, {"alpha": -0.1}]
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ReproError, match=f"{next(iter(wrong))} is .*; it must"):
        qk_clip(weights(), LOGITS, **{"tau": 100.0, "layouts": QK} | wrong)


def test_weights_without_a_layer_axis_take_one_maximum_per_head():
    single = {name: Layout("matrix", (0,), (1, 2), head=1, qk=name.strip("v")) for name in QK}
    got = qk_clip(jax.tree.map(lambda w: w[1], weights()), LOGITS[1], tau=100.0, layouts=single)
    want = jax.tree.map(lambda w: w[1], qk_clip(weights(), LOGITS, tau=100.0, layouts=QK))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(ReproError, match="QK-Clip got max_logits of shape"):
        qk_clip(jax.tree.map(lambda w: w[1], weights()), LOGITS, tau=100.0, layouts=single)


def test_attention_groups_have_maxima_of_their_own():
    params = {"early": weights(0), "late": jax.tree.map(lambda w: w[:1, :, :2], weights(1))}
    layouts = {group: {name: dataclasses.replace(QK[name], group=group) for name in QK} for group in ("early", "late")}
    maxima = {"early": LOGITS, "late": jnp.array([[7.0, 300.0]])}
    got = qk_clip(params, maxima, tau=100.0, layouts=layouts)
    for group in params:
        want = qk_clip(params[group], maxima[group], tau=100.0, layouts=QK)
        jax.tree.map(np.testing.assert_array_equal, got[group], want)
    odd = {"early": LOGITS, "lat": maxima["late"]}
    for wrong, said in [
        (LOGITS, "mapping of"),
        ({"early": LOGITS}, "'late'"),
        (odd, "'lat'"),
        (maxima | {"kda": 0}, "'kda'"),
    ]:
        with pytest.raises(ReproError, match=said):
            qk_clip(params, wrong, tau=100.0, layouts=layouts)


def test_the_maximum_over_a_mapped_axis():
    """Two devices, each with half of the batch: both clip by the larger maximum."""
    halves = jnp.stack([LOGITS, LOGITS[::-1]])
    clip = jax.vmap(
        lambda s: qk_clip(weights(), s, tau=100.0, layouts=QK, axis_name="data"), axis_name="data", out_axes=0
    )
    want = qk_clip(weights(), halves.max(0), tau=100.0, layouts=QK)
    for device in range(2):
        np.testing.assert_allclose(clip(halves)["q"][device], want["q"], rtol=1e-6)
