"""Policies of the linear layers: which products follow them, and what stays as it is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.models import ModelConfig, init_and_apply
from repro.models.linear import linear
from repro.quant import POLICIES, PRECISIONS, dot, fake_quantize, precision_of, stored

pytestmark = pytest.mark.usefixtures("quick_compile")

PLAIN = ModelConfig(vocab_size=32, layers=2, width=32, heads=2, ffn=32)
TOKENS = np.arange(16).reshape(2, 8) % 7


def config(precision: str) -> ModelConfig:
    return dataclasses.replace(PLAIN, precision=precision)


@functools.cache
def start():
    """Parameters, which no precision changes."""
    return jax.jit(init_and_apply(PLAIN)[0])(jax.random.key(0))


@functools.cache
def results(precision: str):
    """Logits, and the gradient of a loss that depends on all of them."""
    _, apply = init_and_apply(config(precision))

    def loss(params):
        logits = apply(params, TOKENS).logits
        return jnp.sin(logits).sum(), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(start())
    return np.asarray(logits), jax.tree.map(np.asarray, grads)


@pytest.fixture
def plain():
    return results("plain")


def test_a_linear_layer_is_the_dot_of_its_role():
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 3, 4, 16), (4, 16, 24)]))
    ours = linear(x, w, config("ffn=mxfp8"), "ffn", None, inputs=2)
    np.testing.assert_array_equal(ours, dot(x.reshape(2, 3, 64), w.reshape(64, 24), "mxfp8"))
    np.testing.assert_array_equal(
        linear(x, w, config("ffn=mxfp8"), "attention", None, inputs=2), jnp.einsum("bthk,hkf->btf", x, w)
    )


def test_what_is_stored_has_its_format_and_a_straight_gradient():
    table = jax.random.normal(jax.random.key(0), (32, 32))
    np.testing.assert_array_equal(stored(table, POLICIES["mxfp4_w"]), fake_quantize(table, "mxfp4"))
    np.testing.assert_array_equal(stored(table, POLICIES["bf16"]), table.astype(jnp.bfloat16).astype(jnp.float32))
    for policy in ("mxfp4_w", "bf16"):
        gradient = jax.grad(lambda t, p=policy: (3 * stored(t, POLICIES[p])).sum())(table)
        np.testing.assert_array_equal(gradient, np.full_like(table, 3))


def test_gains_are_quantised_where_the_norm_role_says_so():
    """Gains of 0.97 all become 0.875, the largest E4M3 value below 1, so logits are those of a model with 0.875."""
    logits, params = {}, start()
    for precision, gains in (("norm=mxfp8", (0.97,)), ("plain", (0.875, 0.97))):
        apply = jax.jit(init_and_apply(config(precision))[1])
        for gain in gains:
            full = lambda norm, gain=gain: jax.tree.map(lambda g: np.full_like(g, gain), norm)
            own = {n: full(params["blocks"][n]) for n in ("attention_norm", "ffn_norm")}
            changed = {**params, "blocks": {**params["blocks"], **own}, "final_norm": full(params["final_norm"])}
            logits[precision, gain] = np.asarray(apply(changed, TOKENS).logits)
    np.testing.assert_allclose(logits["norm=mxfp8", 0.97], logits["plain", 0.875], rtol=1e-5, atol=1e-6)
    assert np.abs(logits["plain", 0.97] - logits["plain", 0.875]).max() > 0.01


@pytest.mark.parametrize("role", ["attention", "ffn", "embedding", "head"])
def test_every_role_changes_the_model(plain, role):
    ours, _ = results(f"{role}=mxfp4")
    assert 1e-3 < np.abs(ours - plain[0]).max() < 10


def test_a_policy_of_the_backward_pass_leaves_the_forward_pass_alone(plain):
    logits, grads = results("attention=dgrad_e2m1_block,ffn=dgrad_e2m1_block")
    np.testing.assert_allclose(logits, plain[0], atol=2e-5)
    for name in ("head_DZ", "final_norm"):  # nothing is quantised between them and the loss
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4), grads[name], plain[1][name])
    assert np.abs(grads["embedding_ZD"] - plain[1]["embedding_ZD"]).max() > 1e-3


@functools.cache
def noisy():
    """Gradients of a model with noise in one role, as a compiled function of parameters and key."""
    _, apply = init_and_apply(config("ffn=nvfp4"))
    loss = lambda params, key: jnp.sin(apply(params, TOKENS, key=key).logits).sum()
    return start(), jax.jit(jax.grad(loss)), loss


def test_noise_needs_a_key_and_follows_it():
    params, gradient, loss = noisy()
    one, again, other = (gradient(params, jax.random.key(k)) for k in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != b)), one, other)))
    with pytest.raises(ReproError, match="key="):
        loss(params, None)


def test_layers_draw_noise_of_their_own():
    """Two layers with equal weights and inputs round differently: the key is folded with the layer."""
    params, gradient, _ = noisy()
    params = {**params, "blocks": jax.tree.map(lambda w: np.stack([w[0], w[0]]), params["blocks"])}
    # Without a residual contribution both layers see the same input and the same gradient.
    params["blocks"]["ffn"]["down_FD"] *= 0
    params["blocks"]["attention"]["o_HVD"] *= 0
    down = gradient(params, jax.random.key(3))["blocks"]["ffn"]["down_FD"]
    assert np.abs(down[0] - down[1]).max() > 0.01 * np.abs(down).max()


def test_names_and_roles():
    assert precision_of("ffn=mxfp4, head=bf16").roles() == {
        "attention": "plain", "ffn": "mxfp4", "embedding": "plain", "head": "bf16", "norm": "plain",
        "experts": "plain", "router": "plain",
    }  # fmt: skip
    assert {"plain", "bf16", "v3", "mxfp8", "mxfp4_w", "nvfp4", "k3_qat", "k3_qat_experts"} <= set(PRECISIONS)
    assert all(name in POLICIES for p in PRECISIONS.values() for name in p.roles().values() if name != "plain")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v4", "unknown"),
        ("gate=mxfp8", "roles are"),
        ("ffn=mxfp8,ffn=bf16", "once"),
        ("ffn=fp3", "fp3"),
        ("", "unknown"),
    ],
)
def test_what_is_refused(text, said):
    with pytest.raises(ReproError, match=said):
        config(text)
