"""From findings to labels: the decision rule, stated once and applied to every claim.

The rule for a D claim, at level alpha (0.05), after its criterion has given p, p_opposite and an interval:

1. Within each family (the D claims with one `family`, of one call) the p are adjusted by Holm's method, and so are
   the p_opposite, separately. A claim whose effect cannot be computed counts in the family with p = 1.
2. **supported**: adjusted p <= alpha, the two-sided 1 - alpha interval lies wholly on the claimed side of the bound,
   and the effect is at least the smallest that counts, where one is stated.
3. **contradicted**: adjusted p_opposite <= alpha and the interval lies wholly on the other side.
4. **not supported**: the interval leaves out every effect that counts. Where no smallest effect is stated, every
   effect on the claimed side counts, so an interval that holds the bound itself never gives this label.
5. **inconclusive**: everything else; one seed, or a value that is not finite, always ends here.

A conjunction is supported if every part passes 2, contradicted if a part passes 3 after the division of alpha that
`All` describes, not supported if a part meets 4; its effect and interval are those of the part that decides.

An M claim is compared on every run: **supported** or **contradicted**. An S claim is **not testable at this scale**.

Then the control is judged alone by the same rule (a family of one). If it is supported, the rule passes something it
must refuse, and a label "supported" is withdrawn to "inconclusive". Other labels stay: where the control is the claim
with its arms exchanged, a contradicted claim has a supported control.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repro.claims.canonical import number_from_json, number_to_json
from repro.claims.claim import Claim
from repro.claims.finding import Finding
from repro.claims.runs import Runs
from repro.claims.sentence import explain
from repro.claims.statistics import holm
from repro.errors import ReproError

ALPHA = 0.05
RULE_VERSION = 1  # of the rule in this module's docstring; part of every rule hash

SUPPORTED = "supported"
CONTRADICTED = "contradicted"
NOT_SUPPORTED = "not supported"
INCONCLUSIVE = "inconclusive"
NOT_TESTABLE = "not testable at this scale"
LABELS = (SUPPORTED, CONTRADICTED, NOT_SUPPORTED, INCONCLUSIVE, NOT_TESTABLE)


@dataclass(frozen=True)
class Verdict:
    """The judgement of one claim.

    Fields:
        label: one of `LABELS`.
        effect: what was measured (for an M claim, the worst run); None where nothing could be.
        interval: its two-sided interval; None without one.
        n: number of seeds; None for M and S claims.
        p, p_holm: one-sided p-value in the claimed direction, before and after Holm; None for M and S claims.
        mde: minimum detectable effect at 80 % power; None for M and S claims.
        reason: one sentence with the numbers.
        scale: "ratio" (effect, interval and mde are factors), "difference" (differences in the metric's units) or
            "value" (a level of the metric, the mde a distance from the bound); empty for S claims.
        quantity: in words, what the effect measures.
        per_seed: seed -> effect of that seed.
        control_label, control_reason: the judgement of the control; empty for S claims.
        claim_id, variant: which claim this is.
    """

    label: str
    effect: float | None
    interval: tuple[float, float] | None
    n: int | None
    p: float | None
    mde: float | None
    reason: str
    scale: str
    p_holm: float | None
    per_seed: Mapping[int, float]
    control_label: str
    control_reason: str
    claim_id: str
    variant: str
    quantity: str

    def to_json(self) -> dict:
        """A dict that `json.dumps(..., allow_nan=False)` takes; NaN and infinities are strings."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {name: number_to_json(fields[name]) for name in ("effect", "p", "mde", "p_holm")}
        fields["interval"] = None if self.interval is None else [number_to_json(end) for end in self.interval]
        fields["per_seed"] = {str(seed): number_to_json(value) for seed, value in self.per_seed.items()}
        return fields

    @classmethod
    def from_json(cls, fields: Mapping) -> "Verdict":
        """The inverse of `to_json`. ReproError for missing or unknown fields, or an unknown label."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(fields) != names:
            raise ReproError(f"a stored verdict lacks or adds the fields {sorted(names ^ set(fields))}")
        if fields["label"] not in LABELS:
            raise ReproError(f"{fields['label']!r} is not a label; there is {', '.join(LABELS)}")
        values = dict(fields)
        values |= {name: number_from_json(fields[name]) for name in ("effect", "p", "mde", "p_holm")}
        if fields["interval"] is not None:
            values["interval"] = tuple(number_from_json(end) for end in fields["interval"])
        values["per_seed"] = {int(seed): number_from_json(value) for seed, value in fields["per_seed"].items()}
        return cls(**values)

    def differences(self, other: "Verdict") -> list[str]:
        """Names of the fields that are not those of `other`. Words, labels and counts are compared exactly, other
        numbers to one part in 10^12: NumPy's logarithms and exponentials differ in the last bit between processors."""
        ours, theirs = self.to_json(), other.to_json()
        return [name for name, value in ours.items() if not _same(value, theirs[name])]


def _same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-15)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a == b


