"""Hyper-parameters that are numbers must be finite, and in their range."""

from __future__ import annotations

import math
import numbers
from typing import Any

from repro.errors import ReproError


def check_finite(**values: Any) -> None:
    """Raises `ReproError` naming the first plain number that is NaN or infinite; traced values and schedules pass."""
    for name, value in values.items():
        if isinstance(value, (int, float)) and not math.isfinite(value):
            raise ReproError(f"{name} is {value}; it must be a finite number.")


def check_range(low: float, high: float, **values: Any) -> None:
    """Raises `ReproError` naming the first plain number outside [low, high), NaN included; traced values, schedules and
    None pass."""
    for name, value in values.items():
        if isinstance(value, numbers.Real) and not low <= value < high:
            raise ReproError(f"{name} is {value}; it must be a number in [{low:g}, {high:g}).")


def check_positive(**values: Any) -> None:
    """Raises `ReproError` naming the first plain number that is not positive and finite."""
    for name, value in values.items():
        if isinstance(value, numbers.Real) and not 0 < value < math.inf:
            raise ReproError(f"{name} is {value}; it must be a number above 0, and finite.")


def check_adam(**values: Any) -> None:
    """`check_range` of what the optimizers have in common: rates and eps in [0, inf), averaging constants in [0, 1)."""
    for name, value in values.items():
        check_range(0, 1 if name in ("b1", "b2", "momentum") else math.inf, **{name: value})
