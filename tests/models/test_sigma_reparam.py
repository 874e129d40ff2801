"""Sigma-reparametrisation against NumPy's singular values, its buffers, and the entropy bound against its worst row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import ReproError
from repro.models import ModelConfig, abstract, declarations, init_and_apply, initial_buffers
from repro.models.sigma_reparam import SigmaReparam, entropy_bound, extremal_row, power_iteration
from repro.optim import Layout, check_layouts, from_declarations, qk_clip
from repro.train import TrainConfig
from repro.train.step import Program

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = ModelConfig(vocab_size=16, layers=2, width=12, heads=2, ffn=20, sigma_reparam=True)
LATENT = dataclasses.replace(
    CONFIG, attention="mla", q_rank=8, kv_rank=10, nope_size=4, rope_size=2, value_size=6, qk_norm="v4",
    output_gate=True, attention_sink=True,
)  # fmt: skip
PLAIN = dataclasses.replace(CONFIG, sigma_reparam=False)
TOKENS = np.random.default_rng(0).integers(0, 16, size=(2, 5))
INPUTS = {"o_HVD": 2}  # axes of inputs, where it is not one


def without(tree, name):
    return {k: without(v, name) if isinstance(v, dict) else v for k, v in tree.items() if k != name}


@functools.cache
def weights():
    """Parameters of the plain model, drawn by NumPy."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(init_and_apply(PLAIN)[0], jax.random.key(0))
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.4, shapes)


def matrices():
    """{child of `sigma`: [L, I, O]} of the weights, float64."""
    found = {}
    for module in ("attention", "ffn"):
        for name, w in weights()["blocks"][module].items():
            size = int(np.prod(w.shape[1 : 1 + INPUTS.get(name, 1)]))
            found[f"{module}_{name}"] = np.float64(w).reshape(CONFIG.layers, size, -1)
    return found


def start():
    """The buffers of the start, by NumPy."""
    return {"blocks": {"sigma": {n: {"u": np.float32(np.linalg.svd(w)[0][..., 0])} for n, w in matrices().items()}}}


def parameters(gamma=None):
    """The same weights with gammas: those of the start, or others."""
    sigma = {name: np.linalg.svd(w, compute_uv=False)[:, 0] for name, w in matrices().items()}
    gammas = {n: {"gamma": np.float32(s if gamma is None else gamma * np.ones_like(s))} for n, s in sigma.items()}
    return weights() | {"blocks": weights()["blocks"] | {"sigma": gammas}}


@functools.cache
def compiled():
    return jax.jit(init_and_apply(CONFIG)[1])


def apply(params, tokens, buffers=None):
    return compiled()(params, tokens, buffers=start() if buffers is None else buffers)


@functools.cache
def plain():
    return jax.jit(init_and_apply(PLAIN)[1])


def test_every_linear_layer_of_the_blocks_is_scaled_and_nothing_else():
    shapes = jax.eval_shape(init_and_apply(CONFIG)[0], jax.random.key(0))
    assert set(shapes["blocks"]["sigma"]) == set(matrices())
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, parameters())
    for config in (CONFIG, LATENT):
        shapes = jax.eval_shape(init_and_apply(config)[0], jax.random.key(0))
        layouts = from_declarations(declarations(abstract(config)))
        check_layouts(shapes, layouts)
        assert layouts["blocks"]["sigma"]["attention_o_HVD"] == {"gamma": Layout("norm", layer=0)}
        roles = {f"{m}_{n}": x for m in ("attention", "ffn") for n, x in layouts["blocks"][m].items()}
        scaled = {n for n, x in roles.items() if isinstance(x, Layout) and x.role == "matrix"}
        assert set(shapes["blocks"]["sigma"]) == scaled and len(scaled) == (7 if config is CONFIG else 11)


def test_the_start_is_the_plain_model(fusion_emitters):
    out, want = apply(parameters(), TOKENS), plain()(weights(), TOKENS)
    np.testing.assert_allclose(out.logits, want.logits, atol=2e-6)
    with fusion_emitters():
        got = jax.jit(init_and_apply(CONFIG)[0])(jax.random.key(3))
        same = jax.jit(init_and_apply(PLAIN)[0])(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, without(got, "sigma"), same)
    for name, (w, of) in {"attention_q_DHK": ("q_DHK", "attention"), "ffn_down_FD": ("down_FD", "ffn")}.items():
        w = np.asarray(same["blocks"][of][w])
        top = np.linalg.svd(w.reshape(*w.shape[:2], -1), compute_uv=False)[:, 0]
        np.testing.assert_allclose(got["blocks"]["sigma"][name]["gamma"], top, rtol=1e-5)


