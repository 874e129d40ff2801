import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.quant import DelayedScale, fake_quantize, quantize

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_a_step_uses_the_scale_of_the_steps_before():
    state = DelayedScale.create(3)
    assert float(state.scale()) == 1.0
    seen = []
    for amax in (8.0, 2.0, 1.0, 0.5, 0.25):
        x = np.float32([amax, -amax / 3])
        used = state.scale()
        seen.append(float(used))
        np.testing.assert_array_equal(np.asarray(quantize(x, "fp8_delayed", scale=used).scale), [np.float32(used)])
        state = state.update(x)
    largest = np.float32([8, 8, 8, 2])  # of at most three steps
    np.testing.assert_array_equal(np.float32(seen), [1.0, *(largest / np.float32(448))])
    np.testing.assert_array_equal(state.history, [0.25, 0.5, 1.0])
    assert float(state.scale("e5m2")) == np.float32(1.0) / np.float32(57344)


def test_a_tensor_above_the_history_saturates():
    state = DelayedScale.create(4).update(np.float32([1.0]))
    y = np.asarray(fake_quantize(np.float32([0.5, 7.0, -7.0]), "fp8_delayed", scale=state.scale()))
    scale = np.float32(1.0) / np.float32(448)
    np.testing.assert_array_equal(y, np.float32([224, 448, -448]) * scale)


def test_an_element_that_is_not_finite_is_nan_alone():
    y = fake_quantize(np.float32([1.0, np.inf, np.nan, -np.inf]), "fp8_delayed", scale=1.0)
    np.testing.assert_array_equal(np.isnan(y), [False, True, True, True])
    z = quantize(np.float32([1.0, np.inf, np.nan, -np.inf]), "fp8_delayed", scale=1.0).dequantize()
    np.testing.assert_array_equal(np.isnan(z), [False, True, True, True])


def test_steps_without_information_leave_the_history_alone():
    state = DelayedScale.create(2).update(np.float32([3.0]))
    for x in ([0.0, -0.0], [1.0, np.inf], [np.nan, 5.0]):
        np.testing.assert_array_equal(state.update(np.float32(x)).history, state.history)


def test_it_is_a_pytree_that_a_scan_carries():
    xs = np.float32([[1.0, 2.0], [4.0, 0.0], [0.0, 0.0]])

    def step(state, x):
        return state.update(x), state.scale()

    state, scales = jax.lax.scan(step, DelayedScale.create(2), jnp.asarray(xs))
    np.testing.assert_array_equal(state.history, [4.0, 2.0])
    np.testing.assert_array_equal(scales, np.float32([1, np.float32(2) / 448, np.float32(4) / 448]))
    with pytest.raises(ReproError, match="at least 1"):
        DelayedScale.create(0)
