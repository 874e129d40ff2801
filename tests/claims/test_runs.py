"""Reading runs: one place, test seeds only, no seed twice."""

import math
import pickle

import pytest

from repro.claims import Run, Runs
from repro.claims.runs import parse_place
from repro.errors import ReproError

RUNS = Runs(
    [
        Run("muon", 12, {"loss": 2.0}, point="best", size="s", rate=0.01),
        Run("muon", 11, {"loss": 1.5}, point="best", size="s", rate=0.01),
        Run("muon", 11, {"loss": 1.25}, point="best", size="m", rate=0.01),
        Run("muon", 11, {"loss": 9.0}, point="stress", size="s", rate=0.1),
        Run("muon", 1, {"loss": 7.0}, point="best", size="s", rate=0.01, phase="tuning"),
        Run("muon", 11, {"sensitivity": 0.5}, size="s"),
    ]
)


def test_places():
    assert parse_place("a") == ("a", None, None)
    assert parse_place("a@b") == ("a", "b", None)
    assert parse_place("a/s") == ("a", None, "s")
    assert parse_place("a@b/s") == ("a", "b", "s")
    for bad in ("", "@b", "a@", "a/", "a@b@c", "a/s/t", "a/s@b", "a@b/s@c", "@"):
        with pytest.raises(ReproError):
            parse_place(bad)


def test_values_are_test_runs_of_one_place_by_seed():
    assert RUNS.values("loss", "muon@best/s") == RUNS.values("loss", "muon@best", "s") == {11: 1.5, 12: 2.0}
    assert list(RUNS.values("loss", "muon@best/s")) == [11, 12]
    assert RUNS.values("loss", "muon/m") == {11: 1.25}
    assert RUNS.values("sensitivity", "muon") == {11: 0.5}


@pytest.mark.parametrize(
    ("metric", "at", "size", "message"),
    [
        ("loss", "muon", None, "fits muon@best/m, muon@best/s, muon@stress/s"),
        ("loss", "muon@best", None, "name one"),
        ("loss", "adamw", None, "no test run at 'adamw'.*test runs exist at muon"),
        ("los", "muon@best/s", None, "'los'; there is loss$"),
        ("loss", "muon@low", "s", "'muon@low/s'"),
        ("loss", "muon@best/s", "m", "name the size once"),
    ],
)
def test_values_refuse(metric, at, size, message):
    with pytest.raises(ReproError, match=message):
        RUNS.values(metric, at, size)


def test_only_tuning_runs_are_no_test_runs():
    with pytest.raises(ReproError, match="there are no test runs"):
        Runs([Run("a", 1, {"loss": 1.0}, phase="tuning")]).values("loss", "a")


def test_no_seed_twice():
    with pytest.raises(ReproError, match="seed 1"):
        Runs([Run("a", 1, {"loss": 1.0}), Run("a", 1, {"loss": 2.0})])
    ladder = Runs([Run("a", 1, {"loss": 1.0}, rate=0.1), Run("a", 1, {"loss": 2.0}, rate=0.2)])
    with pytest.raises(ReproError, match="seed 1"):
        ladder.values("loss", "a")


def test_select_and_add():
    assert len(RUNS.select(arm="muon", phase="tuning")) == 1
    assert len(RUNS.select(phase=None)) == len(RUNS) == 6
    assert len(RUNS.select(point="")) == 1
    assert len(RUNS + [Run("adamw", 11, {})]) == 7 and len(RUNS) == 6
    assert "muon@best/s" in repr(RUNS)


def test_a_run_is_checked_and_pickles():
    run = Run("a", 1, {"loss": math.inf})
    assert pickle.loads(pickle.dumps(run)).metrics == {"loss": math.inf}
    for bad in ({"arm": "a@b"}, {"arm": ""}, {"point": "x/y"}, {"phase": "train"}):
        with pytest.raises(ReproError):
            Run(**{"arm": "a", "seed": 1, "metrics": {}, **bad})
