"""The rules of first-alarm, what it reads of curves, and its amplifiers."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from repro import catalogue
from repro.claims import Run, Runs
from repro.models import ModelConfig
from repro.runner import lane_config
from repro.train import Program, TrainConfig

EXPERIMENT = catalogue.load("first-alarm")
MODULE = __import__("sys").modules[EXPERIMENT.plan.__module__]
CPU = EXPERIMENT.presets["cpu"]
OWN = {arm: own for arm, (own, _, _) in MODULE.OWN.items()}


def world(arm, point, seed, alarms=None):
    """One in which every claim holds: a loop's own signal first, then general ones, the loss, and the other loops'."""
    row = {f"peak_{name}": 0.5 for name in MODULE.SIGNALS}
    if point in ("limits", "plain"):
        return row | {"until_spike": 70.0}
    spike = 5.0 if point == "fast" else 45.0 if arm == "guarded" else 30.0
    given = dict.fromkeys(MODULE.SIGNALS, 28.0) | {"gradient": 15.0, "residual": 15.0, "loss": 25.0, "load": 12.0}
    given[OWN.get(arm, "hidden")] = 1.0 if point == "fast" else 10.0
    given |= alarms or {}
    return row | {f"alarm_{name}": at for name, at in given.items()} | {"spike": spike, "until_spike": spike}


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(EXPERIMENT, world)


def test_a_world_without_warning(verdicts):
    late = dict.fromkeys(MODULE.SIGNALS, 31.0)
    found = verdicts(EXPERIMENT, CPU, lambda arm, point, seed: world(arm, point, seed, late))
    labels = {(v.claim_id, v.variant.removeprefix("first alarm: ")): v.label for v in found}
    for id, variant in labels:
        if variant in ("warns", "the load warns", "ahead of the loss", "1 to 8 steps"):
            assert labels[id, variant] == "contradicted", (id, variant)


def test_a_world_in_which_every_signal_sees_the_same(verdicts):
    """As early as general signals is then true, and says nothing of the loop: the other loops' signals are so too."""
    same = dict.fromkeys(MODULE.SIGNALS, 10.0)
    for verdict in verdicts(EXPERIMENT, CPU, lambda arm, point, seed: world(arm, point, seed, same)):
        if verdict.variant.endswith("general signals"):
            assert (verdict.label, verdict.control_label) == ("inconclusive", "supported")
        if verdict.variant.endswith("ahead of the loss"):
            assert verdict.label == "contradicted"


def test_false_alarms_in_plain_runs_are_no_warning(verdicts):
    """Where plain runs of the same seed alarm as early, a lead shows nothing."""

    def restless(arm, point, seed):
        row = world(arm, point, seed)
        return row | ({f"alarm_{name}": 10.0 for name in MODULE.SIGNALS} if point == "plain" else {})

    found = [v for v in verdicts(EXPERIMENT, CPU, restless) if v.variant.endswith("warns")]
    assert len(found) == 6 and {v.label for v in found} == {"inconclusive"}


def test_without_a_spike_there_is_no_lead(verdicts):
    calm = lambda arm, point, seed: {k: v for k, v in world(arm, point, seed).items() if k != "spike"}
    found = [v for v in verdicts(EXPERIMENT, CPU, calm) if not v.variant.endswith("sooner")]
    assert {v.label for v in found} == {"inconclusive"}


def test_limits_are_the_largest_scores_of_plain_tuning_runs():
    plan = EXPERIMENT.plan(CPU)
    cells = next(plan)
    assert {cell.phase for cell in cells} == {"tuning"} and not any(cell.settings for cell in cells)
    runs = Runs(
        Run(c.arm, s, {f"peak_{n}": (s - 999) / 100 for n in MODULE.SIGNALS if n != "load"}, "limits", c.size,
            c.rate, "tuning")
        for c in cells for s in c.seeds
    )  # fmt: skip
    test = plan.send(runs)
    asked = {(a.name, p) for a in EXPERIMENT.arms for p in MODULE.GROWTH} | {("moment", "fast")}
    assert {(cell.arm, cell.point) for cell in test} == asked
    configs = {(c.arm, c.point): lane_config(EXPERIMENT, CPU, c) for c in test}
    for config in configs.values():
        assert config.limits.hidden == 0.15 and config.limits.load == math.inf
    for arm in EXPERIMENT.arms:  # one program for all runs of an arm
        assert len({config.structure() for (name, _), config in configs.items() if name == arm.name}) == 1
    assert configs["moment", "slow"].gradient_growth == 1.2 and configs["glu", "slow"].rate_growth == 1.1
    assert configs["moment", "fast"].span == 1.0 and configs["moment", "plain"].gradient_growth == 1.0


