import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from repro.models import Block, ModelConfig, MultiHeadLatentAttention, Transformer, init_and_apply
from repro.models.block import layer_stats

pytestmark = pytest.mark.usefixtures("quick_compile")

Z, T, B = 32, 6, 7  # B = T + 1, so that all tests share one program per config
CONFIG = ModelConfig(vocab_size=Z, layers=2, width=16, heads=2, ffn=24)
KINDS = {
    "plain": CONFIG,
    "rms": dataclasses.replace(CONFIG, qk_norm="rms", soft_cap=20.0),
    "layer": dataclasses.replace(CONFIG, qk_norm="layer"),
    "looped": dataclasses.replace(CONFIG, layers=6),  # more layers than are unrolled
    "mla": dataclasses.replace(
        CONFIG, attention="mla", q_rank=12, kv_rank=10, nope_size=4, rope_size=2, value_size=6, soft_cap=20.0
    ),
}
TOKENS = np.random.default_rng(0).integers(0, Z, size=(B, T))


init = jax.jit(init_and_apply(CONFIG)[0])


@functools.cache
def params_of(kind):
    """Parameters of about the size of the real start, drawn by NumPy."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(init_and_apply(KINDS[kind])[0], jax.random.key(0))

    def draw(path, x):
        mean, deviation = (1, 0.1) if "gain" in path[-1].key else (0, 0.25)
        return (mean + deviation * rng.normal(size=x.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def apply_of(config):
    return jax.jit(init_and_apply(config)[1])


def output_of(kind, tokens=TOKENS):
    return apply_of(KINDS[kind])(params_of(kind), tokens)


def with_params(config, params):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=0))))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_types(kind):
    out = jax.eval_shape(init_and_apply(KINDS[kind])[1], params_of(kind), TOKENS)
    L, H = KINDS[kind].layers, KINDS[kind].heads
    assert out.logits.shape == (B, T, Z) and out.aux_loss.shape == () and out.hidden is None
    for name in ("max_logit", "max_abs_logit", "max_capped_logit", "entropy"):
        assert getattr(out.stats, name).shape == (L, H)
    assert out.stats.activation_max.shape == out.stats.activation_rms.shape == (L,)
    assert {x.dtype for x in jax.tree.leaves((out, params_of(kind)))} == {jnp.dtype(jnp.float32)}
    assert output_of("plain").aux_loss == 0


@pytest.mark.parametrize("kind", KINDS)
def test_number_of_parameters(kind):
    c = KINDS[kind]
    D, H, K, F, L = c.width, c.heads, c.head_size, c.ffn, c.layers
    gains = 2 * D + (2 * K if c.qk_norm != "none" else 0)
    attention = 4 * D * H * K
    if c.attention == "mla":
        gains += c.q_rank + c.kv_rank
        attention = (D + H * K) * c.q_rank + D * (c.kv_rank + c.rope_size + H * c.value_size)
        attention += c.kv_rank * H * (c.nope_size + c.value_size)
    per_layer = attention + 3 * D * F + gains
    assert sum(x.size for x in jax.tree.leaves(params_of(kind))) == 2 * Z * D + D + L * per_layer


WIDE = ModelConfig(vocab_size=256, layers=2, width=64, heads=4, ffn=128, qk_norm="layer")
STANDARD_DEVIATIONS = {
    "embedding_ZD": 1.0,
    "head_DZ": 64**-0.5,
    "q_DHK": 64**-0.5, "k_DHK": 64**-0.5, "v_DHV": 64**-0.5, "o_HVD": 64**-0.5 / 2,
    "gate_DF": 64**-0.5, "up_DF": 64**-0.5, "down_FD": 128**-0.5 / 2,
}  # fmt: skip


@functools.cache
def wide_params():
    return jax.jit(init_and_apply(WIDE)[0])(jax.random.key(0))


def starts_as(params, deviations):
    """Every matrix is Gaussian with the given standard deviation, within 4.5 standard errors."""
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        if (name := path[-1].key) not in deviations:
            continue
        x, sd = np.asarray(x, np.float64), deviations[name]
        assert abs(x.mean()) < 4.5 * sd / x.size**0.5, name
        assert abs(x.std() / sd - 1) < 4.5 / (2 * x.size) ** 0.5, name
        assert abs((x**4).mean() / sd**4 - 3) < 0.2, name
        if x.shape[0] == WIDE.layers and x.ndim > 2:
            assert abs(np.corrcoef(x[0].ravel(), x[1].ravel())[0, 1]) < 4.5 / x[0].size ** 0.5, name


def test_start():
    starts_as(wide_params(), STANDARD_DEVIATIONS)
    for name in STANDARD_DEVIATIONS:  # a twentieth more or less is found
        for factor in (0.95, 1.05):
            with pytest.raises(AssertionError):
                starts_as(wide_params(), {name: STANDARD_DEVIATIONS[name] * factor})
    gains = [x for p, x in jax.tree_util.tree_flatten_with_path(wide_params())[0] if "gain" in p[-1].key]
    assert len(gains) == 5 and all((g == 1).all() for g in gains)


def test_start_of_latent_attention():
    config = ModelConfig(
        attention="mla", layers=2, width=256, q_rank=96, kv_rank=128, nope_size=64, rope_size=64, value_size=40
    )
    with nnx.set_graph_mode(False):
        module = MultiHeadLatentAttention(config, rngs=nnx.Rngs(params=0))
        params = nnx.to_pure_dict(nnx.split(module)[1])
    fan_in = {
        "q_down_DC": 256, "q_up_CHJ": 96, "kv_down_DC": 256, "k_rope_DR": 256, "k_up_CHK": 128, "v_up_CHV": 128,
        "o_HVD": 4 * 160,  # smaller by sqrt(2 L), as everything that writes into the residual stream
    }  # fmt: skip
    starts_as(params, {name: size**-0.5 for name, size in fan_in.items()})
    assert set(params) == {*fan_in, "q_norm", "kv_norm"}


def test_start_depends_on_the_key_alone():
    one, two = init(jax.random.key(0)), init(jax.random.key(1))
    for path, x in jax.tree_util.tree_flatten_with_path(one)[0]:
        other = functools.reduce(lambda t, k: t[k.key], path, two)
        assert ("gain" in path[-1].key) == bool((x == other).all()), path
    jax.tree.map(np.testing.assert_array_equal, one, init(jax.random.key(0)))
    drawn = [x for p, x in jax.tree_util.tree_flatten_with_path(one)[0] if "gain" not in p[-1].key]
    starts = [float(x.ravel()[0] / x.std()) for x in drawn]
    assert len(set(starts)) == len(starts)  # no two parameters share their numbers


def test_start_under_vmap():
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    many = jax.jit(jax.vmap(init_and_apply(CONFIG)[0]))(keys)
    for seed in range(2):
        close(jax.tree.map(lambda x, s=seed: x[s], many), init(jax.random.key(seed)), 1e-6)


def cross_entropy(logits, targets):
    return -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], -1).mean()


def test_first_loss():
    """Logits start with unit variance, so the cross-entropy starts at ln Z + 1/2 and not at ln Z."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 256, size=(2, 16, 64))
    logits = apply_of(WIDE)(wide_params(), tokens).logits
    assert abs(float(jnp.var(logits)) - 1) < 0.05
    loss = cross_entropy(logits, targets)
    assert abs(loss - (math.log(256) + 0.5)) < 0.05
    assert abs(loss / math.log(256) - 1) > 0.05
    wrong = wide_params() | {"head_DZ": wide_params()["head_DZ"] * 2}
    assert abs(cross_entropy(apply_of(WIDE)(wrong, tokens).logits, targets) - (math.log(256) + 0.5)) > 0.5


