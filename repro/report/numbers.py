"""The numbers of a verdict as text, the same in figures, tables and pages."""

import math

from repro.claims import ALPHA, Verdict

INTERVAL = f"{100 * (1 - ALPHA):g} % interval"
NONE = "–"


def digits(verdict: Verdict) -> int:
    """Significant digits that show two of the interval's width: at least 3, at most 12, and 6 without a width."""
    if verdict.interval is None:
        return 6
    low, high = verdict.interval
    if not math.isfinite(high - low) or high == low:
        return 6
    largest = max(abs(low), abs(high))
    return min(12, max(3, math.floor(math.log10(largest)) - math.floor(math.log10(high - low)) + 2))


def number_text(value: float, figures: int) -> str:
    """`value` to so many significant digits, in plain notation between a thousandth and a million."""
    if not math.isfinite(value) or value == 0 or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{figures}g}"
    decimals = figures - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(decimals, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def effect_text(verdict: Verdict) -> str:
    """The effect; "times" follows a ratio."""
    return NONE if verdict.effect is None else number_text(verdict.effect, digits(verdict)) + _times(verdict)


def interval_text(verdict: Verdict) -> str:
    """The interval as "low to high"."""
    return (
        NONE if verdict.interval is None else " to ".join(number_text(end, digits(verdict)) for end in verdict.interval)
    )


def mde_text(verdict: Verdict) -> str:
    """The minimum detectable effect; "times" follows a ratio."""
    return NONE if verdict.mde is None else number_text(verdict.mde, digits(verdict)) + _times(verdict)


def count_text(n: int | None) -> str:
    """A number of seeds."""
    return NONE if n is None else str(n)


def p_text(p: float | None) -> str:
    """A p-value to three digits."""
    return NONE if p is None else f"{p:.3g}"


def is_statistical(verdict: Verdict) -> bool:
    """Whether the verdict is of a D claim, also one whose effect could not be computed."""
    return verdict.p is not None or (verdict.effect is None and verdict.label == "inconclusive")


def verdict_name(verdict: Verdict) -> str:
    """The claim's id, with the variant if there is one."""
    return f"{verdict.claim_id} ({verdict.variant})" if verdict.variant else verdict.claim_id


def _times(verdict: Verdict) -> str:
    return " times" if verdict.scale == "ratio" else ""
