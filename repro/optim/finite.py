"""Hyper-parameters that are numbers must be finite."""

from __future__ import annotations

import math
from typing import Any

from repro.errors import ReproError


def check_finite(**values: Any) -> None:
    """Raises `ReproError` naming the first plain number that is NaN or infinite; traced values and schedules pass."""
    for name, value in values.items():
        if isinstance(value, (int, float)) and not math.isfinite(value):
            raise ReproError(f"{name} is {value}; it must be a finite number.")
