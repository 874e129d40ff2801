"""Routing against loops in float64 and a stored router, each beside mistakes that the same check finds."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.models.functional import (
    affinity,
    hash_table,
    histogram_bias,
    loads,
    margin_histogram,
    quantile_bias,
    router_z_loss,
    select,
    sequence_balance_loss,
    sign_update,
    top_k_gates,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

STORED = dict(np.load(Path(__file__).parent / "data" / "deepseek_v4_router.npz"))
fixed = settings(deadline=None, derandomize=True, max_examples=30)
rng = np.random.default_rng(0)


# ---- Scores, selection and gates.


def by_expert(gates, experts, count=8):
    """Gates [T, E], zero where an expert was not chosen, so that the order of choices does not matter."""
    dense = np.zeros((len(gates), count))
    np.put_along_axis(dense, np.asarray(experts), np.asarray(gates), 1)
    return dense


def test_the_stored_router():
    scores = affinity(STORED["x"] @ STORED["weight"].T, "sqrt_softplus")
    scale = float(STORED["routed_scaling_factor"])
    want = by_expert(STORED["gates"], STORED["experts"])
    router = lambda scores, bias: by_expert(*top_k_gates(scores, bias, 2, scale=scale))
    np.testing.assert_allclose(router(scores, STORED["bias"]), want, rtol=1e-5, atol=1e-5)
    wrong = {
        "gates from biased scores": router(scores + STORED["bias"], None),
        "bias with the other sign": router(scores, -STORED["bias"]),
        "no bias": router(scores, None),
        "sigmoid": router(affinity(STORED["x"] @ STORED["weight"].T, "sigmoid"), STORED["bias"]),
        "no scale": router(scores, STORED["bias"]) / scale,
    }
    for name, gates in wrong.items():
        assert np.abs(gates - want).max() > 1e-2, name


def test_scores_have_their_closed_forms_and_finite_slopes():
    z = np.array([[-300, -104, -20, -1, 0], [0.5, 3, 30, 90, 0]], np.float32)
    z64 = np.float64(z)
    forms = {
        "sigmoid": 1 / (1 + np.exp(-z64)),
        "softmax": np.exp(z64 - z64.max(1, keepdims=True))
        / np.exp(z64 - z64.max(1, keepdims=True)).sum(1, keepdims=True),
        "sqrt_softplus": np.sqrt(np.logaddexp(0, z64)),
    }
    for name, want in forms.items():
        np.testing.assert_allclose(affinity(z, name), want, rtol=3e-6, atol=1e-18)
        assert np.isfinite(jax.grad(lambda z, n=name: affinity(z, n).sum())(z)).all(), name
        assert affinity(jnp.asarray(z, jnp.bfloat16), name).dtype == jnp.float32


def chosen_slowly(scores, bias, k, groups, kept):
    """The chosen experts of one token, as a set, by sorting in Python."""
    biased = list(scores + bias)
    size = len(biased) // groups
    worth = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -worth[g])[:kept]
    allowed = [i for i in range(len(biased)) if i // size in best]
    return set(sorted(allowed, key=lambda i: -biased[i])[:k])


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (2, 1), (4, 2), (12, 3)])
def test_group_limited_selection(groups, kept):
    scores, bias = rng.random((50, 12)).astype(np.float32), 0.3 * rng.normal(size=12).astype(np.float32)
    experts, cutoff = select(scores, bias, 3, groups=groups, kept_groups=kept)
    want = [chosen_slowly(row, bias, 3, groups, kept) for row in scores]
    assert [set(row) for row in np.asarray(experts).tolist()] == want
    biased = np.take_along_axis(scores + bias, np.asarray(experts), 1)
    assert (np.diff(biased, axis=1) <= 0).all() and experts.dtype == jnp.int32
    if kept * 12 // groups > 3:
        assert (np.asarray(cutoff) <= biased[:, -1]).all()
    else:  # three groups of one: every allowed expert was chosen
        assert (np.asarray(cutoff) == -np.inf).all()
    if groups == kept == 1:
        np.testing.assert_array_equal(cutoff, np.sort(scores + bias, 1)[:, -4])
        unbiased = [chosen_slowly(row, 0 * bias, 3, 1, 1) for row in scores]
        assert unbiased != want


def test_gates_sum_to_the_scale_and_their_gradient_is_that_of_the_scores():
    scores, bias = jnp.asarray(rng.random((2, 5, 6)), jnp.float32), jnp.asarray(rng.normal(size=6), jnp.float32)
    gates, experts = top_k_gates(scores, bias, 2, scale=2.5)
    assert gates.shape == experts.shape == (2, 5, 2)
    np.testing.assert_allclose(gates.sum(-1), 2.5, rtol=1e-6)
    plain, _ = top_k_gates(scores, bias, 2, normalise=False)
    np.testing.assert_array_equal(plain, np.take_along_axis(np.asarray(scores), np.asarray(experts), -1))
    loss = lambda s, b: jnp.sum(jnp.sin(3 * top_k_gates(s, b, 2)[0]))
    d_scores, d_bias = jax.grad(loss, (0, 1))(scores, bias)
    assert not d_bias.any()
    of_chosen = np.take_along_axis(np.asarray(d_scores), np.asarray(experts), -1)
    s = np.take_along_axis(np.float64(scores), np.asarray(experts), -1)
    share = s / s.sum(-1, keepdims=True)
    slope = 3 * np.cos(3 * share)
    want = (slope - (slope * share).sum(-1, keepdims=True)) / s.sum(-1, keepdims=True)
    np.testing.assert_allclose(of_chosen, want, rtol=1e-4, atol=1e-5)
    assert np.count_nonzero(d_scores) == experts.size


def test_scores_of_zero_give_gates_of_zero():
    gates, _ = top_k_gates(jnp.zeros((1, 4)), None, 2)
    np.testing.assert_array_equal(gates, 0)


def test_the_hash_table_is_fixed_distinct_and_even():
    table = np.asarray(hash_table(500, 8, 3))
    assert table.shape == (500, 3) and table.dtype == np.int32 and ((0 <= table) & (table < 8)).all()
    assert all(len(set(row)) == 3 for row in table.tolist())
    assert table[:4].tolist() == EXPECTED_ROWS
    share = np.bincount(table.ravel(), minlength=8) / table.size
    assert np.abs(share * 8 - 1).max() < 0.15  # four standard deviations of chance are .25
    other = np.asarray(jax.jit(lambda layer: hash_table(500, 8, 3, layer))(1))
    assert (other != table).mean() > 0.5
    np.testing.assert_array_equal(hash_table(100, 8, 3), table[:100])  # a token keeps its experts


EXPECTED_ROWS = [[7, 3, 5], [2, 6, 5], [7, 5, 1], [1, 0, 3]]


# ---- Losses.


def balance_slowly(scores, experts, *, unbiased=False):
    """Equations 17 to 20 of DeepSeek-V3 with loops."""
    B, T, E = scores.shape
    K, total = experts.shape[-1], 0.0
    for b in range(B):
        for i in range(E):
            chosen = sum(i in (np.argsort(-scores[b, t])[:K] if unbiased else experts[b, t]) for t in range(T))
            total += E / (K * T) * chosen * np.mean([scores[b, t, i] / scores[b, t].sum() for t in range(T)])
    return total / B


def test_the_sequence_wise_balance_loss():
    scores = rng.random((3, 7, 6)).astype(np.float32)
    experts = np.asarray(top_k_gates(scores, np.float32([2, 0, 0, 0, 0, 0]), 2)[1])
    np.testing.assert_allclose(sequence_balance_loss(scores, experts), balance_slowly(scores, experts), rtol=1e-6)
    assert abs(balance_slowly(scores, experts, unbiased=True) - balance_slowly(scores, experts)) > 1e-3
    even = np.array([[[0, 1], [2, 3], [4, 5]]])
    assert sequence_balance_loss(np.ones((1, 3, 6), np.float32), even) == pytest.approx(1)
    loss = lambda s: sequence_balance_loss(s, experts)
    gradient = jax.grad(loss)(scores)
    step = np.zeros_like(scores)
    step[1, 2, 3] = 1e-2
    assert float(gradient[1, 2, 3]) == pytest.approx(float(loss(scores + step) - loss(scores - step)) / 2e-2, rel=1e-2)


def test_the_router_z_loss():
    logits = rng.normal(size=(9, 5)).astype(np.float32)
    want = np.mean([math.log(sum(map(math.exp, row))) ** 2 for row in logits.tolist()])
    np.testing.assert_allclose(router_z_loss(logits), want, rtol=1e-6)
    np.testing.assert_allclose(router_z_loss(logits - np.log(np.exp(logits).sum(1, keepdims=True))), 0, atol=1e-10)


# ---- Balance.


def test_the_sign_rule_lowers_what_is_overloaded():
    load = np.array([10, 2, 3, 5])
    bias = np.float32([0.1, 0.2, 0.3, 0.4])
    got = sign_update(bias, load, 1e-2)
    np.testing.assert_allclose(got - bias, [-0.01, 0.01, 0.01, 0.0], atol=1e-8)
    centred = sign_update(bias, load, 1e-2, centred=True)
    np.testing.assert_allclose(centred.mean(), bias.mean(), atol=1e-8)
    np.testing.assert_allclose(np.diff(centred), np.diff(got), atol=1e-7)  # so it selects the same experts
    assert abs(float(got.mean() - bias.mean())) > 1e-3


def test_the_sign_rule_balances_and_its_opposite_does_not():
    scores = (0.5 + 0.1 * rng.normal(size=(400, 8)) + np.linspace(-0.2, 0.2, 8)).astype(np.float32)

    def end(rate):
        def step(bias, _):
            load = loads(select(scores, bias, 2)[0], 8)
            return sign_update(bias, load, rate), load.max() / load.mean() - 1

        return float(jax.lax.scan(step, jnp.zeros(8), None, 200)[1][-20:].mean())

    assert end(3e-3) < 0.1 < 1 < end(0.0) < end(-3e-3)


def quantile_slowly(scores, bias, k):
    """Quantile Balancing in float64 by sorting every list."""
    T, E = scores.shape
    cutoff = [sorted(row)[-(k + 1)] for row in (scores + bias)]
    found = [-sorted((scores[i, j] - cutoff[i] for i in range(T)), reverse=True)[T * k // E] for j in range(E)]
    return np.array(found) - np.mean(found)


# A few shapes (tokens, experts, choices), since each compiles anew: one token, q a fraction, q whole.
problems = st.tuples(st.sampled_from([(1, 2, 1), (7, 4, 3), (12, 6, 2)]), st.integers(0, 2**31 - 1))


@functools.partial(jax.jit, static_argnums=2)
def by_both(scores, bias, k):
    """Cutoffs, exact biases, and the histogram with its biases."""
    cutoff = select(scores, bias, k)[1]
    counts = margin_histogram(scores, cutoff, bias)
    return cutoff, quantile_bias(scores, cutoff, k), counts, histogram_bias(*counts, k)


@fixed
@given(problems)
def test_quantile_balancing_equals_brute_force(problem):
    (T, E, k), seed = problem
    own = np.random.default_rng(seed)
    # Multiples of 2^-12, so that float32 sums are exact and ties occur.
    scores, bias = (np.float32(own.integers(0, 4096, size=s) / 4096) for s in ((T, E), (E,)))
    cutoff, got = map(np.asarray, by_both(scores, bias, k)[:2])
    np.testing.assert_allclose(got, quantile_slowly(np.float64(scores), np.float64(bias), k), atol=1e-6)
    # At most q tokens would choose an expert at the present cutoffs, and with the next margin there were more.
    margins = scores - cutoff[:, None]
    raw = -np.sort(margins, 0)[T - 1 - T * k // E]
    above, reached = (margins > -raw).sum(0), (margins >= -raw).sum(0)
    assert (above <= T * k / E).all() and (reached > T * k // E).all()
    np.testing.assert_allclose(got, raw - raw.mean(), atol=1e-6)


@fixed
@given(problems)
def test_the_histogram_finds_the_quantile_to_a_bin(problem):
    (T, E, k), seed = problem
    own = np.random.default_rng(seed)
    scores, bias = own.random((T, E), np.float32), (own.random(E, np.float32) - 0.5)
    cutoff, _, (counts, _, width), got = by_both(scores, bias, k)
    cutoff, got = np.asarray(cutoff), np.array(got)
    assert counts.dtype == jnp.int32 and (np.asarray(counts).sum(1) == T).all()
    needs = np.sort(cutoff[:, None] - scores, 0)[-(-T * k // E) - 1]  # the bias that just lets ceil(q) tokens in
    got += needs.mean() - got.mean()
    assert np.abs(got - needs).max() < 2.5 * float(width)


def test_counts_of_microbatches_add_up():
    scores, bias = rng.random((12, 6), np.float32), rng.random(6, np.float32)
    cutoff = np.asarray(select(scores, bias, 2)[1])
    counts = jax.jit(lambda s, c: margin_histogram(s, c, bias)[0])
    halves = [counts(scores[i], cutoff[i]) for i in (slice(6), slice(6, 12))]
    np.testing.assert_array_equal(halves[0] + halves[1], counts(scores, cutoff))


def test_one_update_by_the_quantile_balances_and_a_wrong_quantile_does_not():
    scores = (0.5 + 0.1 * rng.normal(size=(4000, 8)) + np.linspace(-0.15, 0.15, 8)).astype(np.float32)

    def violation(bias):
        load = np.asarray(loads(select(scores, bias, 2)[0], 8))
        assert load.sum() == 8000
        return load.max() / load.mean() - 1

    zero = jnp.zeros(8)
    cutoff = select(scores, zero, 2)[1]
    right = quantile_bias(scores, cutoff, 2)
    assert violation(right) < 0.4 < 1.5 < violation(zero)
    twice = quantile_bias(scores, select(scores, right, 2)[1], 2)
    assert violation(twice) < violation(right) / 2
    from_biased = quantile_bias(scores + right, select(scores, right, 2)[1], 2)  # margins of biased scores
    wrong = [-right, from_biased]
    assert all(violation(bias) > 2 * violation(right) for bias in wrong)
