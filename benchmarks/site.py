"""How long the evidence pages take to open, and what they weigh.

    python benchmarks/site.py [--runs 200]

Builds the pages of the stored results, filled up with made-up runs to the number asked for, and opens three of them in
Debian's chromium, each in a fresh browser context from files. "Opens" is the end of the load event, all scripts run;
"drawn" is when the first figure stands. Medians of five.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
PAGES = ("index.html", "claims/K2-1.html", "claims/K3-1.html", "runs/logit-explosion-cpu.html")
TIMES = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from playwright.sync_api import sync_playwright

    from repro.report.site import build_site
    from repro.report.site.load import run_folders
    from tests.report.site_cases import many_runs

    with tempfile.TemporaryDirectory() as scratch:
        stored = run_folders([ROOT / "results"])
        made = many_runs(Path(scratch) / "runs", max(0, args.runs - len(stored)))
        started = time.perf_counter()
        pages = build_site([*stored, *made], Path(scratch) / "site")
        print(f"{len(pages)} pages of {len(stored) + len(made)} runs built in {time.perf_counter() - started:.1f} s")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name in PAGES:
                opened = [_open(browser, Path(scratch) / "site" / name) for _ in range(TIMES)]
                load, drawn, weight = (statistics.median(values) for values in zip(*opened, strict=True))
                figure = f", first figure after {drawn:.2f} s" if drawn else ""
                print(f"{name}: opens in {load:.2f} s{figure}, {weight / 1e6:.2f} MB")
            browser.close()
    return 0


def _open(browser, path: Path) -> tuple[float, float, int]:
    """Seconds to the load event, seconds to the first figure (0 without one), and bytes of all files asked for."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    started = time.perf_counter()
    page.goto(path.as_uri())
    load = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000
    drawn = 0.0
    if page.locator("[data-figure]").count():
        page.locator("[data-figure]").first.scroll_into_view_if_needed()
        page.locator("svg.main-svg").first.wait_for()
        drawn = time.perf_counter() - started
    files = {unquote(url.removeprefix("file://")) for url in asked if url.startswith("file:")}
    context.close()
    return load, drawn, sum(Path(file).stat().st_size for file in files)


if __name__ == "__main__":
    raise SystemExit(main())
