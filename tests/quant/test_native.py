import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.quant import POLICIES, RECIPES, Accumulator, DelayedScales, delayed_dot, dot, native, native_reason, quantize

pytestmark = pytest.mark.usefixtures("quick_compile")

RNG = np.random.default_rng(0)
X, W, DY = (RNG.normal(size=shape).astype(np.float32) for shape in ((48, 64), (64, 32), (48, 32)))
NATIVE = ["fp8_tensor", "fp8_hybrid_tensor"]


@pytest.fixture
def fp8_units(monkeypatch):
    """The path of FP8 units, which XLA's CPU backend follows by widening the codes."""
    monkeypatch.setattr(native, "hardware_reason", lambda: None)


def results(policy):
    y, back = jax.vjp(lambda x, w: dot(x, w, policy), X, W)
    return y, *back(DY)


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6 * np.abs(np.asarray(other)).max())


def fp8_products(policy):
    """The types of the operands of the products in the compiled-from program, forwards and backwards."""
    jaxpr = str(jax.make_jaxpr(lambda x, w, dy: jax.vjp(lambda x, w: dot(x, w, policy), x, w)[1](dy))(X, W, DY))
    return jaxpr.count("f8_e4m3fn") + jaxpr.count("f8_e5m2"), jaxpr.count("preferred_element_type=float32")


@pytest.mark.parametrize("name", NATIVE)
def test_the_native_path_equals_the_emulation(name, fp8_units):
    policy = replace(POLICIES[name], native=True)
    assert native_reason(policy) is None
    close(results(policy), results(name))
    wrong = replace(POLICIES[name], fprop_x="mxfp8", dgrad_dy="mxfp8", wgrad_x="mxfp8")
    for ours, theirs in zip(results(policy), results(wrong), strict=True):
        with pytest.raises(AssertionError):
            close([ours], [theirs])
    codes, products = fp8_products(policy)
    assert codes >= 6 and products == 3


def test_huge_and_bad_numbers_are_those_of_the_emulation(fp8_units):
    policy = replace(POLICIES["fp8_hybrid_tensor"], native=True)
    x = X.copy()
    x[3] = 1e30
    close([dot(x, W, policy)], [dot(x, W, "fp8_hybrid_tensor")])
    x[4, 5] = np.nan
    assert np.isnan(dot(x, W, policy)).all()


def test_here_it_falls_back_and_says_so():
    for name in NATIVE:
        policy = replace(POLICIES[name], native=True)
        assert "cpu has no FP8 units" in native_reason(policy)
        for ours, theirs in zip(results(policy), results(name), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert fp8_products(policy) == fp8_products(name)


def test_reasons_that_lie_in_the_policy(fp8_units):
    e5m2 = replace(RECIPES["fp8_tensor"], element="e5m2")
    fp6 = replace(RECIPES["fp8_tensor"], element="e3m2")
    base = POLICIES["fp8_tensor"]
    cases = [
        (base, "does not ask"),
        (replace(base, accumulator=Accumulator(14, 32, 128)), "accumulator"),
        (replace(base, dgrad_w="fprop"), "shared between"),
        (replace(base, cache_x="fprop"), "shared between"),
        (replace(base, wgrad_x=None), "Wgrad has an operand that is not FP8"),
        (replace(base, dgrad_dy="bf16"), "Dgrad has an operand that is not FP8"),
        (replace(base, fprop_x="fp8_tile"), "Fprop has block scales"),
        (replace(base, fprop_x=fp6), "elements other than"),
        (replace(base, dgrad_w=e5m2, dgrad_dy=e5m2), "E5M2 by E5M2"),
    ]
    for policy, message in cases:
        assert message in native_reason(replace(policy, native="does not ask" not in message))
        results(replace(policy, native=True)) if policy.accumulator is None else None


@pytest.mark.parametrize(
    ("platform", "capability", "message"),
    [
        ("gpu", "9.0", None),
        ("gpu", "8.9", None),
        ("cuda", "10.0", None),
        ("gpu", "8.0", "8.0 is not 8.9 or later"),
        ("gpu", "gfx942", "gfx942"),
        ("tpu", None, "tpu has no FP8"),
    ],
)
def test_reasons_that_lie_in_the_device(monkeypatch, platform, capability, message):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    reason = native.hardware_reason()
    assert reason is None if message is None else message in reason


def test_delayed_scales_multiply_the_same_codes(monkeypatch):
    scales = DelayedScales.create(4).push(*(jnp.float32(np.abs(a).max()) for a in (X, W, DY)))

    def run(native):
        y, back, _ = jax.vjp(lambda *a: delayed_dot(*a[:2], scales, a[2], native=native), X, W, jnp.zeros(()),
                             has_aux=True)  # fmt: skip
        return y, *back(DY)

    emulated = run(False)
    for ours, theirs in zip(run(True), emulated, strict=True):  # on a CPU, the fallback
        np.testing.assert_array_equal(ours, theirs)
    monkeypatch.setattr(sys.modules["repro.quant.delayed_dot"], "hardware_reason", lambda: None)
    close(run(True), emulated)
    codes = quantize(X, "fp8_delayed", scale=scales.x.scale()).codes
    assert codes.dtype == jnp.float8_e4m3fn
