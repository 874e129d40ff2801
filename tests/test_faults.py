"""What happens to runs: kills, signals, damaged checkpoints, full disks, two processes in one folder.

No run may lose what it finished, and each must end with the bits of one to which nothing happened.
"""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys

import pytest

import repro.runner as runner
from repro.drills import small_run, storage
from repro.errors import ReproError
from repro.report.record import RunFolder

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
def test_three_kills(tmp_path, monkeypatch):
    """`repro drill kill --n 50` is the same drill."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    found = storage.kill(3, tmp_path / "drill", seed=2)  # one run, three times
    assert found["kills"] == 3 and found["equal"] and found["differing"] == [] and found["runs"] >= 1
    assert sum(found["moments"].values()) == 3
    assert found["second_process"].startswith("DIR is in use by another process")


def test_the_comparison_of_the_drill_sees_a_difference(tmp_path, monkeypatch):
    """A run with another seed is not taken for the same, neither by its metrics nor by its state."""
    folders = []
    for name, seeds in (("a", (0, 1)), ("b", (0, 1)), ("c", (0, 2))):
        folder = RunFolder.create(tmp_path / name)
        preset = dataclasses.replace(
            small_run.PRESET, test_seeds=seeds, train=dataclasses.replace(small_run.PRESET.train, steps=10)
        )
        runner.execute(small_run.EXPERIMENT, "drill", preset, folder, keep_checkpoints=True)
        folders.append(folder.path)
    assert storage.different(folders[0], folders[1]) == []
    assert storage.different(folders[0], folders[2]) == [
        "metrics.parquet", "runs.parquet", "verdict.json", "parameters or optimizer state",
    ]  # fmt: skip
    manifest = next((folders[1] / "checkpoints").rglob("manifest.json"))
    about = json.loads(manifest.read_text())
    about["digests"][0] = "other"
    manifest.write_text(json.dumps(about))
    assert storage.different(folders[0], folders[1]) == ["parameters or optimizer state"]


@pytest.mark.parametrize("drill", ["truncated_checkpoint", "flipped_byte", "missing_file"])
def test_a_damaged_checkpoint(tmp_path, drill):
    found = getattr(storage, drill)(tmp_path / "drill", seed=3, alone=False)
    assert found["detected"] and found["equal"] and found["went_on_from"] == 10
    assert found["said"].startswith("the checkpoint of step 20 is damaged (")


@pytest.mark.parametrize(("how", "message"), [("limit", "File too large"), ("device", "No space left on device")])
def test_a_full_disk_leaves_the_last_checkpoint_usable(tmp_path, how, message):
    found = storage.full_disk(tmp_path / "drill", how=how)
    assert (found["said"], found["went_on_from"], found["equal"]) == (message, 10, True)


def test_drills_need_a_folder_of_their_own(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for drill in (functools.partial(storage.kill, 1), storage.flipped_byte, storage.full_disk):
        with pytest.raises(ReproError, match="is not empty"):
            drill(tmp_path)
    with pytest.raises(ReproError, match="by limit or device"):
        storage.full_disk(tmp_path / "new", how="water")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(toy_run, toy, command, tmp_path, monkeypatch, number, code):
    folder, now = tmp_path / "run", []
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def progress(self, progress):
        if (len(now), progress.step) == (2, 10):
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr("repro.progress.ConsoleWatcher.job", lambda self, job, number: now.append(number))
        patch.setattr("repro.progress.ConsoleWatcher.progress", progress)
        got, _, err = command("run", "race", "--preset", "smoke", "--out", folder)
    assert got == code
    assert err.endswith(f"repro: stopped after step 20 of 30; continue with `repro resume {folder}`.\n")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    code, out, err = command("resume", folder)
    assert code == 0 and err == "" and out.count("done before") == 1
    assert out.count("going on from the checkpoint of step 20") == 1
    for name in ("metrics.parquet", "runs.parquet"):
        assert (folder / name).read_bytes() == (toy_run / name).read_bytes()
    assert not (folder / "checkpoints").exists()


def test_differences_that_were_accepted_are_in_the_record_and_the_report(toy, command, refused, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "draw", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert command("run", "race", "--preset", "smoke", "--out", folder)[0] == 130
    about = json.loads((folder / "run.json").read_text())
    about["versions"]["optax"] = "0.0.1"
    (folder / "run.json").write_text(json.dumps(about))
    assert "was begun with optax 0.0.1, this is" in refused("resume", folder)
    assert "accepted_differences" not in json.loads((folder / "run.json").read_text())
    assert command("resume", folder, "--accept-differences")[0] == 0
    (accepted,) = json.loads((folder / "run.json").read_text())["accepted_differences"]
    assert accepted.startswith("optax 0.0.1, this is ") and "optax 0.0.1" in (folder / "report.md").read_text()


def test_checkpoints_are_kept_where_asked_for_and_say_where_a_job_ended(toy_run, toy, command, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert command("run", "race", "--preset", "smoke", "--keep-checkpoints", "--out", folder)[0] == 0
    kept = [p.relative_to(folder / "checkpoints").parts for p in (folder / "checkpoints").glob("*/30/manifest.sha256")]
    assert len(kept) == 3 and not (folder / "jobs").exists()
    assert (folder / "metrics.parquet").read_bytes() == (toy_run / "metrics.parquet").read_bytes()
    code, out, _ = command("replay", folder, "--step", 29)
    assert code == 0 and "so is the state after step 30" in " ".join(out.split())


def test_two_processes_in_one_folder(toy, command, refused, tmp_path, monkeypatch):
    """The second is a process of its own, and is refused in one sentence while the first trains."""
    found = []

    def progress(self, progress):
        if not found:
            words = [sys.executable, "-m", "repro", "resume", str(tmp_path / "run")]
            found.append(subprocess.run(words, capture_output=True, text=True))

    with monkeypatch.context() as patch:
        patch.setattr("repro.progress.ConsoleWatcher.progress", progress)
        assert command("run", "race", "--preset", "smoke", "--out", tmp_path / "run")[0] == 0
    (second,) = found
    assert second.returncode == 2 and "is in use by another process" in second.stderr and "step" not in second.stdout
    files = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert "is not an empty folder" in refused("run", "race", "--preset", "smoke", "--out", tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == files
