"""Turning tiles: what is measured, by independent arithmetic, and that every control fails."""

import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from repro import catalogue
from repro.claims import decide_all, gather
from repro.errors import ReproError
from repro.quant import RECIPES, fake_quantize, quantize

EXPERIMENT = catalogue.load("tile-axis")
MODULE = sys.modules["repro.experiments.tile_axis"]
SMOKE = EXPERIMENT.presets["smoke"]
pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def runs():
    return gather(EXPERIMENT, SMOKE, list)


def test_every_control_fails(runs):
    for verdict in decide_all(EXPERIMENT.claims_for(SMOKE), runs):
        assert verdict.label in ("supported", "contradicted") and verdict.control_label == "contradicted"


def tiled(x, axis, pow2):
    """E4M3 in tiles of 128 along an axis of a 128 x 128 matrix, written with ml_dtypes."""
    scale = np.maximum(np.abs(x).max(axis, keepdims=True), np.float32(1e-4)) / np.float32(448)
    if pow2:
        scale = np.exp2(np.ceil(np.log2(scale))).astype(np.float32)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


@pytest.mark.parametrize("pow2", [False, True])
def test_turning_against_arithmetic_of_its_own(pow2):
    x = np.asarray(MODULE.matrix(3, 128))
    cached = tiled(x, 1, pow2)
    again = tiled(cached, 0, pow2)
    norm = np.linalg.norm
    found = MODULE.turned(jnp.asarray(x), MODULE.SCALES["pow2_scales" if pow2 else "fp32_scales"])
    assert found["error_cached"] == pytest.approx(norm(cached - x) / norm(x), rel=1e-4)
    assert found["error_turned"] == pytest.approx(norm(again - x) / norm(x), rel=1e-4)
    assert found["error_direct"] == pytest.approx(norm(tiled(x, 0, pow2) - x) / norm(x), rel=1e-4)
    assert found["changed_share"] == pytest.approx(np.mean(again != cached), abs=2e-4)
    assert found["growth"] == found["error_turned"] / found["error_cached"]


def test_a_recipe_at_the_block_boundary_differs_only_where_it_should():
    x = MODULE.matrix(0, 128)
    for name in MODULE.RECIPE_GROUPS["square"]:
        assert quantize(x, name).transpose().dequantize().tolist() == quantize(x.T, name).dequantize().tolist()
        assert MODULE.differing(x, name) == 0
    assert MODULE.differing(x, "fp8_tile") > 0.5
    shapes = {name: RECIPES[name].block_shape for group in MODULE.RECIPE_GROUPS.values() for name in group}
    square = {name for name, shape in shapes.items() if shape is None or shape[0] == shape[1]}
    assert square == set(MODULE.RECIPE_GROUPS["square"])
    powers = {name for name in shapes if name not in square and RECIPES[name].power_of_two}
    assert powers == set(MODULE.RECIPE_GROUPS["tiles_pow2"])


def test_scales_in_their_place_give_the_product():
    a, b = MODULE.matrix(0, 128), MODULE.matrix(1, 128)
    assert MODULE.product_error(a, b, along=True) < 1e-13
    assert MODULE.product_error(a, b, along=False) > 0.01
    assert jnp.allclose(fake_quantize(a, "fp8_tile", axis=-2), quantize(a, "fp8_tile", axis=-2).dequantize())


def test_rows_spread_by_powers_of_two():
    x, y = (np.abs(np.asarray(MODULE.matrix(0, 256, spread))).max(1) for spread in (0, 12))
    assert x.max() / x.min() < 3 and 2**10 < y.max() / y.min() < 2**14


def test_the_heatmap_shows_no_change_for_powers_of_two():
    first, second = MODULE.what_turning_changes().values()
    assert first.shape == second.shape == (64, 64) and first.max() > 1 and second.max() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 100}, "multiple of 128"),
        ({"spreads": (0,)}, "must hold 0 and 12"),
        ({"spreads": (0, 12, 99)}, "between 0 and 60"),
        ({"trials": 0}, "at least 1"),
    ],
)
def test_presets_without_a_meaning(change, message):
    with pytest.raises(ReproError, match=message):
        MODULE.Preset(**change)
