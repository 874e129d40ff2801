"""QK-Clip where heads share keys: latent attention and grouped queries, against the logits themselves in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from repro.models import ModelConfig, MultiHeadAttention, MultiHeadLatentAttention, declarations, init_and_apply
from repro.models.transformer import abstract
from repro.optim import Layout, Part, Parts, from_declarations, qk_clip

pytestmark = pytest.mark.usefixtures("quick_compile")

L, H, D, TAU = 2, 4, 16, 100.0
MAXIMA = np.float32([[150, -3, 50, 0], [20, 1000, -5, 99]])
GAMMA = np.array([[2 / 3, 1, 1, 1], [1, 0.1, 1, 1]])
SHAPE = dict(vocab_size=11, layers=L, width=D, heads=H, ffn=8)
CONFIGS = {
    "latent": ModelConfig(
        **SHAPE, attention="mla", q_rank=10, kv_rank=8, nope_size=6, rope_size=4, value_size=3
    ),
    "latent, full-rank queries": ModelConfig(
        **SHAPE, attention="mla", kv_rank=8, nope_size=6, rope_size=4, value_size=3
    ),
    "grouped": ModelConfig(**SHAPE, kv_heads=2, head_dim=6),
}  # fmt: skip


def attention(kind):
    """Random weights and the layouts of the attention of a model."""
    shapes = jax.eval_shape(init_and_apply(CONFIGS[kind])[0], jax.random.key(0))["blocks"]["attention"]
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)
    return weights, from_declarations(declarations(abstract(CONFIGS[kind])))["blocks"]["attention"]


def logits(weights):
    """[L, H, T, S] for fixed inputs and latents, scaled as it may be: the clip is a statement about ratios."""
    w = jax.tree.map(np.float64, weights)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, D))
    if "k_up_CHK" in w:
        c_q, c_kv = rng.normal(size=(5, 10)), rng.normal(size=(5, 8))
        q = (
            np.einsum("tc,lchj->lhtj", c_q, w["q_up_CHJ"])
            if "q_up_CHJ" in w
            else np.einsum("td,ldhj->lhtj", x, w["q_DHJ"])
        )
        own = np.einsum("lhtk,lhsk->lhts", q[..., :6], np.einsum("tc,lchk->lhtk", c_kv, w["k_up_CHK"]))
        return own + np.einsum("lhtr,lsr->lhts", q[..., 6:], np.einsum("sd,ldr->lsr", x, w["k_rope_DR"]))
    q, k = (np.einsum("td,ldhk->lhtk", x, w[n]) for n in ("q_DHK", "k_DHK"))
    return np.einsum("lhtk,lhsk->lhts", q, np.repeat(k, 2, 1))


def clips_exactly(kind, clip):
    """Every logit of a clipped head scales by gamma; other heads' weights, and all that is shared, keep their bits."""
    weights, layouts = attention(kind)
    after = clip(weights, layouts)
    want = GAMMA[:, :, None, None] * logits(weights)
    np.testing.assert_allclose(logits(after), want, atol=1e-6 * np.abs(want).max())
    for name in weights:
        if name in ("q_up_CHJ", "q_DHJ", "k_up_CHK", "q_DHK"):
            before, now = (np.moveaxis(np.asarray(w[name]), 2, 1) for w in (weights, after))  # [L, H, ...]
            np.testing.assert_array_equal(now[GAMMA == 1], before[GAMMA == 1])
            assert (now[GAMMA < 1] != before[GAMMA < 1]).all()
        else:
            jax.tree.map(np.testing.assert_array_equal, after[name], weights[name])


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("alpha", [0.5, 0.3])
def test_the_logits_of_a_clipped_head_scale_by_gamma_and_nothing_else_changes(kind, alpha):
    clips_exactly(kind, lambda w, n: qk_clip(w, MAXIMA, tau=TAU, layouts=n, alpha=alpha))


@pytest.mark.parametrize(("kind", "module"), [("latent", MultiHeadLatentAttention), ("grouped", MultiHeadAttention)])
def test_the_module_sees_its_clipped_heads_at_tau(kind, module):
    """By the statistic that the module itself reports, at its own inputs."""
    weights, layouts = jax.tree.map(lambda w: w * 0.5, attention(kind)[0]), attention(kind)[1]
    x_BTD = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5, D)), jnp.float32)

    @jax.jit
    def maxima(weights):
        graphdef, state = nnx.split(nnx.eval_shape(lambda: module(CONFIGS[kind], rngs=nnx.Rngs(0))))

        def layer(w):
            nnx.replace_by_pure_dict(state, w)
            return nnx.merge(graphdef, state)(x_BTD)[1]["max_logit"]

        return jnp.stack([layer(jax.tree.map(lambda w, i=i: w[i], weights)) for i in range(L)])

    before = np.asarray(maxima(weights))
    tau = float(np.sort(before.ravel())[-3] * 0.99)
    after = np.asarray(maxima(qk_clip(weights, before, tau=tau, layouts=layouts)))
    assert (before > tau).sum() == 3
    np.testing.assert_allclose(after[before > tau], tau, rtol=1e-5)
    np.testing.assert_allclose(after[before <= tau], before[before <= tau], rtol=1e-6)


