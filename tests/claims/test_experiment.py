"""Experiments: what is refused before a run, the plan, the choice of rates, and the rule hash."""

import dataclasses
import enum
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import repro
from repro.claims import (
    Arm,
    Cell,
    Claim,
    Control,
    Exact,
    Experiment,
    Greater,
    Run,
    Runs,
    Trend,
    best_rate,
    decide_all,
    extend_ladder,
    gather,
    rule_hash,
    swapped,
)
from repro.claims.canonical import plain
from repro.errors import ReproError

ROOT = Path(repro.__file__).parents[1]


@dataclass(frozen=True)
class Preset:
    tuning_seeds: tuple[int, ...] = (1, 2)
    test_seeds: tuple[int, ...] = (11, 12, 13, 14, 15, 16, 17, 18)
    rates: tuple[float, ...] = (0.1, 0.2)
    evidence: bool = True
    sizes: tuple[str, ...] = ("s",)


LOSS = Greater("loss", "adamw@best", "muon@best", smallest=1.01)
RULE = Claim("ML-3", "paper", "Muon ends lower", "", "", "D", LOSS, Control("exchanged", swapped(LOSS)), family="ML")
CHECK = Claim(
    *("ML-2", "paper", "lemma", "", "", "M"),
    Exact("error", "lemma", 0.0),
    Control("wrong", Exact("error", "no_root", 0.0)),
)


def plan(preset):
    best = {}
    for arm in ("muon", "adamw"):
        rates = list(preset.rates)
        runs = yield [Cell(arm, "s", rate, "ladder", "tuning", preset.tuning_seeds) for rate in rates]
        while extra := extend_ladder(rates, best_rate(runs, arm, "s"), 2.0):
            rates.append(extra)
            runs = yield [Cell(arm, "s", extra, "ladder", "tuning", preset.tuning_seeds)]
        best[arm] = best_rate(runs, arm, "s")
    yield [Cell(arm, "s", rate, "best", "test", preset.test_seeds) for arm, rate in best.items()]


def checks(preset):
    return [Run("lemma", 0, {"error": 0.0}), Run("no_root", 0, {"error": 0.2})]


EXPERIMENT = Experiment(
    "race",
    "A race",
    (RULE, CHECK),
    (Arm("muon", "Muon", {"decay": 0.1}), Arm("adamw", "AdamW", {"decay": 0.1})),
    {"cpu": Preset(), "smoke": Preset(test_seeds=(11,), evidence=False)},
    plan=plan,
    checks=checks,
    check_arms=("lemma", "no_root"),
)


def train(cells):
    """A loss with its best rate at 0.8 for muon and inside the ladder's first extension for adamw."""
    optimum = {"muon": 0.8, "adamw": 0.2}
    for cell in cells:
        for seed in cell.seeds:
            loss = 1 + math.log(cell.rate / optimum[cell.arm]) ** 2 + 0.001 * seed + 0.5 * (cell.arm == "adamw")
            yield Run(cell.arm, seed, {"loss": loss}, cell.point, cell.size, cell.rate, cell.phase)


def changed(**fields):
    return dataclasses.replace(EXPERIMENT, **fields)


def test_the_plan_is_followed_to_its_verdicts():
    runs = gather(EXPERIMENT, EXPERIMENT.presets["cpu"], train)
    assert {run.rate for run in runs.select(arm="muon", point="best")} == {0.8}
    assert {run.rate for run in runs.select(arm="muon", phase="tuning")} == {0.1, 0.2, 0.4, 0.8, 1.6}
    loss, lemma = decide_all(EXPERIMENT.claims, runs)
    assert (loss.label, loss.n, lemma.label) == ("supported", 8, "supported")


def test_derived_runs_see_everything():
    def derive(runs):
        return [Run("muon", 0, {"runs": len(runs)})]

    runs = gather(changed(derive=derive, plan=None), Preset(), train)
    assert runs.values("runs", "muon") == {0: 2.0}


def test_a_plan_may_not_test_on_tuning_seeds():
    def careless(preset):
        yield [Cell("muon", "s", 0.1, "ladder", "tuning", (1,))]
        yield [Cell("muon", "s", 0.1, "best", "test", (1,))]

    def unknown(preset):
        yield [Cell("lion", "s", 0.1, "", "test", (1,))]

    with pytest.raises(ReproError, match="seed 1 for tuning and for the test"):
        gather(changed(plan=careless), Preset(), train)
    with pytest.raises(ReproError, match="no arm 'lion'"):
        gather(changed(plan=unknown), Preset(), train)


