import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from repro.optim import (
    LossScale,
    clip_by_global_norm,
    optimizer,
    warmup_constant_cosine,
    with_loss_scale,
    with_low_precision_state,
    with_master_weights,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

RNG = np.random.default_rng(0)
PARAMS = {
    "w_LDF": jnp.asarray(RNG.normal(size=(2, 4, 3)), jnp.bfloat16),
    "norm_LD": jnp.asarray(RNG.uniform(1, 2, size=(2, 4)), jnp.float32),
}
STEPS = 6


def training(inner, bad):
    """Parameters before and after every step, and the scale; gradients of a quadratic, one of them infinite."""
    tx = with_loss_scale(
        optax.chain(clip_by_global_norm(1.0), with_master_weights(inner, "bf16_kahan")),
        LossScale(initial=8.0, interval=2),
    )

    def step(carry, t):
        params, state = carry
        scale = jnp.where(t == bad, jnp.inf, state.scale.scale)
        grads = jax.tree.map(lambda x: (x * scale).astype(x.dtype), params)
        updates, state = tx.update(grads, state, params)
        after = optax.apply_updates(params, updates)
        return (after, state), (params, after, state.scale.scale)

    return jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), jnp.arange(STEPS))[1]


def test_all_wrappers_in_lanes_of_traced_rates_and_seeds():
    formats = {"mu": "e4m3", "nu": "dynamic8_unsigned"}

    def lane(rate, seed):
        schedule = warmup_constant_cosine(STEPS, warmup=2)
        inner = optimizer("adamw", lambda count: rate * schedule(count))
        return training(with_low_precision_state(inner, formats, rounding="stochastic", seed=seed), bad=2)

    lanes = jnp.array([0.01, 0.1, 0.1]), jnp.array([1, 1, 2], jnp.uint32)
    before, after, scales = jax.jit(jax.vmap(lane))(*lanes)
    np.testing.assert_array_equal(scales, [[8, 16, 8, 8, 16, 16]] * 3)
    for name, old in before.items():
        changed = np.asarray(jnp.any(old != after[name], axis=tuple(range(2, old.ndim))))
        np.testing.assert_array_equal(changed[1:, 2], False)
        assert changed[1:, [0, 1, 3, 4]].all()
    assert after["w_LDF"].dtype == jnp.bfloat16
    last = np.asarray(after["norm_LD"][:, -1])
    assert (last[1] < last[0]).all() and not np.array_equal(last[1], last[2])
