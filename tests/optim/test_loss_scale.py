import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import ReproError
from repro.optim import LossScale, with_loss_scale
from repro.optim.clipping import clip_by_global_norm

pytestmark = pytest.mark.usefixtures("quick_compile")

START = [0.8, -0.5]
WINDOWS = [  # two microbatches each; 70 / 2 * 2048 exceeds 65504
    ([3.0, 4.0], [3.0, 4.0]),
    ([0.5, -0.25], [-0.1, 0.35]),
    ([70.0, 0.0], [0.25, 0.125]),
    ([-2.0, 0.5], [1e-4, 3e-6]),
]


def rate(taken):
    return 0.05 / (1 + 0.2 * taken)


def window(scale, microbatches):
    """Two equal microbatches in float16: each gradient is halved, scaled and rounded; the sum is float32."""
    rounded = [(jnp.float32(scale) * jnp.asarray(g, jnp.float32) / 2).astype(jnp.float16) for g in microbatches]
    return rounded[0].astype(jnp.float32) + rounded[1].astype(jnp.float32)


def ledger(wrong=""):
    """(updated, next scale, rate, parameters) of every window, in NumPy: unscale, check, clip at 1, step, and only then
    change the scale."""
    scale, clean, taken, w, rows = 1024.0, 0, 0, np.array(START, np.float32), []
    for first, second in WINDOWS:
        with np.errstate(over="ignore"):
            parts = [(np.float32(scale) * np.array(g, np.float32) / 2).astype(np.float16) for g in (first, second)]
        total = parts[0].astype(np.float32) + parts[1].astype(np.float32)
        g = total / np.float32(scale)
        if wrong == "clip before unscaling":
            with np.errstate(invalid="ignore"):
                g = total * np.float32(min(1, 1 / np.linalg.norm(total))) / np.float32(scale)
        now, finite = rate(len(rows) if wrong == "rate by attempts" else taken), bool(np.isfinite(total).all())
        if finite:
            g = g * np.float32(min(1.0, 1.0 / np.linalg.norm(g)))
            w, taken, clean = w - np.float32(now) * g, taken + 1, clean + 1
            if clean == 2 and wrong != "never grows":
                scale, clean = 2 * scale, 0
        else:
            scale, clean = scale / 2, 0
        rows.append((finite, scale, now, w))
    return rows


def windows_of_the_code():
    tx = with_loss_scale(
        optax.chain(clip_by_global_norm(1.0), optax.sgd(rate)), LossScale(initial=1024.0, growth=2.0, interval=2)
    )
    w = jnp.array(START)
    state, rows = tx.init(w), []
    step = jax.jit(tx.update)
    for microbatches in WINDOWS:
        before = state
        updates, state = step(window(state.scale.scale, microbatches), state, w)
        w = optax.apply_updates(w, updates)
        rows.append((int(state.scale.taken) > int(before.scale.taken), float(state.scale.scale), np.asarray(w), state))
    return rows


def test_four_windows():
    """Growth after two finite windows, halving at an overflow, rate 0.05 / (1 + 0.2 u) with u the updates made, clip
    at 1, and float32 parameters from [0.8, -0.5]."""
    got = windows_of_the_code()
    for (updated, scale, w, _), (finite, next_scale, _, expected) in zip(got, ledger(), strict=True):
        assert (updated, scale) == (finite, next_scale)
        np.testing.assert_allclose(w, expected, rtol=2e-7)
    assert [(updated, scale) for updated, scale, *_ in got] == [(1, 1024), (1, 2048), (0, 1024), (1, 1024)]
    np.testing.assert_allclose(got[0][2], [0.77, -0.54], rtol=1e-6)  # [3, 4] clipped to [0.6, 0.8]
    np.testing.assert_array_equal(got[1][2], got[2][2])
    last = got[-1][3].scale
    assert (int(last.taken), int(last.skipped), int(last.clean)) == (3, 1, 1)
    for wrong in ("clip before unscaling", "rate by attempts", "never grows"):
        rows = zip(got, ledger(wrong), strict=True)
        assert not all(a[1] == b[1] and np.allclose(a[2], b[3], rtol=1e-5) for a, b in rows), wrong


def test_clipping_belongs_behind_unscaling():
    """[3, 4] at scale 8 and threshold 1: [0.6, 0.8], and not [0.075, 0.1]."""
    rule, g = LossScale(initial=8.0), jnp.array([24.0, 32.0])
    inside = with_loss_scale(clip_by_global_norm(1.0), rule)
    outside = optax.chain(clip_by_global_norm(1.0), with_loss_scale(optax.identity(), rule))
    got = jax.jit(lambda: [tx.update(g, tx.init(g))[0] for tx in (inside, outside)])()
    np.testing.assert_allclose(got, [[0.6, 0.8], [0.075, 0.1]], rtol=1e-6)


def test_a_skipped_step_changes_no_bit():
    tx = with_loss_scale(optax.adamw(optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.1), LossScale(initial=8.0))
    w = {"w": jnp.array([0.0, -0.0, 1e-30, -3.5]), "short": jnp.array([-0.0, 2.0], jnp.bfloat16)}
    step = jax.jit(tx.update)
    state = step(jax.tree.map(jnp.ones_like, w), tx.init(w), w)[1]
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        grads = jax.tree.map(lambda x, bad=bad: jnp.ones_like(x).at[1].set(bad), w)
        updates, after = step(grads, state, w)
        same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), after.inner, state.inner)
        assert all(jax.tree.leaves(same))
        written = optax.apply_updates(w, updates)
        assert all(written[name].tobytes() == w[name].tobytes() for name in w)
        assert after.scale.scale == 4 and after.scale.skipped == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=12, max_size=12))
def test_the_scale_by_hand(finite):
    scale, clean = 4.0, 0
    for ok, got in zip(finite, np.asarray(_scales(jnp.array(finite))), strict=True):
        if not ok:
            scale, clean = max(1.0, scale / 2), 0
        else:
            clean += 1
            if clean == 3:
                scale, clean = min(16.0, scale * 2), 0
        assert got == scale


@jax.jit
def _scales(finite):
    rule = LossScale(initial=4.0, interval=3, smallest=1.0, largest=16.0)

    def step(state, ok):
        state = rule.after(state, ok)
        return state, state.scale

    return jax.lax.scan(step, rule.init(), finite)[1]


def test_lanes_keep_scales_of_their_own():
    tx = with_loss_scale(optax.sgd(0.1), LossScale(initial=8.0, interval=1))
    w = jnp.ones((2, 3))
    grads = w.at[1, 0].set(jnp.inf)
    state = jax.vmap(tx.init)(w)
    updates, state = jax.jit(jax.vmap(tx.update))(grads, state, w)
    np.testing.assert_array_equal(state.scale.scale, [16, 4])
    np.testing.assert_allclose(updates, [[-0.0125] * 3, [0] * 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interval": 0}, "interval is 0"), ({"interval": 2.0}, "interval is 2.0"), ({"growth": 1.0}, "growth is 1.0"),
        ({"growth": float("inf")}, "growth is inf"), ({"backoff": 1.0}, "backoff is 1.0"),
        ({"backoff": 0.0}, "backoff is 0.0"), ({"initial": float("nan")}, "initial is nan"),
        ({"initial": 2.0**30}, "outside"), ({"smallest": 0.0}, "smallest is 0.0"),
    ],
)  # fmt: skip
def test_refusals(options, words):
    with pytest.raises(ReproError, match=words):
        LossScale(**options)
