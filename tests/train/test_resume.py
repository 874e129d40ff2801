"""A job that is interrupted after any checkpoint ends with the bits of one that was not."""

import dataclasses
import hashlib
import json

import jax
import numpy as np
import pytest

from repro.errors import ReproError, Stopped
from repro.train import Lane, Numbers, train
from repro.train import origin as origins

pytestmark = pytest.mark.usefixtures("quick_compile")

LANES = [Lane(Numbers(0.02, 0.1, 2.0, 0.0), 3), Lane(Numbers(0.05, 0.0, np.inf, 1e-3), 4)]


class Stop(Exception):
    pass


def stopping_at(step):
    def on_chunk(progress):
        if progress.step == step:
            raise Stop

    return on_chunk


def interrupted(config, corpus, folder, step):
    with pytest.raises(Stop):
        train(config, LANES, corpus, checkpoints=folder, checkpoint_seconds=0, on_chunk=stopping_at(step))


def change_manifest(folder, change):
    """Rewrites a manifest together with its own hash, as no accident would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n")


def equal(a, b):
    return all(
        np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(dataclasses.astuple(a)), jax.tree.leaves(dataclasses.astuple(b)), strict=True)
    )


@pytest.mark.parametrize(("stop", "first"), [(10, 10), (20, 20), (30, 30)])
def test_resumed_bits(tiny, kjv, tmp_path, stop, first):
    whole = train(tiny, LANES, kjv)
    interrupted(tiny, kjv, tmp_path / "saves", stop)
    seen = []
    again = train(tiny, LANES, kjv, checkpoints=tmp_path / "saves", on_chunk=lambda p: seen.append(p.step))
    assert seen == list(range(first, 31, 10)), "a resumed job does only what is left"
    assert equal(whole, again)


def test_interrupted_twice(tiny, kjv, tmp_path):
    interrupted(tiny, kjv, tmp_path, 20)
    interrupted(tiny, kjv, tmp_path, 30)
    assert equal(train(tiny, LANES, kjv), train(tiny, LANES, kjv, checkpoints=tmp_path))


def test_asked_to_stop(tiny, kjv, tmp_path):
    """A job finishes its chunk, saves itself, and says where it is; the interval between saves does not matter."""
    answers = iter([False, True])
    with pytest.raises(Stopped, match="stopped after step 10 of 30") as stopped:
        train(tiny, LANES, kjv, checkpoints=tmp_path, stop=lambda: next(answers))
    assert (stopped.value.step, stopped.value.saved) == (10, True)
    seen = []
    again = train(tiny, LANES, kjv, checkpoints=tmp_path, on_chunk=lambda p: seen.append(p.step))
    assert seen == [20, 30] and equal(train(tiny, LANES, kjv), again)
    with pytest.raises(Stopped, match="after step 0 of 30, nothing saved"):
        train(tiny, LANES, kjv, stop=lambda: True)


def test_a_checkpoint_of_another_job_is_refused_by_the_difference(tiny, kjv, tmp_path):
    interrupted(tiny, kjv, tmp_path, 20)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(ReproError, match="was written with 2 runs, this has 1; resume where"):
        train(tiny, LANES[:1], kjv, checkpoints=tmp_path)
    slower = [LANES[0], dataclasses.replace(LANES[1], numbers=LANES[1].numbers._replace(learning_rate=0.04))]
    with pytest.raises(ReproError, match=r"written with learning_rate 0\.05 of run 1, this is 0\.04;"):
        train(tiny, slower, kjv, checkpoints=tmp_path)
    with pytest.raises(ReproError, match=f"written with corpus {kjv.sha256[:12]}, this is other"):
        train(tiny, LANES, dataclasses.replace(kjv, sha256="other"), checkpoints=tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before, "a refusal leaves everything as it was"


def test_other_versions_and_programs_are_refused_unless_accepted(tiny, kjv, tmp_path):
    """The manifest is that of another version of JAX, and of another program."""
    interrupted(tiny, kjv, tmp_path, 20)
    now = origins.package_versions()["jax"]

    def change(manifest):
        manifest["origin"]["versions"]["jax"] = "0.1.0"
        manifest["origin"]["program"] = "0" * 64

    change_manifest(tmp_path / "10", change)
    with pytest.raises(ReproError, match=f"written with jax 0.1.0, this is {now}, step program 000000000000, this is"):
        train(tiny, LANES, kjv, checkpoints=tmp_path)
    found = []
    again = train(tiny, LANES, kjv, checkpoints=tmp_path, accept_differences=True, on_restore=found.append)
    (restored,) = found
    assert restored.step == 10
    assert [d.split(", this is")[0] for d in restored.differences] == ["jax 0.1.0", "step program 000000000000"]
    assert equal(train(tiny, LANES, kjv), again)


def test_a_state_that_does_not_fit_is_refused_even_if_differences_are_accepted(tiny, kjv, tmp_path):
    interrupted(tiny, kjv, tmp_path, 20)
    change_manifest(tmp_path / "10", lambda manifest: manifest["leaves"].pop())
    with pytest.raises(ReproError, match="holds .* arrays of .* values, and the state of this job"):
        train(tiny, LANES, kjv, checkpoints=tmp_path, accept_differences=True)


def test_differences_in_words():
    then = {"versions": {"jax": "0.10.2"}, "platform": "cpu", "config": {"steps": 3, "model": {"width": 8}}}
    now = {"versions": {"jax": "0.12.0"}, "platform": "gpu", "config": {"steps": 3, "model": {"width": 9, "new": True}}}
    assert origins.differences(then, now) == [
        "jax 0.10.2, this is 0.12.0", "platform cpu, this is gpu", "train.model.width 8, this is 9",
        "train.model.new unset, this is True",
    ]  # fmt: skip
    assert origins.differences({"flags": []}, {"flags": ["--xla_a=1"]}) == ["XLA_FLAGS unset, this is --xla_a=1"]
    assert origins.differences(then, then) == [] and origins.differences(then, {"corpus": "x"}) == []
