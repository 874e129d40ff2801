"""Attention and its statistics against loops over batch, head and position in float64."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import repro.models.softmax
from repro.models import ModelConfig, MultiHeadAttention, YarnConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

B, T, D, H, K = 2, 5, 8, 2, 4
# Of the two pairs the first turns 1.9 times in the original window and the second 0.6 times: one third of the ramp.
YARN = YarnConfig(factor=3.0, original=12, beta_fast=1.0, beta_slow=0.1, mscale=2.0, mscale_all_dim=0.5)
KINDS = {
    "plain": {},
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer"},
    "soft_cap": {"soft_cap": 3.0},
    "layer and soft_cap": {"qk_norm": "layer", "soft_cap": 1.5},
    "grouped": {"heads": 4, "kv_heads": 2, "head_dim": K, "rope_interleaved": True},  # four heads of K: wider than D
    "rms_plain": {"qk_norm": "rms_plain", "position": "none"},
    "l2": {"qk_norm": "l2"},
    "v4": {"qk_norm": "v4", "heads": 4, "kv_heads": 2, "head_dim": K},
    "gate, sink and yarn": {"output_gate": True, "attention_sink": True, "soft_cap": 3.0, "yarn": YARN},
}
NORMS = ["rms", "layer", "rms_plain", "l2", "v4"]


def config_of(kind):
    return ModelConfig(**dict(layers=2, width=D, heads=H, ffn=8, rope_theta=10.0, norm_eps=1e-3) | KINDS[kind])


def make_weights(kind, seed=0, scale=0.7):
    rng, heads = np.random.default_rng(seed), config_of(kind).heads
    sizes = {"q_DHK": heads, "k_DHK": H, "v_DHV": H}
    w = {n: rng.normal(size=(D, h, K)) * scale for n, h in sizes.items()}
    w["o_HVD"] = rng.normal(size=(heads, K, D))
    norm = KINDS[kind].get("qk_norm")
    if norm in ("rms", "layer"):
        w |= {n: 1 + rng.normal(size=K) for n in ("q_gain_K", "k_gain_K")}
    w |= {"k_gain_K": 1 + rng.normal(size=K)} if norm == "v4" else {}
    w |= {"logit_scale": np.array(3.0)} if norm == "l2" else {}
    if "output_gate" in KINDS[kind]:
        w |= {"gate_DHV": rng.normal(size=(D, heads, K)), "sink_H": rng.normal(size=heads)}
    return {n: x.astype(np.float32) for n, x in w.items()}


X = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)


def with_weights(config, w):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MultiHeadAttention(config, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, w)
    return nnx.merge(graphdef, state)


@functools.partial(jax.jit, static_argnames="config")
def module(config, w, x):
    return with_weights(config, w)(x)


@functools.cache
def of_module(kind):
    return module(config_of(kind), make_weights(kind), X)


def by_loops(kind, wrong=""):
    """The definition, one query position of one head at a time. `wrong` names a deliberate error."""
    config, w = config_of(kind), {n: np.float64(x) for n, x in make_weights(kind).items()}
    x, eps = np.float64(X), config.norm_eps
    out = np.zeros((B, T, D))
    heads = config.heads
    found = {n: [[] for _ in range(heads)] for n in ("max_logit", "max_abs_logit", "max_capped_logit", "entropy")}

    def turn(v, t):
        a, b = (v[::2], v[1::2]) if config.rope_interleaved != (wrong == "other pairs") else (v[: K // 2], v[K // 2 :])
        frequency = config.rope_theta ** (-2 * np.arange(K // 2) / K)
        if config.yarn.factor > 1:  # whole pairs bound the ramp: 0 is the last that turns once, 3 the first with 0.1
            share = np.arange(K // 2) / 3
            frequency = frequency * (1 - share) + frequency / (1 if wrong == "not stretched" else 3) * share
        z = (a + 1j * b) * np.exp(1j * t * frequency)
        length = (1 + 0.2 * np.log(3)) / (1 + 0.05 * np.log(3)) if config.yarn.factor > 1 else 1
        return np.concatenate([z.real, z.imag]) * (1 if wrong == "no ratio" else length)

    def norm(v, side):
        if config.qk_norm == "none" or wrong == "no qk-norm":
            return v
        if (config.qk_norm == "layer") != (wrong == "other norm"):
            v = v - v.mean()
        gain = w.get(f"{'k' if wrong == 'gain on queries' else side}_gain_K", 1.0)
        size = (v * v).sum() if config.qk_norm == "l2" and wrong != "mean" else (v * v).mean()
        return v / np.sqrt(size + eps) * (1.0 if wrong == "no gain" else gain)

    def ready(weight, side, b, t, h):
        v = x[b, t] @ weight[:, h]
        if wrong == "norm after rope":
            return norm(turn(v, t), side)
        return turn(norm(v, side), 0 if wrong == "no rope" or KINDS[kind].get("position") else t)

    for b in range(B):
        for h in range(heads):
            own = h % H if wrong == "groups across" else h // (heads // H)
            for t in range(T):
                q = ready(w["q_DHK"], "q", b, t, h)
                raw = np.array([q @ ready(w["k_DHK"], "k", b, s, own) for s in range(T)])
                if config.qk_norm == "l2" and wrong != "scale 1/sqrt(K)":
                    raw = raw * w["logit_scale"]
                else:
                    raw = raw / (K if wrong == "scale 1/K" else D**0.5 if wrong == "scale by width" else K**0.5)
                if config.yarn.factor > 1 and wrong != "no m":
                    raw = raw * (1 + (0.2 if wrong == "m of mscale" else 0.05) * np.log(3)) ** 2
                seen = raw
                if (cap := config.soft_cap) and wrong != "no cap":
                    seen = np.clip(raw, -cap, cap) if wrong == "hard cap" else cap * np.tanh(raw / cap)
                visible = np.arange(T) < t if wrong == "strict mask" and t else np.arange(T) <= t
                if wrong == "no mask":
                    visible[:] = True
                p = np.where(visible, np.exp(seen), 0)
                sink = np.exp(w["sink_H"][h]) if "sink_H" in w and wrong != "no sink" else 0.0
                p, left = p / p.sum(), p.sum() / (p.sum() + sink)  # of the weights, and of the row without the sink
                mixed = left * sum(p[s] * (x[b, s] @ w["v_DHV"][:, own]) for s in range(T))
                if "gate_DHV" in w and wrong != "no gate":
                    gate = x[b, t] @ w["gate_DHV"][:, h]
                    mixed = mixed * (np.tanh(gate) if wrong == "tanh gate" else 1 / (1 + np.exp(-gate)))
                if wrong == "sink in the entropy":
                    p = np.append(p * left, 1 - left)
                out[b, t] += mixed @ w["o_HVD"][h]
                here = np.ones(T, bool) if wrong == "masked counted" else visible
                signed = {"absolute": np.abs(raw), "after cap": seen}.get(wrong, raw)
                found["max_logit"][h].append(max(signed[here]))
                found["max_abs_logit"][h].append(max(raw[here] if wrong == "signed" else np.abs(raw[here])))
                found["max_capped_logit"][h].append(max(np.abs(raw[here] if wrong == "before cap" else seen[here])))
                entropy = -sum(v * (np.log2(v) if wrong == "bits" else np.log(v)) for v in p if v > 0)
                found["entropy"][h].append(entropy)
    reduce = {"entropy": np.max if wrong == "largest entropy" else np.mean}
    return out, {n: np.array([reduce.get(n, np.max)(v) for v in lists]) for n, lists in found.items()}


def same(got, want):
    np.testing.assert_allclose(got[0], want[0], atol=3e-5)
    assert set(got[1]) == set(want[1])
    for name in want[1]:
        assert got[1][name].shape == want[1][name].shape and got[1][name].dtype == jnp.float32
        np.testing.assert_allclose(got[1][name], want[1][name], atol=3e-5, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_loops_over_heads_and_positions(kind):
    same(of_module(kind), by_loops(kind))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *(
            ("plain", w)
            for w in [
                "scale 1/K", "scale by width", "no mask", "strict mask", "no rope", "absolute", "signed",
                "masked counted", "bits", "largest entropy",
            ]
        ),
        *((kind, w) for kind in ("rms", "layer") for w in ["no qk-norm", "other norm", "no gain", "norm after rope"]),
        *(("soft_cap", w) for w in ["no cap", "hard cap", "after cap", "before cap"]),
        *(("grouped", w) for w in ["groups across", "other pairs", "scale by width"]),
        *(("l2", w) for w in ["no qk-norm", "mean", "scale 1/sqrt(K)"]),
        *(("v4", w) for w in ["no qk-norm", "other norm", "no gain", "gain on queries", "norm after rope"]),
        *(("rms_plain", w) for w in ["no qk-norm", "other norm"]),
        *(
            ("gate, sink and yarn", w)
            for w in [
                "no gate", "tanh gate", "no sink", "sink in the entropy", "not stretched", "no ratio", "no m",
                "m of mscale",
            ]
        ),
    ],
)  # fmt: skip
def test_the_same_check_finds(kind, wrong):
    with pytest.raises(AssertionError):
        same(of_module(kind), by_loops(kind, wrong))


def test_capped_maximum_equals_the_absolute_one_without_a_cap():
    stats = of_module("plain")[1]
    np.testing.assert_array_equal(stats["max_capped_logit"], stats["max_abs_logit"])
    stats = of_module("soft_cap")[1]
    assert (stats["max_capped_logit"] < 3.0).all() and (stats["max_abs_logit"] > 3.0).any()


def bound_of(w):
    """The largest |logit| that a norm of queries and keys allows."""
    gains = [np.abs(w[n]).max() for n in ("q_gain_K", "k_gain_K") if n in w]
    return float(np.abs(w["logit_scale"])) if "logit_scale" in w else K**0.5 * math.prod(gains)


@pytest.mark.parametrize("kind", NORMS)
@settings(max_examples=15, deadline=None)
@given(size=st.floats(-8, 8), gain=st.floats(-4, 4), seed=st.integers(0, 99))
def test_a_norm_bounds_the_logits_whatever_the_weights(kind, size, gain, seed):
    w = make_weights(kind, seed, 10.0**size)
    w |= {n: (x * gain).astype(np.float32) for n, x in w.items() if "gain" in n or "scale" in n}
    stats = module(config_of(kind), w, X)[1]
    assert (stats["max_abs_logit"] <= bound_of(w) * (1 + 1e-6)).all()


@pytest.mark.parametrize("kind", NORMS)
def test_the_bound_is_reached(kind):
    # Queries equal to keys, at t = s; with unequal gains only a vector along one axis would reach it.
    heads, w = config_of(kind).heads, make_weights(kind)
    w |= {n: np.full(K, 1.5, np.float32) for n in w if "gain" in n}
    same_key = np.repeat(w["k_DHK"], heads // H, 1) * np.float32(1e3)
    stats = module(config_of(kind), w | {"q_DHK": same_key, "k_DHK": w["k_DHK"] * np.float32(1e3)}, X)[1]
    np.testing.assert_allclose(stats["max_logit"], bound_of(w), rtol=1e-5)


def test_without_a_norm_nothing_is_bounded():
    w = make_weights("plain")
    stats = module(config_of("plain"), w | {"q_DHK": w["q_DHK"] * 1e3}, X)[1]
    assert (stats["max_abs_logit"] > 100 * K**0.5).all()


def test_unit_length_starts_where_the_norm_without_gain_does():
    norms = {n: dataclasses.replace(config_of("plain"), qk_norm=n, norm_eps=1e-12) for n in ("l2", "rms_plain")}
    one = nnx.to_pure_dict(nnx.split(MultiHeadAttention(norms["l2"], rngs=nnx.Rngs(0)))[1])
    assert float(one["logit_scale"]) == K**0.5
    two = {n: x for n, x in one.items() if n != "logit_scale"}
    np.testing.assert_allclose(module(norms["l2"], one, X)[0], module(norms["rms_plain"], two, X)[0], atol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "l2", "v4", "gate, sink and yarn"])
def test_everything_learns_and_with_a_norm_only_across_the_weights(kind):
    config = dataclasses.replace(config_of(kind), norm_eps=1e-12)
    loss = lambda w: (with_weights(config, w)(jnp.asarray(X))[0] ** 3).mean()
    w = make_weights(kind)
    g = jax.jit(jax.grad(loss))(w)
    along = [float((g[n] * w[n]).sum()) / float(np.abs(g[n] * w[n]).sum()) for n in ("q_DHK", "k_DHK")]
    normed = config.qk_norm != "none"
    assert (np.abs(along) < 1e-5).all() == normed and (normed or np.abs(along).min() > 1e-3)
    assert set(g) == set(w) and all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in g.values())


def test_a_sink_takes_from_the_output_and_not_from_the_statistics():
    kind = "gate, sink and yarn"
    config, w = config_of(kind), make_weights(kind)
    out, stats = of_module(kind)
    far = module(config, w | {"sink_H": np.full(H, -1e30, np.float32)}, X)
    none = module(dataclasses.replace(config, attention_sink=False), {n: x for n, x in w.items() if n != "sink_H"}, X)
    np.testing.assert_allclose(far[0], none[0], atol=1e-6)
    huge = module(config, w | {"sink_H": np.full(H, 1e30, np.float32)}, X)[0]
    np.testing.assert_array_equal(huge, np.zeros_like(huge))
    for name, value in none[1].items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-6, err_msg=name)
    assert np.abs(out - none[0]).max() > 0.01


def test_entropy_of_uniform_and_of_sharp_attention():
    w = make_weights("plain")
    flat = module(config_of("plain"), w | {"q_DHK": 0 * w["q_DHK"]}, X)[1]
    np.testing.assert_allclose(flat["entropy"], np.mean(np.log(np.arange(1, T + 1))), rtol=1e-6)
    sharp = module(config_of("plain"), w | {"q_DHK": 1e5 * w["q_DHK"]}, X)[1]
    assert (sharp["entropy"] < 1e-3).all() and (sharp["entropy"] >= 0).all()


def test_huge_logits_stay_finite_and_causal():
    # The first position sees itself alone, also where its logit is far below zero.
    w = make_weights("plain")
    out, stats = module(config_of("plain"), w | {"q_DHK": 1e15 * w["q_DHK"], "k_DHK": -1e15 * w["q_DHK"]}, X)
    assert (stats["max_abs_logit"] > 1e30).all() and all(np.isfinite(s).all() for s in stats.values())
    np.testing.assert_allclose(out[:, 0], by_loops("plain")[0][:, 0], atol=3e-5)
    np.testing.assert_allclose(stats["entropy"], 0, atol=1e-6)


def test_bfloat16_inputs_keep_float32_logits():
    out, stats = module(config_of("plain"), make_weights("plain"), jnp.asarray(X, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16 and {s.dtype for s in stats.values()} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(np.asarray(out, np.float32), of_module("plain")[0], atol=0.3)
    np.testing.assert_allclose(stats["max_logit"], of_module("plain")[1]["max_logit"], rtol=0.05)


def statistics_leave_the_gradient_alone(statistic):
    """Adding a statistic to the loss changes no gradient."""

    @jax.jit
    def gradient(w, weight):
        def loss(w):
            out, stats = with_weights(config_of("layer and soft_cap"), w)(jnp.asarray(X))
            return (out**2).mean() + weight * statistic(out, stats)

        return jax.grad(loss)(w)

    w = make_weights("layer and soft_cap")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), gradient(w, 0.0), gradient(w, 1.0))


def test_statistics_carry_no_gradient():
    statistics_leave_the_gradient_alone(lambda out, stats: sum(s.sum() for s in stats.values()))
    with pytest.raises(AssertionError):
        statistics_leave_the_gradient_alone(lambda out, stats: out.max())


def influence(config, w):
    """[T, T] of bool: does changing the input at s change the output at t?"""
    x = np.broadcast_to(X[:1], (T + 1, T, D)).copy()
    for s in range(T):
        x[s, s] += 1.0
    out = np.asarray(with_weights(config, w)(jnp.asarray(x))[0])
    return np.abs(out[:T] - out[T]).max(-1) > 1e-6


@pytest.mark.parametrize("kind", ["plain", "gate, sink and yarn"])
def test_causal(kind, monkeypatch):
    config, w = config_of(kind), make_weights(kind)
    np.testing.assert_array_equal(influence(config, w), np.triu(np.ones((T, T), bool)))
    for wrong in [lambda m: np.tril(m, 1), lambda m: np.tril(m, -1) | np.eye(len(m), k=len(m) - 1, dtype=bool)]:
        monkeypatch.setattr(repro.models.softmax, "np", types.SimpleNamespace(**vars(np) | {"tril": wrong}))
        with pytest.raises(AssertionError):
            np.testing.assert_array_equal(influence(config, w), np.triu(np.ones((T, T), bool)))
