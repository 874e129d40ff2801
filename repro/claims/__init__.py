"""What is claimed, and how a verdict is reached. Plain Python, NumPy and SciPy."""

from repro.claims.claim import Claim, Control
from repro.claims.criterion import (
    All,
    AtLeast,
    AtMost,
    Criterion,
    Equivalent,
    Greater,
    NonInferior,
    Ratio,
    Trend,
    swapped,
)
from repro.claims.deterministic import Exact, Within
from repro.claims.experiment import Arm, Cell, Experiment, gather, rule_hash
from repro.claims.ladder import best_rate, extend_ladder
from repro.claims.ledger import LEDGER, LedgerRow, ledger, ledger_row
from repro.claims.runs import Run, Runs
from repro.claims.statistics import (
    holm,
    minimum_detectable_effect,
    paired_t_interval,
    sign_flip_p,
    slope,
    t_p,
)
from repro.claims.verdict import ALPHA, LABELS, Verdict, decide, decide_all

__all__ = [
    "ALPHA",
    "LABELS",
    "LEDGER",
    "All",
    "Arm",
    "AtLeast",
    "AtMost",
    "Cell",
    "Claim",
    "Control",
    "Criterion",
    "Equivalent",
    "Exact",
    "Experiment",
    "Greater",
    "LedgerRow",
    "NonInferior",
    "Ratio",
    "Run",
    "Runs",
    "Trend",
    "Verdict",
    "Within",
    "best_rate",
    "decide",
    "decide_all",
    "extend_ladder",
    "gather",
    "holm",
    "ledger",
    "ledger_row",
    "minimum_detectable_effect",
    "paired_t_interval",
    "rule_hash",
    "sign_flip_p",
    "slope",
    "swapped",
    "t_p",
]
