"""All monitors in training: they appear when they should, and leave the training alone."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import repro.train.monitors as package
from repro.models import ModelConfig, MoEConfig
from repro.train import Lane, TrainConfig, train
from repro.train.monitors import DEAR, GROUPS, MONITORS, MonitorConfig
from repro.train.monitors.system import checksum

pytestmark = pytest.mark.usefixtures("quick_compile_module")

MOE = MoEConfig(experts=4, active=2, ffn=8, balance="sign")
PLAIN = TrainConfig(
    model=ModelConfig(layers=1, width=16, heads=2, ffn=16, moe=MOE), length=8, batch_size=2, steps=6, eval_windows=4
)
ALL = dataclasses.replace(PLAIN, monitors=MonitorConfig(names=("all",), interval=4))
DUE = [0, 4]


@pytest.fixture(scope="module")
def results(quick_compile_module):
    from repro.data import load_corpus

    kjv = load_corpus("kjv")
    return {config: train(config, [Lane(config.numbers(), seed) for seed in (0, 1)], kjv) for config in (PLAIN, ALL)}


def test_training_is_the_same_up_to_rounding(results):
    plain, full = results[PLAIN], results[ALL]
    for name, values in plain.curves.items():
        np.testing.assert_allclose(full.curves[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(full.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_what_appears_is_what_was_declared(results):
    added = set(results[ALL].curves) - set(results[PLAIN].curves)
    declared = {metric for monitor in MONITORS.values() for metric in monitor.metrics}
    assert added <= declared and set(results[ALL].curves) <= set(GROUPS)
    elsewhere = {"state_scale_max", "state_scale_min"} | {f"loss_quarter{i}" for i in range(1, 5)}
    assert declared - added == elsewhere, "no state in eight bits, and another table of tokens"
    for monitor in MONITORS.values():
        assert added & set(monitor.metrics), monitor.name


def test_dear_metrics_are_measured_at_their_times(results):
    curves = results[ALL].curves
    for name in DEAR & set(curves):
        values = curves[name].reshape(6, -1)
        missing = values == -1 if values.dtype.kind in "iu" else np.isnan(values)
        assert not missing[DUE].any() and missing[[1, 2, 3, 5]].all(), name
    rare = {f"loss_{kind}" for kind in ("digit", "punctuation", "other")}
    for name in set(curves) - DEAR - rare:
        assert np.isfinite(curves[name]).all(), name


def test_values_agree_with_what_is_always_measured(results):
    curves = results[ALL].curves
    np.testing.assert_allclose(np.sqrt((curves["gradient_norms"] ** 2).sum(-1)), curves["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(curves["expert_violations"].max(-1), curves["max_violation"], rtol=1e-5)
    np.testing.assert_allclose(curves["head_entropy"].mean((2, 3)), curves["entropy_mean"], rtol=1e-5)
    np.testing.assert_array_equal(curves["layer_activation_max"].max(-1), curves["activation_max"])
    assert (curves["expert_drop"] == 0).all() and (curves["first_nonfinite"] == -1).all()
    lanes = [jax.tree.map(lambda x, lane=lane: x[lane], results[ALL].params) for lane in range(2)]
    last = [int(checksum(params)) for params in lanes]
    np.testing.assert_array_equal(curves["checksum"][-1], last)
    assert curves["checksum"].dtype == np.uint32 and len(np.unique(curves["checksum"])) == 12
    staleness = curves["staleness"]
    assert ((staleness == -1) | (staleness > 0)).all() and 0 < (staleness == -1).mean() < 1, (
        "Muon has none for matrices"
    )
    assert (curves["logit_p999_max"][DUE] <= curves["probe_max_logit"][DUE]).all()


def test_the_example_on_the_page_runs(capsys):
    page = Path(package.__file__).with_name("README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "(4, 1, 12)" and second.count("nan") == 2
