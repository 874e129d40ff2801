"""The evidence pages as files: what is in them, what they link to, and what they refuse."""

import ast
import dataclasses
import html.parser
import json
import re
import shutil
from urllib.parse import unquote

import pytest

pytest.importorskip("plotly", reason="the pages need repro[pages]")
pytest.importorskip("jinja2", reason="the pages need repro[pages]")

from repro import catalogue
from repro.claims import (
    LEDGER,
    All,
    AtLeast,
    AtMost,
    Claim,
    Control,
    Greater,
    NonInferior,
    Ratio,
    Trend,
    Verdict,
    decide_all,
    swapped,
)
from repro.claims.runs import Run, Runs
from repro.errors import ReproError
from repro.report.rule_words import parts
from repro.report.site import build_site, conflicts, load_results
from repro.report.site.build import Judged
from repro.report.site.claim_plots import by_size, cut
from repro.report.site.definitions import definitions
from repro.report.site.matrix import COLUMNS, SUBJECTS, outside, rows
from repro.report.site.plot import Plot, add_level, text
from repro.report.site.spec_plots import _caption
from repro.report.site.words import seeds_needed, what_would_change
from repro.report.specs import Dose, Width
from tests.report.site_cases import HOSTILE, RESULTS, STORED, VERDICT, conflicting, hostile, make_run


class _Page(html.parser.HTMLParser):
    """What a test asks of a page: ids, links, and elements with their attributes."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.elements = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.elements.append((tag, attrs))
        if "id" in attrs:
            assert attrs["id"] not in self.ids, attrs["id"]
            self.ids.add(attrs["id"])
        self.links += [attrs[name] for name in ("href", "src", "data-src") if attrs.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Pages of one stored run with training, one without, a conflict, and hostile names: path -> parsed page."""
    made = tmp_path_factory.mktemp("runs")
    folders = [RESULTS / STORED[0], RESULTS / STORED[2], *conflicting(made), hostile(made)]
    out = tmp_path_factory.mktemp("site") / "site"
    build_site(folders, out)
    return out, {path: _Page(path) for path in out.rglob("*.html")}


def test_every_link_resolves_inside_the_site(site):
    out, pages = site
    for path, page in pages.items():
        for link in page.links:
            if link == "data:,":
                continue
            assert "://" not in link and not link.startswith(("/", "javascript:")), (path, link)
            file, _, anchor = link.partition("#")
            target = (path.parent / unquote(file)).resolve() if file else path
            assert target.is_file() and target.is_relative_to(out.resolve()), (path, link)
            if anchor:
                assert unquote(anchor) in pages[out / target.relative_to(out.resolve())].ids, (path, link)


def test_pages_can_be_read_without_seeing_them(site):
    for path, page in site[1].items():
        tags = [tag for tag, _ in page.elements]
        assert [tags.count(tag) for tag in ("main", "header", "footer", "h1")] == [1, 1, 1, 1], path
        assert ("html", {"lang": "en"}) in page.elements and "nav" in tags
        assert all("scope" in attrs for tag, attrs in page.elements if tag == "th"), path
        assert all(attrs.get("aria-label") for _, attrs in page.elements if attrs.get("role") in ("img", "search"))
        regions = [attrs for _, attrs in page.elements if "scroll" in attrs.get("class", "").split()]
        assert all(
            "tabindex" in r and r["role"] == "group" and (r.get("aria-label") or r["aria-labelledby"] in page.ids)
            for r in regions
        ), path
        levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h\d", tag)]
        assert all(later <= before + 1 for before, later in zip(levels, levels[1:], strict=False)), (path, levels)


def test_there_is_a_page_for_every_claim_and_run(site):
    out, _ = site
    assert {path.stem for path in (out / "claims").glob("*.html")} == set(LEDGER)
    assert {path.stem for path in (out / "runs").glob("*.html")} == {
        STORED[0],
        STORED[2],
        "first",
        "second",
        "b-onclick-x",
    }
    assert "Nothing in these results runs it yet" in (out / "claims" / "Q-1.html").read_text()
    overview = (out / "index.html").read_text()
    assert 'data-label="not run" data-system="Quantisation after and around training"' in overview


