"""QK-Clip on real attention: what it does to the logits of the same inputs, and mistakes that the same check finds.

Four heads of the first layer, each a trap for one mistake:
0 exceeds tau; 1 has large negative logits and small positive ones; 2 exceeds tau only where the causal mask hides it;
3 has negative logits only. In the second layer head 2 exceeds tau.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from repro.models import ModelConfig, MultiHeadAttention, declarations, init_and_apply, rope
from repro.models.transformer import abstract
from repro.optim import from_declarations, muon, qk_clip, qk_clip_factor

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = ModelConfig(vocab_size=11, layers=2, width=16, heads=4, ffn=8, rope_theta=1e6)
L, D, H, K = 2, 16, 4, 4
B, T = 2, 6
TAU = 20.0
CLIPPED = np.zeros((L, H), bool)
CLIPPED[0, 0] = CLIPPED[1, 2] = True
LAYOUTS = from_declarations(declarations(abstract(CONFIG)))["blocks"]["attention"]
MASK = np.tril(np.ones((T, T), bool))


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_weights():
    """Small random weights, then each head's trap in the components 1 and 3, whose RoPE angle hardly grows."""
    shapes = jax.eval_shape(init_and_apply(CONFIG)[0], jax.random.key(0))["blocks"]["attention"]
    w = {name: normal(i, x.shape) * (0.05 if name[0] in "qk" else 0.25) for i, (name, x) in enumerate(shapes.items())}
    q, k = w["q_DHK"], w["k_DHK"]
    q[0, 0, 0, 1] = k[0, 0, 0, 1] = 8.0  # feature 0 is 1 everywhere
    q[0, 1, 1, 1], k[0, 1, 1, 1] = 10.0, -10.0  # feature 1 is 0 at the first position, else 1
    q[0, 2, 2, 1], k[0, 3, 2, 1] = 10.0, 10.0  # feature 2 is 1 at the first position only, feature 3 at the last only
    q[0, 0, 3, 1], k[0, 0, 3, 1] = 4.0, -4.0
    q[1, 0, 2, 1] = k[1, 0, 2, 1] = 9.0
    return jax.tree.map(jnp.asarray, w)


def make_inputs():
    x = 0.1 * normal(0, (B, T, D))
    x[..., 0] = 1.0
    x[..., 1] = np.arange(T) > 0
    x[..., 2] = np.arange(T) == 0
    x[..., 3] = np.arange(T) == T - 1
    return jnp.asarray(x, jnp.float32)


WEIGHTS, X = make_weights(), make_inputs()


