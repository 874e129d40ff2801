"""The evidence pages in a real browser: Debian's chromium, driven by Playwright."""

import json
import os
import shutil
from pathlib import Path

import pytest

from repro.report.site import build_site
from tests.report.site_cases import HOSTILE, RESULTS, STORED, conflicting, hostile, many_runs, stored_verdicts

# `.ci/run` installs a browser and sets this: then a missing one is a failure and no reason to skip.
REQUIRED = os.environ.get("REPRO_BROWSER_TESTS") == "required"
RUNS = 200


def _browser_or_reason() -> str:
    try:
        import axe_playwright_python  # noqa: F401
        import playwright.sync_api  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed; install repro[test]"
    return "" if shutil.which("chromium") else "no chromium on this machine; install Debian's package chromium"


REASON = _browser_or_reason()
pytestmark = pytest.mark.skipif(bool(REASON) and not REQUIRED, reason=REASON)


@pytest.fixture(scope="module")
def browser():
    assert not REASON, REASON
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A container has no sandbox for a root user; the pages are our own files.
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # a thousand small files need not outlive a loss of power
        folders = [RESULTS / name for name in (*STORED, "mup-cpu")] + conflicting(made) + [hostile(made)]
        folders += many_runs(made, RUNS - len(folders))
    out = tmp_path_factory.mktemp("site") / "site"
    build_site(folders, out)
    return out


@pytest.fixture
def visit(browser, site):
    """`visit(page, width) -> page` of a fresh browser; every message, error and request of it is checked at the end."""
    opened, said, asked = [], [], []

    def call(name, width=1440, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(120_000)  # of a machine that has much else to do
        opened.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / name).as_uri())
        page.asked = asked
        return page

    yield call
    for context in opened:
        context.close()
    assert not said
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked


def _shown(page):
    return page.locator("#every-verdict tbody tr:visible")


def test_filtering(visit):
    page = visit("index.html")
    everything = page.locator("#every-verdict tbody tr").count()
    assert _shown(page).count() == 60 and page.locator("#shown").inner_text().startswith(
        f"{everything} of {everything}"
    )
    page.locator("#more").click()
    assert _shown(page).count() == everything

    page.get_by_role("searchbox").fill("k2-1 adamw")
    rows = _shown(page)
    assert 0 < rows.count() < 20 and all("K2-1" in text for text in rows.all_inner_texts())
    page.locator("#label").select_option("contradicted")
    assert all("contradicted" in text for text in _shown(page).all_inner_texts())
    page.get_by_role("button", name="Clear").click()
    page.wait_for_function(f"document.querySelector('#shown').textContent.startsWith('{everything} of')")

    tile = page.get_by_role("button", name="inconclusive")
    tile.focus()
    page.keyboard.press("Enter")
    assert tile.get_attribute("aria-pressed") == "true"
    assert set(_shown(page).evaluate_all("rows => rows.map(row => row.dataset.label)")) == {"inconclusive"}
    page.locator("#label").select_option("")
    page.get_by_role("searchbox").fill("no such claim")
    assert _shown(page).count() == 0 and page.locator("#shown").inner_text().startswith("0 of")


def test_sorting_with_the_keyboard(visit):
    page = visit("index.html")
    head = page.get_by_role("columnheader", name="effect")
    values = "rows => rows.map(row => row.cells[4].dataset.sort)"
    assert page.get_by_role("columnheader", name="claim").get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").focus()
    for key, order in (("Enter", "ascending"), ("Space", "descending")):
        page.keyboard.press(key)
        assert head.get_attribute("aria-sort") == order
        assert page.get_by_role("columnheader", name="claim").get_attribute("aria-sort") is None
        found = page.locator("#every-verdict tbody tr").evaluate_all(values)
        numbers = [float(value) for value in found if value]
        assert numbers == sorted(numbers, reverse=order == "descending") and len(numbers) > 200
        assert not any(found[len(numbers) :])  # rows without a number stay last
    page.get_by_role("columnheader", name="system").get_by_role("button").click()
    systems = page.locator("#every-verdict tbody tr").evaluate_all("rows => rows.map(row => row.dataset.system)")
    assert systems == sorted(systems)


def test_a_claim_page_shows_the_numbers_of_its_verdicts(visit):
    for id in ("K2-1", "V3-3"):
        page = visit(f"claims/{id}.html")
        judged = [(name, v) for name in STORED for v in stored_verdicts(name) if v["claim_id"] == id]
        assert judged
        for name, verdict in judged:
            table = page.locator(f'table[data-run="{name}"][data-variant="{verdict["variant"]}"]')
            low, high = verdict["interval"] or (None, None)
            wanted = {field: verdict[field] for field in ("effect", "n", "p", "p_holm", "mde")}
            wanted |= {"interval_low": low, "interval_high": high}
            wanted |= {f"seed {seed}": value for seed, value in verdict["per_seed"].items()}
            read = table.locator("td[data-field]").evaluate_all(
                "cells => cells.map(c => [c.dataset.field, c.textContent])"
            )
            assert dict(read) == {field: "null" if value is None else str(value) for field, value in wanted.items()}, (
                id,
                verdict["variant"],
            )
            assert page.get_by_text(verdict["reason"]).count() >= 1


