"""The rules of latent-moe, and the branch against its equation."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from repro import catalogue
from repro.claims import Run, Runs, gather
from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig
from repro.models.moe import LatentMoE
from repro.runner import lane_config

EXPERIMENT = catalogue.load("latent-moe")
MODULE = __import__("sys").modules[EXPERIMENT.plan.__module__]
CPU = EXPERIMENT.presets["cpu"]


@pytest.fixture(scope="module")
def checked(quick_compile_module):
    return EXPERIMENT.checks(CPU)


@pytest.fixture
def experiment(checked):
    """The experiment with its layer computed once for all worlds."""
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def world(arm, point, seed, inside=3.0):
    """One in which every claim holds; `inside` is how much more the tensors inside grow without the norm."""
    plain = arm.startswith("plain")
    end = {"routed_rms": 4.0 if plain else 1.0, "sum_rms": inside if plain else 1.0}
    end["expert_hidden_max"] = 20 * (inside if plain else 1.0)
    early = {"early_routed_rms": 0.4, "early_sum_rms": 0.5, "early_expert_hidden_max": 10.0}
    return end | early | {"loss": 1.95 + 0.02 * plain + 0.2 * (point == "harm")}


def test_claims_and_controls(check_that_claims_can_hold, experiment):
    check_that_claims_can_hold(experiment, world)


def test_a_world_in_which_the_norm_lets_grow_what_is_inside(verdicts, experiment):
    found = verdicts(experiment, CPU, lambda *at: world(*at, inside=0.2))
    labels = {v.variant: v.label for v in found}
    for words in ("no decay", "decay 0.1"):
        assert labels[f"branch output, {words}"] == "supported"
        assert labels[f"summed latent, {words}"] == labels[f"expert hidden units, {words}"] == "contradicted"


def test_a_world_in_which_the_norm_does_nothing(verdicts, experiment):
    alike = lambda arm, point, seed: world("norm", point, seed)
    labels = {v.variant: v.label for v in verdicts(experiment, CPU, alike)}
    assert labels["branch output, no decay"] == labels["lower loss"] == "not supported"
    assert labels["no harm"] == "supported"


def test_growth_is_the_end_over_the_start():
    row = world("plain", "shared", 0)
    (derived,) = EXPERIMENT.derive(Runs([Run("plain", 0, row, "shared", "custom", 0.01)]))
    assert derived.metrics == {"routed_growth": 10.0, "sum_growth": 6.0, "hidden_growth": 6.0}


def test_only_the_norm_removes_the_size_of_the_gates(checked):
    found = {run.arm: run.metrics for run in checked}
    assert found["with_norm"]["changed"] < 1e-5 and found["with_norm"]["latent_rms"] > 1
    # Without it everything is ten times as large: nine times the largest entry, which is some root mean squares.
    assert found["without_norm"]["changed"] > 9


@pytest.mark.usefixtures("quick_compile")
def test_the_branch_is_its_equation():
    """y = W_up norm(sum of gate * expert(W_down x)), token by token in NumPy; without the norm, and the norm before the
    sum, come out elsewhere."""
    config = ModelConfig(width=16, heads=2, moe=MoEConfig(experts=4, active=2, ffn=8, latent=8))
    x = np.random.default_rng(0).normal(size=(1, 5, 16)).astype(np.float32)

    @jax.jit
    def run(key):
        with nnx.set_graph_mode(False):
            model = LatentMoE(config, rngs=nnx.Rngs(params=key))
            y, record = model(jnp.asarray(x))
            return y, record.routes, nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[1])

    y, routes, w = run(jax.random.key(0))
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), w)
    norm = lambda u: u / np.sqrt((u**2).mean() + config.norm_eps)
    sigmoid = lambda z: 1 / (1 + np.exp(-z))
    right, bare, early = [], [], []
    for token, chosen in zip(x[0].astype(np.float64), np.asarray(routes)[0], strict=True):
        scores = sigmoid(token @ w["router_DE"])
        assert set(chosen) == set(np.argsort(scores)[-2:])
        z = token @ w["latent_down_DC"]
        outputs = []
        for e in chosen:
            gate, up = z @ w["gate_EDF"][e], z @ w["up_EDF"][e]
            outputs.append((gate * sigmoid(gate) * up) @ w["down_EFD"][e])
        gates = scores[chosen] / scores[chosen].sum()
        u = sum(g * out for g, out in zip(gates, outputs, strict=True))
        right.append(norm(u) @ w["latent_up_CD"])
        bare.append(u @ w["latent_up_CD"])
        early.append(sum(g * norm(out) for g, out in zip(gates, outputs, strict=True)) @ w["latent_up_CD"])
    np.testing.assert_allclose(y[0], right, atol=2e-5)
    for wrong in (bare, early):
        assert np.abs(y[0] - np.array(wrong)).max() > 0.05


def test_the_plan():
    asked = []

    def train(cells):
        for cell in cells:
            asked.append(cell)
            for seed in cell.seeds:
                row = world(cell.arm, cell.point, seed) | {"loss": 2 + abs(math.log2(cell.rate / 0.003))}
                yield Run(cell.arm, seed, row, cell.point, cell.size, cell.rate, cell.phase)

    gather(dataclasses.replace(EXPERIMENT, checks=None), CPU, train)
    test = {(c.arm, c.point): c for c in asked if c.phase == "test"}
    assert test["norm", "best"].rate == 0.003 and test["norm", "harm"].rate == 0.024
    assert {c.rate for (_, point), c in test.items() if point == "shared"} == {0.01}
    configs = {arm.name: lane_config(EXPERIMENT, CPU, test[arm.name, "shared"]) for arm in EXPERIMENT.arms}
    assert [configs[a].model.moe.latent_norm for a in configs] == [False, True, False, True]
    assert [configs[a].weight_decay for a in configs] == [0.0, 0.0, 0.1, 0.1]
    assert len({config.structure() for config in configs.values()}) == 2


def test_what_a_preset_refuses():
    with pytest.raises(ReproError, match="below high_rate"):
        dataclasses.replace(CPU, shared_rate=0.05)
    with pytest.raises(ReproError, match="one size"):
        dataclasses.replace(CPU, sizes=("w32", "xs"))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "latent-moe", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
