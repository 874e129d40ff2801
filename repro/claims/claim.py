"""A claim with the rule that judges it, and the control that the rule must refuse."""

from dataclasses import dataclass

from repro.claims.criterion import Criterion
from repro.errors import ReproError

TIERS = {"M": "mechanism, compared exactly", "D": "dynamics, judged over seeds", "S": "scale, only stated"}


@dataclass(frozen=True)
class Control:
    """A rule that must not come out supported, or the claim's own rule would pass anything.

    For a difference: the arms exchanged, or the mechanism switched off. For no harm: an arm declared harmful.
    For a mechanism: a deliberately wrong formula.

    Fields:
        description: what the control is, as it is read after "the control, ": "arms exchanged".
        criterion: the rule applied to it.
    """

    description: str
    criterion: Criterion


@dataclass(frozen=True)
class Claim:
    """One published claim and how it is judged.

    Fields:
        id: row of the ledger, such as "K2-1".
        source: paper and section.
        statement: what is judged here, in one sentence.
        reported: what the source reported.
        boundary: where the report, and this test of it, stop.
        tier: "M" (deterministic criterion), "D" (statistical criterion) or "S" (no criterion, never run).
        criterion, control: the rule and its control; both None for tier S.
        variant: tells apart several rules for one id; empty if there is one.
        family: the paper over whose D claims the p-values of one experiment are adjusted. Claims with the same text
            form one family.
        reason_untestable: for tier S, what would be needed to test the claim.

    ReproError if the parts do not fit together.
    """

    id: str
    source: str
    statement: str
    reported: str
    boundary: str
    tier: str
    criterion: Criterion | None
    control: Control | None
    variant: str = ""
    family: str = ""
    reason_untestable: str = ""

    @property
    def name(self) -> str:
        """The id, with the variant if there is one."""
        return f"{self.id} ({self.variant})" if self.variant else self.id

    def __post_init__(self):
        if self.tier not in TIERS:
            raise ReproError(f"claim {self.name}: the tier is one of {', '.join(TIERS)}, not {self.tier!r}")
        if not self.id or not self.statement:
            raise ReproError(f"claim {self.name!r} needs an id and a statement")
        if self.tier == "S":
            self._check_stated_only()
        else:
            self._check_judged()

    def _check_stated_only(self):
        if self.criterion is not None or self.control is not None:
            raise ReproError(f"claim {self.name}: a claim of tier S is not judged, so it has no criterion or control")
        if not self.reason_untestable:
            raise ReproError(f"claim {self.name}: a claim of tier S says in reason_untestable what a test would need")

    def _check_judged(self):
        if self.criterion is None or self.control is None:
            raise ReproError(f"claim {self.name}: a claim of tier {self.tier} has a criterion and a control")
        if self.reason_untestable:
            raise ReproError(f"claim {self.name}: only a claim of tier S has a reason_untestable")
        if self.control.criterion == self.criterion:
            raise ReproError(f"claim {self.name}: the control is the claim's own criterion")
        if self.criterion.deterministic != (self.tier == "M"):
            kind = "deterministic" if self.tier == "M" else "statistical"
            raise ReproError(f"claim {self.name}: a claim of tier {self.tier} has a {kind} criterion")
