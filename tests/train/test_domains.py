"""The decoder of two domains against `repro.quant.dot`, closed forms and finite differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.data import load_corpus
from repro.errors import ReproError
from repro.models import ModelConfig
from repro.quant import dot, fake_quantize
from repro.train import domains as M

pytestmark = pytest.mark.usefixtures("quick_compile")

TINY = M.DgradConfig(
    steps=3, eval_windows=4, model=ModelConfig(vocab_size=M.TEXT + M.QUIET, layers=1, width=16, heads=1, ffn=16)
)
BASE = M.Dgrad("e4m3", "block", "token", 2, 64)


def gradient(shape=(256, 32), loud=2.0**-20):
    """A gradient of 4 rows of 64 tokens, whose odd rows are quiet."""
    dy = jax.random.normal(jax.random.key(5), shape)
    return dy * jnp.where(np.arange(shape[0]) // 64 % 2 == 1, loud, 1.0)[:, None]


@pytest.mark.parametrize("granularity", ["tile", "block"])
@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_dgrad_is_that_of_the_policy_and_wgrad_is_exact(element, granularity):
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(4, 64, 48), (48, 2, 16)]))
    dy = gradient().reshape(4, 64, 2, 16)
    dgrad = dataclasses.replace(BASE, element=element, granularity=granularity)
    _, pull = jax.vjp(lambda x, w: M.product("btd,dhk->bthk", dgrad, False, x, w), x, w)
    dx, dw = pull(dy)
    _, pull = jax.vjp(lambda x, w: dot(x, w, f"dgrad_{element}_{granularity}"), x, w)
    np.testing.assert_allclose(dx, pull(dy)[0], rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(dw, np.einsum("btd,bthk->dhk", x, dy), rtol=1e-4, atol=1e-4)
    wrong = np.einsum("btd,bthk->dhk", x, np.asarray(dgrad(dy.reshape(4, 64, 32), False)).reshape(dy.shape))
    assert np.abs(dw - wrong).max() > 1e-3  # a quantised Wgrad would be seen


def error_of_quiet(dgrad, dispatched=False):
    dy = gradient()
    ours = np.asarray(dgrad(dy, dispatched))
    quiet = np.arange(256) // 64 % 2 == 1
    return np.linalg.norm(ours[quiet] - dy[quiet]) / np.linalg.norm(dy[quiet])


def test_every_order_removes_the_imbalance_but_that_of_tokens():
    orders = {order: error_of_quiet(dataclasses.replace(BASE, order=order)) for order in M.Order.__args__}
    assert orders["token"] > 0.9
    assert all(orders[order] < 0.04 for order in ("prescaled", "by_domain", "by_magnitude"))
    assert orders["after_dispatch"] > 0.9  # outside the experts it is the order of tokens
    assert error_of_quiet(dataclasses.replace(BASE, order="after_dispatch"), dispatched=True) < 0.04
    assert error_of_quiet(dataclasses.replace(BASE, granularity="tile")) < 0.04
    for order in M.Order.__args__:  # tiles do not care about the order, bit for bit
        ours = dataclasses.replace(BASE, granularity="tile", order=order)(gradient(), False)
        if order != "prescaled":
            np.testing.assert_array_equal(ours, fake_quantize(gradient(), M.POLICIES["dgrad_e4m3_tile"].dgrad_dy))


def test_a_prescaled_block_is_the_block_of_scaled_tokens():
    dy = np.asarray(gradient())
    power = 2.0 ** np.floor(np.log2(np.abs(dy).max(1, keepdims=True)))
    expected = np.asarray(fake_quantize(dy / power, M.POLICIES["dgrad_e4m3_block"].dgrad_dy)) * power
    np.testing.assert_array_equal(dataclasses.replace(BASE, order="prescaled")(jnp.asarray(dy), False), expected)
    assert not np.asarray(dataclasses.replace(BASE, order="prescaled")(jnp.zeros((256, 8)), False)).any()


def test_quiet_sequences_follow_their_rule():
    x = M.quiet_sequences(20) - M.TEXT
    assert x.shape == (256, 20) and x.min() == 0 and x.max() == 15
    assert len({tuple(row[:2]) for row in x}) == 256
    seen = {}
    for row in x:
        for before, now, after in zip(row, row[1:], row[2:], strict=False):
            assert seen.setdefault((now, before), after) == after
    for now in range(16):
        assert sorted(seen[now, before] for before in range(16)) == list(range(16))  # each is a permutation


def test_odd_rows_become_quiet():
    program = M.DgradProgram(TINY)
    window = load_corpus("kjv").batch(0, 0, batch_size=4, length=64).astype(np.int32)
    ours = np.asarray(program.windows(jnp.asarray(window)))
    np.testing.assert_array_equal(ours[::2], window[::2])
    assert (ours[1::2] >= M.TEXT).all()
    one = M.DgradProgram(dataclasses.replace(TINY, domains=1))
    np.testing.assert_array_equal(one.windows(jnp.asarray(window)), window)


@pytest.fixture(scope="module")
def trained():
    program = M.DgradProgram(TINY)
    state = program.init(np.uint32(0))
    window = jnp.asarray(load_corpus("kjv").batch(0, 0, batch_size=4, length=64).astype(np.int32))
    return program, state, window


def gradients(trained, dgrad, weight=1.0):
    program, state, window = trained
    run = lambda p, probe: program.objective(p, probe, program.windows(window), weight, dgrad)[0]
    return jax.jit(jax.grad(run, (0, 1)))(state.params, jnp.zeros((1, 4, 64, 16)))


def test_domains_meet_in_attention_alone(trained):
    """With the quiet domain's weight at zero its expert and its half of the softmax have no gradient."""
    grads, _ = gradients(trained, dataclasses.replace(BASE, element="none"), 0.0)
    for name in ("gate_LEDF", "up_LEDF", "down_LEFD"):
        assert not np.asarray(grads[name])[:, 1].any() and np.asarray(grads[name])[:, 0].any()
    assert not np.asarray(grads["head_DZ"])[:, M.TEXT :].any()
    assert not np.asarray(grads["embedding_ZD"])[M.TEXT :].any()


