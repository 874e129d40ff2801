"""Muon inside other transforms, and on trees of several libraries."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from repro.errors import ReproError
from repro.optim import Layout, muon

pytestmark = pytest.mark.usefixtures("quick_compile")

KERNEL, BIAS = Layout("matrix", (0,), (1,)), Layout("bias")
LAYOUTS = {"dense": {"kernel": KERNEL, "bias": BIAS}}


def tree(seed, shape=(4, 6)):
    rng = np.random.default_rng(seed)
    make = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)
    return {"dense": {"kernel": make(*shape), "bias": make(shape[1])}}


PARAMS, GRADS = tree(0), [tree(i) for i in (1, 2, 3)]


def run(tx, params=PARAMS, grads=GRADS):
    state, step = tx.init(params), jax.jit(tx.update)
    for g in grads:
        updates, state = step(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def plain(**options):
    return muon(0.1, layouts=LAYOUTS, **options)


def equal(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **(tolerance or {"rtol": 1e-6, "atol": 1e-6})), a, b)


def test_chain_and_apply_if_finite():
    want, _ = run(plain())
    equal(run(optax.chain(optax.identity(), plain()))[0], want)
    bad = jax.tree.map(lambda g: g * jnp.nan, GRADS[0])
    got, state = run(optax.apply_if_finite(plain(), 5), grads=[GRADS[0], bad, *GRADS[1:]])
    equal(got, want)
    assert state.total_notfinite == 1


def test_inject_hyperparams():
    tx = optax.inject_hyperparams(muon)(0.1, layouts=LAYOUTS, rms=0.2)
    got, state = run(tx)
    equal(got, run(plain())[0])
    assert {"learning_rate", "rms", "momentum", "weight_decay"} <= set(state.hyperparams)
    state.hyperparams["learning_rate"] = jnp.float32(0.0)
    updates, _ = tx.update(GRADS[0], state, got)
    assert all((np.asarray(u) == 0).all() for u in jax.tree.leaves(updates))


def test_multi_steps_is_one_step_on_the_mean():
    tx = optax.MultiSteps(plain(), every_k_schedule=3)
    mean = jax.tree.map(lambda *g: sum(g) / 3, *GRADS)
    equal(run(tx.gradient_transformation())[0], run(plain(), grads=[mean])[0])


def test_linen_and_nnx_trees():
    want, _ = run(plain())

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(6, name="dense")(x)

    shapes = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 4)))["params"]
    assert jax.tree.structure(shapes) == jax.tree.structure(PARAMS)
    equal(run(muon(0.1, layouts=LAYOUTS))[0], want)

    class Module(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(4, 6, rngs=nnx.Rngs(0))

    state = nnx.state(Module(), nnx.Param)

    def filled(values):
        new = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(new, values)
        return new

    got, _ = run(plain(), filled(PARAMS), [filled(g) for g in GRADS])
    equal(nnx.to_pure_dict(got), want)
    optimizer = nnx.Optimizer(Module(), plain(), wrt=nnx.Param)
    assert optimizer is not None


def test_zero_half_precision_gradients_give_no_nan():
    params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
    got, _ = run(plain(weight_decay=0.0), params, [jax.tree.map(jnp.zeros_like, params)])
    # The bias is AdamW's, whose epsilon is zero in float16 in optax as here.
    np.testing.assert_array_equal(got["dense"]["kernel"], params["dense"]["kernel"])


def test_a_transform_of_ones_own_for_the_others():
    got, _ = run(muon(0.1, layouts=LAYOUTS, adamw=optax.sgd(0.5)))
    want = PARAMS["dense"]["bias"] - 0.5 * sum(g["dense"]["bias"] for g in GRADS)
    np.testing.assert_allclose(got["dense"]["bias"], want, rtol=1e-5)
    equal(got["dense"]["kernel"], run(plain())[0]["dense"]["kernel"])


def test_roles_that_go_to_muon():
    layouts = {"dense": {"kernel": Layout("router", (0,), (1,)), "bias": BIAS}}
    as_matrix = run(plain())[0]
    equal(run(muon(0.1, layouts=layouts, roles=("matrix", "router")))[0], as_matrix)
    assert np.abs(run(muon(0.1, layouts=layouts))[0]["dense"]["kernel"] - as_matrix["dense"]["kernel"]).max() > 0.01
    with pytest.raises(ReproError, match="dense/bias of role bias names no input and output axes"):
        muon(0.1, layouts=layouts, roles=("bias",)).init(PARAMS)


def test_no_decay():
    equal(run(plain(decay="none"))[0], run(plain(weight_decay=0.0))[0])
    assert np.abs(run(plain(decay="none"))[0]["dense"]["kernel"] - run(plain())[0]["dense"]["kernel"]).max() > 1e-3


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "momentum", "rms", "b2", "eps"])
def test_hyper_parameters_that_are_not_finite_are_refused(name):
    options = {"learning_rate": 0.1, "layouts": LAYOUTS, name: float("nan")}
    with pytest.raises(ReproError, match=f"{name} is nan; it must be a finite number"):
        muon(**options)
