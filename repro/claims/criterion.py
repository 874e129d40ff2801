"""Criteria: rules that turn runs into a finding, written down before the runs exist.

A statistical criterion reduces the runs to one number d per seed, positive on the claimed side of its bound, and
asks whether the mean of d is positive. Comparisons without n and p are in `deterministic`. All are frozen dataclasses
of plain values; `kind` names the rule in `dataclasses.asdict`.

Places are addressed as "arm", "arm@point", "arm/size" or "arm@point/size"; two places are paired by seed.
"""

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

import numpy as np

from repro.claims.finding import Finding, directional, displayed, read
from repro.claims.runs import Runs, parse_place
from repro.claims.statistics import paired_t_interval, slope, t_p
from repro.errors import ReproError


def _identity(x):
    return x


def need(condition: bool, what: str):
    """ReproError saying `what` a rule lacks, unless the condition holds."""
    if not condition:
        raise ReproError(what)


class Criterion:
    """A rule that can be applied to runs. `deterministic` ones have no p-value."""

    deterministic: ClassVar[bool] = False

    def reads(self) -> tuple[str, ...]:
        """The addresses this rule reads."""
        raise NotImplementedError

    def find(self, runs: Runs, alpha: float) -> Finding:
        """Apply the rule, with two-sided 1 - alpha intervals. ReproError where a run or metric is absent."""
        raise NotImplementedError


class _TwoArms(Criterion):
    def __post_init__(self):
        need(parse_place(self.left) != parse_place(self.right), f"{self.left!r} cannot be compared with itself")
        self._check()

    def reads(self) -> tuple[str, ...]:
        return self.left, self.right

    def _read(self, runs: Runs, *, positive: bool):
        return read(runs, self.metric, [(self.left, None), (self.right, None)], positive=positive)


@dataclass(frozen=True)
class Greater(_TwoArms):
    """`left` has more of the metric than `right`. For "less", swap the arms.

    d = ln(left / right) if `log` (for positive, heavy-tailed metrics; the effect is the ratio), else left - right.
    `smallest`: smallest effect that counts, a ratio above 1 if `log`, else a difference above 0; None for any effect.
    Test: exact sign flip.
    """

    metric: str
    left: str
    right: str
    _: KW_ONLY
    log: bool = True
    smallest: float | None = None
    kind: str = field(default="greater", init=False, repr=False)

    def _check(self):
        least = 1 if self.log else 0
        ok = self.smallest is None or least < self.smallest < math.inf
        need(ok, f"the smallest effect that counts is above {least}, not {self.smallest}")

    def find(self, runs: Runs, alpha: float) -> Finding:
        least = (1.0 if self.log else 0.0) if self.smallest is None else self.smallest
        return directional(
            self._read(runs, positive=self.log),
            lambda v: np.log(v[0]) - np.log(v[1]) if self.log else v[0] - v[1],
            quantity=f"{self.metric} of {self.left} {'over' if self.log else 'minus'} {self.right}",
            asks=("above 1" if self.log else "above 0")
            + ("" if self.smallest is None else f" and at least {self.smallest:g}"),
            scale="ratio" if self.log else "difference",
            transform=np.exp if self.log else _identity,
            alpha=alpha,
            smallest=math.log(least) if self.log else least,
        )


@dataclass(frozen=True)
class Ratio(_TwoArms):
    """`left` is more than `at_least` times `right`: d = ln(left / right) - ln(at_least). The effect is left / right.

    Stronger than `Greater(smallest=...)`: the test itself is against `at_least`. Test: exact sign flip.
    """

    metric: str
    left: str
    right: str
    _: KW_ONLY
    at_least: float
    kind: str = field(default="ratio", init=False, repr=False)

    def _check(self):
        need(0 < self.at_least < math.inf, f"a ratio is compared with a positive bound, not {self.at_least}")

    def find(self, runs: Runs, alpha: float) -> Finding:
        bound = math.log(self.at_least)
        return directional(
            self._read(runs, positive=True),
            lambda v: np.log(v[0]) - np.log(v[1]) - bound,
            quantity=f"{self.metric} of {self.left} over {self.right}",
            asks=f"above {self.at_least:g}",
            scale="ratio",
            transform=lambda d: np.exp(d + bound),
            alpha=alpha,
        )


