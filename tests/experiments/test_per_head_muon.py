"""The rules of per-head-muon, and what its program does and measures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.errors import ReproError
from repro.train import at_size, with_settings

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERIMENT = catalogue.load("per-head-muon")
CPU = EXPERIMENT.presets["cpu"]


def world(arm, point, seed):
    """One in which every claim holds."""
    whole, wide, loud = arm.startswith("whole"), "wide" in arm, arm.endswith("loud")
    spread = (20.0 if loud and wide else 1.5 if loud or wide else 1.05) if whole else 1.0
    return {"head_spread": spread, "loss": 2.0 + 0.1 * (whole and wide) + 0.5 * arm.endswith("harm")}


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(EXPERIMENT, world)


def test_a_world_in_which_heads_are_equal_anyway(verdicts):
    labels = {v.label for v in verdicts(EXPERIMENT, CPU, lambda *_: {"head_spread": 1.0, "loss": 2.0})}
    assert "supported" not in labels


def test_arms_have_the_shapes_they_are_named_for():
    for arm in EXPERIMENT.arms:
        for size in CPU.sizes:
            model = with_settings(at_size(CPU.train, size), dict(arm.settings)).model
            assert model.heads * model.head_size == (4 if "wide" in arm.name else 1) * model.width, arm.name


def test_one_loud_head():
    config = at_size(dataclasses.replace(CPU.train, boost=100.0), "w32")
    program = config.program_class()(config)
    state = jax.jit(program.init)(jnp.uint32(0))
    ones = jax.tree.map(jnp.ones_like, state.params)
    loud = program.gradients(ones, config.numbers())
    for name in ("q_DHK", "k_DHK", "v_DHV"):
        got = np.asarray(loud["blocks"]["attention"][name])
        assert (got[:, :, 0] == 100).all() and (got[:, :, 1:] == 1).all()
    others = {**loud, "blocks": {**loud["blocks"], "attention": {"o_HVD": loud["blocks"]["attention"]["o_HVD"]}}}
    assert all((np.asarray(g) == 1).all() for g in jax.tree.leaves(others))

    window = np.random.default_rng(0).integers(0, 256, (config.batch_size, config.length + 1))
    after, metrics = jax.jit(program.step)(state, window, config.numbers())
    change = np.asarray(after.params["blocks"]["attention"]["q_DHK"] - state.params["blocks"]["attention"]["q_DHK"])
    rms = np.sqrt(np.mean(change**2, (1, 3)))
    np.testing.assert_allclose(metrics["head_spread"], np.exp(np.log(rms.max(1) / rms.min(1)).mean()), rtol=1e-4)


def test_a_boost_that_is_refused():
    with pytest.raises(ReproError, match="train.boost is 0.0; it must be positive"):
        dataclasses.replace(CPU.train, boost=0.0)
