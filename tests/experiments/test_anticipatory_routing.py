"""The rules of anticipatory-routing, the toy against closed forms, and which parameters' indices a step takes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.claims import Run, gather
from repro.errors import ReproError
from repro.models import MoEConfig
from repro.runner import lane_config
from repro.train import JobResult

EXPERIMENT = catalogue.load("anticipatory-routing")
MODULE = __import__("sys").modules[EXPERIMENT.plan.__module__]
CPU = EXPERIMENT.presets["cpu"]


@pytest.fixture(scope="module")
def checked():
    return list(EXPERIMENT.checks(CPU))


@pytest.fixture
def experiment(checked):
    """The experiment with its toy computed once for all worlds."""
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def world(arm, point, seed):
    """One in which every claim holds."""
    loss = 2.0 + {"mixed": 0.1}.get(arm, 0.0) + (0.5 if (arm, point) == ("sync", "hot") else 0.0)
    sync_hit = arm == "sync_hit"
    return {
        "loss": loss, "outlier_then_load": 0.3, "load_then_outlier": 0.3, "outlier_then_other": -0.05,
        "hit_load": 1.5 if sync_hit else 1.2, "hit_hidden": 90.0 if sync_hit else 40.0,
        "hit_loss": 2.3 if sync_hit else 2.2,
    }  # fmt: skip


def test_claims_and_controls(check_that_claims_can_hold, experiment):
    check_that_claims_can_hold(experiment, world)


def test_a_world_without_a_loop(verdicts, experiment):
    def still(arm, point, seed):
        loss = 2.0 + 0.1 * (arm == "mixed")
        return world("sync", "best", seed) | {"loss": loss, "outlier_then_load": -0.1, "load_then_outlier": 0.0}

    labels = {v.variant: v.label for v in verdicts(experiment, CPU, still)}
    assert labels["no harm"] == "supported"
    for variant in (
        "a loop, best rate", "a loop, hot", "older indices help, hot", "a hit expert gains load",
        "older indices shrink the outlier", "older indices spare the loss",
    ):  # fmt: skip
        assert labels[variant] == "not supported", variant


def test_where_any_indices_do_no_harm_means_nothing(verdicts, experiment):
    careless = lambda arm, point, seed: world(arm, point, seed) | {"loss": 2.0}
    assert {v.variant: v.label for v in verdicts(experiment, CPU, careless)}["no harm"] == "inconclusive"


def test_the_toy_against_closed_forms(checked):
    of = {(run.arm, run.point): run.metrics for run in checked}
    for lag in MODULE.LAGS:
        z = 1 + of["positive", f"d{lag}"]["growth"]
        assert z ** (lag + 1) == pytest.approx(0.9 * z**lag + 0.2, rel=1e-6)
        # On the unit circle, z = exp(i t): 0.9 sin(d t) = sin((d + 1) t), and k = 0.9 cos(d t) - cos((d + 1) t).
        t = np.linspace(1e-4, np.pi, 400_001)
        off = 0.9 * np.sin(lag * t) - np.sin((lag + 1) * t)
        crossings = t[:-1][np.sign(off[:-1]) != np.sign(off[1:])]
        k = [0.9 * math.cos(lag * at) - math.cos((lag + 1) * at) for at in [*crossings, math.pi]]
        assert of["negative", f"d{lag}"]["threshold"] == pytest.approx(min(x for x in k if x > 0), rel=1e-3)
    assert of["excitable", "d0"]["impulse"] == pytest.approx(1.0)  # the fixed point of 0.9 x + 0.1 x^2
    # With a lag of 1 the second step is 0.9 of the first, and from then on x' = 0.9 x + 0.1 x x_before.
    x, before = 0.9 * of["excitable", "d1"]["impulse"], of["excitable", "d1"]["impulse"]
    for _ in range(60):
        x, before = 0.9 * x + 0.1 * x * before, x
    assert x == pytest.approx(1.0, abs=0.05)  # the critical one creeps along the unstable fixed point


def test_partial_correlation_and_the_halves_of_a_loop():
    rng = np.random.default_rng(0)
    given, own, noise = rng.normal(size=(3, 4000))
    assert MODULE.partial_correlation(own + 3 * given, 2 * own + given, given) == pytest.approx(1.0)
    assert abs(MODULE.partial_correlation(given + own, given + noise, given)) < 0.05  # 0.5 without the partial
    assert math.isnan(MODULE.partial_correlation(given, own, given))

    steps, lag = 600, 20
    log_unit = rng.normal(size=(steps, 8))
    load = 0.125 + 0.01 * rng.normal(size=(steps, 8))
    load[lag:] += 0.02 * log_unit[:-lag]  # outliers bring tokens 20 steps later, and load does nothing to outliers
    found = MODULE.halves(load, np.exp(log_unit), lag, steps // 5)
    assert found["outlier_then_load"] > 0.8
    assert abs(found["load_then_outlier"]) < 0.1 and abs(found["outlier_then_other"]) < 0.1
    assert MODULE.halves(load[:30], np.exp(log_unit[:30]), lag, 10) == {}


def test_scalars_follow_the_expert_that_is_busiest_before_the_hit(monkeypatch):
    steps, hit = 200, 120
    load = np.full((steps, 1, 2, 4), 0.25)
    load[:hit, 0, 1] = [0.1, 0.4, 0.3, 0.2]
    load[hit:, 0, 1] = [0.4, 0.3, 0.2, 0.1]
    hidden = np.ones((steps, 1, 2, 4))
    hidden[hit + 20 : hit + 40, 0, 1, 1] = 7.0
    loss = np.full((steps, 1), 2.0)
    loss[hit : hit + 40] = 3.0
    monkeypatch.setattr(MODULE.Program, "scalars", staticmethod(lambda result, configs: [{}]))
    result = JobResult({"loss": loss, "expert_load": load, "expert_hidden": hidden}, {}, None)
    (row,) = MODULE.RoutingProgram.scalars(result, [MODULE.RoutingConfig()])
    assert row["hit_hidden"] == pytest.approx(7.0) and row["hit_load"] == pytest.approx(1.2)
    assert row["hit_loss"] == pytest.approx(3.0)


TINY = dataclasses.replace(
    CPU.train.model, layers=1, width=16, heads=2, vocab_size=64,
    moe=MoEConfig(experts=4, active=1, ffn=8, balance="sign", balance_rate=0.05),
)  # fmt: skip


def tiny(**settings):
    config = MODULE.RoutingConfig(
        model=TINY, length=8, batch_size=4, steps=8, warmup=0.0, schedule="constant", optimizer="adamw", hit_step=1,
        learning_rate=0.3, **settings,
    )  # fmt: skip
    program = MODULE.RoutingProgram(config)
    return program, jax.jit(program.step), config.numbers()


@pytest.fixture(scope="module")
def walked(quick_compile_module, fusion_emitters):
    """Two programs, and the states of five steps with a lag of 2 under several settings."""
    present, present_step, numbers = tiny()
    late, late_step, late_numbers = tiny(lag=2)
    windows = np.random.default_rng(0).integers(0, 64, (6, 4, 9))

    def walk(program, step, numbers):
        states = [jax.jit(program.init)(jnp.uint32(0))]
        for window in windows[:-1]:
            states.append(step(states[-1], window, numbers)[0])
        return states

    with fusion_emitters():  # Adam's first steps make much of a last bit
        states = {
            "present": walk(present, present_step, numbers),
            "lag": walk(late, late_step, late_numbers),
            "frozen": walk(late, late_step, late_numbers._replace(frozen=1.0, since=1.0)),
            "since": walk(late, late_step, late_numbers._replace(since=9.0)),
            "hit": walk(late, late_step, late_numbers._replace(hit=30.0, since=9.0)),
        }
    routes = jax.jit(lambda params, buffers, tokens: late.apply(params, tokens, buffers=buffers).routes)
    older = jax.jit(lambda state, tokens, numbers: late._older(state, tokens, numbers)[0])
    return states, windows[:, :, :-1], routes, older, late_numbers


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_indices_are_those_of_the_parameters_so_many_steps_ago(walked):
    states, tokens, routes, older, numbers = walked
    of = states["lag"]
    at = lambda t, now: np.asarray(routes(of[t].params, of[t].buffers, tokens[now]))
    for now, source in ((0, 0), (1, 0), (2, 0), (3, 1), (4, 2)):
        taken = np.asarray(older(of[now], tokens[now], numbers))
        np.testing.assert_array_equal(taken, at(source, now))
    assert not np.array_equal(at(2, 4), at(4, 4)) and not np.array_equal(at(2, 4), at(3, 4))
    mixed = np.asarray(older(of[4], tokens[4], numbers._replace(mixed=1.0)))
    np.testing.assert_array_equal(mixed, np.roll(at(2, 4), 1, 1))


def test_frozen_indices_are_those_of_one_step_for_ever(walked):
    states, tokens, routes, older, numbers = walked
    of, frozen = states["frozen"], numbers._replace(frozen=1.0, since=1.0)
    for now in (1, 2, 3, 4):
        expected = routes(of[1].params, of[1].buffers, tokens[now])
        np.testing.assert_array_equal(older(of[now], tokens[now], frozen), expected)


def test_before_its_first_step_nothing_differs_from_present_indices(walked):
    states, *_ = walked
    close = lambda a, b: jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), a, b)
    close(states["since"][2].params, states["present"][2].params)
    close(states["lag"][1].params, states["present"][1].params)  # the first step has no older parameters
    assert not same(states["lag"][3].params, states["since"][3].params)


def test_a_hit_scales_one_unit_of_the_busiest_expert(walked):
    states, *_ = walked
    program, _, numbers = tiny()
    before = states["since"][1]
    hit = program._hit(before, numbers._replace(hit=30.0))
    ratio = np.asarray(hit["blocks"]["ffn"]["up_EDF"]) / np.asarray(before.params["blocks"]["ffn"]["up_EDF"])
    busiest = int(before.load_LE[-1].argmax())
    expected = np.ones_like(ratio)
    expected[-1, busiest, :, 0] = 30.0
    np.testing.assert_allclose(ratio, expected, rtol=1e-6)
    assert same(program._hit(states["since"][2], numbers._replace(hit=30.0)), states["since"][2].params)  # too late
    assert same(states["hit"][1].params, states["since"][1].params)
    assert not same(states["hit"][2].params, states["since"][2].params)


def test_the_plan():
    asked = []

    def train(cells):
        for cell in cells:
            asked.append(cell)
            for seed in cell.seeds:
                row = world(cell.arm, cell.point, seed) | {"loss": 2 + abs(math.log2(cell.rate / 0.005))}
                yield Run(cell.arm, seed, row, cell.point, cell.size, cell.rate, cell.phase)

    gather(dataclasses.replace(EXPERIMENT, checks=None), CPU, train)
    test = {(c.arm, c.point): c for c in asked if c.phase == "test"}
    assert {c.rate for (_, point), c in test.items() if point == "best"} == {0.005}
    assert {c.rate for (_, point), c in test.items() if point == "hot"} == {0.02}
    configs = {key: lane_config(EXPERIMENT, CPU, cell) for key, cell in test.items()}
    assert len({config.structure() for config in configs.values()}) == 2
    assert configs["lag_hit", "best"].since == 120.0 and configs["lag", "best"].since == 0.0
    assert configs["frozen_hit", "best"].frozen == 1.0 and configs["sync_hit", "best"].hit == 30.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mixed": 1.0}, "set train.lag"),
        ({"lag": 2, "frozen": 0.5}, "0 or 1"),
        ({"lag": -1}, "zero or positive"),
        ({"model": dataclasses.replace(TINY, moe=MoEConfig())}, "needs experts"),
    ],
)
def test_what_a_config_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU.train, **change)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "anticipatory-routing", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