class _OneArm(Criterion):
    _sign: ClassVar[int]

    def __post_init__(self):
        parse_place(self.arm)
        ok = math.isfinite(self.bound) and (self.bound > 0 or not self.log)
        need(ok, f"{self.bound} is not a bound (a finite number, positive where log is set)")

    def reads(self) -> tuple[str, ...]:
        return (self.arm,)

    def find(self, runs: Runs, alpha: float) -> Finding:
        sign, forward, back = self._sign, *((np.log, np.exp) if self.log else (_identity, _identity))
        bound = forward(self.bound)
        return directional(
            read(runs, self.metric, [(self.arm, None)], positive=self.log),
            lambda v: sign * (forward(v[0]) - bound),
            quantity=f"{'the geometric mean of ' if self.log else ''}{self.metric} of {self.arm}",
            asks=f"{'above' if sign > 0 else 'below'} {self.bound:g}",
            scale="value",
            transform=lambda d: back(sign * d + bound),
            alpha=alpha,
        )


@dataclass(frozen=True)
class AtLeast(_OneArm):
    """The mean of one arm lies above a constant: d = value - bound, or ln(value / bound) if `log`.

    The effect is the (geometric) mean itself. Runs that all equal the bound are inconclusive. Test: exact sign flip.
    """

    metric: str
    arm: str
    bound: float
    _: KW_ONLY
    log: bool = False
    kind: str = field(default="at_least", init=False, repr=False)
    _sign: ClassVar[int] = 1


@dataclass(frozen=True)
class AtMost(_OneArm):
    """The mean of one arm lies below a constant: d = bound - value, or ln(bound / value) if `log`. See `AtLeast`."""

    metric: str
    arm: str
    bound: float
    _: KW_ONLY
    log: bool = False
    kind: str = field(default="at_most", init=False, repr=False)
    _sign: ClassVar[int] = -1


@dataclass(frozen=True)
class NonInferior(Criterion):
    """No harm, where lower is better: mean(arm - reference) < margin, so d = margin - (arm - reference).

    The effect is arm - reference. Test: one-sided paired t.
    Source: for margins stated beforehand, ICH guideline E9 (1998), section 3.3.2.
    """

    metric: str
    arm: str
    reference: str
    _: KW_ONLY
    margin: float
    kind: str = field(default="non_inferior", init=False, repr=False)

    def __post_init__(self):
        need(parse_place(self.arm) != parse_place(self.reference), f"{self.arm!r} cannot be compared with itself")
        need(0 < self.margin < math.inf, f"a margin is positive, not {self.margin}")

    def reads(self) -> tuple[str, ...]:
        return self.arm, self.reference

    def find(self, runs: Runs, alpha: float) -> Finding:
        return directional(
            read(runs, self.metric, [(self.arm, None), (self.reference, None)], positive=False),
            lambda v: self.margin - (v[0] - v[1]),
            quantity=f"{self.metric} of {self.arm} minus {self.reference}",
            asks=f"below {self.margin:g}",
            scale="difference",
            transform=lambda d: self.margin - d,
            alpha=alpha,
            test=t_p,
        )


@dataclass(frozen=True)
class Equivalent(_TwoArms):
    """The arms differ by less than `margin` either way; with `relative`, (left - right) / right does.

    Two one-sided paired t-tests (TOST): p is the larger of the two. The opposite, "they differ by more than the
    margin", may be shown on either side, so its p is twice the smaller of the two.
    Source: D. J. Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15 (1987).
    """

    metric: str
    left: str
    right: str
    _: KW_ONLY
    margin: float
    relative: bool = False
    kind: str = field(default="equivalent", init=False, repr=False)

    def _check(self):
        need(0 < self.margin < math.inf, f"a margin is positive, not {self.margin}")

    def find(self, runs: Runs, alpha: float) -> Finding:
        of, margin = f"{self.metric} of {self.left} minus {self.right}", self.margin
        quantity = f"{of}, relative to {self.right}," if self.relative else of
        asks = f"between -{margin:g} and {margin:g}"
        readings = self._read(runs, positive=self.relative)
        if readings.problem:
            return Finding(quantity, asks, "difference", problem=readings.problem)
        left, right = readings.values
        d = (left - right) / right if self.relative else left - right
        low, high = paired_t_interval(d, 1 - alpha)
        outside = low > margin or high < -margin
        return Finding(
            quantity,
            asks,
            **displayed(readings, d, "difference", _identity, alpha),
            p=max(t_p(d + margin), t_p(margin - d)),
            p_opposite=min(1.0, 2 * min(t_p(d - margin), t_p(-margin - d))),
            claimed=low > -margin and high < margin,
            opposite=outside,
            excluded=outside,
        )