def test_what_is_read_of_curves():
    steps, since = 170, 100
    limits = MODULE.Limits(**dict.fromkeys(MODULE.SIGNALS, 0.25))
    config = dataclasses.replace(CPU.train, rate_growth=1.1, gradient_growth=1.2, limits=limits)
    grown = np.clip(np.arange(steps) - since + 1, 0, None)
    curves = {metric: np.ones(steps) for name, metric in MODULE.SIGNALS.items() if name not in ("load", "router")}
    curves |= {"update_norm": 2 * 1.1**grown, "grad_norm": 3 * 1.2**grown, "activation_max": 5 * 1.1**grown}
    curves["layer_gradient_norms"] = np.stack([np.ones(steps), 0.8**grown], 1) * (1.2**grown)[:, None]
    curves["loss"] = 2 + 0.01 * grown
    curves["loss"][140] += 0.2
    found = MODULE.watched(curves, config)
    # Updates per rate and gradients per factor do not move; a tenth per step passes 0.25 in the third step.
    assert found["alarm_residual"] == 2 and "alarm_update" not in found and "alarm_gradient" not in found
    assert found["peak_update"] == pytest.approx(0, abs=1e-12)
    assert found["alarm_layers"] == 1  # the quicker of the two layers
    # At step 140 the median of the 51 before is 2.15, and the loss 2.61; without the bump no step is 0.4 above.
    assert found["spike"] == found["until_spike"] == 40
    curves["loss"][140] -= 0.2
    found = MODULE.watched(curves, config)
    assert "spike" not in found and found["until_spike"] == 70 and "alarm_load" not in found


@pytest.fixture(scope="module")
def steps(quick_compile_module):
    """The update of one step as `(step, **numbers) -> (params, metrics)`, and that of the engine's own program."""
    model = ModelConfig(layers=1, width=16, heads=2, ffn=16)
    shared = dict(model=model, length=8, batch_size=2, optimizer="adamw", steps=60, warmup=0.0, schedule="constant")
    amplified, plain = MODULE.AlarmConfig(**shared, since=40.0), TrainConfig(**shared)
    window = np.random.default_rng(0).integers(0, 256, (2, 9))
    jitted = {c: (jax.jit(p.step), p.init(np.uint32(0))) for c, p in
              ((amplified, MODULE.AlarmProgram(amplified)), (plain, Program(plain)))}  # fmt: skip

    def one(config, step, **numbers):
        call, state = jitted[config]
        numbers = dataclasses.replace(config, **numbers).numbers()
        after, metrics = call(dataclasses.replace(state, step=np.int32(step)), window, numbers)
        return jax.tree.map(np.asarray, (after.params, metrics))

    return lambda step, **numbers: one(amplified, step, **numbers), lambda step: one(plain, step)


def test_amplifiers(steps):
    amplified, plain = steps
    same = lambda a, b, **how: jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **how), a, b)
    same(amplified(45)[0], plain(45)[0], rtol=1e-5, atol=1e-6)  # off
    same(amplified(39, rate_growth=1.5, gradient_growth=2.0)[0], amplified(39)[0], rtol=0, atol=0)  # not yet
    before = plain(42)[1]
    rate, gradient, burst = (
        amplified(42, **numbers)[1]
        for numbers in ({"rate_growth": 1.5}, {"gradient_growth": 2.0}, {"gradient_growth": 2.0, "span": 1.0})
    )
    assert rate["update_norm"] == pytest.approx(1.5**3 * before["update_norm"], rel=1e-5)
    assert rate["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-5)
    assert gradient["grad_norm"] == pytest.approx(8 * before["grad_norm"], rel=1e-5)
    assert burst["grad_norm"] == pytest.approx(2 * before["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path, quick_compile):
    code, _, err = command("run", "first-alarm", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0


def test_refusals(refused):
    run = lambda *words: refused("run", "first-alarm", "--preset", "smoke", *words)
    assert "nothing grows" in run("--train.since", "99")
    assert "looks back" in run("--train.since", "12")
    assert "adamw" in run("--train.optimizer", "muon")
    assert "loops" in run("--loops", "other")
