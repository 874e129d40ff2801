"""The parameters themselves, before the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.train.monitors.monitor import Metrics, Monitor, Observation
from repro.train.monitors.spectrum import spectra
from repro.train.monitors.tensors import root_mean_squares

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig


def _sizes(config: MonitorConfig, seen: Observation) -> Metrics:
    rms_P = root_mean_squares(seen.params, seen.layouts)
    return {"weight_rms": rms_P, "weight_rms_max": rms_P.max()}


def _spectrum(config: MonitorConfig, seen: Observation) -> Metrics:
    found = spectra(seen.params, seen.layouts)
    return {
        "weight_sigmas": found.sigma_max,
        "weight_stable_ranks": found.stable_rank,
        "weight_entropies": found.entropy,
        "weight_sigma_max": found.sigma_max.max(),
        "weight_entropy_min": found.entropy.min(),
    }


WEIGHT = Monitor(
    name="weight",
    group="weight",
    dear=False,
    sees="growth over a long time, and of which tensor",
    cannot_prove="a loss spike of this step",
    metrics={
        "weight_rms": "[P] root mean square of each tensor",
        "weight_rms_max": "the largest of `weight_rms`",
    },
    measure=_sizes,
)

WEIGHT_SPECTRUM = Monitor(
    name="weight_spectrum",
    group="weight",
    dear=True,
    sees="growth along one direction that a root mean square hides, and loss of rank",
    cannot_prove="a loss spike of this step",
    metrics={
        "weight_sigmas": "[M] largest singular value of each matrix",
        "weight_stable_ranks": "[M] |W|_F^2 over the square of that",
        "weight_entropies": "[M] entropy of the squared singular values over its largest possible value",
        "weight_sigma_max": "the largest of `weight_sigmas`",
        "weight_entropy_min": "the smallest of `weight_entropies`",
    },
    measure=_spectrum,
)

MONITORS = (WEIGHT, WEIGHT_SPECTRUM)
