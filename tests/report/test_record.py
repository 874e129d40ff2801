"""Run folders: written whole or not at all, locked, and refused when they are not what the verdict was derived from."""

import errno
import json
import math
import os

import polars as pl
import pytest

from repro.claims import Claim, Control, Exact, Run, Runs, decide_all
from repro.errors import ReproError
from repro.report.record import (
    SCHEMA,
    RunFolder,
    runs_from_table,
    runs_table,
    stored_verdicts,
    write_atomically,
    write_json,
    write_table,
)

RUNS = Runs(
    [
        Run("muon", 0, {"loss": 1.5, "max_logit": math.inf}, "best", "xs", 0.01),
        Run("muon", 0, {"loss": math.nan}, "0.01", "xs", 0.01, "tuning"),
        Run("check", 0, {"error": 0.0}),
    ]
)
CURVES = pl.DataFrame({"arm": ["muon"], "step": [0], "loss": [1.5]})
CLAIM = Claim(
    "K2-2", "s", "t", "", "", "M", Exact("error", "check", 0.0), Control("other", Exact("error", "check", 1.0))
)
VERDICTS = decide_all((CLAIM,), RUNS)


def made(path):
    folder = RunFolder.create(path)
    write_json(path / "run.json", {"schema": SCHEMA, "experiment": "made-up"})
    folder.write_job("001-a", RUNS, CURVES)
    folder.write_results(RUNS, CURVES)
    folder.seal({"experiment": "made-up", "verdicts": [v.to_json() for v in VERDICTS]})
    return folder


def test_runs_come_back_from_their_table():
    table = runs_table(RUNS)
    assert table.columns == ["arm", "size", "point", "phase", "rate", "seed", "error", "loss", "max_logit"]
    assert repr([*runs_from_table(table)]) == repr([*RUNS])
    assert table["error"].to_list() == [None, None, 0.0], "what was not measured is null, not NaN"


def test_a_sealed_folder_reads_back(tmp_path):
    folder = made(tmp_path / "run")
    record, verdict, runs = folder.sealed()
    assert record["experiment"] == "made-up" and stored_verdicts(verdict) == VERDICTS and len(runs) == 3
    assert folder.finished and sorted(os.listdir(folder.path)) == [
        "metrics.parquet",
        "run.json",
        "runs.parquet",
        "verdict.json",
    ]
    with open(folder.path / "verdict.json") as file:
        assert json.load(file)["files"].keys() == {"run.json", "metrics.parquet", "runs.parquet"}


@pytest.mark.parametrize("name", ["run.json", "metrics.parquet", "runs.parquet"])
def test_files_that_were_edited_or_lost(tmp_path, name):
    folder = made(tmp_path / "run")
    path = folder.path / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ReproError, match=f"{name} was edited after its verdict"):
        folder.sealed()
    path.unlink()
    with pytest.raises(ReproError, match=f"is incomplete: {name} is missing; restore it"):
        folder.sealed()


@pytest.mark.parametrize("text", ["{", "", "[1]", "{}", '{"schema": 2}', "\x00"])
def test_json_that_cannot_be_read(tmp_path, text):
    folder = made(tmp_path / "run")
    (folder.path / "verdict.json").write_text(text)
    with pytest.raises(ReproError, match="cannot be read as JSON|has schema (None|2); this version reads schema 1"):
        folder.sealed()


def test_a_verdict_that_lacks_fields_is_refused(tmp_path):
    folder = made(tmp_path / "run")
    stored = folder.read("verdict.json")
    with pytest.raises(ReproError, match="lacks or adds the fields"):
        stored_verdicts({**stored, "verdicts": [{"label": "supported"}]})
    for broken in ({"schema": 1}, {"schema": 1, "verdicts": 3}, {"schema": 1, "verdicts": ["supported"]}):
        with pytest.raises(ReproError, match="was edited|lacks or adds the fields"):
            stored_verdicts(broken)


def test_files_hashes_that_are_no_mapping(tmp_path):
    folder = made(tmp_path / "run")
    write_json(folder.path / "verdict.json", {**folder.read("verdict.json"), "files": ["run.json"]})
    with pytest.raises(ReproError, match="was edited"):
        folder.sealed()


def test_an_unfinished_folder(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(ReproError, match="holds no run.json; give the folder"):
        RunFolder.existing(folder.path)
    write_json(folder.path / "run.json", {"schema": SCHEMA})
    assert not RunFolder.existing(folder.path).finished
    with pytest.raises(ReproError, match="verdict.json is missing; continue it with `repro resume"):
        folder.sealed()


def test_an_output_folder_must_be_empty(tmp_path):
    RunFolder.create(tmp_path / "new" / "deep")
    RunFolder.create(tmp_path / "new" / "deep")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for taken in ("used", "file"):
        with pytest.raises(ReproError, match="is not an empty folder; choose another --out"):
            RunFolder.create(tmp_path / taken)
    with pytest.raises(ReproError, match="cannot be created"):
        RunFolder.create(tmp_path / "file" / "below")
    assert (tmp_path / "used" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_a_folder_is_held_once(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    with folder.locked():
        with pytest.raises(ReproError, match="is in use by another process"), RunFolder(folder.path).locked():
            pass
        with RunFolder.create(tmp_path / "other").locked():
            pass
    with RunFolder(folder.path).locked():
        assert os.listdir(folder.path) == [], "a lock leaves no file"


def test_a_job_counts_once_its_runs_are_there(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "run")
    assert folder.read_job("001-a") is None and not folder.has_job("001-a")
    replace = os.replace

    def full(source, target):
        if str(target).endswith(".runs.parquet"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_job("001-a", RUNS, CURVES)
    assert not folder.has_job("001-a") and os.listdir(folder.jobs) == ["001-a.metrics.parquet"]
    monkeypatch.setattr(os, "replace", replace)
    folder.write_job("001-a", RUNS, CURVES)
    runs, curves = folder.read_job("001-a")
    assert repr([*runs]) == repr([*RUNS]) and curves.equals(CURVES)


def test_a_damaged_job_is_named(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.write_job("001-a", RUNS, CURVES)
    path = folder.jobs / "001-a.metrics.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ReproError, match="remove both to run this job again"):
        folder.read_job("001-a")
    path.unlink()
    with pytest.raises(ReproError, match="remove both to run this job again"):
        folder.read_job("001-a")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, failing):
    path = tmp_path / "table.json"
    write_json(path, {"x": 1})

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(OSError, match="No space"):
            write_atomically(path, b"other")
    assert json.loads(path.read_text()) == {"x": 1} and os.listdir(tmp_path) == ["table.json"]


def test_numbers_that_json_has_not(tmp_path):
    write_json(tmp_path / "a.json", {"tau": math.inf, "x": math.nan})
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == {"tau": "inf", "x": "nan"}


def test_tables_of_equal_content_have_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write_table(tmp_path / name, runs_table(RUNS))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
