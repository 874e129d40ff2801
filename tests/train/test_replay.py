"""A replay gives the bits of the run, finds any that are others, and tells what that means."""

import itertools

import numpy as np
import pytest

from repro.errors import ReproError, Stopped
from repro.train import Lane, Numbers, lane_mesh, train
from repro.train.checkpoint import Checkpoints
from repro.train.job import Job
from repro.train.replay import Difference, replay

pytestmark = pytest.mark.usefixtures("quick_compile")

LANES = [Lane(Numbers(0.02, 0.1, 2.0, 0.0), 3), Lane(Numbers(0.05, 0.0, np.inf, 1e-3), 4)]


@pytest.fixture
def job(tiny, kjv):
    return Job(tiny, LANES, kjv, lane_mesh())


@pytest.fixture
def recorded(tiny, kjv):
    return train(tiny, LANES, kjv).curves


def stopped(config, corpus, folder, step):
    steps = itertools.count(0, 10)
    with pytest.raises(Stopped):
        train(
            config, LANES, corpus, checkpoints=folder, checkpoint_seconds=0, stop=lambda: next(steps) >= step
        )  # fmt: skip


def flipped(curves, name, step, run):
    """The curves with the lowest bit of one value another."""
    values = curves[name].copy()
    values.view(np.uint32)[step, run] ^= 1
    return curves | {name: values}


def test_from_the_start_and_from_the_last_checkpoint_before(tiny, kjv, job, recorded, tmp_path):
    found = replay(job, 14, recorded)
    assert found.equal and (found.start, found.step, found.end) == (0, 14, 20) and found.cause == ""
    assert {"loss", "grad_norm", "head_logits"} <= {*found.metrics} and found.state_equal is None
    stopped(tiny, kjv, tmp_path, 20)
    with Checkpoints(tmp_path, job.origin) as saves:
        before = saves.steps()
        for step, start, state_equal in ((9, 0, True), (10, 10, True), (19, 10, True), (20, 20, None), (29, 20, None)):
            found = replay(job, step, recorded, saves)
            assert found.equal and (found.start, found.state_equal) == (start, state_equal), step
        assert saves.steps() == before == [20, 10]


def test_a_record_with_one_bit_another_is_found(job, recorded):
    """What was recorded cannot be computed again, and a second replay says that the first is right."""
    found = replay(job, 14, flipped(recorded, "loss", 12, 1))
    assert not found.equal and found.repeatable
    (difference,) = found.differences
    assert (difference.step, difference.run, difference.metric) == (12, 1, "loss")
    assert difference.recorded != difference.replayed == recorded["loss"][12, 1]
    assert found.cause.startswith("a second replay gives the bits of the first")
    assert replay(job, 11, flipped(recorded, "loss", 12, 1)).equal, "steps after the one asked for are not compared"
    several = flipped(flipped(recorded, "max_logit", 12, 0), "loss", 13, 0)
    assert [d.metric for d in replay(job, 14, several).differences] == ["max_logit"], "the first step that differs"


def test_nan_is_equal_to_itself_and_zero_has_a_sign(job, recorded):
    values = recorded["loss"].copy()
    values[3] = np.nan
    assert replay(job, 5, recorded | {"loss": values}).differences[0].step == 3
    real = Job.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "take", lambda self, metrics: real(self, metrics) | {"extra": np.full((10, 2), np.nan)})
        assert replay(job, 5, recorded | {"extra": np.full((30, 2), np.nan)}).equal
        assert not replay(job, 5, recorded | {"extra": np.zeros((30, 2))}).equal


def test_a_kernel_that_is_not_deterministic_is_told_from_a_fault_in_the_past(job, recorded, monkeypatch):
    real, calls = Job.take, itertools.count()

    def take(self, metrics):
        found = real(self, metrics)
        return found | {"loss": np.nextafter(found["loss"], np.float32(99)) if next(calls) == 0 else found["loss"]}

    monkeypatch.setattr(Job, "take", take)
    found = replay(job, 5, recorded)
    assert not found.equal and found.repeatable is False and "nondeterministic kernel" in found.cause
    assert found.differences[0] == Difference(
        0, 0, "loss", recorded["loss"][0, 0], np.nextafter(recorded["loss"][0, 0], np.float32(99))
    )


def test_a_state_that_is_not_that_of_the_checkpoint_is_found(tiny, kjv, job, recorded, tmp_path, monkeypatch):
    """Equal metrics do not hide a state that is another."""
    stopped(tiny, kjv, tmp_path, 20)
    with Checkpoints(tmp_path, job.origin) as saves:
        monkeypatch.setattr(saves, "digests_of", lambda step: ("other", "other"))
        found = replay(job, 15, recorded, saves)
    assert not found.equal and found.state_equal is False and found.differences == () and found.repeatable


def test_steps_that_are_not_stored_are_refused(job, recorded):
    for step in (-1, 30):
        with pytest.raises(ReproError, match=f"step {step} is not stored; steps 0 to 29 are."):
            replay(job, step, recorded)
    with pytest.raises(ReproError, match="no step is, as yet"):
        replay(job, 0, {})