@dataclass(frozen=True)
class Trend(_TwoArms):
    """The comparison of two arms grows (`rising`) or shrinks with model size.

    Per seed, d is the least-squares slope of ln(left / right) (or of left - right without `log`) over log2 of the
    size value, with its sign turned if not `rising`. The effect is the factor (or difference) per doubling of size.
    `sizes` pairs each size name with a number, such as its parameter count. Test: exact sign flip.
    ReproError for fewer than three sizes: two are listed side by side, but are no trend.
    """

    metric: str
    left: str
    right: str
    _: KW_ONLY
    sizes: tuple[tuple[str, float], ...]
    log: bool = True
    rising: bool = True
    kind: str = field(default="trend", init=False, repr=False)

    def _check(self):
        object.__setattr__(self, "sizes", tuple((name, value) for name, value in self.sizes))
        names, values = {name for name, _ in self.sizes}, {value for _, value in self.sizes}
        enough = len(self.sizes) >= 3 and len(names) == len(values) == len(self.sizes)
        need(enough, f"a trend needs at least three different sizes, not {list(self.sizes)}; two are only listed")
        need(all(0 < value < math.inf for value in values), "the sizes of a trend are positive numbers")
        own = parse_place(self.left).size or parse_place(self.right).size
        need(own is None, f"a trend goes through its sizes; leave out /{own}")

    def find(self, runs: Runs, alpha: float) -> Finding:
        names, x = [name for name, _ in self.sizes], np.log2([value for _, value in self.sizes])
        places = [(at, name) for at in (self.left, self.right) for name in names]
        sign = 1 if self.rising else -1

        def slopes(values: np.ndarray) -> np.ndarray:
            left, right = (np.log(values) if self.log else values).reshape(2, len(names), -1)
            return sign * slope(x, (left - right).T)

        between = "over" if self.log else "minus"
        return directional(
            read(runs, self.metric, places, positive=self.log),
            slopes,
            quantity=f"the change of {self.metric} of {self.left} {between} {self.right} per doubling of size",
            asks=f"{'above' if self.rising else 'below'} {1 if self.log else 0}",
            scale="ratio" if self.log else "difference",
            transform=(lambda d: np.exp(sign * d)) if self.log else (lambda d: sign * d),
            alpha=alpha,
        )


@dataclass(frozen=True)
class All(Criterion):
    """Every part holds: an intersection-union test, whose p is the largest of the parts'.

    The opposite, "some part is contradicted", may be shown by any part, so its p is the smallest of the parts' times
    their number (deterministic parts, which cannot err by chance, are not counted). Parts do not nest.
    Source: R. L. Berger, Technometrics 24 (1982).
    """

    criteria: tuple[Criterion, ...]
    kind: str = field(default="all", init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "criteria", tuple(self.criteria))
        plain = all(isinstance(part, Criterion) and not isinstance(part, All) for part in self.criteria)
        need(plain and len(self.criteria) >= 2, "All takes at least two criteria, none of them an All")
        need(len(set(self.criteria)) == len(self.criteria), "All holds the same criterion twice")

    @property
    def deterministic(self) -> bool:
        """Whether no part has a p-value."""
        return all(part.deterministic for part in self.criteria)

    def reads(self) -> tuple[str, ...]:
        return tuple(at for part in self.criteria for at in part.reads())

    def find(self, runs: Runs, alpha: float) -> Finding:
        parts = tuple(part.find(runs, alpha) for part in self.criteria)
        chances = sum(not part.deterministic for part in parts)
        certain = any(part.deterministic and part.opposite for part in parts)
        opposite = min(part.p_opposite if part.opposite else 1.0 for part in parts)
        return Finding(
            " and ".join(part.quantity for part in parts),
            " and ".join(part.asks for part in parts),
            "parts",
            p=max(part.p for part in parts),
            p_opposite=0.0 if certain else min(1.0, chances * opposite),
            claimed=all(part.claimed for part in parts),
            opposite=any(part.opposite for part in parts),
            large_enough=all(part.large_enough for part in parts),
            excluded=any(part.excluded for part in parts),
            deterministic=self.deterministic,
            parts=parts,
        )


def swapped(criterion: Criterion) -> Criterion:
    """The rule with its two arms exchanged: a control for `Greater`, `Ratio` and `Trend`; ReproError for others."""
    if not isinstance(criterion, Greater | Ratio | Trend):
        raise ReproError(f"{type(criterion).__name__} has no two arms whose exchange would be its opposite")
    return replace(criterion, left=criterion.right, right=criterion.left)
