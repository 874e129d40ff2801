from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.quant import RECIPES, DelayedScale, DelayedScales, delayed_dot, fake_quantize, quantize

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


RNG = np.random.default_rng(0)
X, W, DY = (RNG.normal(size=shape).astype(np.float32) for shape in ((24, 40), (40, 16), (24, 16)))


def seen(*arrays):
    return [jnp.float32(np.abs(a).max()) for a in arrays]


def test_a_dot_with_delayed_scales_and_the_amax_of_its_gradient():
    scales = DelayedScales.create(2).push(*seen(X / 2, W, DY * 3))

    def loss(x, w, probe):
        y, amaxes = delayed_dot(x.reshape(4, 6, 40), w, scales, probe)
        return (y.reshape(24, 16) * DY).sum(), (y, amaxes)

    (dx, dw, amax_dy), (y, amaxes) = jax.grad(loss, (0, 1, 2), has_aux=True)(X, W, jnp.zeros(()))
    x = fake_quantize(X, "fp8_delayed", scale=scales.x.scale())  # saturates at half of its largest number
    w = fake_quantize(W, "fp8_delayed", scale=scales.w.scale())
    e5m2 = replace(RECIPES["fp8_delayed"], element="e5m2")
    dy = fake_quantize(DY, e5m2, scale=scales.dy.scale("e5m2"))
    for ours, theirs in ((y.reshape(24, 16), x @ w), (dx, dy @ w.T), (dw, x.T @ dy)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert np.abs(x).max() < 0.51 * np.abs(X).max()
    np.testing.assert_array_equal([*amaxes, amax_dy], seen(X, W, DY))
    with pytest.raises(AssertionError):  # the wrong variant: gradients in E4M3
        wrong = fake_quantize(DY, "fp8_delayed", scale=scales.dy.scale())
        np.testing.assert_allclose(dx, wrong @ w.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(ReproError, match="do not match"):
        delayed_dot(X, W.T, scales, jnp.zeros(()))


def test_types_of_gradients_are_those_of_the_operands():
    scales = DelayedScales.create(2)
    x, w = jnp.asarray(X, jnp.bfloat16), jnp.asarray(W, jnp.float16)
    gradients = jax.grad(lambda *a: delayed_dot(a[0], a[1], scales, a[2])[0].sum(), (0, 1, 2))(x, w, jnp.zeros(()))
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float16, jnp.float32]
    assert float(gradients[2]) == 1.0


def test_a_training_loop_carries_the_scales_of_two_layers():
    """A linear regression through two layers, compiled as one scan: scales lag by one step, and the loss falls."""
    target = X @ W
    steps, rate = 40, 5e-3

    def loss_of(layers, scales, probes):
        h, first = delayed_dot(X, layers[0], scales[0], probes[0])
        y, second = delayed_dot(h, layers[1], scales[1], probes[1])
        return ((y - target) ** 2).sum() / 24, (first, second)

    def step(state, _):
        layers, scales = state
        probes = (jnp.zeros(()), jnp.zeros(()))
        (loss, amaxes), (gradients, amax_dys) = jax.value_and_grad(loss_of, (0, 2), has_aux=True)(
            layers, scales, probes
        )
        layers = jax.tree.map(lambda p, g: p - rate * g, layers, gradients)
        used = [s.dy.scale("e5m2") for s in scales]
        scales = tuple(s.push(*a, d) for s, a, d in zip(scales, amaxes, amax_dys, strict=True))
        return (layers, scales), (loss, used, amax_dys)

    start = tuple(jnp.asarray(RNG.normal(size=s).astype(np.float32) / 6) for s in ((40, 32), (32, 16)))
    state = (start, (DelayedScales.create(4), DelayedScales.create(4)))
    (layers, scales), (losses, used, amaxes) = jax.jit(lambda s: jax.lax.scan(step, s, None, steps))(state)
    assert losses[-1] < 0.1 * losses[0] and np.isfinite(losses).all()
    for layer in range(2):
        seen = np.asarray(amaxes[layer])
        assert used[layer][0] == 1.0
        expected = [seen[max(0, t - 4) : t].max() / np.float32(57344) for t in range(1, steps)]
        np.testing.assert_array_equal(used[layer][1:], np.float32(expected))
        np.testing.assert_array_equal(scales[layer].dy.history, seen[:-5:-1])

    # Step by step it is the same loop.
    by_hand = state
    for _ in range(3):
        by_hand, (loss, *_) = step(by_hand, None)
    np.testing.assert_allclose(loss, losses[2], rtol=1e-5)


def test_a_shared_probe_is_a_sum_and_one_per_use_is_not():
    scales = DelayedScales.create(1)

    def loss(probes, shared):
        def use(total, probe):
            return total + (delayed_dot(X, W, scales, shared if probe is None else probe)[0] * DY).sum(), None

        return jax.lax.scan(use, 0.0, probes, length=2)[0]

    assert float(jax.grad(loss, 1)(None, jnp.zeros(()))) == pytest.approx(2 * np.abs(DY).max())
    np.testing.assert_allclose(jax.grad(loss)(jnp.zeros(2), None), [np.abs(DY).max()] * 2)


def test_a_step_that_overflows_leaves_the_histories_alone():
    scales = DelayedScales.create(2).push(*seen(X, W, DY))
    for bad in (np.inf, np.nan, 0.0):
        after = scales.push(*(jnp.float32(bad) for _ in range(3)))
        jax.tree.map(np.testing.assert_array_equal, after, scales)
