import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from repro.optim import Layout, adafactor, scale_by_adafactor

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYOUTS = {
    "q_LDHK": Layout("matrix", (1,), (2, 3), head=2, layer=0),
    "embedding_ZD": Layout("embedding"),
    "norm_LD": Layout("norm", layer=0),
}
SHAPES = {"q_LDHK": (8, 3, 2, 2), "embedding_ZD": (5, 3), "norm_LD": (8, 3)}
STEPS = 4


def normal_tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


PARAMS = normal_tree(0)
GRADS = [normal_tree(1 + t, 1.0 if t < 3 else 30.0) for t in range(STEPS)]  # the last is larger, so that the clip acts


def updates_of(tx, params=PARAMS, grads=GRADS):
    state, history = tx.init(params), []
    update = jax.jit(tx.update)
    for g in grads:
        u, state = update(g, state, params)
        history.append(u)
    return history, state


def by_hand(grads, *, wrong=""):
    """U in each step for one tensor, [rows, columns] or a vector, in float64, with sums as in the paper."""
    r = c = v = 0.0
    history = []
    for t, g in enumerate(grads, 1):
        b = 1 - t**-0.8
        if wrong == "constant decay":
            b = 0.99 if t > 1 else 0.0
        if wrong == "clip the gradient":
            g = g / max(1, np.sqrt((g**2).mean()))
        square = g**2 + 1e-30
        if g.ndim == 2 and wrong != "not factored":
            r, c = b * r + (1 - b) * square.sum(1), b * c + (1 - b) * square.sum(0)
            u = g / np.sqrt(np.outer(r, c) / r.sum())
        else:
            v = b * v + (1 - b) * square
            u = g / np.sqrt(v)
        if wrong not in ("clip the gradient", "no clip"):
            u = u / max(1, np.sqrt((u**2).mean()))
        history.append(u)
    return history


def tensors(tree):
    """Every tensor as a matrix or a vector: one per layer."""
    q, n = np.asarray(tree["q_LDHK"], np.float64), np.asarray(tree["norm_LD"], np.float64)
    return [*q.reshape(8, 3, 4), np.asarray(tree["embedding_ZD"], np.float64), *n]


def follows(wrong=""):
    history = updates_of(scale_by_adafactor(LAYOUTS))[0]
    for i, grads in enumerate(zip(*map(tensors, GRADS), strict=True)):
        for got, want in zip(history, by_hand(grads, wrong=wrong), strict=True):
            np.testing.assert_allclose(tensors(got)[i], want, rtol=2e-5, atol=1e-6)


def test_steps_by_hand():
    follows()
    for wrong in ("constant decay", "clip the gradient", "no clip", "not factored"):
        with pytest.raises(AssertionError):
            follows(wrong)


def test_one_matrix_is_as_in_optax():
    only = lambda tree: {"embedding_ZD": tree["embedding_ZD"]}  # noqa: E731
    theirs = optax.adafactor(
        0.1, min_dim_size_to_factor=1, multiply_by_parameter_scale=True, momentum=0.9, clipping_threshold=1.0
    )
    ours = adafactor(0.1, weight_decay=0.0, b1=0.9, relative=True)
    got, want = (updates_of(tx, only(PARAMS), [only(g) for g in GRADS])[0] for tx in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), got, want)


def test_optax_takes_layers_for_a_side_of_the_matrix():
    """Why it is not used: the first layer's update depends on the other layers' gradients."""
    theirs = optax.scale_by_factored_rms(min_dim_size_to_factor=1)

    def first_layer(tx, factor):
        # Eight layers of 3 x 4: the two largest axes are the layers and the columns.
        stack = np.random.default_rng(0).normal(size=(8, 3, 4)) * np.array([1.0, *[factor] * 7])[:, None, None]
        tree = {"w_LDF": jnp.asarray(stack, jnp.float32)}
        return updates_of(tx, tree, [tree])[0][0]["w_LDF"][0]

    ours = scale_by_adafactor({"w_LDF": Layout("matrix", (1,), (2,), layer=0)})
    np.testing.assert_allclose(first_layer(ours, 1.0), first_layer(ours, 100.0), rtol=1e-6)
    assert np.abs(first_layer(theirs, 1.0) - first_layer(theirs, 100.0)).max() > 0.01


def test_state_is_a_row_and_a_column():
    second = jax.eval_shape(scale_by_adafactor(LAYOUTS).init, PARAMS).second
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(second[name])) for name in SHAPES}
    assert sizes == {"q_LDHK": 8 * (3 + 4), "embedding_ZD": 5 + 3, "norm_LD": 8 * 3}


def test_a_zero_gradient_changes_nothing():
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    for leaf in jax.tree.leaves(updates_of(scale_by_adafactor(LAYOUTS), grads=[zeros, zeros])[0]):
        np.testing.assert_array_equal(leaf, 0)
