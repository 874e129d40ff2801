"""The statistics behind a verdict: pure functions of a few paired differences.

Throughout, `d` is a vector of n real numbers, one per seed, positive where the seed speaks for the claim.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

from repro.errors import ReproError

MAX_PAIRS = 40  # two halves of 2^20 sums each


def _vector(d: ArrayLike) -> np.ndarray:
    d = np.asarray(d, dtype=np.float64)
    if d.ndim != 1 or d.size == 0:
        raise ReproError(f"a test needs a vector of at least one value, not one of shape {d.shape}")
    if not np.isfinite(d).all():
        raise ReproError("a test needs finite values; decide beforehand what a diverged run counts as")
    return d


def _directed(d: ArrayLike, alternative: str) -> np.ndarray:
    if alternative not in ("greater", "less"):
        raise ReproError(f"the alternative is 'greater' or 'less', not {alternative!r}")
    return _vector(d) if alternative == "greater" else -_vector(d)


def _all_signed_sums(d: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for value in d:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def sign_flip_p(d: ArrayLike, alternative: str = "greater") -> float:
    """Exact one-sided sign-flip test of the mean.

    Under the null hypothesis each d_i is symmetric about zero, so all 2^n sign assignments s are equally likely:

        p = #{ s in {-1, +1}^n : sum_i s_i d_i >= sum_i d_i } / 2^n        (<= for "less")

    The observed assignment counts itself, so p >= 2^-n. Sums that agree to 1e-12 of sum |d_i| count as ties, so
    that rounding cannot turn a tie into a win. Two halves of the sums are matched by sorting: O(n 2^(n/2)).

    Args:
        d: n values, 1 <= n <= 40.
        alternative: "greater" or "less".

    ReproError for an empty, non-finite or longer vector. Source: R. A. Fisher, The Design of Experiments (1935), § 21.
    """
    d = _directed(d, alternative)
    if d.size > MAX_PAIRS:
        raise ReproError(f"the exact sign-flip test takes at most {MAX_PAIRS} pairs, not {d.size}")
    least = d.sum() - 1e-12 * np.abs(d).sum()
    first, second = _all_signed_sums(d[: d.size // 2]), np.sort(_all_signed_sums(d[d.size // 2 :]))
    below = np.searchsorted(second, least - first, side="left")
    return float(second.size * first.size - int(below.sum())) / 2.0**d.size


def paired_t_interval(d: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided interval of the mean: mean(d) -+ t_{(1 + confidence)/2, n-1} sd(d) / sqrt(n).

    Equal values give the point (d_1, d_1); a single value says nothing about spread and gives (-inf, inf).
    ReproError for an empty or non-finite vector. Source: Student, Biometrika 6 (1908).
    """
    d = _vector(d)
    if d.size == 1:
        return -math.inf, math.inf
    if np.ptp(d) == 0:
        return float(d[0]), float(d[0])
    half = stdtrit(d.size - 1, (1 + confidence) / 2) * d.std(ddof=1) / math.sqrt(d.size)
    return float(d.mean() - half), float(d.mean() + half)


def t_p(d: ArrayLike, alternative: str = "greater") -> float:
    """One-sided paired t-test of mean(d) against zero: P(T_{n-1} >= mean(d) sqrt(n) / sd(d)).

    For a non-inferiority test pass margin - (arm - reference). Equal values are judged by their sign alone:
    0 if positive, 1 if negative, 0.5 at zero, the limits of the formula. A single value gives 1: no spread, no test.
    ReproError for an empty or non-finite vector. Source: Student, Biometrika 6 (1908).
    """
    d = _directed(d, alternative)
    if d.size == 1:
        return 1.0
    if np.ptp(d) == 0:
        return 0.5 - 0.5 * float(np.sign(d[0]))
    return float(stdtr(d.size - 1, -d.mean() * math.sqrt(d.size) / d.std(ddof=1)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Step-down adjusted p-values of one family, in the order given.

    With p_(1) <= ... <= p_(m):  adjusted_(k) = max_{j <= k} min(1, (m - j + 1) p_(j)).
    Rejecting where adjusted <= alpha keeps the chance of any false rejection at or below alpha, under any dependence.
    Source: S. Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statistics 6 (1979).
    """
    m, adjusted, largest = len(p_values), [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(m), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (m - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def minimum_detectable_effect(d: ArrayLike, alpha: float = 0.05, power: float = 0.8) -> float:
    """Mean that a one-sided test at level `alpha` would find with probability `power`, given the spread seen:

        (t_{1-alpha, n-1} + t_{power, n-1}) sd(d) / sqrt(n)

    In the units of d; infinite for a single value. An approximation: at n = 8 a t-test's power at this mean is within
    0.03 of `power`. ReproError for an empty or non-finite vector.
    """
    d = _vector(d)
    if d.size == 1:
        return math.inf
    if np.ptp(d) == 0:
        return 0.0
    quantiles = stdtrit(d.size - 1, 1 - alpha) + stdtrit(d.size - 1, power)
    return float(quantiles * d.std(ddof=1) / math.sqrt(d.size))


def slope(x: ArrayLike, y: ArrayLike) -> np.ndarray:
    """Least-squares slope of y over x: sum (x - mean x) y / sum (x - mean x)^2.

    Args:
        x: [K] positions, not all equal.
        y: [..., K] values.

    Returns [...] slopes. ReproError if the lengths differ or all x are equal.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.ndim != 1 or y.shape[-1:] != x.shape:
        raise ReproError(f"a slope needs as many positions as values, not {x.shape} and {y.shape}")
    if x.size == 0 or np.ptp(x) == 0:
        raise ReproError("a slope needs at least two different positions")
    centred = x - x.mean()
    return (y @ centred) / (centred @ centred)
