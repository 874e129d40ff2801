"""Runs of a plan in a world whose metrics are given: for testing rules without training."""

import numpy as np
import pytest

from repro.claims import Run, decide_all, gather


@pytest.fixture
def verdicts():
    return _verdicts


def _verdicts(experiment, preset, metrics):
    """The verdicts where `metrics(arm, point, seed) -> {name: value}`, with a little noise of its own for every run."""

    def train(cells):
        for cell in cells:
            for seed in cell.seeds:
                noise = np.random.default_rng([seed, *map(ord, cell.arm + cell.point)]).normal()
                row = {name: value * (1 + 1e-4 * noise) for name, value in metrics(cell.arm, cell.point, seed).items()}
                yield Run(cell.arm, seed, row, cell.point, cell.size, cell.rate, cell.phase)

    runs = gather(experiment, preset, train)
    return decide_all(experiment.claims_for(preset), runs)


@pytest.fixture
def check_that_claims_can_hold():
    return _check


def _check(experiment, metrics):
    """In a world where every claim of every evidence preset holds, all are supported and no control is."""
    for name, preset in experiment.presets.items():
        if preset.evidence:
            for verdict in _verdicts(experiment, preset, metrics):
                assert verdict.label == "supported", (name, verdict.variant, verdict.reason)
                assert verdict.control_label != "supported", (name, verdict.variant, verdict.control_reason)
