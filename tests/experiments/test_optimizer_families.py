"""The rules of optimizer-families, the arms' optimizers, and what a hybrid updates with what."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from repro import catalogue
from repro.claims import Cell, Run, Runs
from repro.errors import ReproError
from repro.optim import adam, sgd
from repro.optim.layout import named_layouts, path_name
from repro.runner import lane_config

EXPERIMENT = catalogue.load("optimizer-families")
CPU = EXPERIMENT.presets["cpu"]
LOSSES = {"sgd": 5.0, "adam_on_rest": 4.8, "adam_on_ends": 4.55, "adalayer": 4.52}


def world(arm, point, seed):
    return {"loss": LOSSES.get(arm, 4.5)}


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(EXPERIMENT, world)


@pytest.mark.parametrize(
    ("losses", "label_of"),
    [
        # SGD ties as well: then the tie says nothing, and there is no gap to recover.
        ({"sgd": 4.51}, {"Lion ties": "inconclusive", "SGD falls behind": "not supported"}),
        # Adaptivity elsewhere does as well.
        ({"adam_on_rest": 4.52}, {"Adam on head and norms recovers": "inconclusive", "Lion ties": "supported"}),
        ({"lion": 4.7}, {"Lion ties": "contradicted", "Signum ties": "supported"}),
        ({"adam_on_ends": 4.9}, {"Adam on head and norms recovers": "contradicted"}),
    ],
)
def test_other_worlds(verdicts, losses, label_of):
    labels = {
        v.variant: v.label for v in verdicts(EXPERIMENT, CPU, lambda arm, *_: {"loss": (LOSSES | losses).get(arm, 4.5)})
    }
    for variant, label in label_of.items():
        assert labels[f"{variant}, w32"] == label


def test_what_is_recovered():
    losses = {"sgd": 5.0, "adam": 4.0, "adalayer": 4.25, "adam_on_rest": 5.5}
    runs = Runs(Run(arm, 3, {"loss": loss}, point="best", size="w32", rate=0.1) for arm, loss in losses.items())
    assert {r.arm: r.metrics["recovered"] for r in EXPERIMENT.derive(runs)} == {"adalayer": 0.75, "adam_on_rest": -0.5}
    no_gap = Runs(Run(arm, 3, {"loss": 4.0}, point="best", size="w32", rate=0.1) for arm in losses)
    assert all(math.isnan(r.metrics["recovered"]) for r in EXPERIMENT.derive(no_gap))


def test_every_arm_searches_on_its_own_ladder_and_hybrids_take_adams_best_rate():
    best = {"adam": 0.02, "lion": 0.001, "sgd": 4.0}  # a loss with its minimum there; Adam's and SGD's beyond the start
    asked = []

    def train(cells):
        for cell in cells:
            asked.append(cell)
            target = best.get(cell.arm, 0.5 if cell.arm.startswith("adam_on") else 0.004)
            for seed in cell.seeds:
                loss = 4 + math.log2(cell.rate / target) ** 2
                yield Run(cell.arm, seed, {"loss": loss}, cell.point, cell.size, cell.rate, cell.phase)

    from repro.claims import gather

    gather(EXPERIMENT, CPU, train)
    tried = lambda arm: sorted({c.rate for c in asked if c.arm == arm and c.phase == "tuning"})
    assert tried("adam") == [0.005, 0.01, 0.02, 0.04]
    assert tried("lion") == [0.0005, 0.001, 0.002, 0.004]
    assert tried("sgd") == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert {c.settings["adam_rate"] for c in asked if c.arm == "adam_on_ends"} == {0.02}
    assert {c.arm: c.rate for c in asked if c.phase == "test"} | best == {
        c.arm: c.rate for c in asked if c.phase == "test"
    }


def test_no_arm_has_a_second_moment_that_forgets_before_the_first():
    for arm in EXPERIMENT.arms:
        config = lane_config(EXPERIMENT, CPU, Cell(arm.name, "w32", 0.01, "best", "test", (0,)))
        assert config.optim.b2 >= config.optim.b1**2 and config.weight_decay == 0
        program = config.program_class()(config)
        jax.eval_shape(program.init, jax.ShapeDtypeStruct((), np.uint32))  # every arm's optimizer can be built


@pytest.mark.usefixtures("quick_compile")
def test_a_hybrid_is_adam_on_its_roles_and_sgd_elsewhere():
    cell = Cell("adam_on_ends", "w32", 0.5, "best", "test", (0,), {"adam_rate": 0.03})
    config = lane_config(EXPERIMENT, CPU, cell)
    program = config.program_class()(config)
    shapes = jax.eval_shape(program.init, jax.ShapeDtypeStruct((), np.uint32)).params

    @jax.jit
    def updates(grads):
        rules = {"hybrid": program.optimizer(config.numbers(), 0.5), "adam": adam(0.015), "sgd": sgd(0.25)}
        return {name: tx.update(grads, tx.init(grads), grads)[0] for name, tx in rules.items()}

    grads = jax.tree.map(lambda x: np.full(x.shape, 0.25, np.float32), shapes)
    named = lambda tree: {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    found = {name: named(tree) for name, tree in updates(grads).items()}
    roles = {path: layout.role for path, layout in named_layouts(program.layouts).items()}
    for path, role in roles.items():
        same, other = ("adam", "sgd") if role in ("head", "norm") else ("sgd", "adam")
        np.testing.assert_allclose(found["hybrid"][path], found[same][path], rtol=1e-6)
        assert not np.allclose(found["hybrid"][path], found[other][path], rtol=0.1)
    assert set(roles.values()) == {"embedding", "matrix", "head", "norm"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": ("adam", "lion")}, "take adam, sgd"),
        ({"arms": ("adam", "sgd", "muon")}, "take adam, sgd"),
        ({"sgd_rates": (1.0, 0.5)}, "ascending"),
        ({"tuning_limit": 3, "sign_rates": (0.001, 0.002, 0.004, 0.008)}, "tuning_limit"),
    ],
)
def test_what_a_preset_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"adam_roles": "heads"}, "roles are"),
        ({"adam_rate": 0.0}, "positive"),
        ({"adam_roles": "head", "weight_decay": 0.1}, "without weight decay"),
    ],
)
def test_what_a_config_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU.train, **change)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "optimizer-families", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
