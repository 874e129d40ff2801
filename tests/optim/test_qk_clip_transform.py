"""QK-Clip as an Optax transform: equal to the pure form, and at home in what Optax wraps around transforms."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from repro.errors import ReproError
from repro.optim import Layout, qk_clip, qk_clip_factor, with_qk_clip

pytestmark = pytest.mark.usefixtures("quick_compile")

L, D, H, K, TAU = 2, 6, 4, 5, 100.0
LAYOUTS = {
    "q": Layout("matrix", (1,), (2, 3), head=2, layer=0, qk="q"),
    "k": Layout("matrix", (1,), (2, 3), head=2, layer=0, qk="k"),
    "v": Layout("matrix", (1,), (2, 3), head=2, layer=0),
}
MAXIMA = jnp.array([[150.0, -3.0, 50.0, 0.0], [0.0, 1000.0, 100.5, 2.0]])
CLIPPED = np.asarray(MAXIMA) > TAU


def tree(seed, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.normal(size=(L, D, H, K)), dtype) for name in LAYOUTS}


PARAMS, GRADS = tree(0), tree(1)
SGD = optax.sgd(0.5)


def pure(params, grads, maxima=MAXIMA, tau=TAU, tx=SGD):
    updates, _ = tx.update(grads, tx.init(params), params)
    return qk_clip(optax.apply_updates(params, updates), maxima, tau=tau, layouts=LAYOUTS)


def step(tx, params, grads, maxima=MAXIMA, state=None):
    updates, state = tx.update(grads, tx.init(params) if state is None else state, params, max_logits=maxima)
    return optax.apply_updates(params, updates), updates, state


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)


def test_equals_the_pure_form_to_one_ulp_and_leaves_other_updates_alone():
    tx = with_qk_clip(SGD, tau=TAU, layouts=LAYOUTS)
    fused = jax.jit(lambda p, g: step(tx, p, g))
    for seed, scale in enumerate([1e-3, 1.0, 4.0, 1e3]):  # updates that are small, turn the sign, and rule
        params, grads = tree(seed), tree(seed + 9, scale)
        got, updates, _ = fused(params, grads)
        want = pure(params, grads)
        plain, _ = SGD.update(grads, SGD.init(params))
        for name in LAYOUTS:
            p, moved = np.asarray(params[name]), np.asarray(params[name] + plain[name])
            ulp = np.spacing(np.maximum(np.abs(p), np.abs(moved)))
            assert (np.abs(np.float64(got[name]) - np.float64(want[name])) <= ulp).all()
            heads, own = (np.moveaxis(np.asarray(u[name]), 2, 1) for u in (updates, plain))
            np.testing.assert_array_equal(heads[~CLIPPED], own[~CLIPPED])
            assert name == "v" or (heads[CLIPPED] != own[CLIPPED]).all()
        for wrong in [  # of the weights before the update; of the update alone
            optax.apply_updates(qk_clip(params, MAXIMA, tau=TAU, layouts=LAYOUTS), plain),
            optax.apply_updates(params, qk_clip(plain, MAXIMA, tau=TAU, layouts=LAYOUTS)),
        ]:
            assert np.abs(wrong["q"] - want["q"]).max() > 1e-5


def test_bfloat16_parameters():
    params, grads = tree(0, dtype=jnp.bfloat16), tree(1, dtype=jnp.bfloat16)
    got, updates, _ = step(with_qk_clip(SGD, tau=TAU, layouts=LAYOUTS), params, grads)
    assert {x.dtype for x in jax.tree.leaves((got, updates))} == {jnp.dtype(jnp.bfloat16)}
    for name, want in pure(params, grads).items():
        ulp = 2.0**-7 * np.maximum(np.abs(params[name]), np.abs(params[name] + 0.5 * grads[name])).astype(np.float32)
        assert (np.abs(np.float32(got[name]) - np.float32(want)) <= ulp).all()


def test_log_only_records_and_changes_nothing():
    plain = SGD.update(GRADS, SGD.init(PARAMS))[0]
    for log_only in (False, True):
        tx = with_qk_clip(SGD, tau=TAU, layouts=LAYOUTS, log_only=log_only)
        np.testing.assert_array_equal(tx.init(PARAMS).factors, 1.0)
        _, updates, state = step(tx, PARAMS, GRADS)
        np.testing.assert_array_equal(state.factors, qk_clip_factor(MAXIMA, TAU))
        assert bool((updates["q"] == plain["q"]).all()) is log_only


def test_around_multi_steps_it_takes_the_maximum_over_the_microbatches():
    cold = jnp.zeros_like(MAXIMA)
    batches = [(cold.at[0, 0].set(150.0), GRADS), (cold.at[1, 2].set(400.0), tree(2)), (cold, tree(3))]
    mean = jax.tree.map(lambda *g: sum(g) / 3, *(g for _, g in batches))

    @jax.jit
    def run(params):
        state, seen = tx.init(params), []
        for maxima, grads in batches:
            before = params
            params, _, state = step(tx, params, grads, maxima, state)
            seen.append((jax.tree.map(lambda a, b: (a == b).all(), params, before), state.factors))
        return params, state, seen

    tx = with_qk_clip(optax.MultiSteps(SGD, 3), tau=TAU, layouts=LAYOUTS)
    params, state, seen = run(PARAMS)
    close(params, pure(PARAMS, mean, jnp.maximum(batches[0][0], batches[1][0])))
    assert np.abs(params["q"] - pure(PARAMS, mean, cold)["q"]).max() > 0.1  # the last microbatch alone
    for kept, factors in seen[:2]:
        assert all(jax.tree.leaves(kept)) and (factors == 1).all()
    np.testing.assert_array_equal(state.max_logits, -jnp.inf)
    np.testing.assert_allclose((state.factors[0, 0], state.factors[1, 2]), (2 / 3, 1 / 4), rtol=1e-6)


def test_a_skipped_microbatch_does_not_count():
    multi = optax.MultiSteps(SGD, 2, should_skip_update_fn=optax.skip_not_finite)
    tx = with_qk_clip(multi, tau=TAU, layouts=LAYOUTS)
    bad, cold = jax.tree.map(lambda g: g * jnp.nan, GRADS), jnp.zeros_like(MAXIMA)
    params, state = PARAMS, tx.init(PARAMS)
    for maxima, grads in [(cold, GRADS), (MAXIMA, bad), (cold, GRADS)]:
        params, _, state = step(tx, params, grads, maxima, state)
    close(params, pure(PARAMS, GRADS, cold))
    np.testing.assert_array_equal(state.factors, 1.0)


def wrappers():
    clip = lambda tau=TAU, **options: with_qk_clip(SGD, tau=tau, layouts=LAYOUTS, **options)
    return {
        "chain": optax.chain(optax.clip(1e6), clip()),
        "named chain of its own": with_qk_clip(
            optax.chain(optax.trace(0.9), optax.scale(-0.5)), tau=TAU, layouts=LAYOUTS
        ),
        "apply_if_finite": optax.apply_if_finite(clip(), 3),
        "around apply_if_finite": with_qk_clip(optax.apply_if_finite(SGD, 3), tau=TAU, layouts=LAYOUTS),
        "inject_hyperparams": optax.inject_hyperparams(with_qk_clip)(SGD, tau=TAU, layouts=LAYOUTS),
        "a schedule of tau": optax.inject_hyperparams(with_qk_clip)(
            SGD, tau=lambda count: TAU / (1 + count), layouts=LAYOUTS
        ),
    }


@pytest.mark.parametrize("name", wrappers())
def test_inside_the_wrappers_of_optax(name):
    tx = wrappers()[name]
    got, _, state = jax.jit(lambda p, g: step(tx, p, g))(PARAMS, GRADS)
    close(got, pure(PARAMS, GRADS))
    if name == "apply_if_finite":
        bad = jax.tree.map(lambda g: g * jnp.nan, GRADS)
        kept, _, after = step(tx, PARAMS, bad, state=state)
        jax.tree.map(np.testing.assert_array_equal, kept, PARAMS)
        jax.tree.map(np.testing.assert_array_equal, after.inner_state, state.inner_state)
    if name == "a schedule of tau":
        again, _, _ = step(tx, got, GRADS, state=state)
        close(again, pure(got, GRADS, tau=TAU / 2))


def test_linen_and_nnx_trees():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self):
            return [self.param(n, lambda key, n=n: PARAMS[n]) for n in LAYOUTS]

    class Nnx(nnx.Module):
        def __init__(self):
            for n in LAYOUTS:
                setattr(self, n, nnx.Param(PARAMS[n]))

    want = pure(PARAMS, GRADS)
    params = Linen().init(jax.random.key(0))
    tx = with_qk_clip(SGD, tau=TAU, layouts={"params": LAYOUTS})
    close(step(tx, params, {"params": GRADS})[0], {"params": want})

    state = nnx.state(Nnx(), nnx.Param)
    grads = jax.tree.unflatten(jax.tree.structure(state), [GRADS[n] for n in sorted(GRADS)])
    tx = with_qk_clip(SGD, tau=TAU, layouts=LAYOUTS)
    close(nnx.to_pure_dict(step(tx, state, grads)[0]), want)
    close(
        nnx.to_pure_dict(qk_clip(state, MAXIMA, tau=TAU, layouts=LAYOUTS)),
        qk_clip(PARAMS, MAXIMA, tau=TAU, layouts=LAYOUTS),
    )


def test_groups_keep_their_names_in_the_state():
    layouts = {name: dataclasses.replace(layout, group="global") for name, layout in LAYOUTS.items()}
    tx = with_qk_clip(SGD, tau=TAU, layouts=layouts)
    got, _, state = step(tx, PARAMS, GRADS, {"global": MAXIMA})
    close(got, pure(PARAMS, GRADS))
    assert set(state.factors) == set(state.max_logits) == {"global"}


def test_what_is_refused():
    tx = with_qk_clip(SGD, tau=TAU, layouts=LAYOUTS)
    state = tx.init(PARAMS)
    for arguments in [dict(params=PARAMS), dict(max_logits=MAXIMA)]:
        with pytest.raises(ReproError, match="max_logits=..."):
            tx.update(GRADS, state, **arguments)
    with pytest.raises(ReproError, match="got max_logits of shape"):
        tx.update(GRADS, state, PARAMS, max_logits=MAXIMA[0])
    with pytest.raises(ReproError, match="inject_hyperparams"):
        with_qk_clip(SGD, tau=lambda count: TAU, layouts=LAYOUTS)
    with pytest.raises(ReproError, match="tau is 0"):
        with_qk_clip(SGD, tau=0, layouts=LAYOUTS)
    normed = LAYOUTS | {"gain": Layout("norm", qk="k")}
    with pytest.raises(ReproError, match="norm on queries or keys"):
        with_qk_clip(SGD, tau=TAU, layouts=normed).init(PARAMS | {"gain": jnp.ones(K)})