def test_a_claim_page_says_all_that_is_known(site):
    text = (site[0] / "claims" / "K2-1.html").read_text()
    for needed in (
        "9B/53B, &gt; 1000", "Kimi K2 (arXiv 2507.20534), section 2.1", "Definition", "Computed by", "Pinned by",
        "Rule, fixed beforehand", "Hash of the rule", "unchanged since the run", "Control, which must not pass",
        "What the control did", "What would change the verdict", "Ledgers N1 to N10", "N6 update",
        "N10 evidence and cost", "repro run logit-explosion --preset cpu", "15 min on 2 CPU cores", "Muon + QK RMSNorm",
    ):  # fmt: skip
        assert needed in text, needed


def test_markup_in_names_stays_text(site):
    out, pages = site
    for path, page in pages.items():
        assert 'onerror="window.pwned' not in path.read_text() and "{{" not in path.read_text().replace("{{ 7*7 }}", "")
        assert not any("onerror" in attrs or "onclick" in attrs for _, attrs in page.elements), path
    shown = (out / "runs" / "b-onclick-x.html").read_text()
    assert "&lt;/script&gt;&lt;script&gt;window.pwned=1" in shown and "{{ 7*7 }}" in shown


def test_markup_in_figures_stays_text():
    plot = Plot(
        "x", HOSTILE, HOSTILE, HOSTILE, [{"name": text(HOSTILE), "y": [1.0]}], {}, (HOSTILE,), [(HOSTILE, float("nan"))]
    )
    script = plot.script()
    assert "<" not in script and ">" not in script and "&lt;img" in script
    value = json.loads(script.partition('["x"]=')[2].rstrip(";\n"))
    assert value["rows"] == [[HOSTILE, "nan"]]
    assert plot.csv().splitlines()[0].startswith('"<img src=x')


def test_two_rules_for_one_claim_are_shown_side_by_side(site, tmp_path):
    out, _ = site
    page = (out / "claims" / "K2-1.html").read_text()
    assert page.count("The results are not merged.") == 2 and "ffffffffffff" in page and "ssssssssssss" in page
    assert "Conflicts of rules" in (out / "index.html").read_text() and "conflict of rules" in page
    same = [make_run(tmp_path / name) for name in ("one", "two")]
    assert conflicts(load_results(same)) == {}
    assert list(conflicts(load_results(conflicting(tmp_path)))) == [("K2-1 (made up)", "elsewhere")]


def test_a_conflict_says_whether_the_rules_differ_or_only_the_presets(tmp_path):
    folders = [RESULTS / f"second-moment-lag-{preset}" for preset in ("cpu", "cpu-sizes")]
    results = load_results(folders)
    found = conflicts(results)
    assert ("O-2 (memory)", "second-moment-lag") in found
    (verdict,) = (verdict for verdict in results[0].verdicts if verdict.variant == "memory")
    judged = Judged(results[0], verdict, tuple(results))
    assert judged.one_rule and "widths is 64 (cpu) and 16, 256 (cpu-sizes)" in judged.why
    build_site(folders, tmp_path / "site")
    page = (tmp_path / "site" / "claims" / "O-2.html").read_text()
    assert "conflict of presets" in page and "conflict of rules" not in page and "The results are not merged." in page

    claim = results[1].claims["O-2 (memory)"]
    stricter = dataclasses.replace(claim, criterion=dataclasses.replace(claim.criterion, value=1.0))
    rule = dataclasses.replace(results[1], claims=results[1].claims | {"O-2 (memory)": stricter})
    changed = dataclasses.replace(results[1], rule_now="1" * 64)
    unknown = dataclasses.replace(results[1], claims={})
    for other, said in ((rule, "The rules differ. cpu: "), (changed, "cannot say"), (unknown, "cannot say")):
        judged = Judged(results[0], verdict, (results[0], other))
        assert not judged.one_rule and said in judged.why


