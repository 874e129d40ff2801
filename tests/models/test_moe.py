"""The modules against the papers' sums, inside the decoder, and the balance that they hand on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from repro.errors import ReproError
from repro.models import LatentMoE, ModelConfig, MoE, MoEConfig, abstract, declarations, init_and_apply, initial_buffers
from repro.models.functional import (
    histogram_bias,
    margin_histogram,
    quantile_bias,
    router_z_loss,
    select,
    sequence_balance_loss,
    sign_update,
)
from repro.optim import check_layouts, from_declarations

pytestmark = pytest.mark.usefixtures("quick_compile")

B, T, D = 3, 7, 16
EXPERTS = MoEConfig(experts=6, active=2, ffn=8, shared=2, scale=1.5)
CONFIG = ModelConfig(vocab_size=32, layers=2, width=D, heads=2, ffn=24, moe=EXPERTS)
LATENT = dataclasses.replace(CONFIG, moe=dataclasses.replace(EXPERTS, latent=8))
rng = np.random.default_rng(0)
X = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
TOKENS = rng.integers(0, 32, (B, T))


def with_moe(config, **settings):
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, **settings))


@functools.cache
def module_of(config, hashed=False):
    """A module with a bias that is not zero."""
    kind = LatentMoE if config.moe.latent else MoE
    with nnx.set_graph_mode(False):
        module = jax.jit(lambda: nnx.split(kind(config, hashed=hashed, rngs=nnx.Rngs(params=1))))()
        module = nnx.merge(*module)
        if not hashed:
            module.bias_E[...] = jnp.linspace(-0.2, 0.2, config.moe.experts)
    return module


def call(module, x=X, **given):
    graphdef, state = nnx.split(module)
    return jax.jit(lambda s, x: nnx.merge(graphdef, s)(x, **given))(state, x)


def np64(module):
    return {
        name: np.float64(v) for name, v in nnx.to_pure_dict(nnx.split(module)[1]).items() if not isinstance(v, dict)
    }


sigmoid = lambda z: 1 / (1 + np.exp(-z))
unit = lambda g, u: g * sigmoid(g) * u


def by_hand(module, x, *, norm_first=False):
    """Equations 12 to 15 of DeepSeek-V3, or 11 of Kimi K3, token by token in float64."""
    w, moe = np64(module), module.config.moe
    shared = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.split(module.shared)[1]))
    rms = lambda u: u / np.sqrt((u * u).mean() + module.config.norm_eps)
    y = []
    for v in np.float64(x).reshape(-1, D):
        s = sigmoid(v @ w["router_DE"])
        chosen = np.argsort(-(s + w["bias_E"]))[: moe.active]
        z = v @ w["latent_down_DC"] if moe.latent else v
        out = lambda e, z: unit(z @ w["gate_EDF"][e], z @ w["up_EDF"][e]) @ w["down_EFD"][e]
        outs = [rms(out(e, z)) if norm_first else out(e, z) for e in chosen]
        u = sum(moe.scale * s[e] / s[chosen].sum() * o for e, o in zip(chosen, outs, strict=True))
        if moe.latent:
            u = (u if norm_first else rms(u)) @ w["latent_up_CD"]
        y.append(u + unit(v @ shared["gate_DF"], v @ shared["up_DF"]) @ shared["down_FD"])
    return np.reshape(y, x.shape)


@pytest.mark.parametrize("config", [CONFIG, LATENT], ids=["MoE", "LatentMoE"])
def test_the_module_is_the_sum_of_the_paper(config):
    module = module_of(config)
    y, record = call(module)
    np.testing.assert_allclose(y, by_hand(module, X), rtol=1e-5, atol=1e-5)
    assert record.routes.shape == (B, T, 2) and record.routes.dtype == jnp.int32
    np.testing.assert_allclose(record.moe.load.sum(), 1, rtol=1e-6)
    counts = np.bincount(np.ravel(record.routes), minlength=6)
    np.testing.assert_allclose(record.moe.load, counts / counts.sum())
    np.testing.assert_allclose(record.moe.max_violation, counts.max() / counts.mean() - 1, rtol=1e-6)
    logits = np.float64(X).reshape(-1, D) @ np64(module)["router_DE"]
    np.testing.assert_allclose(record.moe.router_logit_max, np.abs(logits).max(), rtol=1e-5)
    z = np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(record.moe.router_log_z, np.sqrt((z * z).mean()), rtol=1e-5)
    routed = np.float64(y) - np.float64(jax.jit(lambda: module.shared(X)[0])())
    np.testing.assert_allclose(record.moe.routed_rms, np.sqrt((routed**2).mean()), rtol=1e-4)
    assert float(record.hidden_max) == float(record.moe.expert_hidden_max.max()) > float(record.hidden_rms) > 0
    assert (float(record.moe.sum_rms) == float(record.moe.routed_rms)) == (config is CONFIG)
    assert float(record.aux_loss) == 0
    if config is LATENT:
        assert np.abs(by_hand(module, X, norm_first=True) - y).max() > 1e-2


def test_latent_experts_do_not_see_the_size_of_their_gates():
    """At a latent of at least unit size, where the norm's epsilon does not act."""
    gates, experts = jnp.asarray(rng.random((B * T, 2)), jnp.float32), jnp.asarray(rng.integers(0, 6, (B * T, 2)))

    def routed(config):
        """The routed branch under the gates and ten times the gates, and the least size of a summed latent."""
        module = nnx.clone(module_of(config))
        module.down_EFD[...] = 100 * module.down_EFD[...]
        run = jax.jit(lambda g: module._routed(X.reshape(-1, D), g, experts, None)[:2])
        (one, latent), (ten, _) = run(gates), run(10 * gates)
        return np.asarray(one), np.asarray(ten), float(jnp.sqrt((latent * latent).mean(1)).min())

    one, ten, size = routed(LATENT)
    assert size >= 1 and np.abs(ten - one).max() <= 1e-4 < 0.1 < np.abs(one).max()
    one, ten, _ = routed(with_moe(LATENT, latent_norm=False))
    np.testing.assert_allclose(ten, 10 * one, rtol=1e-4, atol=1e-3)