def decide(claim: Claim, runs: Runs, *, alpha: float = ALPHA) -> Verdict:
    """Judge one claim as a family of its own, by the rule in this module's docstring.

    ReproError if the runs lack a metric or place that the claim or its control reads.
    """
    return decide_all((claim,), runs, alpha=alpha)[0]


def decide_all(claims: Sequence[Claim], runs: Runs, *, alpha: float = ALPHA) -> tuple[Verdict, ...]:
    """Judge the claims of one experiment, with Holm's adjustment per family; verdicts in the order of the claims.

    ReproError as in `decide`, or if alpha is not between 0 and 1/2.
    """
    if not 0 < alpha < 0.5:
        raise ReproError(f"alpha lies between 0 and 0.5, not {alpha}")
    findings = [None if claim.criterion is None else claim.criterion.find(runs, alpha) for claim in claims]
    families: dict[str, list[int]] = defaultdict(list)
    for index, claim in enumerate(claims):
        if claim.tier == "D":
            families[claim.family].append(index)
    adjusted = {}
    for members in families.values():
        p = holm([findings[index].p for index in members])
        p_opposite = holm([findings[index].p_opposite for index in members])
        adjusted |= dict(zip(members, zip(p, p_opposite, strict=True), strict=True))
    verdicts = []
    for index, (claim, finding) in enumerate(zip(claims, findings, strict=True)):
        if finding is None:
            verdicts.append(_stated(claim))
        else:
            p, p_opposite = adjusted.get(index, (finding.p, finding.p_opposite))
            verdicts.append(_judge(claim, finding, p, p_opposite, runs, alpha))
    return tuple(verdicts)


def label_of(finding: Finding, p: float, p_opposite: float, alpha: float) -> str:
    """The label of a finding whose p-values are already adjusted, before its control is looked at."""
    if p <= alpha and finding.claimed and finding.large_enough:
        return SUPPORTED
    if p_opposite <= alpha and finding.opposite:
        return CONTRADICTED
    if finding.excluded:
        return NOT_SUPPORTED
    return INCONCLUSIVE


def deciding_part(finding: Finding, label: str, alpha: float) -> Finding:
    """The part of a conjunction that its label rests on; the finding itself if it has no parts."""
    parts = finding.parts
    if not parts:
        return finding
    if label == CONTRADICTED:
        return min((part for part in parts if part.opposite), key=lambda part: part.p_opposite)
    if label == NOT_SUPPORTED:
        return next(part for part in parts if part.excluded)
    failing = [part for part in parts if label_of(part, part.p, part.p_opposite, alpha) != SUPPORTED]
    return max(failing or parts, key=lambda part: (bool(part.problem), part.p))


def _judge(claim: Claim, finding: Finding, p: float, p_opposite: float, runs: Runs, alpha: float) -> Verdict:
    label = label_of(finding, p, p_opposite, alpha)
    shown = deciding_part(finding, label, alpha)
    judged = claim.tier == "D" and not shown.problem
    reason = explain(label, finding, shown, p, p_opposite, alpha)

    control = claim.control.criterion.find(runs, alpha)
    control_label = label_of(control, control.p, control.p_opposite, alpha)
    control_shown = deciding_part(control, control_label, alpha)
    control_reason = explain(control_label, control, control_shown, control.p, control.p_opposite, alpha)
    if control_label == SUPPORTED and label == SUPPORTED:
        label = INCONCLUSIVE
        passed = f"but the control ({claim.control.description}) passed too, so the rule shows nothing"
        reason = f"{reason.removesuffix('.')}; {passed}."

    return Verdict(
        label=label,
        effect=shown.effect,
        interval=shown.interval,
        n=shown.n,
        p=finding.p if judged else None,
        mde=shown.mde,
        reason=reason,
        scale=shown.scale,
        p_holm=p if judged else None,
        per_seed=shown.per_seed,
        control_label=control_label,
        control_reason=control_reason,
        claim_id=claim.id,
        variant=claim.variant,
        quantity=shown.quantity,
    )


def _stated(claim: Claim) -> Verdict:
    return Verdict(
        label=NOT_TESTABLE,
        effect=None,
        interval=None,
        n=None,
        p=None,
        mde=None,
        reason=claim.reason_untestable,
        scale="",
        p_holm=None,
        per_seed={},
        control_label="",
        control_reason="",
        claim_id=claim.id,
        variant=claim.variant,
        quantity="",
    )
