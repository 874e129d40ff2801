"""The rules of adam-epsilon in made-up worlds, its closed form, and what its program hands to Adam."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.errors import ReproError
from repro.train import with_settings

pytestmark = pytest.mark.usefixtures("quick_compile_module")

EXPERIMENT = catalogue.load("adam-epsilon")
M = sys.modules["repro.experiments.adam_epsilon"]
CPU = EXPERIMENT.presets["cpu"]


@pytest.fixture(scope="module")
def checked(quick_compile_module):
    return EXPERIMENT.checks(CPU)


@pytest.fixture
def experiment(checked):
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def world(arm, point, seed):
    """One in which every claim holds."""
    lost = {("eps1e-8", "c1e-6"): 0.3, ("eps1e-6", "c1e-6"): 1.5, ("eps1e-6", "c1e-4"): 0.4}.get((arm, point), 0.0)
    return {"loss": 2.0 + lost, "least_grad_rms": 1e-4 * M.SCALES[point]}


def test_claims_and_controls(check_that_claims_can_hold, experiment):
    check_that_claims_can_hold(experiment, world)


def test_a_world_in_which_eps_does_the_opposite(verdicts, experiment):
    def other(arm, point, seed):
        small = point == "c1e-6"
        loss = {"eps1e-15": 0.1 * small, "eps1e-6": 0.5 * (not small)}.get(arm, 0.0)
        return {"loss": 2.0 + loss, "least_grad_rms": 1e-8}

    found = verdicts(experiment, CPU, other)
    assert all(v.label in ("contradicted", "not supported") for v in found if v.n is not None)
    assert sum(v.n is not None for v in found) == 10


def test_the_forms_and_the_wrong_ones(checked):
    found = checked[0].metrics
    assert found["off"] < 1e-5 < 0.1 < found["off_inside"]
    assert found["bits_both"] == 0 < found["bits_loss"]


def test_a_constant_gradient_as_large_as_eps_gives_half_an_update():
    for g in (1e-6, -1e-9):
        u = M.updates(jnp.full((5, 1), g), jnp.float32(abs(g)))
        np.testing.assert_allclose(u, np.sign(g) / 2, rtol=1e-5)
    np.testing.assert_allclose(M.updates(jnp.full((5, 1), 1e-9), jnp.float32(1e-6)), 1 / 1001, rtol=1e-5)


def test_the_first_step_of_the_program():
    """rate * c g / (c |g| + eps) for every parameter; the gradient's size is that of the scaled loss."""
    config = dataclasses.replace(EXPERIMENT.presets["smoke"].config("w32"), schedule="constant", warmup=0.0)
    program = config.program_class()(config)
    state = program.init(jnp.uint32(0))
    window = jnp.asarray(np.random.default_rng(0).integers(0, 256, (config.batch_size, config.length + 1)), jnp.int32)

    @jax.jit
    def one(state, window, eps, scale):
        numbers = config.numbers_type()(0.01, 0.0, jnp.inf, 0.0, eps, scale)
        after, metrics = program.step(state, window, numbers)
        return jax.tree.map(jnp.subtract, state.params, after.params), metrics

    moved, at_one = one(state, window, 1e-15, 1.0)
    few, small = one(state, window, 1e-6, 1e-6)
    grads = jax.jit(jax.grad(lambda p, window: program.loss(p, window, 0.0)[0]))(state.params, window)
    leaves = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (grads, moved, few)]
    g, plain, shrunk = (x.astype(np.float64) for x in leaves)
    clear = np.abs(g) > 1e-4  # of small steps float32 weights keep few digits
    np.testing.assert_allclose(plain[clear], 0.01 * np.sign(g[clear]), atol=1e-6)
    assert not np.allclose(shrunk[clear], plain[clear], atol=1e-3)
    np.testing.assert_allclose(shrunk, 0.01 * g / (np.abs(g) + 1.0), atol=1e-6)
    rms = np.sqrt(np.mean(np.square(grads["embedding_ZD"], dtype=np.float64)))
    assert float(at_one["grad_rms"]) == pytest.approx(np.sqrt(np.mean(g**2)), rel=1e-3)
    assert min(abs(float(x) / rms - 1) for x in at_one["tensor_grad_rms"]) < 1e-3
    np.testing.assert_allclose(small["tensor_grad_rms"], 1e-6 * at_one["tensor_grad_rms"], rtol=1e-3)


def test_one_program_for_all_cells():
    for size in CPU.sizes:
        cells = [cell for cell in next(EXPERIMENT.plan(CPU)) if cell.size == size]
        configs = [with_settings(CPU.config(size), EXPERIMENT.settings(cell)) for cell in cells]
        assert len({config.structure() for config in configs}) == 1
        assert len({(config.eps, config.loss_scale) for config in configs}) == 10


@pytest.mark.parametrize(
    ("change", "said"),
    [({"eps": 0.0}, "positive"), ({"loss_scale": -1.0}, "positive"), ({"optimizer": "lion"}, "plain AdamW"),
     ({"optim.eps": 1e-7}, "plain AdamW")],
)  # fmt: skip
def test_what_a_config_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        with_settings(CPU.train, change)


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "adam-epsilon", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
