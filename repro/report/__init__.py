"""From scalars, curves and verdicts to figures, tables and pages."""

from repro.report.figures import draw, figure
from repro.report.page import write_report
from repro.report.readme_table import claims_markdown, replace_between_markers
from repro.report.rule_words import rule_words
from repro.report.specs import Curve, Dose, Effects, Heatmap, Ladder, Reference, Spec, Width
from repro.report.tables import arms_table, claims_table, ledger_table

__all__ = [
    "Curve",
    "Dose",
    "Effects",
    "Heatmap",
    "Ladder",
    "Reference",
    "Spec",
    "Width",
    "arms_table",
    "claims_markdown",
    "claims_table",
    "draw",
    "figure",
    "ledger_table",
    "replace_between_markers",
    "rule_words",
    "write_report",
]