@jax.jit
def forward(weights):
    """The statistics of the module and all logits [L, B, H, T, S], masked ones included, both layers on X."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MultiHeadAttention(CONFIG, rngs=nnx.Rngs(0))))

    def layer(w):
        nnx.replace_by_pure_dict(state, w)
        q, k = (rope(jnp.einsum("btd,dhk->bthk", X, w[n]), CONFIG.rope_theta) for n in ("q_DHK", "k_DHK"))
        return nnx.merge(graphdef, state)(X)[1], jnp.einsum("bthk,bshk->bhts", q, k) / K**0.5

    layers = [layer(jax.tree.map(lambda w, i=i: w[i], weights)) for i in range(L)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


def test_the_traps_are_set():
    stats, logits = forward(WEIGHTS)
    seen = np.where(MASK, logits, np.nan)
    top, low, everywhere = np.nanmax(seen, (1, 3, 4)), np.nanmin(seen, (1, 3, 4)), np.asarray(logits.max((1, 3, 4)))
    np.testing.assert_allclose(stats["max_logit"], top, rtol=1e-6)
    np.testing.assert_array_equal(top > TAU, CLIPPED)
    assert low[0, 1] < -TAU and 0 < top[0, 1] < TAU
    assert top[0, 2] < TAU < everywhere[0, 2]
    assert -TAU < low[0, 3] and top[0, 3] < 0


def clips_exactly(step):
    """`step(weights) -> weights` brings the heads above tau to tau on the same inputs, and touches nothing else."""
    after = step(WEIGHTS)
    (old_stats, old), (stats, new) = forward(WEIGHTS), forward(after)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))
    np.testing.assert_allclose(np.asarray(stats["max_logit"])[CLIPPED], TAU, rtol=1e-5)
    gamma = np.where(CLIPPED, TAU / old_stats["max_logit"], 1.0)[:, None, :, None, None]
    scale = np.abs(old).max((1, 3, 4), keepdims=True)
    assert (np.abs(new - gamma * old) <= 1e-5 * scale).all()
    for name in ("q_DHK", "k_DHK"):
        before, now = (np.moveaxis(np.asarray(w[name]), 2, 1) for w in (WEIGHTS, after))  # [L, H, D, K]
        np.testing.assert_array_equal(now[~CLIPPED], before[~CLIPPED])
        assert (now[CLIPPED] != before[CLIPPED]).mean() > 0.9
    for name in ("v_DHK", "o_HVD", "v_DHV"):
        if name in after:
            np.testing.assert_array_equal(after[name], WEIGHTS[name])


def clip_with(statistic, **options):
    return lambda w: qk_clip(w, statistic(*forward(w)), tau=TAU, layouts=LAYOUTS, **options)


@pytest.mark.parametrize("alpha", [0.5, 0.3])
def test_logits_come_down_to_tau_and_nothing_else_changes(alpha):
    clips_exactly(clip_with(lambda stats, logits: stats["max_logit"], alpha=alpha))


def one_gamma_for_all(w):
    maxima = forward(w)[0]["max_logit"]
    return qk_clip(w, jnp.broadcast_to(maxima.max(1, keepdims=True), maxima.shape), tau=TAU, layouts=LAYOUTS)


def minimum_of_one_and_the_ratio(w):
    gamma = jnp.sqrt(jnp.minimum(1.0, TAU / forward(w)[0]["max_logit"]))[:, None, :, None]
    return w | {"q_DHK": w["q_DHK"] * gamma, "k_DHK": w["k_DHK"] * gamma}


def gamma_on_both(w):
    gamma = qk_clip_factor(forward(w)[0]["max_logit"], TAU)[:, None, :, None]
    return w | {"q_DHK": w["q_DHK"] * gamma, "k_DHK": w["k_DHK"] * gamma}


WRONG = {
    "one gamma for the heads of a layer": one_gamma_for_all,
    "absolute maximum": clip_with(lambda stats, logits: stats["max_abs_logit"]),
    "min(1, tau / S)": minimum_of_one_and_the_ratio,
    "masked positions counted": clip_with(lambda stats, logits: logits.max((1, 3, 4))),
    "gamma on both sides": gamma_on_both,
    "raw products without 1/sqrt(K)": clip_with(lambda stats, logits: stats["max_logit"] * K**0.5),
    "layers exchanged": clip_with(lambda stats, logits: stats["max_logit"][::-1]),
    "heads exchanged": clip_with(lambda stats, logits: stats["max_logit"][:, ::-1]),
    "no clip": lambda w: w,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_same_check_finds(name):
    with pytest.raises(AssertionError):
        clips_exactly(WRONG[name])


def is_the_last_thing_in_a_step(step):
    """`step(weights, update, maxima)`: after it the logits are gamma times those of the weights after the update."""
    update = jax.tree.map(lambda w: 0.1 * normal(9, w.shape), WEIGHTS)
    maxima = forward(WEIGHTS)[0]["max_logit"]  # of the forward pass of the step, before the update
    _, got = forward(step(WEIGHTS, update, maxima))
    _, unclipped = forward(optax.apply_updates(WEIGHTS, update))
    want = unclipped * qk_clip_factor(maxima, TAU)[:, None, :, None, None]
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_order_of_update_and_clip():
    clip = lambda w, s: qk_clip(w, s, tau=TAU, layouts=LAYOUTS)
    is_the_last_thing_in_a_step(lambda w, u, s: clip(optax.apply_updates(w, u), s))
    with pytest.raises(AssertionError):
        is_the_last_thing_in_a_step(lambda w, u, s: optax.apply_updates(clip(w, s), u))


def test_momentum_is_left_alone():
    tx = muon(0.1, layouts=LAYOUTS, schedule=((1.5, -0.5, 0.0),))
    grads = jax.tree.map(jnp.ones_like, WEIGHTS)
    updates, state = jax.jit(lambda w, g: tx.update(g, tx.init(w), w))(WEIGHTS, grads)
    moved = optax.apply_updates(WEIGHTS, updates)
    clipped = qk_clip(moved, forward(WEIGHTS)[0]["max_logit"], tau=TAU, layouts=LAYOUTS)
    assert (clipped["q_DHK"] != moved["q_DHK"]).any()
    momentum = [x for x in jax.tree.leaves(state) if x.ndim == 4]
    assert len(momentum) == 4
    for m in momentum:
        np.testing.assert_array_equal(m, 1.0)
