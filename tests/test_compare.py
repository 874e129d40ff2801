"""What differs between two runs."""

import re

import pytest

pytest.importorskip("plotly", reason="the page borrows the style of the evidence pages, repro[pages]")

from repro.claims import Run, Runs
from repro.compare_command import Side, differences
from repro.report.record import RunFolder, no_curves, write_json
from tests.report.site_cases import HOSTILE, RESULTS, VERDICT, make_run


def _part(found, title):
    (part,) = (part for part in found if part.title == title)
    return part


def _side(path, runs, verdicts=(), **record):
    return Side(path, {"experiment": "x", "preset_name": "cpu"} | record, Runs(runs), verdicts)


def test_only_what_differs_is_listed(tmp_path):
    a = _side(
        tmp_path, [Run("a", 0, {"loss": 1.0, "same": 2.0})], preset={"train": {"steps": 3, "width": 8}}, started="1"
    )
    b = _side(
        tmp_path, [Run("a", 0, {"loss": 1.5, "same": 2.0})], preset={"train": {"steps": 4, "width": 8}}, started="1"
    )
    found = differences(a, b)
    config = _part(found, "configuration")
    assert config.rows == (("preset.train.steps", "3", "4"),) and config.same == 5
    metrics = _part(found, "metrics")
    assert metrics.rows == (("a", "loss", "1 (n = 1)", "1.5 (n = 1)", "+0.5"),) and metrics.same == 2
    assert all(not part.rows for part in differences(a, a))


def test_means_are_over_test_seeds_and_ladders_stay_apart(tmp_path):
    tuning = Run("a", 9, {"loss": 100.0}, rate=0.1, phase="tuning")
    one = [Run("a", seed, {"loss": loss}, point="best", rate=0.1) for seed, loss in enumerate((1.0, 2.0))]
    other = [Run("a", seed, {"loss": loss}, point="best", rate=0.2) for seed, loss in enumerate((1.0, 4.0))]
    rows = _part(differences(_side(tmp_path, [tuning, *one]), _side(tmp_path, other)), "metrics").rows
    assert rows == (
        ("a@best", "rate", "0.1 (n = 1)", "0.2 (n = 1)", "+0.1"),
        ("a@best", "loss", "1.5 (n = 2)", "2.5 (n = 2)", "+1"),
    )
    ladder = [Run("a", 0, {"loss": rate}, rate=rate) for rate in (0.1, 0.2)]
    part = _part(differences(_side(tmp_path, ladder), _side(tmp_path, ladder[:1])), "metrics")
    assert not part.rows and part.note == "Places 1 only in A: a at 0.2."


def test_what_diverged_is_counted_and_not_averaged(tmp_path):
    a = [Run("a", seed, {"loss": loss}) for seed, loss in enumerate((1.0, float("nan")))]
    b = [Run("a", seed, {"loss": 1.0}) for seed in (0, 1)]
    (row,) = _part(differences(_side(tmp_path, a), _side(tmp_path, b)), "metrics").rows
    assert row == ("a", "loss", "1 of 2 not finite", "1 (n = 2)", "–")


def test_a_changed_label_is_said(tmp_path, command):
    one = make_run(tmp_path / "one")
    other = make_run(tmp_path / "other", verdicts=[VERDICT | {"label": "inconclusive", "effect": 0.5}])
    code, said, _ = command("compare", one, other)
    assert code == 0 and re.search(r"K2-1 \(made up\).*supported: 1.5.*inconclusive: 0.5.*changed", said)
    assert "configuration: no difference" in said and "metrics: no difference" in said
    assert "no difference" in command("compare", one, one)[1].split("verdicts:")[1]


def test_the_page_shows_names_as_text(tmp_path, command):
    one, other = make_run(tmp_path / "one", started=HOSTILE), make_run(tmp_path / "other", experiment=HOSTILE)
    code, _, _ = command("compare", one, other, "--out", tmp_path / "page")
    page = (tmp_path / "page" / "index.html").read_text()
    assert code == 0 and "<img" not in page and "<script" not in page and "&lt;img" in page
    assert (tmp_path / "page" / "assets" / "site.css").is_file()


def test_a_run_that_is_going_has_what_it_has(tmp_path):
    from repro.compare_command import read_side

    folder = RunFolder.create(tmp_path / "run")
    write_json(folder.path / "run.json", {"schema": 1, "experiment": "x"})
    folder.write_job("001", Runs([Run("a", 0, {"loss": 1.0})]), no_curves())
    side = read_side(folder.path)
    assert len(side.runs) == 1 and side.verdicts == ()


def test_refusals(tmp_path, refused):
    run = make_run(tmp_path / "run")
    assert "holds no run.json" in refused("compare", run, tmp_path)
    (run / "runs.parquet").write_bytes(b"")
    assert "runs.parquet was edited" in refused("compare", run, RESULTS / "state-ledger-cpu")
    other = make_run(tmp_path / "other")
    assert "not an empty folder" in refused("compare", other, other, "--out", other)