def test_cell_settings_override_the_arm():
    cell = Cell("muon", "s", 0.1, "best", "test", [1], {"decay": 0.0, "tau": 30})
    assert EXPERIMENT.settings(cell) == {"decay": 0.0, "tau": 30} and cell.seeds == (1,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arms": (*EXPERIMENT.arms, Arm("muon", "again"))}, "'muon' is there 2 times"),
        ({"check_arms": ("lemma", "no_root", "muon")}, "'muon' is there 2 times"),
        ({"arms": EXPERIMENT.arms[:1]}, "reads 'adamw@best', which is no arm"),
        ({"check_arms": ("lemma",)}, "reads 'no_root'"),
        ({"claims": (RULE, RULE)}, "'ML-3' is there 2 times"),
        ({"claims": (dataclasses.replace(RULE, id="ML-9"),)}, "no claim 'ML-9'"),
        ({"presets": {}}, "no preset"),
        ({"presets": {"cpu": Preset}}, "instance of a dataclass"),
        ({"presets": {"cpu": {"test_seeds": ()}}}, "instance of a dataclass"),
        ({"presets": {"cpu": Preset(tuning_seeds=(11, 2))}}, r"\[11\] are used for tuning"),
        ({"presets": {"cpu": Preset(test_seeds=(11, 11))}}, "test seed 11 is there 2"),
        ({"presets": {"cpu": Preset(test_seeds=tuple(range(10, 14)))}}, "4 test seeds cannot.*at least 5"),
        ({"presets": {"cpu": Preset(test_seeds=tuple(range(10, 51)))}}, "at most 40"),
    ],
)
def test_refused_at_construction(fields, message):
    with pytest.raises(ReproError, match=message):
        changed(**fields)


def test_more_claims_in_a_family_need_more_seeds():
    six = tuple(range(20, 26))
    many = tuple(dataclasses.replace(RULE, variant=str(i)) for i in range(4))
    apart = tuple(dataclasses.replace(claim, family=claim.variant) for claim in many)
    assert changed(claims=many[:3], presets={"cpu": Preset(test_seeds=six)})
    with pytest.raises(ReproError, match="at least 7"):
        changed(claims=many, presets={"cpu": Preset(test_seeds=six)})
    assert changed(claims=apart, presets={"cpu": Preset(test_seeds=six)})


def test_claims_may_depend_on_the_preset():
    sizes = (("s", 1.0), ("m", 2.0), ("l", 4.0))
    trend = Trend("loss", "adamw@best", "muon@best", sizes=sizes)
    grown = dataclasses.replace(RULE, criterion=trend, control=Control("exchanged", swapped(trend)), variant="trend")
    by_preset = changed(claims=lambda preset: (RULE, grown) if len(preset.sizes) > 2 else (RULE,))
    assert by_preset.claims_for(Preset()) == (RULE,)
    assert by_preset.claims_for(Preset(sizes=("s", "m", "l"))) == (RULE, grown)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Arm("a@b", ""),
        lambda: Arm("", ""),
        lambda: Arm("a", "", {"x": [1]}),
        lambda: Cell("a", "s", 0.0, "", "test", (1,)),
        lambda: Cell("a", "s", math.nan, "", "test", (1,)),
        lambda: Cell("a", "s", 0.1, "", "train", (1,)),
        lambda: Cell("a", "s", 0.1, "", "test", ()),
        lambda: Cell("a", "s", 0.1, "", "test", (1, 1)),
        lambda: Cell("a", "s", 0.1, "", "test", (1,), {"x": None}),
    ],
)
def test_arms_and_cells_that_make_no_sense(build):
    with pytest.raises(ReproError):
        build()


def tuning(values, seeds=(1, 2), arm="a"):
    return Runs(
        Run(arm, seed, {"loss": v}, "ladder", "s", rate, "tuning")
        for rate, vs in values.items()
        for seed, v in zip(seeds, vs, strict=True)
    )


def test_best_rate():
    assert best_rate(tuning({0.1: (3, 3), 0.2: (1, 4), 0.4: (5, 5)}), "a", "s") == 0.2
    assert best_rate(tuning({0.2: (1, 1), 0.1: (1, 1)}), "a", "s") == 0.1
    assert best_rate(tuning({0.1: (9, 9), 0.2: (0, math.nan), 0.4: (0, -math.inf)}), "a", "s") == 0.1
    assert best_rate(tuning({0.2: (math.nan, 1), 0.1: (math.inf, 1)}), "a", "s") == 0.1
    with pytest.raises(ReproError, match="different seeds"):
        best_rate(tuning({0.1: (1, 1)}) + tuning({0.2: (1, 1)}, seeds=(2, 3)), "a", "s")
    with pytest.raises(ReproError, match="no tuning run of b"):
        best_rate(tuning({0.1: (1, 1)}), "b", "s")
    twice = tuning({0.1: (1, 1)}) + [Run("a", 1, {"loss": 0.0}, "again", "s", 0.1, "tuning")]
    with pytest.raises(ReproError, match="two tuning runs"):
        best_rate(twice, "a", "s")


