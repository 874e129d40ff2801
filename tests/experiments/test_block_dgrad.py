"""The mechanism and the rules of block-dgrad; its program is tested in tests/train/test_domains.py."""

import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.claims import Run, Runs, decide_all, gather
from repro.quant import FORMATS

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("block-dgrad")
M = sys.modules["repro.experiments.block_dgrad"]


def test_the_predicted_knee_is_that_of_its_derivation():
    """Where the squares of both errors add to four times the first, with the crest factor of the data."""
    crest = float(jnp.abs(M.one_group()[0]).max() / jnp.sqrt((M.one_group() ** 2).mean()))
    for element in M.FORMATS_TRIED:
        fmt = FORMATS[element]
        relative = 2.0**-fmt.mantissa_bits / math.sqrt(12 * 2.164)
        rms = fmt.max / 2.0 ** M.predicted_knee(element) / crest
        absolute = fmt.min_subnormal / math.sqrt(12) / rms
        assert relative**2 + absolute**2 == pytest.approx(4 * relative**2)


def test_mechanism_claims_and_controls():
    preset = EXPERIMENT.presets["cpu"]
    runs = Runs(M.checks(preset))
    assert len(runs) == 10 * 33 + 4
    for verdict in decide_all(M.MECHANISM, runs):
        assert verdict.label == "supported", verdict.reason
        assert verdict.control_label != "supported", verdict.reason


# Final losses (text, quiet) of a world in which every claim holds.
def world(arm, point):
    weight = 0.0 if point == "2^0" else -float(point.removeprefix("2^-"))
    text = 2.0 + (0.2 if arm == "e2m1_block" else 0.05 if arm == "e4m3_block" else 0.0)
    fails = (arm == "e4m3_block" and weight <= -17) or (arm.endswith("_block") and arm[:4] != "e4m3" and weight < 0)
    quiet = 2.6 if fails else 0.3 if arm == "block_after_dispatch" else 0.14
    return text, quiet


def made_up(cells):
    for cell in cells:
        for seed in cell.seeds:
            text, quiet = (
                v + 1e-3 * np.random.default_rng([seed, i]).normal() for i, v in enumerate(world(cell.arm, cell.point))
            )
            quiet += 1e-4 * len(cell.arm) * np.random.default_rng([seed, 7]).normal()
            metrics = {
                "loss": text, "train_loss": text, "quiet_loss": quiet, "token_range": 15 + 0.1 * seed, "token_range_start": 2.0 + 0.1 * seed,
                "error_e2m1_tile_first": 0.2, "error_e2m1_tile_last": 0.1 + 1e-3 * seed,
                "error_e2m1_block_first": 0.4, "error_e2m1_block_last": 0.1 + 1e-3 * seed,
            }  # fmt: skip
            yield Run(cell.arm, seed, metrics, cell.point, cell.size, cell.rate, cell.phase)


@pytest.mark.parametrize("name", [n for n, p in EXPERIMENT.presets.items() if p.evidence])
def test_every_claim_can_be_supported_and_no_control_then_is(name):
    preset = EXPERIMENT.presets[name]
    runs = gather(EXPERIMENT, preset, lambda cells: made_up(cells))
    for verdict in decide_all(EXPERIMENT.claims_for(preset), runs):
        assert verdict.label == "supported", (verdict.variant, verdict.reason)
        assert verdict.control_label != "supported", verdict.reason


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, out, err = command("run", "block-dgrad", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == "", err
    assert (tmp_path / "run" / "report.md").is_file()
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
