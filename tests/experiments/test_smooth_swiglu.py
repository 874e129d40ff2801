"""The mathematics of smooth-swiglu, and what its rules say of small versions of it."""

import sys

import jax
import numpy as np
import pytest

from repro import catalogue
from repro.claims import decide_all, gather
from repro.errors import ReproError

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("smooth-swiglu")
MODULE = sys.modules["repro.experiments.smooth_swiglu"]
SMOKE = EXPERIMENT.presets["smoke"]


@pytest.fixture(scope="module")
def labels(quick_compile_module):
    verdicts = decide_all(EXPERIMENT.claims_for(SMOKE), gather(EXPERIMENT, SMOKE, None))
    return {v.variant: (v.label, v.control_label) for v in verdicts}


def test_what_the_rules_say_of_a_small_version(labels):
    refused = ("supported", "contradicted")
    for variant in (
        "stationarity", "norms", "exact", "delayed scaling saturates", "Smooth-SwiGLU repairs it",
        "small units survive", "directions, strong penalty",
    ):  # fmt: skip
        assert labels[variant] == refused, variant
    assert labels["directions"][0] == "contradicted"  # the data determine both branches, and the penalty is small


@pytest.fixture(scope="module")
def unit():
    """A draw other than those of the presets."""
    return {p: MODULE.fit(3000, MODULE.TEACHER, p, 1) for p in (MODULE.SMALL, MODULE.STRONG)}


def test_a_penalty_balances_norms_before_it_aligns_directions(unit):
    small, strong = unit[MODULE.SMALL], unit[MODULE.STRONG]
    assert abs(small["norm_ratio"] - 1) < 1e-3 and abs(small["abs_cosine"] - 0.5) < 0.05
    assert strong["abs_cosine"] > 0.99
    assert max(small["identity_error"], strong["identity_error"]) < 0.01


def test_the_summary_of_a_run():
    steps = MODULE.PERIOD * 3
    row = {name: np.zeros(steps) for name in ("saturated", "error", "flushed", "ordinary")}
    row["saturated"][[MODULE.PERIOD, 3]] = 0.1  # the first doubling, and a step without a history
    row["error"][[3, 70]] = 9.0, 0.4
    row["flushed"][: MODULE.PERIOD], row["flushed"][-MODULE.PERIOD :] = 0.01, 0.03
    row["ordinary"][: MODULE.PERIOD], row["ordinary"][-MODULE.PERIOD :] = 0.02, 0.02
    got = MODULE.summary(row)
    want = {"growths_missed": 1, "saturated_steps": 1, "worst_error": 0.4, "flush_rise": 3.0, "ordinary_rise": 1.0}
    assert got == pytest.approx(want)


def test_the_growing_channel(labels):
    """Doublings saturate a delayed scale alone, by about half of the channel."""
    found = jax.tree.map(np.asarray, MODULE.grown(1, 2))  # compiled by the fixture
    P, H = MODULE.PERIOD, MODULE.HISTORY
    share = {arm: values["saturated"][0] for arm, values in found.items()}
    assert (share["delayed"][[P, 2 * P]] > 0.9 / MODULE.CHANNELS).all()
    assert share["just_in_time"].max() == share["smooth"][H:].max() == 0
    error = {arm: values["error"][0] for arm, values in found.items()}
    assert (error["delayed"][[P, 2 * P]] > 0.2).all() and error["smooth"][H:].max() < 0.04


def test_what_is_refused():
    for wrong in ({"penalties": (0.0, 0.01)}, {"penalties": (0.0, 0.01, 0.3, -1.0)}, {"draws": 0}, {"growths": 0}):
        with pytest.raises(ReproError, match=next(iter(wrong))):
            MODULE.Preset(**wrong)


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "smooth-swiglu", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
