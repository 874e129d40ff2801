"""When a signal gives an alarm, when the loss spikes, and how far the one is ahead of the other.

One rule for every signal and no memory of what is normal but the run's own. The *score* of a signal at step t is how
far its logarithm lies from the mean of its logarithms over the `WINDOW` steps before. An *alarm* is a score above a
limit, and the limit of a signal is the largest score that it has in calibration runs without a fault, over the same
steps. So every signal has the same budget of false alarms: if a further run without a fault is exchangeable with n
calibration runs, its largest score exceeds theirs with probability 1 / (n + 1) (for scores without ties), whatever
their distribution.

A *spike* is a loss above the median of the `SPIKE_WINDOW` steps before by more than `SPIKE_MARGIN` nats, or not
finite.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from repro.errors import ReproError

WINDOW = 32
"""Steps that a score looks back."""
SPIKE_WINDOW, SPIKE_MARGIN = 51, 0.5
"""Steps, odd so that the median is one of the losses; nats."""
TINY = 1e-30
"""Where magnitudes are cut off below, for a logarithm: a count that leaves zero is a large step."""


def scores(values: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """The score [S] of a signal [S] or [S, ...], the largest over its entries: |ln|x_t| - mean ln|x| over the `window`
    steps before|. Infinite where x_t is not finite; NaN in the first `window` steps, which have no history, and where
    that history is not finite but x_t is. Raises `ReproError` unless `window` is at least 1."""
    if window < 1:
        raise ReproError(f"a score looks back over at least one step, not {window}.")
    raw = np.asarray(values, np.float64).reshape(len(values), -1)
    logs = np.log(np.maximum(np.abs(raw), TINY))
    found = np.full(raw.shape, np.nan)
    if len(logs) > window:
        past = np.lib.stride_tricks.sliding_window_view(logs[:-1], window, axis=0).mean(-1)
        with np.errstate(invalid="ignore"):
            found[window:] = np.abs(logs[window:] - past)
    found[~np.isfinite(raw)] = np.inf
    found[:window] = np.nan
    known = np.where(np.isnan(found), -np.inf, found).max(1)
    return np.where(np.isneginf(known), np.nan, known)


def peak(score_S: np.ndarray, since: int, until: int | None = None) -> float:
    """The largest score in [since, until); 0 where none is known."""
    watched = score_S[since:until]
    return float(np.nanmax(watched)) if np.isfinite(watched).any() or np.isinf(watched).any() else 0.0


def limit(peaks: Iterable[float]) -> float:
    """The limit of a signal from its largest scores in calibration runs. Raises `ReproError` without any."""
    found = list(peaks)
    if not found:
        raise ReproError("a limit needs at least one calibration run.")
    return max(found)


def alarm_step(score_S: np.ndarray, limit: float, since: int, until: int | None = None) -> int | None:
    """The first step in [since, until) whose score exceeds the limit; an infinite score exceeds a finite limit."""
    steps = np.flatnonzero(score_S[since:until] > limit)
    return since + int(steps[0]) if len(steps) else None


def spike_step(loss_S: np.ndarray, since: int, margin: float = SPIKE_MARGIN, window: int = SPIKE_WINDOW) -> int | None:
    """The first step from `since` on whose loss is not finite or exceeds the median of the `window` losses before (of
    as many as there are) by more than `margin`."""
    loss = np.asarray(loss_S, np.float64)
    for t in range(max(since, 1), len(loss)):
        before = loss[max(0, t - window) : t]
        if not np.isfinite(loss[t]) or loss[t] - np.median(before) > margin:
            return t
    return None


def lead(alarm: int | None, spike: int) -> int:
    """Steps by which an alarm is ahead of the spike; 0 for an alarm at the spike, after it, or none: no warning."""
    return 0 if alarm is None else max(0, spike - alarm)