def test_figures_are_drawn_saved_and_told(visit, tmp_path):
    page = visit("claims/K2-1.html", color_scheme="dark")
    canvases = page.locator("[data-figure]")
    assert canvases.count() > 8
    assert all(len(words) > 40 for words in canvases.evaluate_all("all => all.map(one => one.ariaLabel)"))
    for number in range(0, canvases.count(), 5):
        canvases.nth(number).scroll_into_view_if_needed()
        canvases.nth(number).locator("svg.main-svg").first.wait_for()
    figure = page.locator("figure.plot", has_text="max logit by step, at the point best").first
    ticks = "figure => [...figure.querySelectorAll('.ytick text')].map(t => t.textContent)"
    assert {"10", "100"} & set(figure.evaluate(ticks)) and not {"2", "3", "4", "6", "7"} & set(figure.evaluate(ticks))
    for kind, begins in (("PNG", b"\x89PNG"), ("SVG", b"<svg")):
        with page.expect_download() as download:
            figure.get_by_role("button", name=kind).click()
        download.value.save_as(tmp_path / kind)
        assert (tmp_path / kind).read_bytes().startswith(begins)
    figure.get_by_text("The numbers as a table").click()
    rows = figure.locator("tbody tr")
    csv = Path(page.url.removeprefix("file://")).parent / figure.get_by_role("link", name="CSV").get_attribute("href")
    assert rows.count() == len(csv.read_text().splitlines()) - 1 > 50
    # A black line is white on a dark page, and dark again on light paper.
    curve = "figure => [...figure.querySelectorAll('path.js-line')].map(p => getComputedStyle(p).stroke)"
    dark = figure.evaluate(curve)
    page.emulate_media(color_scheme="light")
    page.wait_for_timeout(200)
    assert figure.evaluate(curve) != dark


def test_hostile_names_are_text(visit):
    for name in ("index.html", "claims/S-9.html", "runs/b-onclick-x.html"):
        page = visit(name)
        assert page.evaluate("window.pwned") is None and page.locator("main img").count() == 0
        assert HOSTILE.replace("&amp;", "&amp;") in page.locator("main").evaluate("main => main.textContent")


def test_pages_fit_a_phone_and_weigh_little(visit, site):
    for name in ("index.html", "claims/K2-1.html", "runs/accumulation-cpu.html", "runs/b-onclick-x.html"):
        page = visit(name, width=360)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
        if name.startswith("claims"):
            page.locator("[data-figure]").first.scroll_into_view_if_needed()
            page.locator("svg.main-svg").first.wait_for()
            assert any(url.endswith("plotly.min.js") for url in page.asked)
        files = {Path(url.removeprefix("file://")) for url in page.asked if url.startswith("file:")}
        assert sum(file.stat().st_size for file in files) < 6e6, name
        page.asked.clear()
    overview = json.loads(
        visit("index.html").evaluate("JSON.stringify([document.querySelectorAll('#runs ~ * tbody tr').length])")
    )
    assert overview == [RUNS] and len(list((site / "claims").glob("*.html"))) == 70


def test_a_title_longer_than_its_axis_goes_on_in_the_next_line(visit):
    page = visit("claims/S-1.html", width=360)
    canvas = page.locator('[data-figure$="effects-1"]').first
    canvas.scroll_into_view_if_needed()
    canvas.locator("svg.main-svg").first.wait_for()
    outside = """canvas => { const box = canvas.getBoundingClientRect();
        return [...canvas.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()])
            .filter(([, at]) => at.width && (at.left < box.left - 1 || at.right > box.right + 1)).map(([words]) => words);
    }"""
    assert canvas.locator(".xtitle tspan").count() > 1 and canvas.evaluate(outside) == []


@pytest.mark.parametrize("width", [1440, 390])
def test_labels_of_ticks_keep_apart_within_a_decade(visit, width):
    page = visit("claims/O-6.html", width=width)
    gaps = """canvas => { const at = [...canvas.querySelectorAll(".xtick text")].map(text => text.getBoundingClientRect());
        at.sort((a, b) => a.left - b.left);
        return at.slice(1).map((box, i) => box.left - at[i].right);
    }"""
    ladders = page.locator('[data-figure*="rates"]')
    assert ladders.count() == 3
    for canvas in ladders.all():
        canvas.scroll_into_view_if_needed()
        canvas.locator("svg.main-svg").first.wait_for()
        found = canvas.evaluate(gaps)
        assert found and min(found) > 3


def test_a_link_into_a_folded_verdict_opens_it(visit):
    page = visit("index.html")
    page.get_by_role("searchbox").fill("K2-1 equal rate")
    _shown(page).first.get_by_role("link").first.click()
    part = page.locator("article.verdict:target")
    assert part.locator("> details").get_attribute("open") is not None
    assert part.get_by_text("What would change the verdict").is_visible()


def test_axe_finds_nothing_that_a_screen_reader_could_not_use(visit):
    from axe_playwright_python.sync_playwright import Axe

    # Its preloading would fetch style sheets, which files may not; only what fails is worked out in full.
    options = {"preload": False, "resultTypes": ["violations"]}

    def violations(page):
        return [(v["id"], v["nodes"][0]["html"]) for v in Axe().run(page, options=options).response["violations"]]

    for name, scheme in (("index.html", "dark"), ("claims/V3-3.html", "light")):
        page = visit(name, color_scheme=scheme)
        # One row of a long table is like another.
        page.evaluate("document.querySelectorAll('tbody tr:nth-child(n + 9)').forEach(row => row.remove())")
        assert violations(page) == [], name
    page.locator("h1").evaluate("heading => heading.style.color = '#999999'")
    assert [id for id, _ in violations(page)] == ["color-contrast"]
