"""The evidence pages: every claim, what was run, and how far it reaches, as files that a browser opens."""

from repro.report.site.build import build_site
from repro.report.site.load import Result, conflicts, load_results

__all__ = ["Result", "build_site", "conflicts", "load_results"]
