"""A run from its plan to its verdicts: what it leaves, that it can be repeated, and that it can be interrupted."""

import errno
import functools
import json
import os
import re
import resource
import shutil
import socket
import struct
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from tensorboardX.proto.event_pb2 import Event

import repro.runner as runner
from repro.data import load_corpus
from repro.report import record
from repro.report.store import store
from repro.train import train

pytestmark = pytest.mark.usefixtures("quick_compile")
TOY = Path(__file__).parent / "toy"


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())


def events(path):
    """(step, tag, value) of a TensorBoard file, without the time of day."""
    data, found = Path(path).read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[12 + length + 4 :]
    return found


def same_results(a, b):
    """Everything that must not depend on the attempt, compared exactly."""
    assert files(a) == files(b)
    for name in ("metrics.parquet", "runs.parquet"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    verdicts = [json.loads((folder / "verdict.json").read_text()) for folder in (a, b)]
    for verdict in verdicts:
        del verdict["files"]["run.json"]  # it holds the seconds that the run took
    assert verdicts[0] == verdicts[1]
    for name in files(a):
        if name.startswith("tensorboard"):
            assert events(a / name) == events(b / name), name
        if name.endswith(".png"):
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


def test_what_a_run_leaves(toy_run):
    assert files(toy_run) == [
        "figures/effects.png", "figures/loss.png", "metrics.parquet", "report.md", "run.json", "runs.parquet",
        "tensorboard/test/decayed/custom-best-0.02/events.out.tfevents.0.repro",
        "tensorboard/test/plain/custom-best-0.02/events.out.tfevents.0.repro",
        "tensorboard/tuning/plain/custom-tuning-0.01/events.out.tfevents.0.repro",
        "tensorboard/tuning/plain/custom-tuning-0.02/events.out.tfevents.0.repro",
        "verdict.json",
    ]  # fmt: skip
    assert all((toy_run / name).stat().st_size > 100 for name in files(toy_run))
    about = json.loads((toy_run / "run.json").read_text())
    assert about["preset"]["train"]["steps"] == 30 and about["corpus"]["sha256"] == load_corpus("kjv").sha256
    assert list(about["ledgers"]) == [f"N{i}" for i in range(1, 11)] and about["ledgers_by_arm"].keys() == {
        "plain",
        "decayed",
    }
    assert "9, coupled" in about["ledgers_by_arm"]["decayed"]["N6"]["rows"]["weight decay"]
    assert about["seconds"] > 0 and about["changed"] == [] and about["rule_hash"]


def test_the_tables_hold_what_was_trained(toy_run, toy):
    curves, runs = pl.read_parquet(toy_run / "metrics.parquet"), pl.read_parquet(toy_run / "runs.parquet")
    assert len(curves) == 8 * 30 and len(runs) == 8 + 2
    assert curves.select("arm", "phase", "seed", "rate", "step").is_duplicated().sum() == 0
    arm = curves.filter(arm="decayed", seed=1).sort("step")
    assert arm["step"].to_list() == list(range(30)) and arm["head_logits"].list.len().unique().to_list() == [2]
    (config,) = {runner.lane_config(toy, toy.presets["smoke"], c) for c in [next(toy.plan(toy.presets["smoke"]))[0]]}
    assert (config.learning_rate, config.optimizer, config.weight_decay) == (0.01, "adamw", 0.0)
    row = runs.filter(arm="decayed", seed=1).row(0, named=True)
    assert row["initial_loss"] == pytest.approx(arm["loss"][0]) and row["peak_max_logit"] == pytest.approx(
        arm["max_logit"].max()
    )
    assert not np.allclose(arm["loss"], curves.filter(arm="plain", seed=1, phase="test").sort("step")["loss"])


def test_tensorboard_has_every_seed_of_a_cell_that_lies_in_two_jobs(toy_run):
    curves = pl.read_parquet(toy_run / "metrics.parquet")
    for arm in ("plain", "decayed"):
        (path,) = (toy_run / "tensorboard/test" / arm).rglob("events*")
        found = {(step, tag): value for step, tag, value in events(path)}
        loss = (
            curves.filter(arm=arm, phase="test")
            .group_by("step")
            .agg(pl.col("loss").median().alias("m"), pl.col("loss").max().alias("top"))
        )
        for step, median, top in loss.iter_rows():
            assert found[step, "loss/loss/median"] == pytest.approx(median)
            assert found[step, "loss/loss/max"] == pytest.approx(top)


def test_the_tables_name_no_machine_path_or_date(toy_run):
    for name in ("metrics.parquet", "runs.parquet"):
        table = pl.read_parquet(toy_run / name)
        strings = {str(v) for c in table.columns if table[c].dtype == pl.String for v in table[c].unique()}
        words = {*table.columns, *strings}
        for private in (socket.gethostname(), str(Path.home()), str(toy_run.parent), time.strftime("%Y-%m-%d")):
            assert not any(word == private or (len(private) > 4 and private in word) for word in words)
        for path in (str(Path.home()), str(toy_run.parent)):
            assert path.encode() not in (toy_run / name).read_bytes()
    about = (toy_run / "run.json").read_text()
    assert str(toy_run.parent) not in about and str(Path.home()) not in about


def test_two_runs_are_equal(toy_run, toy, command, tmp_path):
    assert command("run", "race", "--preset", "smoke", "--out", tmp_path / "again")[0] == 0
    same_results(toy_run, tmp_path / "again")


def test_other_seeds_are_not_equal(toy_run, toy, command, tmp_path):
    assert command("run", "race", "--preset", "smoke", "--seeds", 2, "--out", tmp_path / "two")[0] == 0
    with pytest.raises(AssertionError):
        same_results(toy_run, tmp_path / "two")
    about = json.loads((tmp_path / "two" / "run.json").read_text())
    assert about["changed"] == ["test_seeds"] and about["preset"]["evidence"] is False


class Stop(Exception):
    pass


@pytest.mark.parametrize(("job", "step"), [(1, 10), (1, 30), (2, 20), (3, 30), (None, None)])
def test_a_run_that_was_interrupted_ends_like_one_that_was_not(toy_run, toy, command, tmp_path, monkeypatch, job, step):
    """Stopped within a job, after its first checkpoint or before, and (None) after the last job, before the figures."""
    folder, now = tmp_path / "run", []
    with monkeypatch.context() as patch:
        patch.setattr(runner, "train", functools.partial(train, checkpoint_seconds=0))
        if job is None:
            patch.setattr(runner, "draw", lambda *args: (_ for _ in ()).throw(Stop()))

        def progress(self, progress):
            if (now[-1], progress.step) == (job, step):
                raise Stop

        watch = type(
            "Stopping", (runner.Watcher,), {"job": lambda self, job, number: now.append(number), "progress": progress}
        )
        opened = record.RunFolder.create(folder)
        with pytest.raises(Stop), opened.locked():
            runner.execute(toy, "smoke", toy.presets["smoke"], opened, watcher=watch())
    assert not (folder / "verdict.json").exists()
    code, out, err = command("resume", folder)
    assert code == 0 and err == "" and out.count("done before") == (3 if job is None else job - 1)
    same_results(toy_run, folder)


def test_killed_between_the_events_and_the_job(toy_run, toy, command, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(record.RunFolder, "write_job", lambda *args: (_ for _ in ()).throw(Stop()))
        opened = record.RunFolder.create(tmp_path / "run")
        with pytest.raises(Stop), opened.locked():
            runner.execute(toy, "smoke", toy.presets["smoke"], opened)
    assert command("resume", tmp_path / "run")[0] == 0
    same_results(toy_run, tmp_path / "run")


def test_resume_of_a_finished_run_prints_its_verdict(toy_run, toy, command):
    before = {name: (toy_run / name).read_bytes() for name in files(toy_run)}
    code, out, err = command("resume", toy_run)
    assert code == 0 and err == "" and "Decay costs loss." in out and "inconclusive" in out
    assert before == {name: (toy_run / name).read_bytes() for name in files(toy_run)}


def test_resume_without_any_progress_starts_at_the_first_step(toy_run, toy, command, tmp_path):
    (tmp_path / "run").mkdir()
    about = json.loads((toy_run / "run.json").read_text())
    del about["seconds"]
    record.write_json(tmp_path / "run" / "run.json", about)
    assert command("resume", tmp_path / "run")[0] == 0
    same_results(toy_run, tmp_path / "run")


@pytest.mark.parametrize("finished", [True, False])
def test_rules_that_changed_are_refused(toy_run, toy, refused, tmp_path, monkeypatch, finished):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    if not finished:
        (folder / "verdict.json").unlink()
    source = (Path("experiments") / "race.py").read_text()
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "race.py").write_text(source.replace('"weight_decay": 9.0', '"weight_decay": 8.0'))
    monkeypatch.chdir(tmp_path)
    assert "claims, arms or preset of race have changed since" in refused("resume", folder)
    if finished:
        for words in (["verdict"], ["verdict", "--check"], ["report"]):
            assert "have changed since" in refused(*words, folder)


def test_verdicts_are_derived_again(toy_run, toy, command, refused, tmp_path):
    code, out, _ = command("verdict", "--check", toy_run, toy_run)
    assert code == 0 and out.count("2 verdicts derived again, all as stored.") == 2
    assert "Decay costs loss." in command("verdict", toy_run)[1]
    assert "takes one folder" in refused("verdict", toy_run, toy_run)
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    stored = json.loads((folder / "verdict.json").read_text())
    for change in ({"label": "supported"}, {"effect": 9.0}, {"per_seed": {"0": 1.0}}):
        record.write_json(
            folder / "verdict.json",
            {**stored, "verdicts": [{**stored["verdicts"][0], **change}, stored["verdicts"][1]]},
        )
        said = refused("verdict", "--check", folder)
        assert "the verdict on K2-1" in said and said.endswith(f"not as stored: {next(iter(change))}.")
    record.write_json(folder / "verdict.json", {**stored, "verdicts": stored["verdicts"][:1]})
    assert "the verdicts are those of K2-1, not of K2-1, K2-2" in refused("verdict", "--check", folder)
    record.write_json(folder / "verdict.json", {**stored, "verdicts": 3})
    assert "edited" in refused("verdict", folder)


def test_the_report_is_written_again(toy_run, toy, command, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    shutil.rmtree(folder / "figures")
    page = (folder / "report.md").read_bytes()
    (folder / "report.md").unlink()
    assert command("report", folder)[0] == 0
    assert (folder / "report.md").read_bytes() == page
    same_results(toy_run, folder)


def fail_writes(patch, name, number):
    """The disk is full from the moment that the `number`-th file whose path contains `name` is written."""
    fsync, count = os.fsync, [0]

    def full(handle):
        if name in os.readlink(f"/proc/self/fd/{handle}"):
            count[0] += 1
            if count[0] >= number:
                raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    patch.setattr(os, "fsync", full)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of open files are read from /proc")
@pytest.mark.parametrize(
    ("name", "number", "kept"),
    [("jobs/", 3, 1), ("jobs/", 4, 1), ("run/.metrics.parquet", 1, 3), ("verdict.json", 1, 3)],
)
def test_a_full_disk(toy_run, toy, command, refused, tmp_path, monkeypatch, name, number, kept):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        fail_writes(patch, name, number)
        message = refused("run", "race", "--preset", "smoke", "--out", folder)
    assert (
        message
        == f"the disk is full while writing to {folder}; free some space and continue with `repro resume {folder}`."
    )
    assert not [f for f in files(folder) if f.endswith(".partial")] and not (folder / "verdict.json").exists()
    code, out, _ = command("resume", folder)
    assert code == 0 and out.count("done before") == kept
    same_results(toy_run, folder)


# TensorStore's threads report to an event loop that Orbax has closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("limit", "checkpoint_seconds"), [(300, 60), (20_000, 60), (9_500, 0)])
def test_files_that_may_not_grow(toy_run, toy, command, refused, tmp_path, monkeypatch, limit, checkpoint_seconds):
    """The system's own limit on the size of a file, which meets every writer: tables, events, figures, checkpoints."""
    folder = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "train", functools.partial(train, checkpoint_seconds=checkpoint_seconds))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            message = refused("run", "race", "--preset", "smoke", "--out", folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message.startswith("the disk is full while writing to")
    if not (folder / "run.json").exists():
        assert re.search("holds no run.json", refused("resume", folder))
        return
    assert command("resume", folder)[0] == 0
    same_results(toy_run, folder)


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """The folder of a finished run of `tally`, which trains nothing; copy it before changing anything."""
    from repro.cli import main

    folder = tmp_path_factory.mktemp("tally") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(TOY)
        assert main(["run", "tally", "--out", str(folder)]) == 0
    return folder


def test_a_run_without_training_leaves_the_same_kinds_of_files_and_says_nothing_of_training(computed):
    assert files(computed) == [
        "figures/errors.png", "figures/table.png", "metrics.parquet", "report.md", "run.json", "runs.parquet",
        "verdict.json",
    ]  # fmt: skip
    about = json.loads((computed / "run.json").read_text())
    assert about["preset"] == {"counts": [1, 10, 100], "evidence": True} and about["seconds"] >= 0
    assert not {"corpus", "configs", "ledgers", "ledgers_by_arm"} & about.keys()
    assert json.loads((computed / "verdict.json").read_text())["evidence"] is True
    curves = pl.read_parquet(computed / "metrics.parquet")
    assert len(curves) == 0 and curves.columns == ["arm", "size", "point", "phase", "rate", "seed", "step"]
    assert len(pl.read_parquet(computed / "runs.parquet")) == 8


def test_the_page_of_a_run_without_training_shows_what_there_is(computed):
    text = (computed / "report.md").read_text()
    assert "## What was computed" in text and "| n n / 2 |" in text and "figures/errors.png" in text
    assert "| counts | 1, 10, 100 |" in text and "repro run tally --preset cpu" in text
    for absent in ("Corpus", "seeds", "Ledgers", "Test runs", "loss.png", "median", "not count as evidence"):
        assert absent not in text, absent


def test_a_run_without_training_loads_no_corpus_and_no_mesh(toy, tmp_path, monkeypatch, command):
    for name in ("load_corpus", "lane_mesh", "prepare", "train"):
        monkeypatch.setattr(runner, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    code, out, err = command("run", "tally", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == "" and "nothing is trained" in out


def test_every_command_reads_a_run_without_training(toy, computed, tmp_path, command):
    folder = tmp_path / "run"
    shutil.copytree(computed, folder)
    before = {name: (folder / name).read_bytes() for name in files(folder)}
    assert "1 verdicts derived again, all as stored" in " ".join(command("verdict", folder, "--check")[1].split())
    assert "supported" in command("resume", folder)[1]
    assert command("report", folder)[0] == 0
    assert {name: (folder / name).read_bytes() for name in files(folder)} == before
    (folder / "verdict.json").unlink()
    assert command("resume", folder)[0] == 0
    same_results(folder, computed)
    code, out, _ = command("show", "tally")
    assert code == 0 and "gauss: n (n + 1) / 2" in out
    assert "tally" in command("list")[1] and "tally --preset cpu: can run here" in command("doctor")[1]


def test_a_run_without_training_can_be_stored(toy, computed, tmp_path, command):
    store(computed, tmp_path / "kept")
    assert "all as stored" in " ".join(command("verdict", tmp_path / "kept", "--check")[1].split())
    assert "curves" not in json.loads((tmp_path / "kept" / "verdict.json").read_text())
    (tmp_path / "kept" / "metrics.parquet").unlink()
    assert command("verdict", tmp_path / "kept", "--check")[0] == 2


def test_a_preset_of_ones_own_changed_by_hand_is_no_evidence(toy, tmp_path, command):
    folder = tmp_path / "run"
    assert command("run", "tally", "--counts", "3", "4", "--out", folder)[0] == 0
    about, verdict = (json.loads((folder / name).read_text()) for name in ("run.json", "verdict.json"))
    assert about["changed"] == ["counts"] and about["preset"] == {"counts": [3, 4], "evidence": False}
    assert verdict["evidence"] is False and "not count as evidence" in (folder / "report.md").read_text()
    assert command("verdict", folder, "--check")[0] == 0