def test_extend_ladder():
    assert extend_ladder([0.1, 0.2, 0.4], 0.4, 2) == 0.8
    assert extend_ladder([0.1, 0.2, 0.4], 0.1, 2) == 0.05
    assert extend_ladder([0.1, 0.2, 0.4], 0.2, 2) is None
    for bad in (([0.1], 0.1, 2), ([0.1, 0.2], 0.3, 2), ([0.1, 0.2], 0.1, 1)):
        with pytest.raises(ReproError):
            extend_ladder(*bad)


def hashed(experiment=EXPERIMENT, **preset):
    return rule_hash(experiment, dataclasses.replace(Preset(), **preset))


def test_hash_changes_with_the_rule():
    loose = dataclasses.replace(LOSS, smallest=1.02)
    by_difference = dataclasses.replace(LOSS, log=False, smallest=1.01)
    hashes = [
        hashed(),
        hashed(test_seeds=(11, 12, 13, 14, 15, 16, 17, 19)),
        hashed(tuning_seeds=(1, 3)),
        hashed(rates=(0.1, 0.3)),
        hashed(changed(claims=(RULE,))),
        hashed(changed(claims=(CHECK, RULE))),
        hashed(changed(claims=(dataclasses.replace(RULE, criterion=loose), CHECK))),
        hashed(changed(claims=(dataclasses.replace(RULE, criterion=by_difference), CHECK))),
        hashed(changed(claims=(dataclasses.replace(RULE, control=Control("other", swapped(LOSS))), CHECK))),
        hashed(changed(claims=(dataclasses.replace(RULE, control=Control("exchanged", swapped(loose))), CHECK))),
        hashed(changed(claims=(dataclasses.replace(RULE, family="other"), CHECK))),
        hashed(changed(claims=(dataclasses.replace(RULE, statement="Muon wins"), CHECK))),
        hashed(changed(arms=(Arm("muon", "Muon", {"decay": 0.2}), EXPERIMENT.arms[1]))),
        hashed(changed(arms=(*EXPERIMENT.arms, Arm("lion", "Lion")))),
    ]
    assert len(set(hashes)) == len(hashes) and all(re.fullmatch("[0-9a-f]{64}", h) for h in hashes)


def test_hash_ignores_what_no_verdict_depends_on():
    assert hashed(changed(title="Another title")) == hashed()
    assert hashed(changed(claims=(dataclasses.replace(RULE, reported="52 %"), CHECK))) == hashed()
    reordered = Arm("muon", "M", dict(reversed({"decay": 0.1, "z": 1}.items())))
    ordered = Arm("muon", "M", {"decay": 0.1, "z": 1.0})
    assert hashed(changed(arms=(reordered, EXPERIMENT.arms[1]))) == hashed(changed(arms=(ordered, EXPERIMENT.arms[1])))


def test_hash_is_the_same_in_every_process():
    script = "import runpy, sys; m = runpy.run_path(sys.argv[1]); print(m['hashed']())"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", script, __file__], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == hashed()
    # Written down, so that a change of the canonical form, or of a Python version, shows.
    assert hashed() == "951a8692ab1f17c3cf344c54d7886e5cf71649f7770fec288e002cfd7659f78e"


def test_plain_data():
    class Colour(enum.Enum):
        RED = 1

    @dataclass
    class Inner:
        x: object = None
        names: list = field(default_factory=lambda: ["é"])

    assert plain({"a": Inner(Colour.RED), "b": (np.float32(0.5), np.int64(3), True, 2.0)}) == {
        "a": {"x": 1, "names": ["é"]},
        "b": [0.5, 3, True, 2],
    }
    assert plain([math.inf, -math.inf, math.nan, None]) == ["inf", "-inf", "nan", None]
    for bad in ({1: 2}, {3}, print, Inner(object())):
        with pytest.raises(ReproError):
            plain(bad)


def test_the_package_needs_no_jax():
    script = "import sys, repro.claims; sys.exit(any(m in sys.modules for m in ('jax', 'polars', 'flax')))"
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0


def test_the_example_of_the_readme_runs(capsys):
    text = (ROOT / "repro" / "claims" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("supported: ")
