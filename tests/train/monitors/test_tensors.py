"""Which entry of a metric is which tensor."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.models import ModelConfig
from repro.optim import Layout
from repro.train.monitors import MONITORS, MonitorConfig
from repro.train.monitors.gradient import nonfinite_count
from repro.train.monitors.tensors import layer_norms, norms, root_mean_squares, tensors

pytestmark = pytest.mark.usefixtures("quick_compile")

MATRIX = Layout("matrix", inputs=(1,), outputs=(2,), layer=0)
EXPERTS = Layout("matrix", inputs=(2,), outputs=(3,), expert=1, layer=0)
LAYOUTS = {
    "blocks_0": {"ffn": {"up_DF": MATRIX}},
    "blocks_1": {
        "block0": {"ffn": {"up_DF": MATRIX}},
        "block1": {"ffn": {"up_EDF": EXPERTS}, "norm": {"gain": Layout("norm", layer=0)}},
    },
    "head_DZ": Layout("head"),
}
# Layers 0 | 1 2 | 3 4: a dense one, then a unit of two blocks twice.
MODEL = ModelConfig(layers=5, pattern="dense, 2*(dense, mha.dense)")


def tree():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "blocks_0": {"ffn": {"up_DF": make(1, 3, 4)}},
        "blocks_1": {
            "block0": {"ffn": {"up_DF": make(2, 3, 4)}},
            "block1": {"ffn": {"up_EDF": make(2, 2, 3, 4)}, "norm": {"gain": make(2, 3)}},
        },
        "head_DZ": make(3, 5),
    }


def test_names_and_layers():
    entries = tensors(MODEL, tree(), LAYOUTS)
    assert [entry.name for entry in entries] == [
        "blocks_0/ffn/up_DF[0]",
        "blocks_1/block0/ffn/up_DF[1]", "blocks_1/block0/ffn/up_DF[3]",
        "blocks_1/block1/ffn/up_EDF[2]", "blocks_1/block1/ffn/up_EDF[4]",
        "blocks_1/block1/norm/gain[2]", "blocks_1/block1/norm/gain[4]",
        "head_DZ",
    ]  # fmt: skip
    plain = dataclasses.replace(MODEL, layers=2, pattern="")
    one = {"blocks": {"ffn": {"up_DF": jnp.zeros((2, 3, 4))}}}
    assert [entry.layer for entry in tensors(plain, one, {"blocks": LAYOUTS["blocks_0"]})] == [0, 1]


def test_norms_of_tensors_and_layers():
    params = tree()
    x = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    unit = x["blocks_1"]
    slices = [
        x["blocks_0"]["ffn"]["up_DF"][0], *unit["block0"]["ffn"]["up_DF"], *unit["block1"]["ffn"]["up_EDF"],
        *unit["block1"]["norm"]["gain"], x["head_DZ"],
    ]  # fmt: skip
    found = norms(params, LAYOUTS)
    np.testing.assert_allclose(found, [np.linalg.norm(s) for s in slices], rtol=1e-6)
    np.testing.assert_allclose(root_mean_squares(params, LAYOUTS), [np.sqrt((s**2).mean()) for s in slices], rtol=1e-6)
    of_layers = layer_norms(found, tensors(MODEL, params, LAYOUTS), 5)
    third = np.sqrt((unit["block1"]["ffn"]["up_EDF"][0] ** 2).sum() + (unit["block1"]["norm"]["gain"][0] ** 2).sum())
    assert float(of_layers[2]) == np.float32(of_layers[2]) and np.isclose(of_layers[2], third, rtol=1e-6)
    np.testing.assert_allclose((of_layers**2).sum() + found[-1] ** 2, (found**2).sum(), rtol=1e-6)


def test_gradients_that_are_not_finite_are_counted_and_stay_in_their_layer():
    grads = tree()
    grads["blocks_1"]["block0"]["ffn"]["up_DF"] = grads["blocks_1"]["block0"]["ffn"]["up_DF"].at[1, 0, :2].set(jnp.nan)
    grads["head_DZ"] = grads["head_DZ"].at[0, 0].set(jnp.inf)
    assert int(nonfinite_count(grads)) == 3 and int(nonfinite_count(tree())) == 0
    seen = SimpleNamespace(grads=grads, layouts=LAYOUTS, config=SimpleNamespace(model=MODEL))
    found = MONITORS["gradient"].measure(MonitorConfig(), seen)
    assert np.isfinite(found["layer_gradient_norms"]).tolist() == [True, True, True, False, True]


def test_update_ratio_is_that_of_norms_before_the_step():
    params, updates = tree(), jax.tree.map(lambda x: 0.5 * x, tree())
    params["head_DZ"] = jnp.zeros((3, 5))
    seen = SimpleNamespace(params=params, updates=updates, layouts=LAYOUTS)
    found = MONITORS["update"].measure(MonitorConfig(), seen)
    np.testing.assert_allclose(found["update_ratios"], [0.5] * 7 + [0.0], rtol=1e-6)
    assert float(found["update_ratio_max"]) == np.float32(found["update_ratios"].max())
    np.testing.assert_allclose(found["update_rms"][:-1], 0.5 * root_mean_squares(params, LAYOUTS)[:-1], rtol=1e-6)
