"""Experiments are found by name: those that are shipped, and those of the working directory."""

import dataclasses
import json
import sys

import pytest

from repro import catalogue
from repro.catalogue import stored_preset
from repro.claims.canonical import plain
from repro.errors import ReproError


def test_hyphens_and_underscores_are_one_name():
    assert catalogue.load("logit_explosion") is catalogue.load("logit-explosion")
    assert catalogue.load("logit-explosion").name == "logit-explosion"
    assert "experiments" not in sys.modules


def test_every_name_is_the_name_of_its_experiment():
    assert all(catalogue.load(name).name == name for name in catalogue.names())


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ReproError, match="experiment 'nope' is unknown; known are .*logit-explosion"):
        catalogue.load("nope")


def test_ones_own_experiments(toy, tmp_path, monkeypatch):
    assert toy.name == "race" and "race" in catalogue.names() and "logit-explosion" in catalogue.names()
    monkeypatch.chdir(tmp_path)
    assert "race" not in catalogue.names()
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "empty.py").write_text("x = 1\n")
    with pytest.raises(ReproError, match="defines no EXPERIMENT"):
        catalogue.load("empty")


def test_every_preset_comes_back_from_a_record(tmp_path):
    """Also the settings of runs that an experiment has added to those of the engine."""
    for name in catalogue.names():
        experiment = catalogue.load(name)
        for preset in experiment.presets.values():
            record = {"preset": json.loads(json.dumps(plain(dataclasses.asdict(preset))))}
            assert stored_preset(experiment, record, tmp_path) == preset, name