def test_a_rule_that_changed_after_the_data_is_named(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(RESULTS / "state-ledger-cpu", folder)
    for name in ("run.json", "verdict.json"):
        stored = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(stored | {"rule_hash": "1" * 64}))
    from repro.report.record import RunFolder

    record = json.loads((folder / "verdict.json").read_text())
    RunFolder(folder).seal({name: value for name, value in record.items() if name not in ("schema", "files")})
    (result,) = load_results([folder])
    assert result.changed_after and not load_results([RESULTS / "state-ledger-cpu"])[0].changed_after
    build_site([folder], tmp_path / "site")
    assert "The rule was changed after the data" in (tmp_path / "site" / "claims" / "V3-7.html").read_text()


def _edit(folder, name, **fields):
    stored = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(stored | fields))


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda run: _edit(run, "run.json", started="2020-01-01"), "run.json was edited"),
        (lambda run: _edit(run, "verdict.json", schema=2), "verdict.json has schema 2"),
        (lambda run: (run / "runs.parquet").unlink(), "runs.parquet is missing"),
        (lambda run: (run / "verdict.json").unlink(), "verdict.json is missing"),
        (lambda run: (run / "verdict.json").write_text("{"), "verdict.json cannot be read as JSON"),
        (lambda run: _edit(run, "verdict.json", rule_hash="1" * 64), "not of one run"),
        (lambda run: _edit(run, "verdict.json", verdicts=[VERDICT | {"claim_id": "K2-99"}]), "no claim 'K2-99'"),
        (lambda run: _edit(run, "verdict.json", verdicts=[VERDICT | {"label": "true"}]), "'true' is not a label"),
    ],
)  # fmt: skip
def test_results_that_cannot_be_trusted_are_refused_by_name(tmp_path, spoil, said):
    run = make_run(tmp_path / "run")
    spoil(run)
    with pytest.raises(ReproError, match=said) as error:
        build_site([run], tmp_path / "site")
    assert not (tmp_path / "site").exists() and "\n" not in str(error.value)


def test_the_command_refuses_what_it_cannot_use(tmp_path, refused):
    (tmp_path / "empty").mkdir()
    assert "holds no run" in refused("report", tmp_path / "empty", "--out", tmp_path / "site")
    run = make_run(tmp_path / "run")
    assert "other than evidence pages" in refused("report", run, "--out", run)
    assert "which run folder" in refused("report")


def test_results_are_those_of_the_installation_or_of_the_working_directory(tmp_path, command, refused, monkeypatch):
    monkeypatch.setattr(catalogue, "shipped", lambda: tmp_path / "site-packages" / "experiments")
    monkeypatch.chdir(tmp_path)
    assert "neither this installation nor the working directory" in refused("report", "--out", tmp_path / "site")
    shutil.copytree(RESULTS / STORED[-1], tmp_path / "results" / STORED[-1])
    code, said, _ = command("report", "--out", tmp_path / "site")
    assert code == 0 and "pages written" in said


def test_pages_are_replaced_by_the_next_ones(tmp_path, command):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    code, said, _ = command("report", one, "--out", tmp_path / "site")
    assert code == 0 and "open" in said
    command("report", other, "--out", tmp_path / "site")
    assert [path.stem for path in (tmp_path / "site" / "runs").iterdir()] == ["other"]


def test_a_run_that_is_going_is_shown_only_when_served(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "verdict.json").unlink()
    build_site([run], tmp_path / "site", unfinished=True, live=True)
    page = (tmp_path / "site" / "runs" / "run.html").read_text()
    assert "still going" in page and 'data-live="../version.txt"' in page


def test_the_matrix_holds_the_claims_of_its_systems_once():
    ids = [id for _, row in SUBJECTS for id in row]
    assert sorted(ids) == sorted(id for id in LEDGER if id.split("-")[0] in COLUMNS)
    assert sorted(id for _, cells in rows() for cell in cells for id in cell) == sorted(ids)
    assert set(outside(LEDGER)) | set(ids) == set(LEDGER)


