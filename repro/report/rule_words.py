"""A criterion, read out."""

from repro.claims import (
    ALPHA,
    All,
    AtLeast,
    AtMost,
    Criterion,
    Equivalent,
    Exact,
    Greater,
    NonInferior,
    Ratio,
    Trend,
    Within,
)
from repro.claims.canonical import plain

_FLIP = f"exact one-sided sign-flip test at {ALPHA:g}"
_T = f"one-sided paired t-test at {ALPHA:g}"


def parts(rule: Criterion | None) -> tuple[Criterion, ...]:
    """The comparisons in a rule."""
    return () if rule is None else rule.criteria if isinstance(rule, All) else (rule,)


def rule_words(rule: Criterion) -> str:
    """The rule in one sentence without a full stop; a criterion unknown here is read out field by field."""
    match rule:
        case Greater(metric, left, right):
            return f"{_comparison(rule)}, paired by seed, is above {1 if rule.log else 0}{_smallest(rule)}; {_FLIP}"
        case Ratio(metric, left, right, at_least=bound):
            return f"{metric} of {left} over {right}, paired by seed, is above {bound:g}; {_FLIP}"
        case AtLeast(metric, arm, bound) | AtMost(metric, arm, bound):
            mean = "geometric mean" if rule.log else "mean"
            side = "above" if isinstance(rule, AtLeast) else "below"
            return f"the {mean} of {metric} of {arm} is {side} {bound:g}; {_FLIP}"
        case NonInferior(metric, arm, reference, margin=margin):
            return f"{metric} of {arm} minus {reference}, paired by seed, is below the margin {margin:g}; {_T}"
        case Equivalent(metric, left, right, margin=margin):
            relative = f", relative to {right}" if rule.relative else ""
            both = f"two one-sided paired t-tests at {ALPHA:g}"
            return f"{metric} of {left} minus {right}{relative}, is between -{margin:g} and {margin:g}; {both}"
        case Trend():
            sizes = ", ".join(f"{name} = {value:g}" for name, value in rule.sizes)
            way = "rises" if rule.rising else "falls"
            return f"{_comparison(rule)}, paired by seed, {way} with size ({sizes}); {_FLIP} of the slopes over log2"
        case Exact(metric, arm, value, tolerance):
            within = f" to within {tolerance:g}" if tolerance else " exactly"
            return f"{metric} is {value:g}{within} in every run of {arm}"
        case Within(metric, arm, low, high):
            return f"{metric} lies between {low:g} and {high:g} in every run of {arm}"
        case All(criteria):
            return "all of: " + "; ".join(f"({n}) {rule_words(part)}" for n, part in enumerate(criteria, 1))
    return ", ".join(f"{name} {value}" for name, value in plain(rule).items())


def _comparison(rule: Greater | Trend) -> str:
    return f"{rule.metric} of {rule.left} {'over' if rule.log else 'minus'} {rule.right}"


def _smallest(rule: Greater) -> str:
    return "" if rule.smallest is None else f", and at least {rule.smallest:g} to count"