def test_the_model_is_the_plain_one_with_scaled_weights():
    """From the vectors of the start, sigma is the spectral norm, so that of every weight used is gamma."""
    scaled = {"attention": {}, "ffn": {}}
    for child, w in matrices().items():
        module, name = child.split("_", 1)
        raw = weights()["blocks"][module][name]
        top = np.linalg.svd(w, compute_uv=False)[:, 0].reshape(-1, *[1] * (raw.ndim - 1))
        scaled[module][name] = np.float32(1.7 * raw / top)
    blocks = weights()["blocks"]
    used = weights() | {"blocks": blocks | {m: blocks[m] | scaled[m] for m in scaled}}
    got = apply(parameters(1.7), TOKENS)
    np.testing.assert_allclose(got.logits, plain()(used, TOKENS).logits, atol=1e-5)
    assert np.abs(got.logits - plain()(weights(), TOKENS).logits).max() > 0.01


def test_buffers_are_one_power_iteration_further():
    rng = np.random.default_rng(2)
    found = jax.jit(functools.partial(initial_buffers, CONFIG))(parameters())
    drawn = jax.tree.map(lambda u: rng.normal(size=u.shape).astype(np.float32), found)
    out = apply(parameters(), TOKENS, drawn)
    assert jax.tree.structure(out.buffers) == jax.tree.structure(found)
    for name, w in matrices().items():
        for layer in range(CONFIG.layers):
            left = np.linalg.svd(w[layer])[0][:, 0]
            assert abs(left @ found["blocks"]["sigma"][name]["u"][layer]) == pytest.approx(1, abs=1e-5)
            v = drawn["blocks"]["sigma"][name]["u"][layer] @ w[layer]
            u = w[layer] @ (v / np.linalg.norm(v))
            got = out.buffers["blocks"]["sigma"][name]["u"][layer]
            np.testing.assert_allclose(got, u / np.linalg.norm(u), atol=1e-5)
            assert abs(got @ left) < 0.9999  # one iteration does not find it
    of_start = apply(parameters(), TOKENS, found)
    np.testing.assert_allclose(of_start.logits, apply(parameters(), TOKENS).logits, atol=1e-6)
    assert np.abs(of_start.logits - out.logits).max() > 1e-3
    with pytest.raises(ReproError, match="needs its parameters"):
        initial_buffers(CONFIG)


def test_a_weight_learns_only_across_itself():
    """gamma / sigma(W) W does not change with the length of W, so the gradient is orthogonal to W."""
    gradient = jax.jit(jax.grad(lambda p: (init_and_apply(CONFIG)[1](p, TOKENS, buffers=start()).logits ** 3).mean()))
    g, p = gradient(parameters()), parameters()
    for child in matrices():
        module, name = child.split("_", 1)
        gw, w = (np.float64(tree["blocks"][module][name]) for tree in (g, p))
        assert np.abs((gw * w).sum()) < 1e-4 * np.abs(gw * w).sum(), name
        # gamma moves along W, as no gradient of W does
        assert np.abs(g["blocks"]["sigma"][child]["gamma"]).min() > 0, child


def test_sigma_and_its_gradient():
    rng = np.random.default_rng(0)
    w, u = rng.normal(size=(3, 7, 5)), rng.normal(size=(3, 7))
    v = np.einsum("bi,bio->bo", u, w)
    v /= np.linalg.norm(v, axis=-1, keepdims=True)
    next_u = np.einsum("bio,bo->bi", w, v)
    next_u /= np.linalg.norm(next_u, axis=-1, keepdims=True)
    w, u = jnp.asarray(w, jnp.float32), jnp.asarray(u, jnp.float32)
    sigma, got = power_iteration(w, u)
    np.testing.assert_allclose(got, next_u, atol=1e-6)
    np.testing.assert_allclose(sigma, np.einsum("bi,bio,bo->b", next_u, w, v), rtol=1e-5)
    grad = jax.grad(lambda w: power_iteration(w, u)[0].sum())(w)
    np.testing.assert_allclose(grad, np.einsum("bi,bo->bio", next_u, v), atol=1e-6)

    def through_the_vectors(w):
        v = jnp.einsum("bi,bio->bo", u, w)
        x = jnp.einsum("bio,bo->bi", w, v)
        return (jnp.linalg.norm(x, axis=-1) / jnp.linalg.norm(v, axis=-1)).sum()

    np.testing.assert_allclose(through_the_vectors(w), sigma.sum(), rtol=1e-5)
    assert np.abs(jax.grad(through_the_vectors)(w) - grad).max() > 0.01
    for _ in range(60):
        sigma, got = power_iteration(w, got)
    np.testing.assert_allclose(sigma, np.linalg.svd(w, compute_uv=False)[:, 0], rtol=1e-5)
    assert np.isfinite(power_iteration(0 * w, u)[0]).all()