def test_definitions_name_tests_and_code_that_exist():

    root = RESULTS.parent
    for definition in definitions().values():
        assert definition.equation and definition.code and definition.tests, definition.id
        for name in definition.tests:
            file, _, test = name.partition("::")
            tree = ast.parse((root / file).read_text())
            assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name
        for name in definition.code:
            module, _, attribute = name.rpartition(".")
            text = (root / f"{module.replace('.', '/')}.py").read_text()
            assert re.search(rf"^(async )?(def|class) {attribute}\b", text, re.M), name


def test_every_claim_with_a_stored_verdict_has_a_definition():
    judged = {
        v["claim_id"] for path in RESULTS.glob("*/verdict.json") for v in json.loads(path.read_text())["verdicts"]
    }
    assert judged <= set(definitions())


def _decided(rule, values, control=None):
    claim = Claim("K2-1", "s", "s", "", "", "D", rule, Control("c", control or swapped(rule)))
    runs = Runs(Run(arm, seed, {"loss": v}) for arm, column in values.items() for seed, v in enumerate(column))
    return claim, decide_all([claim], runs)[0]


def test_what_would_change_a_verdict_follows_from_its_rule():
    rule = Greater("loss", "a", "b", log=False, smallest=0.5)
    claim, verdict = _decided(rule, {"a": [2.0, 2.1, 1.9, 2.2, 2.0, 2.1, 1.8, 2.0], "b": [1.0] * 8})
    first, smallest, control = what_would_change(claim, verdict)
    assert verdict.label == "supported" and "reaches 0 (its nearer end is 0.9" in first
    assert "below 0.5" in smallest and "came out contradicted" in control
    claim, verdict = _decided(rule, {"a": [2.0, 0.1, 1.9, 0.2, 2.0, 2.1, 0.8, 2.0], "b": [1.0] * 8})
    assert verdict.label == "inconclusive" and "about" in what_would_change(claim, verdict)[1]
    between = lambda arm: All((AtLeast("loss", arm, 0.5), AtMost("loss", arm, 8.5)))
    claim, verdict = _decided(between("a"), {"a": [2.0, 2.1] * 4, "b": [9.0] * 8}, between("b"))
    assert verdict.label == "supported" and "reaches 0.5 or 8.5 (" in what_would_change(claim, verdict)[0]
    # "a over b" names all that "a" does: the comparison with `b` decides, and its interval reaches 1.
    over = All((AtLeast("loss", "a", 0.5), Greater("loss", "a", "b", log=True)))
    claim, verdict = _decided(
        over, {"a": [2.0, 0.7, 1.9, 0.8, 2.0, 2.1, 0.8, 2.0], "b": [1.0] * 8}, AtLeast("loss", "b", 3.0)
    )
    assert verdict.label == "inconclusive" and "on one side of 1; it is" in what_would_change(claim, verdict)[0]


def test_what_seeds_are_judged_by_has_words():
    """The axis of an effect says what it is, and its unit; ratios need none."""
    without = set()
    for name in catalogue.names():
        experiment = catalogue.load(name)
        labelled = {getattr(spec, "metric", None) for spec in experiment.figures} | set(experiment.words)
        for preset in experiment.presets.values():
            for claim in experiment.claims_for(preset):
                rules = parts(claim.criterion) if claim.tier == "D" else ()
                ratio = lambda rule: isinstance(rule, Ratio) or (isinstance(rule, Greater | Trend) and rule.log)
                on_axis = {rule.metric for rule in rules if not ratio(rule)}
                without |= {(name, metric) for metric in on_axis - labelled}
    assert without == set()


def test_seeds_needed_scale_as_the_square():
    verdict = Verdict(
        "inconclusive", 0.5, (-0.5, 1.5), 8, 0.2, 1.0, "", "difference", 0.2, {0: 1.0}, "", "", "K2-1", "", "loss"
    )
    assert seeds_needed(Greater("loss", "a", "b", log=False), verdict) == 32
    assert seeds_needed(NonInferior("loss", "a", "b", margin=0.75), verdict) == 128
    assert seeds_needed(NonInferior("loss", "a", "b", margin=0.25), verdict) is None


