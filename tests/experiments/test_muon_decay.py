"""The rules of muon-decay, and what its program measures beside the engine's."""

import dataclasses

import jax
import numpy as np
import pytest

from repro import catalogue
from repro.optim.geometry import participation, top_share
from repro.train import at_size

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("muon-decay")
CPU = EXPERIMENT.presets["cpu"]
MATRICES = [f"entropy of {name} {layer}" for name in "abcdefg" for layer in (0, 1)]


def world(arm, point, seed):
    """One in which every claim holds."""
    decayed, muon = arm.endswith("decay"), arm.startswith("muon")
    entropies = {name: (0.95 if muon else 0.85) for name in MATRICES}
    return entropies | {
        "rms_growth": 1.0 if decayed else 1.2 if muon else 1.1, "loss": 1.9 if decayed else 2.0,
        "svd_entropy": 0.95 if muon else 0.85, "update_directions": 0.6 if muon else 0.2, "top_share": 0.3 if muon else 0.1,
    }  # fmt: skip


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(EXPERIMENT, world)


def test_a_world_in_which_it_is_the_other_way_round(verdicts):
    def other(arm, point, seed):
        row = world({"muon": "adamw", "adamw": "muon"}[arm.split("_")[0]] + arm[len(arm.split("_")[0]) :], point, seed)
        return row | {"loss": 2.0 if arm.endswith("decay") else 1.9}

    labels = {v.variant.partition(",")[0]: v.label for v in verdicts(EXPERIMENT, CPU, other)}
    assert labels["weights keep growing"] == labels["decay stops the growth"] == "supported"
    for variant in (
        "more than under AdamW",
        "decay lowers the loss",
        "entropy of the spectra",
        "share of matrices",
        "updates have more directions",
        "updates align with the top direction",
    ):
        assert labels[variant] == "contradicted", variant


def test_what_the_program_measures():
    config = at_size(dataclasses.replace(CPU.train, optimizer="adamw", steps=3), "w32")
    program = config.program_class()(config)
    state = jax.jit(program.init)(jax.numpy.uint32(0))
    window = np.random.default_rng(0).integers(0, 256, (config.batch_size, config.length + 1))
    after, metrics = jax.jit(program.step)(state, window, config.numbers())
    old, new = program.matrices(state.params), program.matrices(after.params)
    assert len(new) == 7 and all(w.shape[0] == 2 and w.ndim == 3 for w in new.values())
    assert new["blocks/attention/o_HVD"].shape == (2, 32, 32)
    rms = np.mean([np.sqrt(np.mean(np.square(w))) for w in new.values()])
    np.testing.assert_allclose(metrics["weight_rms"], rms, rtol=1e-5)
    pairs = [(old[n], new[n] - old[n]) for n in ("blocks/attention/q_DHK", "blocks/attention/k_DHK")]
    directions = np.mean([participation(change) for _, change in pairs]) / 32
    np.testing.assert_allclose(metrics["update_directions"], directions, rtol=1e-3)
    np.testing.assert_allclose(metrics["top_share"], np.mean([top_share(w, c) for w, c in pairs]), atol=1e-4)


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "muon-decay", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
