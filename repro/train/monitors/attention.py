"""Attention logits and the entropy of attention, per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.train.monitors.monitor import Metrics, Monitor, Observation

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig


def _logits(config: MonitorConfig, seen: Observation) -> Metrics:
    stats = seen.probe.stats
    return {
        "logit_p999": stats.logit_p999,
        "logit_p999_max": stats.logit_p999.max(),
        "probe_max_logit": stats.max_logit.max(),
    }


def _entropy(config: MonitorConfig, seen: Observation) -> Metrics:
    return {"head_entropy": seen.output.stats.entropy}


def _relative_entropy(config: MonitorConfig, seen: Observation) -> Metrics:
    relative_LH = seen.probe.stats.relative_entropy
    return {"relative_entropy": relative_LH, "relative_entropy_min": relative_LH.min()}


LOGITS = Monitor(
    name="logits",
    group="attention",
    dear=True,
    sees="growth of queries and keys, and a softmax that saturates, for one pair of tokens (maximum) or many (p99.9)",
    cannot_prove="that feed-forward blocks or the optimizer's state are in order",
    metrics={
        "logit_p999": "[L, H] 99.9th percentile of the raw logits on the validation windows",
        "logit_p999_max": "the largest of `logit_p999`",
        "probe_max_logit": "the largest logit there; in every step `head_logits` has those of the batch",
    },
    measure=_logits,
    probes=True,
)

ENTROPY = Monitor(
    name="entropy",
    group="attention",
    dear=False,
    sees="attention that becomes too sharp or collapses, and in which head",
    cannot_prove="that something is wrong: a head that looks at one place may be right to",
    metrics={"head_entropy": "[L, H] entropy of attention in nats, mean over batch and query positions"},
    measure=_entropy,
)

RELATIVE_ENTROPY = Monitor(
    name="relative_entropy",
    group="attention",
    dear=True,
    sees="the same, comparable between window lengths",
    cannot_prove="that something is wrong: a head that looks at one place may be right to",
    metrics={
        "relative_entropy": "[L, H] entropy over the log of the positions in sight, on validation windows; 1 is even",
        "relative_entropy_min": "the smallest of `relative_entropy`",
    },
    measure=_relative_entropy,
    probes=True,
)

MONITORS = (LOGITS, ENTROPY, RELATIVE_ENTROPY)
