"""Checkpoints by themselves: what is kept, what damage is found, and what a failed save leaves."""

import contextlib
import errno
import os
import shutil
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.train import checkpoint
from repro.train.checkpoint import Checkpoints, digests, mean_loss

ORIGIN = {"versions": {"jax": "1"}, "program": "p"}


def state(step, runs=2):
    """Some types that a training state holds, an array without values among them; each run has its own."""
    base = np.arange(runs, dtype=np.float32)[:, None] + step
    return {
        "w": base * np.ones((runs, 40), np.float32), "half": base.astype(jnp.bfloat16), "none": np.zeros((runs, 0)),
        "codes": base.astype(jnp.float8_e4m3fn), "step": np.full(runs, step, np.int32), "on": base > 1,
    }  # fmt: skip


def curves(first, last, runs=2):
    return {
        "loss": np.arange(first, last, dtype=np.float32)[:, None] + np.zeros((1, runs), np.float32),
        "heads": np.zeros((last - first, runs, 3, 2), np.float32),
    }


def same(a, b):
    assert a.keys() == b.keys()
    assert all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape for k in a)
    return all(np.ascontiguousarray(a[k]).tobytes() == np.ascontiguousarray(b[k]).tobytes() for k in a)


def opened(folder, **options):
    return Checkpoints(folder, lambda: ORIGIN, **options)


def written(folder, *steps, losses=None, **options):
    """A folder with checkpoints at these steps."""
    before = 0
    with opened(folder, **options) as saves:
        for i, step in enumerate(steps):
            saves.save(step, state(step), [curves(before, step)], losses[i] if losses else 1.0)
            before = step
    return folder


def test_what_is_saved_comes_back(tmp_path):
    written(tmp_path, 10, 20)
    restored = opened(tmp_path).restore(state(0))
    assert restored.step == 20 and restored.differences == ()
    assert same(restored.state, state(20)) and same(restored.curves, curves(0, 20))
    assert restored.digests == digests(state(20)) != digests(state(10))
    assert len(set(restored.digests)) == 2, "each run has a digest of its own"


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    losses = [3.0, 1.0, 2.0, float("inf"), 4.0]
    written(tmp_path, 10, 20, 30, 40, 50, losses=losses)
    saves = opened(tmp_path)
    assert saves.steps() == [50, 40, 20] and saves.best() == 20
    assert opened(tmp_path).restore(state(0), at_most=39, keep_later=True).step == 20
    assert saves.steps() == [50, 40, 20], "what only looks removes nothing"
    with pytest.raises(ReproError, match="at least 1"):
        opened(tmp_path, keep=0)


def test_metrics_are_written_once_each_and_removed_with_the_last_that_names_them(tmp_path):
    written(tmp_path, 10, 20, 30)
    names = sorted(p.name.rsplit("-", 1)[0] for p in (tmp_path / "curves").iterdir())
    assert names == ["0-10", "10-20", "20-30"]
    with opened(tmp_path) as saves:
        saves.restore(state(0))
        for step in (40, 50, 60):  # as where a run went back, and what it measured before changed
            saves.save(step, state(step), [curves(0, step)], 0.0, rewritten=True)
    assert sorted(p.name.rsplit("-", 1)[0] for p in (tmp_path / "curves").iterdir()) == ["0-50", "0-60"]
    assert same(opened(tmp_path).recorded(), curves(0, 60))


def every_file(folder, step):
    return sorted(
        p for p in [*(folder / str(step)).rglob("*"), *(folder / "curves").glob(f"*-{step}-*")] if p.is_file()
    )


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": flip,
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_any_damage_to_any_file_of_the_newest_is_found(tmp_path, kind):
    """The one before is used, and one line says so; without damage nothing is said."""
    whole = written(tmp_path / "whole", 10, 20)
    count = len(every_file(whole, 20))
    assert count >= 8
    for i in range(count):
        folder = shutil.copytree(whole, tmp_path / f"{kind}-{i}")
        path = every_file(folder, 20)[i]
        DAMAGE[kind](path)
        said = []
        restored = opened(folder, on_note=said.append).restore(state(0))
        assert restored.step == 10 and same(restored.state, state(10)) and same(restored.curves, curves(0, 10)), path
        (line,) = said
        assert line.startswith("the checkpoint of step 20 is damaged (") and line.endswith("; going on from step 10")
        assert "\n" not in line and path.name in line
        assert opened(folder).steps() == [10], "it is not met a second time"
    said = []
    assert opened(whole, on_note=said.append).restore(state(0)).step == 20 and said == []


