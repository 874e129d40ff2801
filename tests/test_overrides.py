"""Presets changed from the command line."""

import dataclasses

import pytest

from repro import catalogue
from repro.errors import ReproError
from repro.overrides import changed_preset, flatten
from repro.train.preset import Preset


@pytest.fixture(scope="module")
def experiment():
    return catalogue.load("logit-explosion")


def changed(experiment, *arguments, preset="cpu", seeds=None):
    return changed_preset(experiment, experiment.presets[preset], [*arguments], seeds, "repro run x")


def test_nothing_asked_is_the_preset_itself(experiment):
    for name, stored in experiment.presets.items():
        assert changed(experiment, preset=name) == (stored, [])


def test_a_value_that_is_there_already_is_no_change(experiment):
    preset, names = changed(experiment, "--train.steps", str(experiment.presets["cpu"].train.steps))
    assert preset == experiment.presets["cpu"] and names == [] and preset.evidence


def test_a_changed_field_is_named_and_is_no_evidence(experiment):
    preset, names = changed(experiment, "--train.steps", "12", "--data", "mkv2")
    assert names == ["data", "train.steps"] and (preset.train.steps, preset.data) == (12, "mkv2")
    assert preset.evidence is False and preset.sizes == experiment.presets["cpu"].sizes
    assert preset.train.model == experiment.presets["cpu"].train.model
    before, after = flatten(experiment.presets["cpu"]), flatten(preset)
    assert {name for name in before if before[name] != after[name]} == {"train.steps", "data", "evidence"}


def test_hyphens_and_underscores_are_one(experiment):
    assert changed(experiment, "--train.batch-size", "3") == changed(experiment, "--train.batch_size", "3")


def test_a_shape_of_ones_own(experiment):
    preset, names = changed(experiment, "--train.model.width", "32", "--train.length", "16")
    assert preset.sizes == ("custom",) and names == ["train.length", "train.model.width"]
    config = preset.config("custom")
    shown = experiment.presets["cpu"].config("xs")
    assert (config.model.width, config.length, config.model.layers) == (32, 16, shown.model.layers)
    assert [claim.criterion.reads() for claim in experiment.claims_for(preset)], "claims exist at such a size"
    experiment.check(preset)


def test_a_named_size(experiment):
    preset, names = changed(experiment, "--sizes", "w32")
    assert preset.sizes == ("w32",) and names == ["sizes"]
    assert preset.config("w32").model.width == 32


def test_a_preset_whose_size_is_its_own_shape(toy):
    assert changed_preset(toy, toy.presets["smoke"], [], None, "p") == (toy.presets["smoke"], [])
    preset, names = changed_preset(toy, toy.presets["smoke"], ["--train.steps", "5"], None, "p")
    assert names == ["train.steps"] and preset.config("custom").model == toy.presets["smoke"].train.model


def test_seeds(experiment):
    preset, names = changed(experiment, seeds=3, preset="smoke")
    assert preset.test_seeds == (0, 1, 2) and names == ["test_seeds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.nonsense", "3"], "unrecognized|nonsense"),
        (["--train.steps", "many"], "many"),
        (["--train.schedule", "linear"], "linear"),
        (["--train.steps"], "steps"),
        (["extra"], "extra"),
        (["--train.steps", "0"], "train.steps is 0"),
        (["--train.tau", "5"], "train.tau is set by the arms"),
        (["--train.optimizer", "adamw"], "train.optimizer is set by the arms"),
        (["--train.model.qk-norm", "rms"], "train.model.qk_norm is set by the arms"),
        (["--train.learning-rate", "1"], "train.learning_rate is set by --rates"),
        (["--sizes", "w32", "--train.model.width", "32"], "contradict each other"),
        (["--sizes", "w32", "xs", "--train.model.width", "32"], "contradict each other"),
        (["--sizes", "huge"], "size 'huge' is unknown"),
        (["--rates", "0.1", "0.01"], "ascending"),
        (["--tuning-limit", "1"], "tuning_limit 1 is below"),
        (["--lanes-per-device", "0"], "lanes_per_device is 0"),
        (["--train.model.heads", "3"], "no even head size"),
    ],
)  # fmt: skip
def test_refused_in_one_line(experiment, arguments, message):
    with pytest.raises(ReproError, match=message) as error:
        changed(experiment, *arguments)
    text = str(error.value)
    assert "\n" not in text and "│" not in text and "  " not in text.replace("`  ", "")


def test_seeds_must_be_some(experiment):
    with pytest.raises(ReproError, match="--seeds is 0; it must be at least 1"):
        changed(experiment, seeds=0)


def test_a_preset_of_ones_own(toy):
    tally = catalogue.load("tally")
    for stored in tally.presets.values():
        assert changed_preset(tally, stored, [], None, "p") == (stored, [])
    preset, names = changed_preset(tally, tally.presets["cpu"], ["--counts", "5"], None, "p")
    assert names == ["counts"] and preset == type(preset)((5,), evidence=False)
    kept, _ = changed_preset(tally, tally.presets["cpu"], ["--counts", "5", "--no-evidence"], None, "p")
    assert kept == preset
    with pytest.raises(ReproError, match="--seeds 2 has no meaning for tally"):
        changed_preset(tally, tally.presets["cpu"], [], 2, "p")


def test_seeds_and_own_fields_of_a_preset_without_evidence(experiment):
    @dataclasses.dataclass(frozen=True)
    class Seeded:
        trials: int = 3
        test_seeds: tuple[int, ...] = (0, 1)

    preset, names = changed_preset(experiment, Seeded(), ["--trials", "4"], 1, "p")
    assert preset == Seeded(4, (0,)) and names == ["test_seeds", "trials"]
    with pytest.raises(ReproError, match="--seeds is 0"):
        changed_preset(experiment, Seeded(), [], 0, "p")


def test_flat_names():
    flat = flatten(Preset())
    assert flat["train.model.width"] == 64 and flat["sizes"] == ("xs",) and "train" not in flat