def test_given_routes_replace_the_choice_and_not_the_gates():
    module = module_of(CONFIG)
    y, record = call(module)
    same, _ = call(module, routes_BTK=record.routes)
    np.testing.assert_array_equal(same, y)
    other = (np.asarray(record.routes) + 1) % 6
    given, found = call(module, routes_BTK=jnp.asarray(other))
    np.testing.assert_array_equal(found.routes, other)
    w, scores = np64(module), sigmoid(np.float64(X) @ np64(module)["router_DE"])
    b, t = 1, 2
    s = scores[b, t, other[b, t]]
    v = np.float64(X[b, t])
    out = [unit(v @ w["gate_EDF"][e], v @ w["up_EDF"][e]) @ w["down_EFD"][e] for e in other[b, t]]
    want = np.float64(module.shared(X)[0][b, t]) + 1.5 * (s[0] * out[0] + s[1] * out[1]) / s.sum()
    np.testing.assert_allclose(given[b, t], want, rtol=1e-5, atol=1e-5)


def test_a_table_routes_by_token_alone():
    module = module_of(CONFIG, hashed=True)
    y, record = call(module, tokens_BT=jnp.asarray(TOKENS))
    np.testing.assert_array_equal(record.routes, np.asarray(module.table_ZK[...])[TOKENS])
    np.testing.assert_array_equal(record.buffers["table_ZK"], module.table_ZK[...])
    moved, again = call(module, -X, tokens_BT=jnp.asarray(TOKENS))
    np.testing.assert_array_equal(again.routes, record.routes)
    assert np.abs(moved - y).max() > 0.1
    with pytest.raises(ReproError, match="tokens_BT"):
        module(X)


def test_the_next_bias_comes_from_the_whole_batch():
    base = module_of(CONFIG)
    bias, flat = base.bias_E[...], X.reshape(-1, D)
    scores = jax.nn.sigmoid(flat @ base.router_DE[...])
    experts, cutoff = select(scores, bias, 2)
    load = np.bincount(np.ravel(experts), minlength=6)
    wanted = {
        "none": bias,
        "sign": sign_update(bias, load, 1e-3),
        "quantile": quantile_bias(scores, cutoff, 2),
        "histogram": histogram_bias(*margin_histogram(scores, cutoff, bias), 2),
    }
    graphdef, state = nnx.split(base)

    @jax.jit
    def following(state):
        """What each rule hands on; experts are dead code here."""
        found = {}
        for balance in wanted:
            module = nnx.merge(graphdef, state)
            module.config = with_moe(CONFIG, balance=balance)
            found[balance] = module(X)[1].buffers["bias_E"]
        return found

    for balance, got in following(state).items():
        np.testing.assert_allclose(got, wanted[balance], atol=1e-6)
    np.testing.assert_array_equal(base.bias_E[...], bias)  # returned, not written
    assert np.abs(wanted["quantile"] - bias).max() > 1e-2


def test_auxiliary_losses_and_their_gradient():
    config = with_moe(CONFIG, sequence_loss=0.1, router_z_loss=0.01)
    module = nnx.clone(module_of(CONFIG))
    module.config = config
    record = jax.jit(lambda: module(X)[1])()
    logits = X.reshape(-1, D) @ module.router_DE[...]
    want = 0.1 * sequence_balance_loss(jax.nn.sigmoid(logits).reshape(B, T, 6), record.routes)
    want += 0.01 * router_z_loss(logits)
    assert float(record.aux_loss) == pytest.approx(float(want), rel=1e-5)


# ---- In the decoder.

MIXED = dataclasses.replace(
    CONFIG,
    layers=6,
    pattern="3*(moe, hash)",
    moe=dataclasses.replace(EXPERTS, latent=8, balance="quantile", sequence_loss=1e-2, router_z_loss=1e-3),
)
CONFIGS = {
    "pattern": MIXED,
    "attentions": dataclasses.replace(
        CONFIG, layers=3, pattern="dense, moe, mla.hash", nope_size=8, rope_size=4, value_size=8, kv_rank=8
    ),
    "layers": dataclasses.replace(
        with_moe(CONFIG, dense_layers=1, hash_layers=1, affinity="sqrt_softplus", balance="sign"), layers=3
    ),
}


