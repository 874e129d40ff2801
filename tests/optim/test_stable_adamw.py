import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from repro.optim import Layout, scale_by_stable_adam, stable_adamw

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYOUTS = {"w_LDF": Layout("matrix", (1,), (2,), layer=0), "bias": Layout("bias")}
SHAPES = {"w_LDF": (2, 3, 4), "bias": (3,)}


def normal_tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


PARAMS = normal_tree(0)
GRADS = [normal_tree(1 + t, 20.0 if t == 3 else 1.0) for t in range(5)]  # one step with a jump, so that RMS_t exceeds 1


def run(tx):
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    for g in GRADS:
        params, state = step(params, state, g)
    return params


def by_hand(w, grads, *, lr=0.1, wd=0.3, b1=0.9, b2=0.95, eps=1e-8, wrong=""):
    """W after the steps for one tensor, in float64."""
    w, v, u = np.asarray(w, np.float64), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        g = np.asarray(g, np.float64)
        k1, k2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (b1, b2))
        stale = u if wrong == "second moment without the current gradient" else None
        v, u = k1 * v + (1 - k1) * g, k2 * u + (1 - k2) * g**2
        rms = np.sqrt((g**2 / np.maximum(u if stale is None or t == 1 else stale, eps**2)).mean())
        if wrong == "of the momentum update":  # Adafactor's clip
            rms = np.sqrt((v**2 / np.maximum(u, eps**2)).mean())
        rate = lr / max(1, 1 if wrong == "plain AdamW" else rms)
        w = w - rate * v / (np.sqrt(u) + eps) - (lr if wrong == "decay at the full rate" else rate) * wd * w
    return w


WRONG = (
    "plain AdamW",
    "of the momentum update",
    "decay at the full rate",
    "second moment without the current gradient",
)


def test_steps_by_hand():
    stacked = run(stable_adamw(0.1, weight_decay=0.3, layouts=LAYOUTS))
    whole = run(stable_adamw(0.1, weight_decay=0.3))

    def equal(got, of, wrong=""):
        np.testing.assert_allclose(got, by_hand(of(PARAMS), map(of, GRADS), wrong=wrong), rtol=1e-5, atol=1e-6)

    for layer in range(2):
        equal(stacked["w_LDF"][layer], lambda tree, n=layer: tree["w_LDF"][n])
        for wrong in WRONG:
            with pytest.raises(AssertionError):
                equal(stacked["w_LDF"][layer], lambda tree, n=layer: tree["w_LDF"][n], wrong)
    equal(stacked["bias"], lambda tree: tree["bias"])
    equal(whole["w_LDF"], lambda tree: tree["w_LDF"])
    with pytest.raises(AssertionError):  # layers are tensors of their own
        equal(stacked["w_LDF"], lambda tree: tree["w_LDF"])


def test_rms_after_a_quiet_phase_has_its_closed_form():
    """sqrt((1 - b2^t) / (1 - b2)) when the first gradient comes in step t, and 1 in step 1."""
    for b2 in (0.95, 0.99):
        tx = scale_by_stable_adam(b2=b2)
        w = {"w": jnp.zeros(4)}
        gradients = jnp.zeros((40, 4)).at[-1].set(jnp.array([0.5, -1.0, 2.0, 3.0]))

        def step(state, g, tx=tx, w=w):
            state = tx.update({"w": g}, state, w)[1]
            return state, state.rms["w"]

        rms = jax.lax.scan(step, tx.init(w), gradients)[1].ravel()
        np.testing.assert_array_equal(rms[:-1], 0)
        np.testing.assert_allclose(rms[-1], np.sqrt((1 - b2**40) / (1 - b2)), rtol=1e-4)
    assert jax.eval_shape(scale_by_stable_adam(layouts=LAYOUTS).init, PARAMS).rms["w_LDF"].shape == (2, 1, 1)
