"""Interleaved timing: both sides run in turn in one process, so that what disturbs the machine disturbs both."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def interleaved(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, `rounds` values, measured in the order A B A B ... after one untimed call of each.

    A side must return only when its work is done.
    """
    for run in sides.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """The ratio of each round: neighbours in time are compared with each other."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """The side with the smallest median."""
    return min(seconds, key=lambda name: statistics.median(seconds[name]))


def spread(values: Sequence[float], unit: str = "", scale: float = 1.0, digits: int = 2) -> str:
    """`median unit (smallest to largest)`."""
    scaled = [value * scale for value in values]
    shown = [f"{value:,.{digits}f}" for value in (statistics.median(scaled), min(scaled), max(scaled))]
    return f"{shown[0]}{unit and ' ' + unit} ({shown[1]} to {shown[2]})"


def judged(
    label: str,
    values: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    digits: int = 2,
) -> str:
    """One line: the ratio, and whether its median meets the target."""
    middle = statistics.median(values)
    met = middle <= at_most if at_most is not None else middle >= at_least
    target = f"at most {at_most:g}" if at_most is not None else f"at least {at_least:g}"
    return f"{label}: {spread(values, digits=digits)}; target {target}: {'met' if met else 'missed'}"


def machine() -> str:
    """What ran the measurement and how busy it was, in one line."""
    import jax

    load = f", load average {os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else ""
    kinds = sorted({device.device_kind for device in jax.devices()})
    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    return f"{versions}, {os.cpu_count()} cores{load}, {', '.join(kinds)}"
