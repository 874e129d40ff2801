"""`repro replay` on a run that was stopped and on one that is finished, and what it refuses."""

import functools
import os
import shutil
import signal

import pytest

import repro.replay_command as replay_command
import repro.runner as runner
import repro.train.replay as steps
from repro.report import record, store
from repro.train import train

pytestmark = pytest.mark.usefixtures("quick_compile")


def stopped(toy, command, folder, monkeypatch):
    """A run of `race` in `folder` that SIGTERM stopped after step 20 of its second job, saved at every boundary."""
    now = []

    def progress(self, progress):
        if (len(now), progress.step) == (2, 20):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "train", functools.partial(train, checkpoint_seconds=0))
        patch.setattr("repro.progress.ConsoleWatcher.job", lambda self, job, number: now.append(number))
        patch.setattr("repro.progress.ConsoleWatcher.progress", progress)
        code, _, err = command("run", "race", "--preset", "smoke", "--out", folder)
    assert code == 143 and f"continue with `repro resume {folder}`" in err
    return folder


def words(out):
    return " ".join(out.split())


def test_a_run_that_was_stopped(toy, command, refused, tmp_path, monkeypatch):
    folder = stopped(toy, command, tmp_path / "run", monkeypatch)
    before = sorted(folder.rglob("*"))
    code, out, err = command("replay", folder, "--step", 9)
    assert code == 0 and err == "" and "2. custom test: plain" in out and "from step 0\n" in out
    code, out, _ = command("replay", folder, "--step", 10)
    assert code == 0 and "from the checkpoint of step 10" in out
    assert "of 4 runs at steps 10 to 10, and so is the state after step 20." in words(out)
    code, out, _ = command("replay", folder, "--step", 29, "--job", 1)
    assert code == 0 and "1. custom tuning: plain" in out and "at steps 0 to 29." in words(out)
    assert "steps 0 to 19 are" in refused("replay", folder, "--step", 20)
    assert "steps 0 to 29 are" in refused("replay", folder, "--step", -1, "--job", 1)
    assert "there is no job 3; there are 1 to 2" in refused("replay", folder, "--step", 0, "--job", 3)
    assert sorted(folder.rglob("*")) == before, "a replay writes nothing"
    with record.RunFolder(folder).locked():
        assert "is in use by another process" in refused("replay", folder, "--step", 0)


def test_a_finished_run_is_replayed_from_its_start(toy_run, toy, command, refused, tmp_path):
    code, out, _ = command("replay", toy_run, "--step", 15)
    assert code == 0 and out.startswith("3. ") and "from step 0\n" in out and "at steps 0 to 15." in words(out)
    store.store(toy_run, tmp_path / "kept")
    assert "were thinned when it was stored" in refused("replay", tmp_path / "kept", "--step", 15)


def test_what_is_not_equal_is_named(toy_run, toy, command, monkeypatch):
    real = steps.replay

    def altered(job, step, recorded, saves, **options):
        loss = recorded["loss"].copy()
        loss.view("uint32")[4, 1] ^= 1
        return real(job, step, recorded | {"loss": loss}, saves, **options)

    monkeypatch.setattr(steps, "replay", altered)
    code, out, err = command("replay", toy_run, "--step", 9, "--job", 1)
    assert code == 1 and err == "" and "step 4, plain at rate 0.02, seed 100: loss was" in words(out)
    assert "Not what was recorded: a second replay gives the bits of the first" in words(out)


def test_other_versions_are_refused_unless_accepted(toy_run, toy, command, refused, tmp_path):
    folder = shutil.copytree(toy_run, tmp_path / "run")
    about = record.RunFolder(folder).read("run.json")
    about["versions"] |= {"jax": "0.1.0", "python": "2.7"}
    record.write_json(folder / "run.json", about)
    stored = record.RunFolder(folder).read("verdict.json")
    stored["files"]["run.json"] = record.sha256(folder / "run.json")
    record.write_json(folder / "verdict.json", stored)
    assert "was begun with jax 0.1.0, this is" in refused("replay", folder, "--step", 0)
    assert command("replay", folder, "--step", 0, "--accept-differences")[0] == 0


def test_an_experiment_that_trains_nothing_has_no_steps(toy, command, refused, tmp_path):
    assert command("run", "tally", "--preset", "smoke", "--out", tmp_path / "run")[0] == 0
    assert "trains nothing" in refused("replay", tmp_path / "run", "--step", 0)
    assert "no checkpoints to keep" in refused("run", "tally", "--keep-checkpoints", "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_jobs_of_a_run_are_those_that_it_trained(toy_run, toy):
    """Found again from the plan and the stored scalars."""
    from repro.train import lane_mesh

    found = replay_command._jobs(toy, toy.presets["smoke"], record.RunFolder(toy_run), lane_mesh())
    assert [(job.number, len(job.job.lanes)) for job in found] == [(1, 2), (2, 4), (3, 2)]