@functools.cache
def start():
    return jax.jit(lambda: initial_buffers(MIXED))()


@functools.cache
def gradient():
    """Output and gradients of a loss that every parameter reaches, compiled."""
    _, apply = init_and_apply(MIXED)

    def loss(params, buffers):
        out = apply(params, TOKENS, buffers=buffers)
        return jnp.sin(out.logits).sum() + out.aux_loss, out

    return jax.jit(jax.grad(loss, has_aux=True))


@functools.cache
def results():
    params = jax.jit(init_and_apply(MIXED)[0])(jax.random.key(0))
    grads, out = gradient()(params, start())
    return params, out, grads


def of_kind(tree, shapes):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)] == [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_shapes_inside_the_decoder(config):
    init, apply = init_and_apply(config)
    params = jax.eval_shape(init, jax.random.key(0))
    out = jax.eval_shape(apply, params, TOKENS)
    routed = sum(repeats * sum(k.ffn != "dense" for k in unit) for unit, repeats in config.segments)
    assert out.routes.shape == (routed, B, T, 2) and out.stats.moe.load.shape == (routed, 6)
    assert out.stats.hidden_max.shape == (config.layers,)
    expected = jax.eval_shape(lambda: initial_buffers(config))
    assert jax.tree.structure(out.buffers) == jax.tree.structure(expected) and of_kind(out.buffers, expected)
    check_layouts(params, from_declarations(declarations(abstract(config))))


def test_every_parameter_learns():
    params, out, grads = results()
    for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]:
        layers = g.reshape(g.shape[0] if path[0].key.startswith("blocks") else 1, -1)
        assert np.isfinite(g).all() and (np.abs(layers).max(1) > 0).all(), path
    tables = start()["blocks"]["block1"]["ffn"]["table_ZK"]
    assert all((tables[i] != tables[j]).any() for i, j in ((0, 1), (1, 2), (0, 2)))
    np.testing.assert_array_equal(out.routes[1::2], np.asarray(tables)[:, TOKENS])
    assert float(out.aux_loss) > 0


def test_routes_and_buffers_go_in_again():
    _, apply = init_and_apply(MIXED)
    params, out, _ = results()
    again = jax.jit(lambda p, r, b: apply(p, TOKENS, routes=r, buffers=b))
    same = again(params, out.routes, start())
    np.testing.assert_allclose(same.logits, out.logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(same.routes, out.routes)
    turned = again(params, out.routes[::-1], start())
    assert np.abs(turned.logits - out.logits).max() > 1e-2
    # The next bias is in use: it chooses other experts, in the layers that have one.
    _, later = gradient()(params, out.buffers)
    assert (later.routes[::2] != out.routes[::2]).any() and (later.routes[1::2] == out.routes[1::2]).all()
    assert float(later.stats.moe.max_violation[::2].mean()) < float(out.stats.moe.max_violation[::2].mean())


def test_a_policy_of_the_router_changes_its_logits():
    """The role `experts` is tested with the dispatch."""
    base = module_of(CONFIG)

    @jax.jit
    def logits_of(x):
        found = {}
        for precision in ("plain", "router=mxfp8"):
            module = nnx.clone(base)
            module.config = dataclasses.replace(CONFIG, precision=precision)
            found[precision] = module(x)[1].moe.router_logit_max, module(x)[1].moe.router_log_z
        return found

    found = logits_of(X)
    off = np.abs(np.array(found["router=mxfp8"]) / np.array(found["plain"]) - 1)
    assert (1e-4 < off).all() and (off < 0.1).all()
    half = logits_of(X.astype(jnp.bfloat16))["plain"]  # a product in float32 whatever comes in
    np.testing.assert_array_equal(half, logits_of(X.astype(jnp.bfloat16).astype(jnp.float32))["plain"])


# ---- What is refused.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(active=7), "active is 7"),
        (dict(ffn=0), "hidden width"),
        (dict(groups=4), "does not divide"),
        (dict(groups=3, kept_groups=1, active=3), "do not fit"),
        (dict(groups=3, kept_groups=4), "kept_groups"),
        (dict(balance="quantile", active=6), "not chosen"),
        (dict(balance="quantile", groups=3, kept_groups=2), "not defined"),
        (dict(balance="histogram", affinity="sqrt_softplus"), "between 0 and 1"),
        (dict(balance_rate=0.1), "belong to"),
        (dict(balance_centred=True, balance="quantile"), "belong to"),
        (dict(latent_norm=False), "no norm"),
        (dict(affinity="tanh"), "affinity"),
        (dict(experts=0), "experts is 0"),
        (dict(router_z_loss=-1.0), "router_z_loss"),
    ],
)
def test_refusals(settings, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(EXPERTS, **settings)


def test_ragged_dispatch_under_a_policy_is_refused():
    config = dataclasses.replace(with_moe(CONFIG, dispatch="ragged"), precision="experts=mxfp8")
    with pytest.raises(ReproError, match="ragged"):
        init_and_apply(config)
