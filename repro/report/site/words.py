"""Sentences of the pages that follow from a verdict and its rule."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from repro.claims import (
    ALPHA,
    AtLeast,
    AtMost,
    Claim,
    Criterion,
    Equivalent,
    Greater,
    NonInferior,
    Ratio,
    Trend,
    Verdict,
)
from repro.claims.verdict import CONTRADICTED, INCONCLUSIVE, NOT_SUPPORTED, NOT_TESTABLE, SUPPORTED
from repro.report.effects_figure import deciding
from repro.report.numbers import interval_text, number_text, p_text
from repro.report.rule_words import rule_words
from repro.report.site.load import Result, installed_claims, one_rule, settings_apart

MOST_SEEDS = 1000

MEANING = {
    SUPPORTED: "the test passes, the whole interval lies on the claimed side, and the effect is large enough to count",
    CONTRADICTED: "the same test passes in the opposite direction",
    NOT_SUPPORTED: "the interval leaves out every effect that counts",
    INCONCLUSIVE: "everything else, a single seed and a control that passes included",
    NOT_TESTABLE: "declared before anything ran",
    "not run": "nothing runs it yet; this is a state, not a verdict",
}


def bound_of(rule: Criterion | None) -> tuple[float, ...]:
    """Where the test of a statistical rule is made, on the axis of the effect."""
    match rule:
        case Greater() | Trend():
            return (1.0 if rule.log else 0.0,)
        case Ratio(at_least=bound) | AtLeast(bound=bound) | AtMost(bound=bound) | NonInferior(margin=bound):
            return (bound,)
        case Equivalent(margin=margin):
            return (-margin, margin)
    return ()


def what_would_change(claim: Claim | None, verdict: Verdict) -> list[str]:
    """What would have to come out otherwise for another label, from the rule and the numbers of the verdict."""
    if verdict.label == NOT_TESTABLE:
        return [f"A test at the scale that it needs: {verdict.reason}"]
    if claim is None:
        return []
    if claim.tier == "M":
        other = CONTRADICTED if verdict.label == SUPPORTED else SUPPORTED
        one = "One run outside" if verdict.label == SUPPORTED else "Every run inside"
        lines = [
            f"{one} what the rule allows would make it {other}. It is compared exactly: more runs of the same code "
            "change nothing."
        ]
        return lines + ([_control(verdict)] if verdict.label == SUPPORTED else [])
    compared = deciding(claim.criterion, verdict.quantity)
    rule = compared[0] if len(compared) == 1 else None
    bounds = tuple(bound for part in compared for bound in bound_of(part))
    if verdict.effect is None or verdict.interval is None or not bounds:
        return ["Runs whose values are finite at every seed; without them no effect can be computed."]
    bound = " and ".join(f"{b:g}" for b in bounds)
    interval = interval_text(verdict)
    if verdict.label == SUPPORTED:
        ends = [end for end in verdict.interval if math.isfinite(end)]
        nearest = min(((abs(end - b), end) for end in ends for b in bounds), default=(0, math.nan))[1]
        lines = [
            f"An interval that reaches {' or '.join(f'{b:g}' for b in bounds)} (its nearer end is {number_text(nearest, 3)}), or an adjusted p above "
            f"{ALPHA:g} (it is {p_text(verdict.p_holm)})."
        ]
        smallest = getattr(rule, "smallest", None)
        lines += [f"An effect below {smallest:g}, the smallest that counts."] if smallest is not None else []
        return [*lines, _control(verdict)]
    if verdict.label == CONTRADICTED:
        return [f"Seeds that agree the other way: the interval is {interval}, wholly on the far side of {bound}."]
    if verdict.label == NOT_SUPPORTED:
        return [f"An interval that reaches an effect large enough to count; it is {interval}."]
    if verdict.control_label == SUPPORTED:
        return [f"A control that does not pass. It came out {verdict.control_label}, so the rule shows nothing here."]
    where = f"wholly between {bound}, or wholly outside" if len(bounds) > 1 else f"wholly on one side of {bound}"
    lines = [f"An interval {where}; it is {interval}. The adjusted p is {p_text(verdict.p_holm)}."]
    seeds = seeds_needed(rule, verdict)
    if seeds is not None:
        count = f"about {seeds:,}" if seeds <= MOST_SEEDS else f"more than {MOST_SEEDS:,}"
        lines.append(
            f"At this spread an effect of this size would be found at 80 % power with {count} seeds in place of "
            f"{verdict.n}."
        )
    return lines


def seeds_needed(rule: Criterion | None, verdict: Verdict) -> int | None:
    """Seeds at which the minimum detectable effect would be the effect found; None if it lies on the other side of the
    bound, or on an axis where the two do not compare. The minimum detectable effect falls as 1 / sqrt(n)."""
    ratio = verdict.scale == "ratio"
    match rule:
        case Greater() | Ratio() | AtLeast():
            sign = 1
        case NonInferior() | AtMost():
            sign = -1
        case _:
            return None
    if getattr(rule, "log", False) and not ratio:
        return None
    scale = math.log if ratio else float
    if not verdict.n or not verdict.mde or not math.isfinite(verdict.effect) or (ratio and verdict.effect <= 0):
        return None
    distance = sign * (scale(verdict.effect) - scale(bound_of(rule)[0]))
    if distance <= 0 or not math.isfinite(verdict.mde):
        return None
    return math.ceil(verdict.n * (scale(verdict.mde) / distance) ** 2)


def _control(verdict: Verdict) -> str:
    return f"A control that passes the same rule; it came out {verdict.control_label}."


def why_in_conflict(name: str, results: Sequence[Result]) -> str:
    """In what results differ that judge one claim under several rule hashes."""
    if one_rule(name, results):
        apart = [
            f"{setting} is " + " and ".join(f"{v} ({r.preset_name})" for v, r in zip(values, results, strict=True))
            for setting, values in settings_apart(results).items()
        ]
        return f"Rule, control and arms are the same; the hash covers the whole preset, and there {'; '.join(apart)}."
    claims = installed_claims(name, results)
    if not claims:
        return "This installation does not hold all of these rules, so it cannot say in what they differ."
    rules = [rule_words(claim.criterion) if claim.criterion else "none" for claim in claims]
    if len(set(rules)) == 1:
        return "The rules differ in their control, statement or family of tests."
    told = "; ".join(f"{result.preset_name}: {rule}" for result, rule in zip(results, rules, strict=True))
    return f"The rules differ. {told}."


def command(record: dict[str, Any]) -> str:
    """The command that runs it again; settings changed by hand are named beside it."""
    words = ["repro", "run", str(record.get("experiment", "")), "--preset", str(record.get("preset_name", ""))]
    return shlex.join(words)


def duration(seconds: Any) -> str:
    """A time that a reader can compare."""
    if not isinstance(seconds, int | float):
        return "not recorded"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def hardware_words(record: dict[str, Any]) -> str:
    """What it ran on."""
    machine = record.get("hardware") or {}
    device = f"{machine.get('devices')} x {machine.get('device')}" if machine.get("platform") != "cpu" else ""
    cores = f"{machine.get('cpu_cores')} CPU cores" if machine.get("cpu_cores") else ""
    words = [words for words in (device, cores, str(machine.get("machine", ""))) if words]
    return ", ".join(words) or "not recorded"
