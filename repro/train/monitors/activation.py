"""Activations of the residual stream: sizes, percentiles and channels that stand out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from repro.models.quantile import quantile
from repro.train.monitors.monitor import Metrics, Monitor, Observation

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig

OUTLIER = 6.0
"""A channel stands out whose root mean square is this many times that of the median channel; a convention of ours."""

PERCENTILES = {"activation_p50": 0.5, "activation_p99": 0.99, "activation_p999": 0.999}


def channel_outliers(x_LPD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of every layer's tokens P: the root mean square of the largest channel over that of the median one [L], and how
    many channels exceed `OUTLIER` medians [L] int32. 0 and 0 where the median channel is 0."""
    rms_LD = jnp.sqrt(jnp.mean(jnp.square(x_LPD.astype(jnp.float32)), 1))
    median_L1 = jnp.median(rms_LD, 1, keepdims=True)
    ratio_LD = jnp.where(median_L1 == 0, 0.0, rms_LD / jnp.where(median_L1 == 0, 1.0, median_L1))
    return ratio_LD.max(1), jnp.sum(ratio_LD > OUTLIER, 1, dtype=jnp.int32)


def _layers(config: MonitorConfig, seen: Observation) -> Metrics:
    stats = seen.output.stats
    return {
        "layer_activation_max": stats.activation_max,
        "layer_activation_rms": stats.activation_rms,
        "layer_hidden_max": stats.hidden_max,
        "layer_hidden_rms": stats.hidden_rms,
    }


def _channels(config: MonitorConfig, seen: Observation) -> Metrics:
    states = seen.probe.hidden
    x_LPD = states.reshape(states.shape[0], -1, states.shape[-1]).astype(jnp.float32)
    magnitudes = jnp.abs(x_LPD).reshape(len(x_LPD), -1)
    percentiles = {name: quantile(magnitudes, place) for name, place in PERCENTILES.items()}
    ratio_L, count_L = channel_outliers(x_LPD)
    return percentiles | {
        "activation_p999_max": percentiles["activation_p999"].max(),
        "outlier_ratios": ratio_L,
        "outlier_channels": count_L,
        "outlier_ratio": ratio_L.max(),
    }


_PLACE = "[L + 1] of the embedding, the layers' outputs and the final norm's, on the validation windows"

ACTIVATION = Monitor(
    name="activation",
    group="activation",
    dear=False,
    sees="in which layer numbers come near overflow, or a few dwarf the rest",
    cannot_prove="why: a large activation may come from its input, its weights or an update of either",
    metrics={
        "layer_activation_max": "[L] largest |x| of the residual stream after each layer",
        "layer_activation_rms": "[L] its root mean square",
        "layer_hidden_max": "[L] largest |hidden unit| of the feed-forward block or the experts",
        "layer_hidden_rms": "[L] their root mean square",
    },
    measure=_layers,
)

CHANNELS = Monitor(
    name="channels",
    group="activation",
    dear=True,
    sees="that a scale shared by many numbers is set by few: tails, and channels that stand out for every token",
    cannot_prove="why: a large activation may come from its input, its weights or an update of either",
    metrics={name: f"{100 * place:g}th percentile of |x|, {_PLACE}" for name, place in PERCENTILES.items()}
    | {
        "activation_p999_max": "the largest of `activation_p999`",
        "outlier_ratios": f"root mean square of the largest channel over that of the median one, {_PLACE}",
        "outlier_channels": f"int32, channels above {OUTLIER:g} medians, {_PLACE}",
        "outlier_ratio": "the largest of `outlier_ratios`",
    },
    measure=_channels,
    probes=True,
)

MONITORS = (ACTIVATION, CHANNELS)