class Experts(nnx.Module):
    def __init__(self, w):
        from repro.models import parameter

        self.up_EDF = parameter(w, "matrix", inputs=(1,), outputs=(2,), expert=0)
        self.bias = parameter(jnp.ones(3), "bias")


def test_every_expert_has_its_own_norm():
    w = np.random.default_rng(0).normal(size=(3, 6, 4)).astype(np.float32) * np.array([1, 10, 100.0])[:, None, None]
    module = Experts(jnp.asarray(w, jnp.float32))
    sigma = SigmaReparam({"ffn": module})
    top = np.linalg.svd(w, compute_uv=False)[:, 0]
    np.testing.assert_allclose(sigma.ffn_up_EDF.gamma[...], top, rtol=1e-5)
    sigma.ffn_up_EDF.gamma[...] = jnp.ones(3)
    scaled, buffers = sigma({"ffn": module})
    np.testing.assert_allclose(scaled["ffn"].up_EDF[...], w / top[:, None, None], rtol=1e-4)
    np.testing.assert_allclose(module.up_EDF[...], w, rtol=1e-6)  # the module given keeps its weights
    assert buffers["ffn_up_EDF"]["u"].shape == (3, 6)


def test_the_engine_carries_the_vectors_and_refuses_a_clip():
    program = Program(TrainConfig(model=CONFIG, length=4, batch_size=2))
    state = jax.eval_shape(program.init, jax.ShapeDtypeStruct((), jnp.uint32))
    assert state.buffers["blocks"]["sigma"]["ffn_up_DF"]["u"].shape == (2, 12)
    window = jax.ShapeDtypeStruct((2, 5), jnp.uint16)
    after, _ = jax.eval_shape(program.step, state, window, program.config.numbers())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    # What a clip of all heads alike would do: the weights shrink, and the logits stay.
    before, params = apply(parameters(), TOKENS).stats.max_logit, parameters()
    clipped = qk_clip(params, np.full((2, 2), 100.0, np.float32), tau=50.0, layouts=program.layouts)
    q = [p["blocks"]["attention"]["q_DHK"] for p in (clipped, params)]
    np.testing.assert_allclose(q[0], q[1] * 0.5**0.5, rtol=1e-5)
    np.testing.assert_allclose(apply(clipped, TOKENS).stats.max_logit, before, rtol=1e-4)


def entropy(row):
    p = np.exp(row - row.max())
    p /= p.sum()
    return -(p * np.log(np.maximum(p, 1e-300))).sum()


def centred(row, norm):
    row = row - row.mean()
    return row * norm / np.linalg.norm(row)


@settings(max_examples=200, deadline=None)
@given(norm=st.floats(0.01, 40), length=st.integers(2, 200), seed=st.integers(0, 9999), sharp=st.floats(0, 8))
def test_no_row_has_less_entropy_than_the_bound(norm, length, seed, sharp):
    row = np.random.default_rng(seed).normal(size=length)
    row = centred(np.sign(row) * np.abs(row) ** (1 + sharp), norm)  # with `sharp`, a few entries stand out
    bound = entropy_bound(norm, length)
    assert entropy(row + 7.0) >= bound - 1e-9
    assert entropy(centred(row, norm / 2)) >= bound - 1e-9  # "at most this norm"
    worst = extremal_row(norm, length)
    assert abs(worst.mean()) < 1e-9 and np.linalg.norm(worst) == pytest.approx(norm)
    assert entropy(worst) == pytest.approx(float(bound), abs=1e-6)


def test_wrong_bounds_are_violated_or_not_attained():
    wrong = {
        "larger": lambda s, T: entropy_bound(s / 1.05, T),  # some row violates it
        "smaller": lambda s, T: entropy_bound(s * 1.05, T),  # no row attains it
        "without the exponent's root": lambda s, T: (
            np.log1p((T - 1) * np.exp(-s)) + s * np.sqrt(T * (T - 1)) * np.exp(-s) / (1 + (T - 1) * np.exp(-s))
        ),
    }
    for name, bound in wrong.items():
        off = [entropy(extremal_row(s, T)) - bound(s, T) for s in (1.0, 3.0) for T in (2, 8, 64)]
        assert np.abs(off).min() > 1e-4, name
    assert entropy_bound(0.0, 64) == pytest.approx(np.log(64)) and entropy_bound(5.0, 1) == 0
    floor = entropy_bound(30.0, 64) / (30 * 64 * np.exp(-30 * np.sqrt(64 / 63)))
    assert floor == pytest.approx(1.0, abs=0.05)  # it falls exponentially