def by_hand(gamma, rope_power=1.0, shared_power=0.0, value_power=0.0):
    """The rule for latent attention with a gamma [L, H] and the powers as given; right with the defaults."""

    def clip(w, layouts):
        g = jnp.asarray(gamma, jnp.float32)[:, None, :, None]
        power = jnp.concatenate(
            [jnp.broadcast_to(g**0.5, (L, 1, H, 6)), jnp.broadcast_to(g**rope_power, (L, 1, H, 4))], -1
        )
        return w | {
            "q_up_CHJ": w["q_up_CHJ"] * power,
            "k_up_CHK": w["k_up_CHK"] * g**0.5,
            "k_rope_DR": w["k_rope_DR"] * g.min(2) ** shared_power,
            "v_up_CHV": w["v_up_CHV"] * g**value_power,
        }

    return clip


LAYER_MAXIMUM = np.broadcast_to(MAXIMA.max(1, keepdims=True), MAXIMA.shape)
WRONG = {
    "sqrt(gamma) on the rotary part": by_hand(GAMMA, rope_power=0.5),
    "the shared key scaled too": by_hand(GAMMA, rope_power=0.5, shared_power=0.5),
    "the rotary part left out": by_hand(GAMMA, rope_power=0.0),
    "values scaled": by_hand(GAMMA, value_power=0.5),
    "one maximum per layer": lambda w, n: qk_clip(w, LAYER_MAXIMUM, tau=TAU, layouts=n),
    "min(1, tau / S)": by_hand(np.minimum(1, TAU / np.where(MAXIMA == 0, 1e-6, MAXIMA))),
}


def test_the_rule_by_hand():
    clips_exactly("latent", by_hand(GAMMA))


@pytest.mark.parametrize("name", WRONG)
def test_the_same_check_finds(name):
    with pytest.raises(AssertionError):
        clips_exactly("latent", WRONG[name])


def test_the_rule_of_multi_head_attention_harms_the_others_of_a_group():
    def halves(w, layouts):
        g = jnp.asarray(GAMMA, jnp.float32)
        return w | {
            "q_DHK": w["q_DHK"] * g[:, None, :, None] ** 0.5,
            "k_DHK": w["k_DHK"] * g.reshape(L, 2, 2).min(2)[:, None, :, None] ** 0.5,
        }

    with pytest.raises(AssertionError):
        clips_exactly("grouped", halves)


def test_segments_of_fused_weights():
    """K and V halves in one weight, and queries, keys and values of all heads on one axis."""
    weights, layouts = attention("latent")
    want = qk_clip(weights, MAXIMA, tau=TAU, layouts=layouts)
    halves = Parts(3, (Part("k", 6, "k"), Part("v", 3)))
    joined = lambda w: w | {"kv_up": jnp.concatenate([w["k_up_CHK"], w["v_up_CHV"]], 3)}
    without = lambda w: {n: x for n, x in w.items() if n not in ("k_up_CHK", "v_up_CHV")}
    fused = without(layouts) | {"kv_up": Layout("matrix", (1,), (3,), head=2, layer=0, parts=halves)}
    got = qk_clip(without(joined(weights)), MAXIMA, tau=TAU, layouts=fused)
    jax.tree.map(np.testing.assert_array_equal, got, without(joined(want)))

    weights, layouts = attention("grouped")
    want = qk_clip(weights, MAXIMA, tau=TAU, layouts=layouts)
    qkv = Parts(2, (Part("q", 4, "q_shared"), Part("k", 2, "k_shared"), Part("v", 2)))
    joined = lambda w: {"qkv": jnp.concatenate([w["q_DHK"], w["k_DHK"], w["v_DHV"]], 2)}
    fused = {"qkv": Layout("matrix", (1,), (3,), head=2, layer=0, parts=qkv)}
    got = qk_clip(joined(weights), MAXIMA, tau=TAU, layouts=fused)
    jax.tree.map(np.testing.assert_array_equal, got, joined(want))
