"""The sentence that explains a label, with every number it rests on."""

import math

from repro.claims.finding import Finding


def explain(label: str, finding: Finding, shown: Finding, p: float, p_opposite: float, alpha: float) -> str:
    """One sentence for a label.

    Args:
        finding: what the criterion found; `p` and `p_opposite` are its adjusted p-values.
        shown: the part of it that decides (itself, unless it is a conjunction).
    """
    place = [part is shown for part in finding.parts]
    lead = f"part {place.index(True) + 1} of {len(place)} decides: " if place else ""
    if shown.problem:
        return f"{lead}{shown.problem}, so no effect can be computed."
    if shown.deterministic:
        runs = f"every one of {len(shown.per_seed)} runs" if len(shown.per_seed) > 1 else "the one run"
        outcome = f"holds in {runs}" if shown.claimed else "does not hold"
        furthest = f"{shown.quantity} is {shown.effect:.6g} in the run furthest off"
        return f"{lead}{furthest}, and the rule asks for {shown.asks}, which {outcome}."
    digits = _significant_digits(shown)
    times = " times" if shown.scale == "ratio" else ""
    low, high = (f"{end:.{digits}g}" for end in shown.interval)
    seeds = f"{shown.n} seed{'s' if shown.n > 1 else ''}"
    return (
        f"{lead}{shown.quantity} is {shown.effect:.{digits}g}{times} "
        f"({100 * (1 - alpha):g} % interval {low} to {high}) over {seeds}, where the rule asks for {shown.asks}: "
        f"{_why(label, finding, shown, p, p_opposite, alpha)}; "
        f"the minimum detectable effect is {shown.mde:.{digits}g}{times}."
    )


def _why(label: str, finding: Finding, shown: Finding, p: float, p_opposite: float, alpha: float) -> str:
    claim, opposite = _p(finding.p, p), _p(finding.p_opposite, p_opposite)
    if label == "supported":
        return f"the claim passes with {claim}"
    if label == "contradicted":
        return f"the opposite passes with {opposite}"
    if label == "not supported":
        return f"the interval leaves out every effect that counts ({claim}, for the opposite {opposite})"
    if shown.n == 1:
        return "one seed says nothing about the spread"
    if p <= alpha and shown.claimed:
        return f"the claimed direction passes with {claim}, but whether the effect is large enough is open"
    return f"neither the claim ({claim}) nor its opposite ({opposite}) is shown"


def _p(raw: float, adjusted: float) -> str:
    return f"p = {raw:.3g}" if raw == adjusted else f"p = {adjusted:.3g} after Holm, {raw:.3g} before"


def _significant_digits(shown: Finding) -> int:
    """Enough digits to show two of the interval's width, at least 3: an effect of 1.0004 times must not read 1."""
    low, high = shown.interval
    largest = max(abs(low), abs(high))
    if not math.isfinite(high - low) or high == low:
        return 6
    return min(12, max(3, math.floor(math.log10(largest)) - math.floor(math.log10(high - low)) + 2))
