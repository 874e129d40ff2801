"""What formats do to tensors that were made so that the answer is known."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.models import ModelConfig
from repro.optim import Layout
from repro.quant import RECIPES, fake_quantize
from repro.quant.precision import precision_of
from repro.train.monitors import MONITORS, MonitorConfig
from repro.train.monitors.quantisation import EXACT_DB, operand_of, precision_role
from repro.train.monitors.quantisation import reading as eager_reading

pytestmark = pytest.mark.usefixtures("quick_compile")

reading = jax.jit(eager_reading, static_argnums=(1, 2))


def decibels(x, x_hat):
    x, x_hat = np.asarray(x, np.float64), np.asarray(x_hat, np.float64)
    return 10 * math.log10((x**2).sum() / ((x - x_hat) ** 2).sum())


def test_floor_rule_saturates_and_loses():
    """MXFP8: 500 has the exponent 8, so the scale is 1 and E4M3 ends at 448; below half of 2^-9 all is zero."""
    x = np.zeros((2, 32), np.float32)
    x[0, :4] = 500, 448, 2.0**-12, -(2.0**-9)
    x[1, :2] = 3.0, -1.0
    found = reading(jnp.asarray(x), "mxfp8")
    assert float(found.saturation) == pytest.approx(1 / 64)
    assert float(found.underflow) == pytest.approx(1 / 6)
    assert float(found.snr) == pytest.approx(decibels(x, fake_quantize(jnp.asarray(x), "mxfp8")), rel=1e-4)
    assert [float(found.scale_min), float(found.scale_max)] == [-7.0, 0.0], "scales 2^(1 - 8) and 2^(8 - 8)"
    with_zeros = np.concatenate([x, np.zeros((1, 32), np.float32)])
    assert float(reading(jnp.asarray(with_zeros), "mxfp8").scale_min) == -7.0, "a block of zeros has no say"
    raised = reading(jnp.asarray(x), dataclasses.replace(RECIPES["mxfp8"], scale_rule="rceil"))
    assert float(raised.saturation) == 0 and float(raised.scale_max) == 1.0


@pytest.mark.parametrize("recipe", ["fp8_tile", "nvfp4", "nf4"])
def test_noise_of_recipes_whose_scale_holds_the_largest(recipe):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)
    found = reading(x, recipe)
    assert float(found.saturation) <= (0 if recipe == "fp8_tile" else 0.05), "scales in E4M3 may be too small"
    assert float(found.snr) == pytest.approx(decibels(x, fake_quantize(x, recipe)), rel=1e-4)
    assert float(found.scale_min) <= float(found.scale_max) and np.isfinite([*found]).all()


def test_size_does_not_matter_to_noise():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.float32)
    small, middle, large = (float(reading(x * 2.0**e, "mxfp8").snr) for e in (-80, 0, 60))
    assert small == middle == large


def test_formats_without_scales_and_exact_values():
    x = jnp.array([[1.0, 70000.0, 1e-9, 0.0]])
    half = reading(x, "fp16")
    assert float(half.saturation) == 0.25 and float(half.underflow) == pytest.approx(1 / 3)
    assert np.isnan([half.scale_min, half.scale_max]).all()
    exact = reading(jnp.array([[1.0, 2.0, -0.5, 0.0]]), "bf16")
    assert float(exact.snr) == pytest.approx(EXACT_DB, rel=1e-5) and float(exact.underflow) == 0
    nothing = reading(jnp.zeros((2, 32)), "mxfp8")
    assert float(nothing.snr) == pytest.approx(EXACT_DB, rel=1e-5) and not np.isfinite(nothing.scale_min)


def test_stochastic_recipes_are_read_without_noise():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
    noisy = dataclasses.replace(RECIPES["nvfp4"], rounding="stochastic")
    assert [*map(float, reading(x, noisy))] == [*map(float, reading(x, "nvfp4"))]


def test_recipes_are_those_of_the_roles():
    dots = precision_of("ffn=v3_fp8,head=bf16")
    assert (
        operand_of(dots, "ffn", "fprop_w", "mxfp4") == "fp8_block"
        and operand_of(dots, "head", "fprop_w", "x") == "bf16"
    )
    assert operand_of(dots, "attention", "fprop_w", "mxfp4") is None
    assert operand_of(precision_of("plain"), "attention", "fprop_w", "mxfp4") == "mxfp4"
    assert operand_of(precision_of("plain"), None, "fprop_w", "mxfp4") is None
    up = Layout("matrix", inputs=(1,), outputs=(2,), layer=0)
    assert (
        precision_role("blocks/ffn/up_DF", up) == "ffn" and precision_role("blocks/attention/q_DHK", up) == "attention"
    )
    routed = Layout("matrix", inputs=(2,), outputs=(3,), expert=1, layer=0)
    assert precision_role("blocks/ffn/up_EDF", routed) == "experts" and precision_role(
        "embedding_ZD", Layout("embedding")
    )
    assert precision_role("blocks/attention_link/phi", Layout("static")) is None


def seen(precision):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params = {
        "blocks": {"ffn": {"up_DF": make(2, 64, 32)}, "norm": {"gain": 1 + 0.01 * make(2, 64)}},
        "head_DZ": make(64, 8),
    }
    layouts = {
        "blocks": {
            "ffn": {"up_DF": Layout("matrix", inputs=(1,), outputs=(2,), layer=0)},
            "norm": {"gain": Layout("norm", layer=0)},
        },
        "head_DZ": Layout("head"),
    }  # fmt: skip
    model = ModelConfig(precision=precision)
    probe = SimpleNamespace(hidden=make(3, 2, 4, 64))
    return SimpleNamespace(
        params=params, grads=params, layouts=layouts, probe=probe, config=SimpleNamespace(model=model)
    )


def test_weights_are_read_along_the_axis_of_their_product():
    observed = seen("ffn=mxfp8")
    found = jax.jit(lambda: MONITORS["quantisation"].measure(MonitorConfig(), observed))()
    w = np.asarray(observed.params["blocks"]["ffn"]["up_DF"])
    along = [decibels(x, fake_quantize(jnp.asarray(x), "mxfp8", axis=0)) for x in w]
    across = [decibels(x, fake_quantize(jnp.asarray(x), "mxfp8", axis=1)) for x in w]
    assert float(found["weight_snr"]) == pytest.approx(min(along), rel=1e-4) != pytest.approx(min(across), rel=1e-4)
    assert float(found["gradient_snr"]) == pytest.approx(min(across), rel=1e-4)
    tokens = observed.probe.hidden.reshape(3, 8, 64)
    each = [decibels(x, fake_quantize(x, "mxfp8")) for x in tokens]
    assert float(found["activation_snr"]) == pytest.approx(min(each), rel=1e-4)


def test_gains_near_one_saturate_in_the_recipe_of_a_plain_run():
    """MX with the floor rule and E4M3 holds up to 1.75 times a power of two: gains just below 2 leave the range."""
    observed = seen("plain")
    observed.params["blocks"]["norm"]["gain"] = jnp.full((2, 64), 1.95)
    found = jax.jit(lambda: MONITORS["quantisation"].measure(MonitorConfig(recipe="mxfp8"), observed))()
    assert float(found["weight_saturation"]) == 1.0
    half = seen("head=bf16")
    found = jax.jit(lambda: MONITORS["quantisation"].measure(MonitorConfig(), half))()
    assert "activation_snr" not in found and np.isnan(found["weight_scale_min"])
