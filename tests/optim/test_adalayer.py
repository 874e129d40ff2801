import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.optim import Layout, adamw, scale_by_adalayer
from repro.optim.families import adam

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYOUTS = {"w_LDF": Layout("matrix", (1,), (2,), layer=0), "head_DZ": Layout("head"), "norm_D": Layout("norm")}
SHAPES = {"w_LDF": (2, 3, 4), "head_DZ": (3, 5), "norm_D": (3,)}


def normal_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


GRADS = [normal_tree(t) for t in range(4)]


def last_update(tx):
    state, update = tx.init(GRADS[0]), jax.jit(tx.update)
    for g in GRADS:
        u, state = update(g, state, GRADS[0])
    return u, state


def by_hand(grads, axes, b1=0.9, b2=0.95, eps=1e-8):
    m = v = 0.0
    for g in grads:
        g = np.asarray(g, np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g**2).mean(axes, keepdims=True)
    t = len(grads)
    return m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)


def test_steps_by_hand():
    u, state = last_update(scale_by_adalayer(LAYOUTS))
    for name, axes in {"w_LDF": (1, 2), "head_DZ": None, "norm_D": None}.items():
        np.testing.assert_allclose(u[name], by_hand([g[name] for g in GRADS], axes), rtol=1e-5, atol=1e-6)
    assert {name: nu.shape for name, nu in state.nu.items()} == {"w_LDF": (2, 1, 1), "head_DZ": (1, 1), "norm_D": (1,)}
    with pytest.raises(AssertionError):  # one number for the whole stack
        np.testing.assert_allclose(u["w_LDF"], by_hand([g["w_LDF"] for g in GRADS], None), rtol=1e-3)


def test_roles_by_coordinate_are_adam():
    u = last_update(scale_by_adalayer(LAYOUTS, coordinate_roles=("head", "norm")))[0]
    plain = last_update(scale_by_adalayer(LAYOUTS))[0]
    reference = last_update(adam(1.0))[0]
    for name in ("head_DZ", "norm_D"):
        np.testing.assert_allclose(u[name], -reference[name], rtol=1e-5)
        assert np.abs(plain[name] + reference[name]).max() > 0.05
    np.testing.assert_array_equal(u["w_LDF"], plain["w_LDF"])
    assert np.abs(u["w_LDF"] + reference["w_LDF"]).max() > 0.1
    np.testing.assert_allclose(reference["norm_D"], last_update(adamw(1.0, decay="none"))[0]["norm_D"], rtol=1e-6)