def test_the_loss_is_weighted_per_token_and_skips_what_nothing_predicts(trained):
    program, state, window = trained
    windows = program.windows(window)
    exact = dataclasses.replace(BASE, element="none")
    ce, _ = program.losses(state.params, windows, 0.0, exact)
    ce = np.asarray(ce, np.float64)
    loss = float(program.objective(state.params, 0.0, windows, 0.25, exact)[0])
    assert loss == pytest.approx((ce[::2].sum() + 0.25 * ce[1::2, 1:].sum()) / ce.size, rel=1e-5)
    text, quiet = program.parts(jnp.asarray(ce))
    assert float(text) == pytest.approx(ce[::2].mean()) and float(quiet) == pytest.approx(ce[1::2, 1:].mean())
    assert 1.5 < float(quiet) < 4.5  # near log 16, not log 272: the softmax is the domain's own


def test_the_probe_sees_dy_of_the_down_projection(trained):
    """By finite difference: the loss changes with the output of the block as the probe's gradient says."""
    program, state, window = trained
    _, dy = gradients(trained, dataclasses.replace(BASE, element="none"))
    along = jax.random.normal(jax.random.key(1), dy.shape)
    value = lambda t: program.objective(
        state.params, t * along, program.windows(window), 1.0, dataclasses.replace(BASE, element="none")
    )[0]
    slope = float(value(1e-2) - value(-1e-2)) / 2e-2
    assert slope == pytest.approx(float((dy * along).sum()), rel=0.02)


def test_token_range_of_a_known_gradient():
    dy = jnp.ones((2, 2, 64, 4)).at[0, 0, 5].set(2.0**-9).at[1].multiply(2.0**-20)
    largest, median = M.token_range(dy)
    np.testing.assert_array_equal(largest, [9, 0])
    np.testing.assert_array_equal(median, [0, 0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(element="e3m4"), "element"), (dict(domains=3), "domains"), (dict(batch_size=2), "multiple of 256"),
        (dict(quiet_weight=0.0), "quiet_weight"), (dict(tau=1.0), "of its own"), (dict(optimizer="muon"), "of its own"),
    ],
)  # fmt: skip
def test_what_a_config_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(TINY, **change)