def test_where_none_is_intact_the_job_starts_again(tmp_path):
    written(tmp_path, 10, 20)
    for step in (10, 20):
        (tmp_path / str(step) / "manifest.json").unlink()
    said = []
    assert opened(tmp_path, on_note=said.append).restore(state(0)) is None
    (line,) = said
    assert line.count("manifest.json is missing") == 2 and line.endswith("; starting at step 0")
    assert opened(tmp_path).restore(state(0)) is None and opened(tmp_path / "none").restore(state(0)) is None


def test_a_checkpoint_under_another_step_is_damaged(tmp_path):
    written(tmp_path, 10)
    (tmp_path / "10").rename(tmp_path / "20")
    said = []
    assert opened(tmp_path, on_note=said.append).restore(state(0)) is None and "is the one of step 10" in said[0]


def test_the_state_is_compared_too(tmp_path, monkeypatch):
    """Whatever Orbax returns, it must have the digests of what was saved."""
    written(tmp_path, 10)
    real = checkpoint._orbax()

    class Wrong:
        def restore(self, *args, **kwargs):
            found = real.restore(*args, **kwargs)
            return found | {"0005": np.nextafter(np.asarray(found["0005"]), np.float32(99))}

    monkeypatch.setattr(checkpoint, "_orbax", Wrong)
    said = []
    assert opened(tmp_path, on_note=said.append).restore(state(0)) is None and "digests" in said[0]


def test_what_a_killed_process_left_half_written_is_passed_over_and_removed(tmp_path):
    written(tmp_path, 10)
    shutil.copytree(tmp_path / "10", tmp_path / ".20")
    (tmp_path / "curves" / ".10-20-x.npz.partial").write_bytes(b"half")
    said = []
    assert opened(tmp_path, on_note=said.append).restore(state(0)).step == 10 and said == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "curves"]
    assert len([*(tmp_path / "curves").iterdir()]) == 1


def test_a_save_does_not_wait_and_its_error_comes_at_the_next_boundary(tmp_path, monkeypatch):
    """Orbax is replaced by something slow that finds the disk full. What was saved before stands."""
    written(tmp_path, 10)
    release = threading.Event()

    class Slow:
        def save(self, path, args):
            release.wait(10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_orbax", Slow)
    saves = opened(tmp_path)
    saves.restore(state(0), keep_later=True)
    started = time.monotonic()
    saves.save(20, state(20), [curves(10, 20)], 0.0)
    saves.check()  # nothing yet
    assert time.monotonic() - started < 5 and saves.busy
    release.set()
    with pytest.raises(OSError, match="No space left"):
        saves.wait()
    saves.check()  # said once
    saves.close()
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "curves"]
    assert opened(tmp_path).restore(state(0)).step == 10


def test_what_tensorstore_says_of_a_full_disk_is_an_oserror(tmp_path):
    with pytest.raises(OSError) as error, checkpoint._raises_os_errors(tmp_path):
        raise ValueError("RESOURCE_EXHAUSTED: ... [os_error_code='28'] ...")
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(ValueError, match="other"), checkpoint._raises_os_errors(tmp_path):
        raise ValueError("other")


def test_leaving_with_an_error_waits_for_the_writer_and_raises_that_error(tmp_path):
    with contextlib.suppress(ZeroDivisionError), opened(tmp_path) as saves:
        saves.save(10, state(10), [curves(0, 10)], 0.0)
        raise ZeroDivisionError
    assert opened(tmp_path).restore(state(0)).step == 10


def test_the_loss_that_decides_which_is_best():
    assert mean_loss({"loss": np.array([[1.0, 3.0], [2.0, 4.0]])}) == 2.5
    assert mean_loss({"loss": np.array([[1.0, np.nan]])}) == np.inf
