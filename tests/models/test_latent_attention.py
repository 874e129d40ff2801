"""Multi-head latent attention against loops in float64, and its layer against the one in `transformers`."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import repro.models.attention
import repro.models.latent_attention
from repro.models import Block, ModelConfig, MultiHeadLatentAttention, YarnConfig
from repro.models.linear import linear

pytestmark = pytest.mark.usefixtures("quick_compile")

B, T, D, H, K, R, V, C = 2, 5, 10, 2, 4, 6, 3, 7
# Of the three pairs the first turns 1.9 times in the original window, the second 0.9 and the third 0.4 times: the ramp
# goes from pair 0 to pair 4, the first that turns less than 0.1 times.
YARN = YarnConfig(factor=3.0, original=12, beta_fast=1.0, beta_slow=0.1, mscale=2.0, mscale_all_dim=0.5)
KINDS = {
    "plain": {"q_rank": 8},
    "full-rank queries, interleaved, capped": {"rope_interleaved": True, "soft_cap": 2.0},
    "rms": {"qk_norm": "rms", "q_rank": 8},
    "v4, no positions": {"qk_norm": "v4", "position": "none"},
    "l2, gate, sink": {"qk_norm": "l2", "output_gate": True, "attention_sink": True},
    "yarn": {"yarn": YARN, "q_rank": 8},
    "no positions": {"position": "none", "q_rank": 8},
}
X = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)


def config_of(kind):
    return ModelConfig(
        attention="mla", width=D, heads=H, ffn=8, kv_rank=C, nope_size=K, rope_size=R, value_size=V, rope_theta=10.0,
        norm_eps=1e-3, **KINDS[kind],
    )  # fmt: skip


def make_weights(kind):
    with nnx.set_graph_mode(False):
        module = nnx.eval_shape(lambda: MultiHeadLatentAttention(config_of(kind), rngs=nnx.Rngs(0)))
        shapes = nnx.to_pure_dict(nnx.split(module)[1])
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.6, shapes)


def with_weights(module, weights):
    graphdef, state = nnx.split(nnx.eval_shape(module))
    nnx.replace_by_pure_dict(state, weights)
    return nnx.merge(graphdef, state)


@functools.cache
def of_module(kind):
    make = lambda: MultiHeadLatentAttention(config_of(kind), rngs=nnx.Rngs(0))
    return jax.jit(lambda w, x: with_weights(make, w)(x))(make_weights(kind), X)


def by_loops(kind, wrong=""):
    """The definition, one query position of one head at a time. `wrong` names a deliberate error."""
    config, w = config_of(kind), jax.tree.map(np.float64, make_weights(kind))
    x, qk = np.float64(X), config.qk_norm
    out, top = np.zeros((B, T, D)), np.full(H, -np.inf)

    def norm(v, gain):
        return v if wrong == "no norm" else v / np.sqrt((v * v).mean() + config.norm_eps) * gain

    def turn(v, t):
        n = len(v) // 2
        neighbours = config.rope_interleaved != (wrong == "other pairs")
        a, b = (v[::2], v[1::2]) if neighbours else (v[:n], v[n:])
        frequency, length = config.rope_theta ** (-np.arange(n) / n), 1.0
        if config.yarn.factor > 1:
            share = np.arange(n) / 4
            frequency = frequency * (1 - share * (2 / 3)) if wrong != "not stretched" else frequency
            length = (1 + 0.2 * np.log(3)) / (1 + 0.05 * np.log(3)) if wrong != "no ratio" else 1.0
        still = wrong == "no rope" or (config.position == "none" and wrong != "turned")
        return length * (a + 1j * b) * np.exp(1j * (0 if still else t) * frequency)

    def ready(v, side):
        """A whole head after the norm of queries and keys."""
        if qk == "none" or wrong == "no qk-norm":
            return v
        if wrong == "norm on the nope part alone":
            return np.concatenate([ready_part(v[:K], side, slice(0, K)), v[K:]])
        if wrong == "norm of each part":
            return np.concatenate([ready_part(v[:K], side, slice(0, K)), ready_part(v[K:], side, slice(K, None))])
        return ready_part(v, side, slice(None))

    def ready_part(v, side, part):
        gain = w.get(f"{side}_gain_J", np.ones(K + R))[part]
        return v / np.sqrt(((v * v).sum() if qk == "l2" else (v * v).mean()) + config.norm_eps) * gain

    for b in range(B):
        if config.q_rank:
            queries = [
                np.einsum("c,chj->hj", norm(x[b, t] @ w["q_down_DC"], w["q_norm"]["gain"]), w["q_up_CHJ"])
                for t in range(T)
            ]
        else:
            queries = [np.einsum("d,dhj->hj", x[b, t], w["q_DHJ"]) for t in range(T)]
        latents = [norm(x[b, s] @ w["kv_down_DC"], w["kv_norm"]["gain"]) for s in range(T)]
        rotary = [x[b, s] @ w["k_rope_DR"] for s in range(T)]
        if wrong == "norm on the rotary key":
            rotary = [norm(v, 1.0) for v in rotary]
        for h in range(H):
            keys = [ready(np.concatenate([latents[s] @ w["k_up_CHK"][:, h], rotary[s]]), "k") for s in range(T)]
            for t in range(T):
                query = ready(queries[t][h], "q")
                q_nope, q_rope = query[:K], query[K:]
                if wrong == "rope first":
                    q_rope, q_nope = query[:R], query[R:]
                raw = np.array(
                    [
                        q_nope @ keys[s][:K] + (turn(q_rope, t) * turn(keys[s][K:], s).conj()).real.sum()
                        for s in range(t + 1)
                    ]
                )
                own = w["logit_scale"] if qk == "l2" else (K + R) ** -0.5
                raw = raw * (K**-0.5 if wrong == "scale of the nope part" else own)
                if config.yarn.factor > 1 and wrong != "no m":
                    raw = raw * (1 + 0.05 * np.log(3)) ** 2
                top[h] = max(top[h], raw.max())
                seen = config.soft_cap * np.tanh(raw / config.soft_cap) if config.soft_cap else raw
                sink = np.exp(w["sink_H"][h]) if config.attention_sink and wrong != "no sink" else 0.0
                p = np.exp(seen) / (np.exp(seen).sum() + sink)
                mixed = sum(p[s] * (latents[s] @ w["v_up_CHV"][:, h]) for s in range(t + 1))
                if config.output_gate and wrong != "no gate":
                    mixed = mixed / (1 + np.exp(-(x[b, t] @ w["gate_DHV"][:, h])))
                out[b, t] += mixed @ w["o_HVD"][h]
    return out, top


def same(got, want):
    np.testing.assert_allclose(got[0], want[0], atol=3e-5)
    np.testing.assert_allclose(got[1]["max_logit"], want[1], atol=3e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_loops_over_heads_and_positions(kind):
    same(of_module(kind), by_loops(kind))
    stats = of_module(kind)[1]
    assert {s.shape for s in stats.values()} == {(H,)} and (stats["max_abs_logit"] >= stats["max_logit"]).all()
    mistakes = {
        "rms": ["no qk-norm", "norm on the nope part alone", "norm of each part"],
        "v4, no positions": ["no qk-norm", "norm of each part", "turned"],
        "l2, gate, sink": ["no qk-norm", "norm of each part", "no gate", "no sink", "scale of the nope part"],
        "yarn": ["not stretched", "no ratio", "no m"],
        "no positions": ["turned"],
    }
    of_all = ["no norm", "no rope", "other pairs", "norm on the rotary key", "rope first", "scale of the nope part"]
    for wrong in mistakes.get(kind, of_all):
        with pytest.raises(AssertionError):
            same(of_module(kind), by_loops(kind, wrong))


@pytest.mark.parametrize("kind", ["rms", "l2, gate, sink", "v4, no positions"])
def test_a_norm_bounds_the_logits_where_the_norms_of_the_latents_do_not(kind):
    make = lambda: MultiHeadLatentAttention(config_of(kind), rngs=nnx.Rngs(0))
    plain = lambda: MultiHeadLatentAttention(dataclasses.replace(config_of(kind), qk_norm="none"), rngs=nnx.Rngs(0))
    w = make_weights(kind)
    up = {n: w[n] * np.float32(1e3) for n in w if n in ("q_up_CHJ", "q_DHJ", "k_up_CHK", "k_rope_DR")}
    top = jax.jit(lambda w: with_weights(make, w)(jnp.asarray(X))[1]["max_abs_logit"])(w | up)
    gains = [np.abs(w[n]).max() for n in ("q_gain_J", "k_gain_J") if n in w]
    bound = np.abs(w["logit_scale"]) if "logit_scale" in w else (K + R) ** 0.5 * np.prod(gains)
    assert (top <= bound * (1 + 1e-6)).all() and (top > 0.1 * bound).all()
    free = {n: x for n, x in (w | up).items() if "gain" not in n and n != "logit_scale"}
    assert (jax.jit(lambda w: with_weights(plain, w)(jnp.asarray(X))[1]["max_abs_logit"])(free) > 1e3 * bound).all()


def test_every_projection_follows_the_policy_of_attention(monkeypatch):
    seen = []

    def recorded(x, w, config, role, key, *, inputs=1):
        seen.append((role, w.shape))
        return linear(x, w, config, role, key, inputs=inputs)

    for module in (repro.models.latent_attention, repro.models.attention):
        monkeypatch.setattr(module, "linear", recorded)
    for kind in KINDS:
        seen.clear()
        make = lambda kind=kind: MultiHeadLatentAttention(config_of(kind), rngs=nnx.Rngs(0))
        jax.eval_shape(lambda w, make=make: with_weights(make, w)(jnp.asarray(X)), make_weights(kind))
        matrices = [w.shape for w in jax.tree.leaves(make_weights(kind)) if w.ndim > 1]
        assert sorted(seen) == sorted(("attention", shape) for shape in matrices)


GOLDEN = Path(__file__).parent / "data" / "deepseek_v3_layer.npz"


def test_the_layer_of_deepseek_v3_in_transformers():
    with np.load(GOLDEN) as golden:
        released = json.loads(str(golden["config"]))
        interleaved = bool(golden["rope_interleave"])
        x_BTD, y_BTD = golden["hidden/0"], golden["hidden/1"]
        prefix = "w/model.layers.0."
        w = {n.removeprefix(prefix).removesuffix(".weight"): golden[n].T for n in golden if n.startswith(prefix)}
    config = ModelConfig(
        attention="mla", width=released["hidden_size"], heads=released["num_attention_heads"],
        ffn=released["intermediate_size"], q_rank=released["q_lora_rank"], kv_rank=released["kv_lora_rank"],
        nope_size=released["qk_nope_head_dim"], rope_size=released["qk_rope_head_dim"],
        value_size=released["v_head_dim"], rope_theta=released["rope_theta"], norm_eps=released["rms_norm_eps"],
        rope_interleaved=interleaved,
    )  # fmt: skip
    heads, C, K = config.heads, config.kv_rank, config.nope_size
    kv_up_CHE = w["self_attn.kv_b_proj"].reshape(C, heads, -1)
    weights = {
        "attention_norm": {"gain": w["input_layernorm"]},
        "ffn_norm": {"gain": w["post_attention_layernorm"]},
        "ffn": {"gate_DF": w["mlp.gate_proj"], "up_DF": w["mlp.up_proj"], "down_FD": w["mlp.down_proj"]},
        "attention": {
            "q_down_DC": w["self_attn.q_a_proj"],
            "q_norm": {"gain": w["self_attn.q_a_layernorm"]},
            "q_up_CHJ": w["self_attn.q_b_proj"].reshape(config.q_rank, heads, -1),
            "kv_down_DC": w["self_attn.kv_a_proj_with_mqa"][:, :C],
            "k_rope_DR": w["self_attn.kv_a_proj_with_mqa"][:, C:],
            "kv_norm": {"gain": w["self_attn.kv_a_layernorm"]},
            "k_up_CHK": kv_up_CHE[..., :K],
            "v_up_CHV": kv_up_CHE[..., K:],
            "o_HVD": w["self_attn.o_proj"].reshape(heads, config.value_size, -1),
        },
    }

    @jax.jit
    def layer(weights, x_BTD):
        other = ModelConfig(**vars(config) | {"rope_interleaved": not interleaved})
        make = lambda c: lambda: Block(c, rngs=nnx.Rngs(0))
        return [with_weights(make(c), weights)(x_BTD)[0] for c in (config, other)]

    got_BTD, wrong_BTD = layer(jax.tree.map(jnp.asarray, weights), jnp.asarray(x_BTD))
    np.testing.assert_allclose(got_BTD, y_BTD, atol=2e-6)
    assert np.abs(wrong_BTD - y_BTD).max() > 1e-3
