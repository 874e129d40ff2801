"""Gated units against closed forms and a stored layer, each beside mistakes that the same check finds."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import norm

from repro.errors import ReproError
from repro.models import DenseFFN, ModelConfig
from repro.models.functional import clamped_swiglu, gelu, powlu, situ_glu, smooth_swiglu, swiglu
from repro.models.glu import activate
from repro.quant import dot

pytestmark = pytest.mark.usefixtures("quick_compile")

numbers = hnp.arrays(np.float32, (64,), elements=st.floats(-1e4, 1e4, width=32))
fixed = settings(deadline=None, derandomize=True, max_examples=60)
GRID = np.concatenate([-np.geomspace(1e-4, 60, 40)[::-1], [0], np.geomspace(1e-4, 60, 40)]).astype(np.float32)
G, U = (m.ravel() for m in np.meshgrid(GRID, GRID))


def close(got, want, tolerance=4e-6):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


def sigmoid64(x):
    return 1 / (1 + np.exp(-np.float64(x)))


def gradients(f, *args):
    """The derivatives of an elementwise function by its first two arguments."""
    return jax.grad(lambda g, u: f(g, u, *args[2:]).sum(), (0, 1))(*map(jnp.asarray, args[:2]))


# SiTU-GLU (Kimi K3, eq. 12)


def situ64(g, u, a=4.0, b=25.0, gate=None):
    g, u = np.float64(g), np.float64(u)
    return a * np.tanh(g / a) * sigmoid64(g if gate is None else gate) * b * np.tanh(u / b)


def test_situ():
    assert abs(float(situ_glu(jnp.float32(3), jnp.float32(5))) - 11.94) < 0.005
    close(situ_glu(G, U), situ64(G, U))
    capped = 4 * np.tanh(np.float64(G) / 4)
    wrong_forms = [
        situ64(G, U, gate=capped),  # sigmoid of the capped gate
        situ64(U, G),
        situ64(G, U, 25.0, 4.0),
        situ64(G, U, b=1.0),  # the released code's default where the configuration is silent
        capped * sigmoid64(G) * np.float64(U),  # no cap of the other branch
        100 * np.tanh(sigmoid64(G) * np.float64(G) * np.float64(U) / 100),  # a cap of the product
    ]
    for wrong in wrong_forms:
        with pytest.raises(AssertionError):
            close(situ_glu(G, U), wrong)


def situ_slopes64(g, u, a=4.0, b=25.0):
    g, u, s = np.float64(g), np.float64(u), sigmoid64(g)
    up, gate = b * np.tanh(u / b), a * np.tanh(g / a)
    return (np.cosh(g / a) ** -2 * s + gate * s * (1 - s)) * up, gate * s * np.cosh(u / b) ** -2


def test_the_gradient_of_situ_is_its_closed_form_and_does_not_vanish():
    got, want = gradients(situ_glu, G, U), situ_slopes64(G, U)
    close(got[0], want[0], 1e-5)
    close(got[1], want[1], 1e-5)
    at = jnp.float32(20.0)
    assert abs(float(jax.grad(situ_glu)(at, jnp.float32(1.0))) - 1.8e-4) < 1e-5  # small, and not 0 as a clamp's
    half = jnp.bfloat16(20.0)
    assert jax.grad(lambda g: situ_glu(g, jnp.bfloat16(1.0)).astype(jnp.float32))(half) > 0
    assert 1 - jnp.tanh(half / 4) ** 2 == 0  # in bfloat16 itself it would
    # Kimi K3, table of the gate branch: u = 1 with no cap of the other branch.
    close(situ_glu(jnp.float32([1, 2, 4, 8]), jnp.ones(4), 4.0, math.inf), [0.716, 1.628, 2.992, 3.855], 1e-3)


@given(numbers, numbers)
@fixed
def test_situ_is_bounded(g, u):
    f = np.abs(np.asarray(situ_glu(g, u), np.float64))
    assert (f <= 100).all() and (f <= 25 * 4).all()
    assert (np.abs(situ_glu(g, u, 2.0, 3.0)) <= 6).all()


def test_situ_without_caps_is_swiglu():
    np.testing.assert_array_equal(situ_glu(G, U, math.inf, math.inf), jnp.asarray(G) * jax.nn.sigmoid(G) * U)
    close(situ_glu(G, U, 1e6, 1e6), swiglu(G, U), 1e-5)
    # To first order in each branch: tanh takes away (z / beta)^2 / 3 of it.
    small = np.float32(1e-3)
    np.testing.assert_allclose(situ_glu(G * small, U * small), swiglu(G * small, U * small), rtol=(0.06 / 4) ** 2 / 2)


@pytest.mark.parametrize("betas", [(0.0, 25.0), (4.0, 0.0), (-1.0, 25.0), (4.0, math.nan)])
def test_situ_needs_positive_betas(betas):
    with pytest.raises(ReproError, match="betas"):
        situ_glu(jnp.ones(2), jnp.ones(2), *betas)


# The clamp of DeepSeek-V4 (section 4.2.3)


def silu64(x):
    return np.float64(x) * sigmoid64(x)


def test_clamped():
    close(clamped_swiglu(G, U, 10.0), silu64(np.minimum(G, 10)) * np.clip(np.float64(U), -10, 10))
    for wrong in [
        silu64(np.clip(G, -10, 10)) * np.clip(np.float64(U), -10, 10),  # the gate from below too
        silu64(np.minimum(G, 10)) * np.minimum(np.float64(U), 10),  # the other branch from above alone
        np.minimum(silu64(G), 10) * np.clip(np.float64(U), -10, 10),  # after the SiLU
        np.clip(silu64(G) * U, -100, 100),  # the product
    ]:
        with pytest.raises(AssertionError):
            close(clamped_swiglu(G, U, 10.0), wrong)


def test_the_gate_is_not_clamped_from_below():
    """silu(-10) is -4.5e-4, and silu(-30) is -2.8e-12; the gradient passes there."""
    g, u = jnp.float32([-30.0, -10.5]), jnp.float32([10.0, 10.0])
    assert float(clamped_swiglu(g, u, 10.0)[0]) > -1e-9
    assert float(silu64(-10) * 10) < -4e-3  # what a clamp from below would give
    assert (np.asarray(gradients(clamped_swiglu, g, u, 10.0)[0]) != 0).all()


def test_the_gradient_of_the_clamp_is_exactly_zero_where_it_clamps():
    by_g, by_u = map(np.asarray, gradients(clamped_swiglu, G, U, 10.0))
    assert (by_g[G > 10] == 0).all() and (by_u[np.abs(U) > 10] == 0).all()
    inside = (G <= 10) & (np.abs(U) <= 10)
    plain = gradients(swiglu, G, U)
    np.testing.assert_array_equal(by_g[inside], plain[0][inside])
    np.testing.assert_array_equal(by_u[inside], plain[1][inside])
    at = [np.float32([10.0, 1.0, 1.0]), np.float32([1.0, 10.0, -10.0])]  # the limits themselves are not clamped
    np.testing.assert_array_equal(gradients(clamped_swiglu, *at, 10.0), gradients(swiglu, *at))
    halved = gradients(lambda g, u: swiglu(jnp.minimum(g, 10.0), jnp.clip(u, -10.0, 10.0)), *at)
    assert not np.array_equal(halved, gradients(swiglu, *at))


@given(numbers, numbers)
@fixed
def test_clamped_is_bounded(g, u):
    assert (np.abs(np.asarray(clamped_swiglu(g, u, 10.0))) <= 100).all()


def test_a_limit_that_nothing_reaches_is_swiglu():
    np.testing.assert_array_equal(clamped_swiglu(G, U, 1e9), swiglu(jnp.asarray(G), U))
    with pytest.raises(ReproError, match="limit"):
        clamped_swiglu(jnp.ones(2), jnp.ones(2), 0.0)


GOLDEN = np.load(Path(__file__).parent / "data" / "deepseek_v4_mlp.npz")


def module_of(config, **kernels):
    with nnx.set_graph_mode(False):
        module = DenseFFN(config, rngs=nnx.Rngs(0))
    for name, w in kernels.items():
        getattr(module, name)[...] = jnp.asarray(w)
    return module


def test_the_clamped_block_equals_a_released_one():
    F, D = GOLDEN["gate"].shape
    kernels = {"gate_DF": GOLDEN["gate"].T, "up_DF": GOLDEN["up"].T, "down_FD": GOLDEN["down"].T}
    config = ModelConfig(width=D, heads=2, ffn=F, glu="clamped")
    tolerance = 1e-5 * np.abs(GOLDEN["out"]).max()
    y, record = module_of(config, **kernels)(jnp.asarray(GOLDEN["x"])[None])
    np.testing.assert_allclose(y[0], GOLDEN["out"], atol=tolerance)
    assert abs(record.hidden_max - silu64(10) * 10) < 1e-4 and record.hidden_rms < record.hidden_max
    for wrong in [{"glu": "swiglu"}, {"glu": "situ"}, {"glu_limit": 7.0}]:
        off = np.abs(module_of(dataclasses.replace(config, **wrong), **kernels)(jnp.asarray(GOLDEN["x"])[None])[0][0])
        assert np.abs(off - GOLDEN["out"]).max() > 100 * tolerance


# PowLU


def powlu64(x1, x2, m=3.0):
    x = np.float64(x2)
    safe = np.where(x > 0, x, 1)
    return np.float64(x1) * np.where(x > 0, safe ** (m / (np.sqrt(safe) + 1)), x) * sigmoid64(x)


@pytest.mark.parametrize("m", [0.5, 1.0, 3.0, 9.0])
def test_powlu(m):
    tolerance = 2e-5 * m
    close(powlu(U, G, m), powlu64(U, G, m), tolerance)
    for wrong in [powlu64(G, U, m), powlu64(U, G, m + 0.1), np.float64(U) * silu64(G)]:
        with pytest.raises(AssertionError):
            close(powlu(U, G, m), wrong, tolerance)


def test_the_gradient_of_powlu_is_finite_everywhere_and_right():
    x = np.float32([-50, -1, -1e-30, -0.0, 0, 1e-45, 1e-38, 1e-20, 1e-3, 0.5, 1, 4, 1e4, 1e20])
    slopes = np.asarray(gradients(lambda x2, x1: powlu(x1, x2), x, np.ones_like(x)))
    assert np.isfinite(slopes).all()
    at, h = np.float64([-50, -1, 1e-3, 0.5, 1, 4, 1e4]), 1e-4
    numeric = (powlu64(1, at * (1 + h)) - powlu64(1, at * (1 - h))) / (2 * h * at)
    np.testing.assert_allclose(slopes[0][np.isin(x, np.float32(at))], numeric, rtol=1e-4, atol=1e-7)
    naive = lambda v: jnp.where(v > 0, v ** (3 / (jnp.sqrt(v) + 1)), v) * jax.nn.sigmoid(v)
    assert np.isnan(jax.grad(naive)(-1.0))  # what the guarded power is for


def test_powlu_grows_with_one_branch_alone():
    far = np.float32([1e3, 1e5, 1e7, 1e12])
    close(powlu(np.ones(4, np.float32), far)[2:], np.ones(2), 0.02)
    gate = powlu64(1, np.geomspace(1e-3, 1e9, 20_000))
    assert 5.2 < gate.max() < 5.4
    assert (np.asarray(powlu(far, far)) < 5.4 * far).all() and (np.asarray(swiglu(far, far)) > 900 * far).all()
    with pytest.raises(ReproError, match="between 0 and 10"):
        powlu(jnp.ones(2), jnp.ones(2), 10.0)


# GELU


def test_gelu():
    close(gelu(GRID), np.float64(GRID) * norm.cdf(np.float64(GRID)))
    with pytest.raises(AssertionError):  # the tanh approximation
        close(jax.nn.gelu(GRID, approximate=True), np.float64(GRID) * norm.cdf(np.float64(GRID)))


# Smooth-SwiGLU (Fishman et al.)


def outlying(rows=24, channels=16, seed=0):
    """A gate, a linear branch with one channel a thousand times the others and one of zeros, and a down projection."""
    rng = np.random.default_rng(seed)
    g, u = rng.normal(size=(2, 2, rows // 2, channels)).astype(np.float32)
    u[..., 3] *= 1000
    u[..., 5] = 0
    return g, u, rng.normal(size=(channels, 8)).astype(np.float32)


def test_smooth_changes_no_bit():
    g, u, down = outlying()
    h, scale = smooth_swiglu(g, u)
    np.testing.assert_array_equal(h * scale, swiglu(jnp.asarray(g), u))
    assert (np.frexp(scale)[0] == 0.5).all() and scale[5] == 1  # powers of two
    top = np.abs(h).max((0, 1))
    assert ((top >= 1) & (top < 2))[top > 0].all()
    exact, smooth = (
        jax.value_and_grad(f, (0, 1, 2))(*map(jnp.asarray, (g, u, down)))
        for f in (
            lambda g, u, w: jnp.sin(swiglu(g, u) @ w).sum(),
            lambda g, u, w: jnp.sin(smooth_swiglu(g, u)[0] @ (smooth_swiglu(g, u)[1][:, None] * w)).sum(),
        )
    )
    jax.tree.map(np.testing.assert_array_equal, exact, smooth)  # the function and its gradients
    unfolded = jnp.sin(h @ down).sum()
    assert abs(float(unfolded - exact[0])) > 0.1


def test_the_block_quantises_smooth_units_and_scaled_rows():
    g, u, down = outlying()
    kernels = {"gate_DF": np.eye(16, dtype=np.float32), "up_DF": np.eye(16, dtype=np.float32), "down_FD": down}
    x = jnp.asarray(u)  # so that a channel of the input is one of the hidden units
    config = ModelConfig(width=16, heads=2, ffn=16, glu="smooth")
    kernels["down_FD"] = np.concatenate([down, down], 1)
    plain, smooth = (module_of(dataclasses.replace(config, glu=n), **kernels)(x) for n in ("swiglu", "smooth"))
    np.testing.assert_array_equal(plain[0], smooth[0])
    assert plain[1].hidden_max == smooth[1].hidden_max
    low = dataclasses.replace(config, precision="ffn=mxfp8")
    got = module_of(low, **kernels)(x)[0]
    through = lambda a, w: dot(a, jnp.asarray(w), "mxfp8")
    h, scale = smooth_swiglu(through(x, kernels["gate_DF"]), through(x, kernels["up_DF"]))
    np.testing.assert_array_equal(got, through(h, scale[:, None] * kernels["down_FD"]))
    unsmoothed = module_of(dataclasses.replace(low, glu="swiglu"), **kernels)(x)[0]
    assert not np.array_equal(got, unsmoothed)


# The dispatcher and the module


FORMS = {
    "swiglu": swiglu,
    "smooth": swiglu,
    "clamped": lambda g, u: clamped_swiglu(g, u, 2.0),
    "situ": lambda g, u: situ_glu(g, u, 1.5, 2.5),
    "powlu": lambda g, u: powlu(u, g, 2.0),
    "gelu": lambda g, u: gelu(u),
}
SETTINGS = {"glu_limit": 2.0, "situ_gate": 1.5, "situ_up": 2.5, "powlu_m": 2.0}


@pytest.mark.parametrize("glu", FORMS)
def test_every_form_of_the_block(glu):
    config = ModelConfig(width=16, heads=2, ffn=24, glu=glu, **SETTINGS)
    module, (g, u) = module_of(config), jnp.asarray(np.stack([G, U])) / 8
    np.testing.assert_array_equal(activate(config, None if glu == "gelu" else g, u), FORMS[glu](g, u))
    assert hasattr(module, "gate_DF") == (glu != "gelu")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32)
    gate = None if glu == "gelu" else x @ module.gate_DF[...]
    h = FORMS[glu](gate, x @ module.up_DF[...])
    y, record = module(x)
    close(y, h @ module.down_FD[...], 1e-5)
    close((record.hidden_max, record.hidden_rms), (np.abs(h).max(), np.sqrt(np.mean(np.square(h)))), 1e-5)
    default = activate(ModelConfig(width=16, heads=2, glu=glu), g, u)
    assert (glu in ("swiglu", "smooth", "gelu")) == np.array_equal(default, FORMS[glu](g, u))


@pytest.mark.parametrize("glu", [n for n in FORMS if n not in ("swiglu", "gelu", "smooth")])
def test_half_precision_is_computed_in_float32(glu):
    config = ModelConfig(width=16, heads=2, glu=glu, **SETTINGS)
    g, u = (jnp.asarray(x, jnp.bfloat16) for x in (G, U))
    got = activate(config, g, u)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, activate(config, *(x.astype(jnp.float32) for x in (g, u))).astype(jnp.bfloat16))
