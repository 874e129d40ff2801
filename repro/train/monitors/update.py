"""What the optimizer added to the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from repro.train.monitors.monitor import Metrics, Monitor, Observation
from repro.train.monitors.spectrum import spectra
from repro.train.monitors.tensors import norms, root_mean_squares

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig


def _sizes(config: MonitorConfig, seen: Observation) -> Metrics:
    rms_P = root_mean_squares(seen.updates, seen.layouts)
    update_P, weight_P = norms(seen.updates, seen.layouts), norms(seen.params, seen.layouts)
    ratio_P = jnp.where(weight_P == 0, 0.0, update_P / jnp.where(weight_P == 0, 1.0, weight_P))
    return {
        "update_rms": rms_P,
        "update_ratios": ratio_P,
        "update_rms_max": rms_P.max(),
        "update_ratio_max": ratio_P.max(),
    }


def _spectrum(config: MonitorConfig, seen: Observation) -> Metrics:
    found = spectra(seen.updates, seen.layouts)
    return {
        "update_sigmas": found.sigma_max,
        "update_stable_ranks": found.stable_rank,
        "update_sigma_max": found.sigma_max.max(),
        "update_stable_rank_min": found.stable_rank.min(),
    }


UPDATE = Monitor(
    name="update",
    group="update",
    dear=False,
    sees="how far the optimizer really moves each tensor; uneven ratios between tensors",
    cannot_prove="where an outlier of the forward pass comes from; QK-Clip and rounding of weights come after it",
    metrics={
        "update_rms": "[P] root mean square of each tensor's update",
        "update_ratios": "[P] norm of the update over the norm of the tensor before it; 0 for a tensor of zeros",
        "update_rms_max": "the largest of `update_rms`",
        "update_ratio_max": "the largest of `update_ratios`",
    },
    measure=_sizes,
)

UPDATE_SPECTRUM = Monitor(
    name="update_spectrum",
    group="update",
    dear=True,
    sees="updates that push along few directions, and how far along the first",
    cannot_prove="where an outlier of the forward pass comes from",
    metrics={
        "update_sigmas": "[M] largest singular value of each matrix's update",
        "update_stable_ranks": "[M] |U|_F^2 over the square of that",
        "update_sigma_max": "the largest of `update_sigmas`",
        "update_stable_rank_min": "the smallest of `update_stable_ranks`",
    },
    measure=_spectrum,
)

MONITORS = (UPDATE, UPDATE_SPECTRUM)
