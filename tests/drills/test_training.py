"""Outcomes against closed forms, one whole drill in a tiny form, and the form of those that are stored."""

import json
from pathlib import Path

import numpy as np
import pytest

from repro.drill_command import STORAGE
from repro.drills import training
from repro.models import ModelConfig
from repro.train import with_settings

STORED = Path(__file__).parents[2] / "results" / "drills"


def test_outcomes():
    reference = np.full((40, 3), 2.0)
    loss = reference.copy()
    loss[20:25, 0] += [1.0, 0.5, 0.3, 0.15, 0.05]
    loss[20:, 1] = np.nan
    loss[5, 2] = 9.0  # before the fault
    found = training.outcome(loss, reference, 20)
    assert found["recovered"] == [4, None, 0]
    assert found["worst"] == [pytest.approx(1.0), "inf", 0.0] and found["end"] == [0.0, "inf", 0.0]
    loss[39, 0] = 2.2
    assert training.outcome(loss, reference, 20)["recovered"][0] is None


@pytest.fixture(scope="module")
def tiny(quick_compile_module, fusion_emitters):
    """The drill of a NaN gradient in a model that takes no time, whose figures mean nothing."""
    small = {"model": ModelConfig(layers=1, width=16, heads=2, ffn=16), "length": 8, "batch_size": 2,
             "monitors.names": ("gradient",)}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        whole = training.config
        patch.setattr(training, "config", lambda *args, **options: with_settings(whole(*args, **options), small))
        with fusion_emitters():  # the engine's own program is another one, and its bits are asked for
            return training.run("nan-gradient", steps=50, fault_step=40, calibration=(1000, 1001, 1002), test=(0, 1))


def test_a_drill(tiny):
    assert tiny["off_equals_engine"] is True and 0 <= tiny["false_alarms"] <= 1
    assert tiny["budget"] == 0.25
    seen = {row["signal"]: row["steps"] for row in tiny["seen"]}
    # The gradient is known in the step itself, the loss only in the next one.
    assert seen["grad_norm"] == seen["nonfinite_gradients"] == [0, 0] and seen["loss"] == [1, 1]
    order = [sorted(np.inf if s is None else s for s in row["steps"])[1] for row in tiny["seen"]]
    assert order == sorted(order)
    assert tiny["unguarded"]["recovered"] == [None, None] and tiny["unguarded"]["end"] == ["inf", "inf"]
    assert all(abs(end) < 1 for end in tiny["guarded"]["end"])
    assert tiny["guarded"]["ended_by"] == [
        {"rule": "when grad_norm nonfinite then skip", "steps": [0, 0], "before_the_fault": 0}
    ]
    json.dumps(tiny, allow_nan=False)


def test_stored_drills_have_the_present_form(tiny):
    stored = {path.stem: json.loads(path.read_text()) for path in STORED.glob("*.json")}
    assert set(stored) == {*training.DRILLS, *STORAGE}
    for name, found in stored.items():
        assert found["schema"] == training.SCHEMA and found["drill"] == name
        assert set(found["versions"]) == set(training.versions())
        if name in training.DRILLS:
            drill = training.DRILLS[name]
            assert set(found) == set(tiny) and found["rule"] == training.RULE
            assert (found["fault"], found["guards"]) == (dict(drill.fault), list(drill.guards))
            assert found["off_equals_engine"] is True and len(found["seeds"]["test"]) == 8
            for became in (found["unguarded"], found["guarded"]):
                assert all(len(became[word]) == 8 for word in ("worst", "end", "recovered"))
        else:
            assert found["kind"] == "storage" and found["cases"]
            assert all(case["equal"] is True for case in found["cases"])
    assert stored["kill"]["cases"][0]["kills"] >= 50
