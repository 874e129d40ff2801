"""The rules of dgrad-routes, and its loss on a part of each window; policies are tested in tests/quant."""

import dataclasses

import jax
import numpy as np
import pytest

from repro import catalogue
from repro.errors import ReproError
from repro.quant import POLICIES
from repro.quant.precision import precision_of
from repro.train import Program, TrainConfig

EXPERIMENT = catalogue.load("dgrad-routes")
CPU, SMOKE = EXPERIMENT.presets["cpu"], EXPERIMENT.presets["smoke"]


def world(arm, point, seed):
    return {"loss": 2.0 + 0.1 * arm.endswith("_block") + 0.001 * seed}


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(EXPERIMENT, world)


def test_blocks_that_cost_nothing_are_not_supported(verdicts):
    found = verdicts(EXPERIMENT, CPU, lambda arm, point, seed: {"loss": 2.0 + 1e-4 * (seed * len(arm) % 7)})
    assert len(found) == 6 and {v.label for v in found} == {"not supported"}


@pytest.mark.usefixtures("quick_compile")
def test_the_loss_is_that_of_what_is_not_masked():
    model = dataclasses.replace(SMOKE.train.model, vocab_size=16)
    plain = TrainConfig(model=model, optimizer="adamw", length=16, batch_size=2)
    fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    window = jax.random.randint(jax.random.key(1), (2, 17), 0, 16)
    params = jax.jit(Program(plain).init)(0).params

    def losses(params):
        found = [Program(plain).loss(params, window, 0.0)]
        for masked in (0.0, 0.75):
            config = type(SMOKE.train)(**fields, masked=masked)
            found.append(config.program_class()(config).loss(params, window, 0.0))
        return [loss for loss, _ in found], found[0][1][2].logits

    (whole, unmasked, last), logits = jax.jit(losses)(params)
    assert float(unmasked) == float(whole)
    z = np.asarray(logits, np.float64)
    each = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, np.asarray(window)[:, 1:, None], -1)[..., 0]
    assert float(last) == pytest.approx(each[:, 12:].mean(), rel=1e-5)
    assert float(last) != pytest.approx(each[:, :12].mean(), rel=1e-3) and float(last) != pytest.approx(
        each.mean(), rel=1e-3
    )


def test_arms_differ_in_the_input_of_dgrad_alone():
    for arm in EXPERIMENT.arms:
        precision = precision_of(arm.settings["model.precision"])
        for role in ("attention", "ffn", "experts"):
            policy = precision.policy(role)
            others = dataclasses.replace(policy, dgrad_dy=None)
            assert others == POLICIES["fp32"] and (policy.dgrad_dy is None) == (arm.name == "exact")
        assert precision.policy("head") is None and precision.policy("router") is None
    shapes = {arm.name: precision_of(arm.settings["model.precision"]).policy("ffn").dgrad_dy for arm in EXPERIMENT.arms}
    assert shapes["e4m3_tile"].block_shape == (1, 128) and shapes["e4m3_block"].block_shape == (128, 128)
    assert shapes["e2m1_block"].element == "e2m1"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"routes": ("roads",)}, "known are experts"),
        ({"elements": ("e5m2",)}, "known are e4m3"),
        ({"sizes": ("xs",)}, "custom"),
        ({"masked": 1.0}, "below 1"),
    ],
)
def test_what_a_preset_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU.train if "masked" in change else CPU, **change)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "dgrad-routes", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