def _luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """WCAG 2.2, contrast ratio."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_words_stand_out_from_the_page_in_both_schemes():
    from importlib import resources

    css = resources.files("repro.report.site").joinpath("assets/site.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in css.split("* { box-sizing")[0].split("@media")
    )
    assert contrast("#777777", "#ffffff") < 4.5 < contrast("#767676", "#ffffff")
    for scheme in (light, light | dark):
        for ink in ("ink", "muted", "link", "good", "bad", "weak", "plain"):
            for paper in ("paper", "soft"):
                assert contrast(scheme[ink], scheme[paper]) >= 4.5, (ink, paper)
        assert contrast(scheme["focus"], scheme["paper"]) >= 3 and contrast(scheme["ink"], scheme["warn"]) >= 4.5


def test_a_claim_whose_numbers_no_figure_shows_has_the_figures_of_its_run(tmp_path):
    build_site([RESULTS / "weight-decay-cpu"], tmp_path / "site")
    page = _Page(tmp_path / "site" / "claims" / "O-1.html")
    assert 0 < sum("data-figure" in attrs for _, attrs in page.elements) <= 4


def test_a_long_name_keeps_what_tells_it_from_the_others():
    names = [f"Muon against AdamW, each at its best rate, w{width}" for width in (32, 64, 128)]
    assert len({cut(name) for name in names}) == 3 and max(len(cut(name)) for name in names) == 42
    assert cut("growth at the best rate") == "growth at the best rate"


def test_a_caption_names_a_metric_as_its_axis_does():
    dose = Dose("d", "kept_share", "Kept: by step size", "step", "share kept", (("a", 1.0),))
    assert _caption(dose).startswith("Share kept against step. Lines join means")
    width = Width(
        "w", "max_logit", "muon@best", "adamw@best", "Logits", "ratio of logits", (("xs", 64.0), ("w128", 128.0))
    )
    assert _caption(width).startswith("Ratio of logits against model width; dots are test seeds")


def test_labels_of_reference_lines_keep_apart():
    data, layout = [{"x": [1.0], "y": [2.0]}], {}
    for value in (0.9, 1.0, 1.1):
        add_level(data, layout, value, f"at {value}", vertical=True)
    assert [note["yshift"] for note in layout["annotations"]] == [0, 14, 28]
    layout = {}
    for value in (0.0, 0.1, -0.1):
        add_level(data, layout, value, f"at {value}")
    assert {note["y"]: note["yanchor"] for note in layout["annotations"]} == {0.0: "bottom", 0.1: "bottom", -0.1: "top"}


def test_one_test_at_several_sizes_is_a_trend_and_different_tests_of_a_metric_are_none():
    def trends(names, claim):
        found = load_results([RESULTS / name for name in names])
        return list(by_size([(result, v) for result in found for v in result.verdicts if v.claim_id == claim]))

    (plot,) = trends(["logit-explosion-cpu-sizes"], "S-7")
    widths = {row[0] for row in plot.rows}
    assert any("lines" in trace["mode"] for trace in plot.data if trace.get("name")) == (len(widths) > 2)
    (two, *_) = trends(["low-precision-updates-cpu"], "FP-1")
    assert len({row[0] for row in two.rows}) == 2 and not any("lines" in trace["mode"] for trace in two.data)
    # Both judge the range of tokens, of 16 layers at width 32 and of a memorised text at width 64.
    assert trends(["block-dgrad-cpu-deep", "block-dgrad-cpu-memorised"], "V3-2") == []


def test_headings_break_between_words_and_stay_text():
    from repro.report.site.build import whole

    assert whole("scale, 2-D weights") == 'scale, <span class="whole">2-D</span> weights'
    assert whole("<b>Post-LN</b>") == '&lt;b&gt;<span class="whole">Post-LN</span>&lt;/b&gt;'
    assert whole("loss-scaled FP8") == "loss-scaled FP8"