@functools.partial(jax.jit, static_argnames="config")
def gradients(config, params, tokens, stats_weight):
    def loss(p):
        out = init_and_apply(config)[1](p, tokens)
        stats = sum(x.sum() for x in jax.tree.leaves(out.stats))
        return -jnp.mean(jax.nn.log_softmax(out.logits)[:, :-1][..., 0]) + stats_weight * stats

    return jax.grad(loss)(params)


@pytest.mark.parametrize("kind", ["rms", "layer", "mla"])
def test_every_parameter_learns_and_statistics_do_not_interfere(kind):
    grads = gradients(KINDS[kind], params_of(kind), TOKENS, 0.0)
    for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]:
        assert np.isfinite(g).all(), path
        per_layer = g.reshape(2, -1) if path[0].key == "blocks" else g.reshape(1, -1)
        assert (np.abs(per_layer).max(1) > 0).all(), path
    seen = np.zeros(Z, bool)
    seen[TOKENS[:, :-1]] = True
    np.testing.assert_array_equal(np.abs(grads["embedding_ZD"]).max(1) > 0, seen)
    close(gradients(KINDS[kind], params_of(kind), TOKENS, 1.0), grads, 1e-6)


def layer_by_layer(config, params, tokens, *, order=None, scale=1.0):
    """The decoder as a Python loop over its layers: logits, hidden states and statistics per layer."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
    x = params["embedding_ZD"][tokens] * scale
    hidden, stats = [x], []
    for i in order or range(config.layers):
        nnx.replace_by_pure_dict(state, jax.tree.map(lambda w, i=i: w[i], params["blocks"]))
        x, logit_stats, record = nnx.merge(graphdef, state)(x)
        hidden.append(x)
        stats.append(layer_stats(logit_stats, x, record))
    final = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_eps) * params["final_norm"]["gain"]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *stats)
    return final @ params["head_DZ"], jnp.stack([*hidden[:-1], final]), stacked


@pytest.mark.parametrize("kind", ["plain", "looped"])
def test_scan_equals_a_loop_over_layers(kind):
    config, params = KINDS[kind], params_of(kind)
    loop = jax.jit(functools.partial(layer_by_layer, config))
    out = jax.jit(lambda p, t: with_params(config, p)(t, hidden=True))(params, TOKENS)
    got = (out.logits, out.hidden, out.stats)
    assert out.hidden.shape == (config.layers + 1, B, T, config.width)
    close(got, loop(params, TOKENS), 2e-5)
    close(out.stats.activation_rms[:-1], np.sqrt(np.square(out.hidden[1:-1]).mean((1, 2, 3))))
    close(out.stats.activation_max[:-1], np.abs(out.hidden[1:-1]).max((1, 2, 3)))
    close(out.logits, out.hidden[-1] @ params["head_DZ"])
    close(dataclasses.replace(out, hidden=None), output_of(kind))
    if kind == "plain":
        for wrong in [{"order": (1, 0)}, {"scale": CONFIG.width**0.5}]:
            with pytest.raises(AssertionError):
                close(got, jax.jit(functools.partial(layer_by_layer, config, **wrong))(params, TOKENS), 2e-5)


def test_a_block_adds_attention_and_then_the_ffn():
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Block(CONFIG, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda w: w[0], params_of("plain")["blocks"]))
    block = nnx.merge(graphdef, state)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, CONFIG.width)), jnp.float32)
    middle = x + jax.jit(lambda v: block.attention(block.attention_norm(v))[0])(x)
    ffn, norm = jax.jit(lambda v: block.ffn(v)[0]), block.ffn_norm
    got, logit_stats, record = jax.jit(lambda v: block(v))(x)
    close(got, middle + ffn(norm(middle)))
    stats = layer_stats(logit_stats, got, record)
    close((stats.activation_max, stats.activation_rms), (jnp.abs(got).max(), jnp.sqrt(jnp.mean(got**2))))
    assert stats.hidden_max == record.hidden_max and stats.hidden_rms == record.hidden_rms
    for wrong in [middle + ffn(norm(x)), middle + ffn(middle), middle]:
        with pytest.raises(AssertionError):
            close(got, wrong)


def test_functional_equals_the_module():
    @jax.jit
    def module(key):
        model = Transformer(CONFIG, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.split(model)[1]), model(TOKENS)

    params, out = module(jax.random.key(0))
    close(params, init(jax.random.key(0)), 1e-6)
    close(out, apply_of(CONFIG)(params, TOKENS), 5e-6)


def test_apply_does_not_change_its_parameters_or_itself():
    apply = init_and_apply(CONFIG)[1]
    one = jax.eval_shape(apply, params_of("plain"), TOKENS)
    before = jax.tree.map(np.array, params_of("plain"))
    jax.tree.map(np.testing.assert_array_equal, params_of("plain"), before)
    assert jax.eval_shape(apply, params_of("plain"), TOKENS) == one
    jax.tree.map(np.testing.assert_array_equal, output_of("plain"), output_of("plain"))


def test_the_future_does_not_reach_the_past():
    tokens = np.broadcast_to(TOKENS[:1], (T + 1, T)).copy()
    for s in range(T):
        tokens[s, s] = (tokens[s, s] + 1) % Z
    logits = np.asarray(output_of("plain", tokens).logits)
    influence = np.abs(logits[:T] - logits[T]).max(-1) > 1e-6
    np.testing.assert_array_equal(influence, np.triu(np.ones((T, T), bool)))


def test_sequences_of_a_batch_do_not_see_each_other():
    whole = np.asarray(output_of("plain").logits)
    close(np.asarray(output_of("plain", TOKENS[::-1].copy()).logits)[::-1], whole)


def test_bfloat16_is_near_float32():
    half = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    exact = output_of("plain")
    out = jax.jit(lambda p, t: with_params(half, p)(t, hidden=True))(params_of("plain"), TOKENS)
    assert out.logits.dtype == jnp.float32 and out.hidden.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(out.stats)} == {jnp.dtype(jnp.float32)}
    off = np.abs(out.logits - exact.logits) / np.std(exact.logits)
    assert 1e-4 < off.max() < 0.1 and off.mean() < 0.02
    np.testing.assert_allclose(out.stats.max_logit, exact.stats.max_logit, atol=0.05)
    np.testing.assert_allclose(out.stats.entropy, exact.stats.entropy, atol=0.02)


def test_switches_change_the_result():
    kind, plain = "rms", params_of("plain")
    with_gains = params_of(kind)
    attention = with_gains["blocks"]["attention"] | plain["blocks"]["attention"]
    shared = plain | {"blocks": plain["blocks"] | {"attention": attention}}
    got = apply_of(KINDS[kind])(shared, TOKENS)
    assert np.abs(got.logits - output_of("plain").logits).max() > 1e-3
    assert np.abs(got.stats.max_logit - output_of("plain").stats.max_logit).max() > 1e-2
