"""A job that is interrupted after any checkpoint ends with the bits of one that was not."""

import dataclasses

import jax
import numpy as np
import pytest

from repro.errors import ReproError
from repro.train import Lane, Numbers, train

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


def test_a_checkpoint_of_another_job_is_refused(tiny, kjv, tmp_path):
    interrupted(tiny, kjv, tmp_path, 20)
    with pytest.raises(ReproError, match="belongs to another configuration"):
        train(tiny, LANES[:1], kjv, checkpoints=tmp_path)
    slower = [LANES[0], dataclasses.replace(LANES[1], numbers=LANES[1].numbers._replace(learning_rate=0.04))]
    with pytest.raises(ReproError, match="belongs to another configuration"):
        train(tiny, slower, kjv, checkpoints=tmp_path)
    with pytest.raises(ReproError, match="belongs to another configuration"):
        train(tiny, LANES, dataclasses.replace(kjv, sha256="other"), checkpoints=tmp_path)


def test_a_save_that_was_cut_off_is_passed_over(tiny, kjv, tmp_path):
    """A checkpoint is renamed into place when it is whole; what a killed process leaves has another name."""
    interrupted(tiny, kjv, tmp_path, 20)
    (complete,) = [p for p in tmp_path.iterdir() if p.name.isdigit()]
    complete.rename(tmp_path / "20.orbax-checkpoint-tmp-0")
    seen = []
    again = train(tiny, LANES, kjv, checkpoints=tmp_path, on_chunk=lambda p: seen.append(p.step))
    assert seen == [10, 20, 30] and equal(train(tiny, LANES, kjv), again)


@pytest.mark.parametrize("part", ["state", "curves", "identity"])
def test_a_damaged_checkpoint_is_named(tiny, kjv, tmp_path, part):
    interrupted(tiny, kjv, tmp_path, 20)
    (complete,) = [p for p in tmp_path.iterdir() if p.name.isdigit()]
    for file in (complete / part).rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ReproError, match=f"checkpoint in {tmp_path} cannot be read.*remove"):
        train(tiny, LANES, kjv, checkpoints=tmp_path)
