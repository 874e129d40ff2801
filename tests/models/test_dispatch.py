"""Sorted dispatch against the dense oracle, values and gradients, for loads that are even, lopsided and empty."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.models import ModelConfig, MoEConfig
from repro.models.dispatch import TILE, Hidden, _gated_sum, _sorted_rows, _spread, _tiles_of, experts_of, routed

pytestmark = pytest.mark.usefixtures("quick_compile")

E, K, C, F, T = 5, 2, 8, 6, 150
LOW = "experts=mxfp8"
rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
X, WEIGHTS = draw(T, C), {"gate": draw(E, C, F) / 3, "up": draw(E, C, F) / 3, "down": draw(E, F, C) / 3}
GATES = jnp.asarray(rng.random((T, K)), jnp.float32)
ROUTES = {
    "even": np.stack([np.arange(T) % E, (np.arange(T) + 1) % E], 1),
    "random": np.argsort(rng.random((T, E)), 1)[:, :K],
    "lopsided": np.tile([3, 1], (T, 1)),  # three experts without a token
}  # fmt: skip
ROUTES = {name: jnp.asarray(routes, jnp.int32) for name, routes in ROUTES.items()}


def config(dispatch="auto", precision="plain", **settings):
    return ModelConfig(moe=MoEConfig(experts=E, active=K, ffn=F, dispatch=dispatch), precision=precision, **settings)


@functools.partial(jax.jit, static_argnums=0)
def results(config, x, gates, routes, weights, key=None):
    """Output, statistics, and gradients of a function of all outputs."""

    def loss(x, gates, weights):
        y, hidden = routed(config, x, gates, routes, weights, key)
        return jnp.sin(y.astype(jnp.float32)).sum(), (y, hidden)

    (_, (y, hidden)), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, gates, weights)
    return y, hidden, grads


def close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def by_hand(routes):
    """One token at a time, in float64."""
    x, gates, w = jax.tree.map(np.float64, (X, GATES, WEIGHTS))
    y, top, total = np.zeros((T, C)), np.zeros(E), 0.0
    for t, k in np.ndindex(T, K):
        e = int(routes[t, k])
        g = x[t] @ w["gate"][e]
        h = g / (1 + np.exp(-g)) * (x[t] @ w["up"][e])
        y[t] += gates[t, k] * (h @ w["down"][e])
        top[e], total = max(top[e], np.abs(h).max()), total + (h * h).sum()
    return y, Hidden(top, total)


def test_the_oracle_is_the_sum_over_chosen_experts():
    for routes in (ROUTES["random"], ROUTES["lopsided"]):
        y, hidden, _ = results(config("dense"), X, GATES, routes, WEIGHTS)
        close((y, hidden), by_hand(np.asarray(routes)))
    assert (np.asarray(hidden.max_E) == 0).tolist() == [True, False, True, False, True]
    with pytest.raises(AssertionError):
        close(results(config("dense"), X, GATES[:, ::-1], routes, WEIGHTS)[0], y)


@pytest.mark.parametrize("dispatch", ["tiles", "ragged"])
def test_sorted_dispatch_equals_the_oracle(dispatch):
    for routes in ROUTES.values():
        want = results(config("dense"), X, GATES, routes, WEIGHTS)
        close(results(config(dispatch), X, GATES, routes, WEIGHTS), want)
        _, _, (dx, dgates, dweights) = want
        assert (np.abs(dx).max(1) > 0).all() and (np.asarray(dgates) != 0).all()
        used = np.isin(np.arange(E), routes)
        assert all(((np.abs(d).max((1, 2)) > 0) == used).all() for d in dweights.values())


def test_every_pair_has_one_row_whatever_the_load():
    for routes in [*ROUTES.values(), jnp.zeros((T, K), jnp.int32)]:
        for tile in (1, TILE):
            rows = jax.jit(_sorted_rows, static_argnums=(1, 2))(routes, E, tile)
            pairs = np.asarray(rows.pair_R)
            assert sorted(pairs[pairs < T * K].tolist()) == list(range(T * K))
            np.testing.assert_array_equal(pairs[np.asarray(rows.row_TK).ravel()], np.arange(T * K))
            assert pairs.size == (T * K if tile == 1 else _tiles_of(T * K, E, TILE) * TILE)
            experts = np.where(pairs < T * K, np.append(np.ravel(routes), -1)[pairs], -1).reshape(-1, tile)
            assert all(len(set(row[row >= 0].tolist())) <= 1 for row in experts)  # a tile is of one expert
            taken = experts.max(1)[experts.max(1) >= 0]
            assert (np.diff(taken) >= 0).all()


def test_a_dropped_or_misplaced_row_would_be_seen():
    rows = _sorted_rows(ROUTES["random"], E, TILE)
    whole = _gated_sum(_spread(X, rows), GATES, rows)
    close(whole, X * GATES.sum(1, keepdims=True))
    dropped = rows._replace(pair_R=rows.pair_R.at[rows.row_TK[7, 1]].set(T * K))
    moved = rows._replace(row_TK=rows.row_TK[::-1])
    for wrong in (dropped, moved):
        with pytest.raises(AssertionError):
            close(_gated_sum(_spread(X, wrong), GATES, wrong), whole)


def test_tiles_under_vmap_and_scan():
    one = lambda x, routes: routed(config("tiles"), x, GATES, routes, WEIGHTS)[0]
    gradient = jax.grad(lambda x, routes: jnp.sin(one(x, routes)).sum())
    xs, routes = jnp.stack([X, 2 * X, -X]), jnp.stack(list(ROUTES.values()))
    loop = [gradient(x, r) for x, r in zip(xs, routes, strict=True)]
    close(jax.jit(jax.vmap(gradient))(xs, routes), jnp.stack(loop))
    close(jax.jit(lambda: jax.lax.scan(lambda _, a: (None, gradient(*a)), None, (xs, routes))[1])(), jnp.stack(loop))


@pytest.mark.parametrize("glu", ["gelu", "clamped"])
def test_other_units(glu):
    weights = {name: w for name, w in WEIGHTS.items() if glu != "gelu" or name != "gate"}
    got, want = (results(config(d, glu=glu), X, GATES, ROUTES["random"], weights) for d in ("tiles", "dense"))
    close(got, want)


def test_half_precision():
    exact = results(config("tiles"), X, GATES, ROUTES["random"], WEIGHTS)
    got = results(config("tiles"), X.astype(jnp.bfloat16), GATES, ROUTES["random"], WEIGHTS)
    assert got[0].dtype == got[2][0].dtype == jnp.bfloat16 and got[2][2]["up"].dtype == jnp.float32
    assert 1e-4 < np.abs(got[0].astype(jnp.float32) - exact[0]).max() / np.abs(exact[0]).max() < 0.03


@functools.partial(jax.jit, static_argnums=0)
def forward(config):
    return routed(config, X, GATES, ROUTES["random"], WEIGHTS)


def test_a_policy_of_the_experts():
    """Rows are quantised one by one, so both ways agree."""
    exact, (y, hidden), want = (forward(config(*c)) for c in (["dense"], ["tiles", LOW], ["dense", LOW]))
    close((y, hidden), want)
    assert 1e-2 < np.abs(y - exact[0]).max() / np.abs(exact[0]).max() < 0.2


def test_gradients_under_a_policy():
    """One whose gradients of weights have no blocks along the tokens, since those hold other tokens in the oracle."""
    sides = [results(config(d, "experts=mxfp4_w"), X, GATES, ROUTES["random"], WEIGHTS)[2] for d in ("tiles", "dense")]
    close(sides[0], sides[1], 2e-2)  # products of bfloat16 numbers
    exact = results(config("dense"), X, GATES, ROUTES["random"], WEIGHTS)[2]
    assert np.abs(sides[0][0] - exact[0]).max() / np.abs(exact[0]).max() > 5e-2


def test_smooth_units_change_nothing_but_what_is_quantised():
    smooth, plain = (
        results(config("tiles", glu=g), X, GATES, ROUTES["random"], WEIGHTS)[0] for g in ("smooth", "swiglu")
    )
    np.testing.assert_array_equal(smooth, plain)
    low = forward(config("tiles", LOW, glu="smooth"))[0] - forward(config("tiles", LOW))[0]
    assert np.abs(low).max() > 1e-4


def test_auto():
    assert experts_of(config()) == ("tiles" if jax.default_backend() == "cpu" else "ragged")
    assert experts_of(config(precision=LOW)) == "tiles"
    assert experts_of(dataclasses.replace(config("dense"))) == "dense"
