"""The pages say what is so."""

import re
from pathlib import Path

from repro import catalogue
from repro.cli import main

ROOT = Path(__file__).parent.parent


def test_the_example_of_a_new_claim_is_short_and_runs(tmp_path, monkeypatch, capsys, quick_compile):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-claim.md").read_text(), re.S)[1]
    assert len(code.splitlines()) < 60
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "decay_and_logits.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert {"decay-and-logits", "logit-explosion"} <= set(catalogue.names())
    assert main(["run", "decay-and-logits", "--preset", "smoke", "--train.steps", "4"]) == 0
    assert "K2-1 (decay)" in capsys.readouterr().out
    assert main(["verdict", "runs/decay-and-logits-smoke", "--check"]) == 0


def test_the_example_that_only_computes_is_short_and_runs(tmp_path, monkeypatch, capsys, quick_compile):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-claim.md").read_text(), re.S)[1]
    assert len(code.splitlines()) < 40
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "outlier_next_door.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "outlier-next-door", "--preset", "smoke"]) == 0
    assert "FP-5 (next door)" in capsys.readouterr().out
    assert main(["verdict", "runs/outlier-next-door-smoke", "--check"]) == 0
    assert {p.stem for p in (tmp_path / "runs/outlier-next-door-smoke/figures").iterdir()} >= {"dose", "heat"}


def test_installing_more_does_not_leave_the_clone():
    """A plain `pip install .` would put a copy without results in place of the clone."""
    installs = re.findall(r"pip install [^&\n]*", (ROOT / "README.md").read_text())
    own = [words for words in installs if re.search(r" '?\.(\[|'|$| )", words.strip())]
    assert len(own) >= 3 and all(" -e " in words for words in own), own


def test_relative_links_lead_somewhere():
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("repro/*/README.md"),
        *ROOT.glob("results/*/report.md"),
    ]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
