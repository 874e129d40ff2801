import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from repro.optim import Layout, scale_by_shampoo, scale_by_soap, shampoo

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYOUTS = {"w": Layout("matrix", (0,), (1,))}


def updates_of(tx, grads, params=None):
    state, history, update = tx.init(grads[0] if params is None else params), [], jax.jit(tx.update)
    for g in grads:
        u, state = update(g, state, params)
        history.append(u)
    return history


def alone(tx, matrices):
    return [u["w"] for u in updates_of(tx, [{"w": jnp.asarray(m, jnp.float32)} for m in matrices])]


def root(x, power):
    values, vectors = np.linalg.eigh(x)
    values = np.maximum(values, 1e-15 * values[-1])  # rounding may take the kernel's below zero
    return (vectors * values**power) @ vectors.T


def orthogonal(n, rng):
    return np.linalg.qr(rng.normal(size=(n, n)))[0]


def shampoo_by_hand(matrices, power=-0.25, one_sided=False):
    left = right = 0.0
    for g in matrices:
        left, right = left + g @ g.T, right + g.T @ g
    g = matrices[-1]
    return root(left, power) @ g @ (np.eye(g.shape[1]) if one_sided else root(right, power))


def test_one_step_of_shampoo_is_the_polar_factor():
    """L^-1/4 G R^-1/4 = U V^T where L = G G^T and R = G^T G: to 1e-10 in float64, to 1e-5 in the code."""
    rng = np.random.default_rng(0)
    g = orthogonal(6, rng) * np.array([1.0, 0.9, 0.7, 0.5, 0.3, 0.2]) @ orthogonal(6, rng)
    u, _, vh = np.linalg.svd(g)
    np.testing.assert_allclose(shampoo_by_hand([g]), u @ vh, atol=1e-10)
    for wrong in (shampoo_by_hand([g], -0.5), shampoo_by_hand([g], -0.25, one_sided=True)):
        assert np.abs(wrong - u @ vh).max() > 0.1
    for scale in (1.0, 1e-6):
        np.testing.assert_allclose(alone(scale_by_shampoo(LAYOUTS), [scale * g])[0], u @ vh, atol=1e-5)
    np.testing.assert_array_equal(alone(scale_by_shampoo(LAYOUTS), [0 * g])[0], 0)


def test_steps_of_shampoo_by_hand():
    rng = np.random.default_rng(1)
    grads = [{"w": rng.normal(size=(2, 4, 3)), "bias": rng.normal(size=3)} for _ in range(3)]
    layouts = {"w": Layout("matrix", (1,), (2,), layer=0), "bias": Layout("bias")}
    trees = [jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), g) for g in grads]
    published = shampoo(1.0, layouts=layouts, b1=None, b2=None, rms=None, decay="none")
    got = updates_of(published, trees, trees[0])
    for layer in range(2):  # 4 x 3: L of the first steps has a kernel, where G is zero too
        history = [g["w"][layer] for g in grads]
        np.testing.assert_allclose(got[-1]["w"][layer], -shampoo_by_hand(history), atol=1e-4)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(got[-1]["w"][layer], -shampoo_by_hand(history[-1:]), atol=1e-2)
    adam = updates_of(optax.adam(1.0, b2=0.95), trees)[-1]["bias"]
    np.testing.assert_allclose(got[-1]["bias"], adam, rtol=1e-6)


def test_shampoo_with_means_has_the_size_of_adam():
    """On a constant gradient the averages are that gradient, and the update is 0.2 sqrt(max) U V^T."""
    g = np.random.default_rng(2).normal(size=(4, 4))
    u, _, vh = np.linalg.svd(g)
    for update in alone(scale_by_shampoo(LAYOUTS, b1=0.9, b2=0.95, rms=0.2), [g] * 3):
        np.testing.assert_allclose(update, 0.4 * u @ vh, atol=1e-4)


def soap_by_hand(matrices, refresh, *, b=0.95, eps=1e-8, wrong=""):
    """Updates in float64; the bases by eigenvectors, sorted alike."""
    g = matrices[0]
    left, right = (1 - b) * g @ g.T, (1 - b) * g.T @ g
    ql, qr = np.linalg.eigh(left)[1], np.linalg.eigh(right)[1]
    m = v = 0.0
    history = [0 * g]
    for t, g in enumerate(matrices[1:], 1):
        m = b * m + (1 - b) * g
        v = b * v + (1 - b) * (ql.T @ g @ qr) ** 2
        u = (ql.T @ m @ qr) / (1 - b**t) / (np.sqrt(v / (1 - b**t)) + eps)
        history.append(u if wrong == "not turned back" else ql @ u @ qr.T)
        left, right = b * left + (1 - b) * g @ g.T, b * right + (1 - b) * g.T @ g
        if t % refresh == 0 and wrong != "never refreshed":
            ql, qr = np.linalg.qr(left @ ql)[0], np.linalg.qr(right @ qr)[0]
    return history


@pytest.fixture(scope="module")
def gradients():
    rng = np.random.default_rng(3)
    return [rng.normal(size=(5, 5)) for _ in range(6)]


def test_steps_of_soap_by_hand(gradients):
    got = alone(scale_by_soap(LAYOUTS, refresh=2), gradients)
    np.testing.assert_array_equal(got[0], 0)
    for a, b in zip(got, soap_by_hand(gradients, 2), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    for wrong in ("not turned back", "never refreshed"):
        assert np.abs(got[-1] - soap_by_hand(gradients, 2, wrong=wrong)[-1]).max() > 0.05


def test_soap_turns_with_its_gradients_and_adam_does_not(gradients):
    rng = np.random.default_rng(4)
    q, p = orthogonal(5, rng), orthogonal(5, rng)

    def gap(tx):
        plain, rotated = alone(tx, gradients), alone(tx, [q @ g @ p for g in gradients])
        return max(np.abs(b - q @ a @ p).max() for a, b in zip(plain, rotated, strict=True))

    assert gap(scale_by_soap(LAYOUTS, refresh=2)) < 5e-4
    assert gap(optax.scale_by_adam(b1=0.95, b2=0.95)) > 0.3


def test_blocks_follow_the_layout(gradients):
    """A stack of two layers with split heads equals every block on its own."""
    rng = np.random.default_rng(5)
    history = [jnp.asarray(rng.normal(size=(2, 3, 2, 4)), jnp.float32) for _ in range(3)]
    layouts = {"w": Layout("matrix", (1,), (3,), head=2, layer=0)}
    got = updates_of(scale_by_soap(layouts), [{"w": g} for g in history])[-1]["w"]
    want = alone(scale_by_soap(LAYOUTS), [g[1, :, 0] for g in history])[-1]
    np.testing.assert_allclose(got[1, :, 0], want, atol=2e-4)
