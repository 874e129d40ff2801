"""Multi-head latent attention against loops in float64, and its layer against the one in `transformers`."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import repro.models.latent_attention
from repro.models import Block, ModelConfig, MultiHeadLatentAttention
from repro.models.linear import linear

pytestmark = pytest.mark.usefixtures("quick_compile")

B, T, D, H, K, R, V, C = 2, 5, 10, 2, 4, 6, 3, 7
KINDS = {
    "plain": {"q_rank": 8},
    "full-rank queries, interleaved, capped": {"rope_interleaved": True, "soft_cap": 2.0},
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
    x = np.float64(X)
    out, top = np.zeros((B, T, D)), np.full(H, -np.inf)

    def norm(v, gain):
        return v if wrong == "no norm" else v / np.sqrt((v * v).mean() + config.norm_eps) * gain

    def turn(v, t):
        n = len(v) // 2
        neighbours = config.rope_interleaved != (wrong == "other pairs")
        a, b = (v[::2], v[1::2]) if neighbours else (v[:n], v[n:])
        return (a + 1j * b) * np.exp(1j * (0 if wrong == "no rope" else t) * config.rope_theta ** (-np.arange(n) / n))

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
            for t in range(T):
                q_nope, q_rope = queries[t][h, :K], queries[t][h, K:]
                if wrong == "rope first":
                    q_rope, q_nope = queries[t][h, :R], queries[t][h, R:]
                raw = (
                    np.array(
                        [
                            q_nope @ (latents[s] @ w["k_up_CHK"][:, h])
                            + (turn(q_rope, t) * turn(rotary[s], s).conj()).real.sum()
                            for s in range(t + 1)
                        ]
                    )
                    / (K if wrong == "scale of the nope part" else K + R) ** 0.5
                )
                top[h] = max(top[h], raw.max())
                seen = config.soft_cap * np.tanh(raw / config.soft_cap) if config.soft_cap else raw
                p = np.exp(seen) / np.exp(seen).sum()
                mixed = sum(p[s] * (latents[s] @ w["v_up_CHV"][:, h]) for s in range(t + 1))
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
    mistakes = ["no norm", "no rope", "other pairs", "norm on the rotary key", "rope first", "scale of the nope part"]
    for wrong in mistakes:
        with pytest.raises(AssertionError):
            same(of_module(kind), by_loops(kind, wrong))


def test_every_projection_follows_the_policy_of_attention(monkeypatch):
    seen = []

    def recorded(x, w, config, role, key, *, inputs=1):
        seen.append((role, w.shape))
        return linear(x, w, config, role, key, inputs=inputs)

    monkeypatch.setattr(repro.models.latent_attention, "linear", recorded)
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
