"""The report page and the README's table."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import repro.report
from repro.claims import (
    LEDGER,
    All,
    Arm,
    AtLeast,
    Criterion,
    Exact,
    Greater,
    Runs,
    Trend,
    Within,
    rule_hash,
)
from repro.errors import ReproError
from repro.report import claims_markdown, replace_between_markers, rule_words, write_report
from repro.report.markdown import code_block, escape, table

RECORD = {
    "schema": 1,
    "version": "0.1.0",
    "preset_name": "cpu",
    "corpus": {"name": "kjv", "sha256": "0123abcd", "provenance": "public domain | text", "entropy_floor": None},
    "hardware": {"platform": "cpu", "devices": 1},
    "versions": {"jax": "0.10.2"},
    "ledgers": {
        "N10": {"title": "evidence and cost", "rows": {"seeds": "8"}},
        "N1": {"title": "representation", "rows": {"activations": "float32"}},
    },
    "ledgers_by_arm": {"muon": {"N1": {"title": "representation", "rows": {"activations": "bfloat16"}}}},
    "seconds": 12.345,
}


@pytest.fixture
def page(experiment, runs, verdicts, tmp_path):
    path = tmp_path / "report.md"

    def write(record=RECORD, preset=experiment.presets["cpu"], experiment=experiment, figures=(), verdicts=verdicts):
        write_report(path, experiment, preset, record, runs, verdicts, figures)
        return path.read_text(encoding="utf-8")

    return write


def test_numbers_on_the_page_are_those_of_the_verdicts(page, experiment, verdicts):
    text = page()
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    for claim, verdict, section in zip(experiment.claims, verdicts, sections, strict=False):
        assert section.startswith(f"{escape(claim.name)}: {verdict.label}\n")
        assert escape(verdict.reason) in section and escape(claim.statement) in section
        if claim.tier != "D":
            assert "Minimum detectable" not in section
            continue
        field = dict(re.findall(r"^- \*\*(.+?)\*\*: (.+)$", section, re.MULTILINE))
        assert float(field["Effect"].split()[0]) == pytest.approx(verdict.effect, rel=5e-3)
        assert tuple(map(float, field["95 % interval"].split(" to "))) == pytest.approx(verdict.interval, rel=5e-3)
        assert int(field["n"]) == verdict.n
        assert tuple(map(float, field["p, before and after Holm"].split(", "))) == pytest.approx(
            (verdict.p, verdict.p_holm), rel=5e-3
        )
        assert float(field["Minimum detectable effect"].split()[0]) == pytest.approx(verdict.mde, rel=5e-3)
        values = [float(cell) for cell in section.split("| --- |\n")[1].split("\n")[0].strip("| ").split(" | ")]
        assert values == pytest.approx(list(verdict.per_seed.values()), rel=1e-5)
        assert field["Verdict on the control"].startswith(verdict.control_label)


def test_the_page_says_what_was_run(page, experiment):
    text = page()
    rows = set(text.splitlines())
    assert "| test_seeds | 100, 101, 102, 103, 104, 105, 106, 107 |" in rows
    for row in ("| steps | 300 |", "| corpus sha256 | 0123abcd |", "| version of jax | 0.10.2 |", "| seconds | 12.3 |"):
        assert row in rows
    assert "| corpus provenance | public domain \\| text |" in rows
    assert text.index("### N1: representation") < text.index("### N10: evidence")
    assert "| activations |  | float32 |" in rows and "| activations | muon | bfloat16 |" in rows
    assert "repro run logit_explosion --preset cpu\n" in text
    assert rule_hash(experiment, experiment.presets["cpu"]) in text
    assert "| xs | Muon | best | 0.003 | 8 |" in text


def test_the_same_page_again(page):
    assert page() == page()


def test_a_record_may_be_empty(page):
    text = page(record={})
    assert "## Verdicts" in text and "corpus" not in text and "--preset cpu" in text


def test_settings_changed_by_hand_are_listed(page, experiment):
    text = page(preset=dataclasses.replace(experiment.presets["cpu"], steps=7))
    assert "| steps | 7 | 300 |" in text
    text = page(record={}, preset=dataclasses.replace(experiment.presets["cpu"], steps=7))
    assert "not one that the experiment stores" in text


def test_a_rule_changed_after_the_data_is_said(page, experiment):
    own = rule_hash(experiment, experiment.presets["cpu"])
    assert "changed after the data" not in page(record=RECORD | {"rule_hash": own})
    assert "changed after the data" in page(record=RECORD | {"rule_hash": "00ff"})


def test_figures_are_linked_relative_to_the_page(page, tmp_path):
    text = page(figures=[tmp_path / "figures" / "max_logit.png", tmp_path / "other (1).png"])
    assert "![Largest attention logit](figures/max_logit.png)" in text and "bands reach from" in text
    assert "](other%20%281%29.png)" in text


def test_hostile_names_stay_text(page, experiment, verdicts):
    nasty = "a|b `c` <script>alert(1)</script> [x](y) *z* $q$ \\ \n# h"
    claims = (dataclasses.replace(experiment.claims[0], statement=nasty, variant=nasty), *experiment.claims[1:])
    arms = (Arm("adamw", nasty), *experiment.arms[1:])
    hostile = dataclasses.replace(experiment, claims=claims, arms=arms, title=nasty)
    own = (dataclasses.replace(verdicts[0], variant=nasty), *verdicts[1:])
    text = page(experiment=hostile, verdicts=own, record=RECORD | {"corpus": {nasty: nasty}})
    assert "<script" not in text and "\n# h" not in text and " `c`" not in text
    previous = ""
    for line in text.splitlines():
        if line.startswith("| "):
            cells = len(re.findall(r"(?<!\\)\|", line))
            assert cells == len(re.findall(r"(?<!\\)\|", previous)) or not previous.startswith("| ")
        previous = line


def test_escape():
    assert escape("max_logit of muon@best") == "max_logit of muon@best"
    assert escape("_a_ **b** ~~c~~\nd") == "\\_a\\_ \\*\\*b\\*\\* \\~\\~c\\~\\~ d"
    assert escape("<a&b>") == "&lt;a&amp;b&gt;"
    assert table(("a|",), [("b\n",)]) == "| a\\| |\n| --- |\n| b |\n"
    assert code_block("a ``` b").startswith("````\n")


def test_rules_read_out():
    assert rule_words(Greater("x", "a", "b", smallest=1.5)).startswith(
        "x of a over b, paired by seed, is above 1, and at least 1.5 to count; exact one-sided sign-flip"
    )
    assert "minus b" in rule_words(Greater("x", "a", "b", log=False))
    assert "the geometric mean of x of a is above 3" in rule_words(AtLeast("x", "a", 3, log=True))
    trend = rule_words(Trend("x", "a", "b", sizes=(("s", 1), ("m", 2), ("l", 4)), rising=False))
    assert "falls with size (s = 1, m = 2, l = 4)" in trend
    both = rule_words(All((Exact("x", "a", 1, 0.5), Within("y", "a", 0, 2))))
    assert both == "all of: (1) x is 1 to within 0.5 in every run of a; (2) y lies between 0 and 2 in every run of a"

    @dataclasses.dataclass(frozen=True)
    class Own(Criterion):
        metric: str
        kind: str = "own"

    assert rule_words(Own("x")) == "metric x, kind own"


def store(folder, verdicts, experiment="logit_explosion", preset="cpu"):
    folder.mkdir(parents=True)
    stored = {"schema": 1, "experiment": experiment, "preset": preset, "verdicts": [v.to_json() for v in verdicts]}
    (folder / "verdict.json").write_text(json.dumps(stored), encoding="utf-8")


def test_readme_table_is_in_the_order_of_the_ledger(verdicts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store(Path("results/a b"), verdicts)
    store(Path("results/gpu"), verdicts[:1], preset="gpu")
    Path("results/a b/report.md").touch()
    text = claims_markdown([Path("results/a b"), Path("results/gpu")])
    lines = text.splitlines()[2:]
    ids = [re.match(r"\| ([A-Z0-9]+-\d+)", line).group(1) for line in lines]
    assert len(lines) == 8 and ids == sorted(ids, key=list(LEDGER).index)
    first = next(line for line in lines if "(gpu)" not in line and line.startswith("| K2-1"))
    assert "| **supported** | 371 times | 341 to 402 | 8 | 0.00781 |" in first
    assert "[logit_explosion](results/a%20b/report.md) (cpu)" in first and "logit_explosion (gpu)" in text


def test_readme_table_errors(verdicts, tmp_path):
    store(tmp_path / "a", verdicts)
    store(tmp_path / "b", verdicts)
    with pytest.raises(ReproError, match="in both"):
        claims_markdown([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ReproError, match="cannot be read"):
        claims_markdown([tmp_path / "c"])
    for text, message in (("{", "is not JSON"), ("{}", "has no experiment"), ("[]", "has no experiment")):
        (tmp_path / "a" / "verdict.json").write_text(text)
        with pytest.raises(ReproError, match=message):
            claims_markdown([tmp_path / "a"])
    store(tmp_path / "d", [dataclasses.replace(verdicts[0], claim_id="XX-1")])
    with pytest.raises(ReproError, match="no claim 'XX-1'"):
        claims_markdown([tmp_path / "d"])


def test_markers():
    text = "a\n<!-- claims:begin -->\nold\n<!-- claims:end -->\nb\n"
    once = replace_between_markers(text, "| x |\n")
    assert once == "a\n<!-- claims:begin -->\n\n| x |\n\n<!-- claims:end -->\nb\n"
    assert replace_between_markers(once, "| x |\n") == once
    for broken in ("a", "<!-- claims:end --><!-- claims:begin -->", text + text):
        with pytest.raises(ReproError, match="the text needs one"):
            replace_between_markers(broken, "x")


def test_verdicts_of_other_claims_are_refused(page, verdicts):
    with pytest.raises(ReproError, match="the verdicts are those of"):
        page(verdicts=verdicts[:1])


def test_a_page_without_runs(experiment, verdicts, tmp_path):
    write_report(tmp_path / "r.md", experiment, experiment.presets["cpu"], {}, Runs(), verdicts, ())
    assert "## Test runs" not in (tmp_path / "r.md").read_text(encoding="utf-8")


def test_the_example_on_the_package_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = Path(repro.report.__file__).with_name("README.md").read_text(encoding="utf-8")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "report" / "loss.png").is_file() and (tmp_path / "report" / "report.md").is_file()
