"""The rules of low-precision-updates in made-up worlds, its sums and roundings, and what its program does with them."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from repro import catalogue
from repro.errors import ReproError
from repro.train import Program, with_settings

pytestmark = pytest.mark.usefixtures("quick_compile_module")

EXPERIMENT = catalogue.load("low-precision-updates")
M = sys.modules["repro.experiments.low_precision_updates"]
CPU = EXPERIMENT.presets["cpu"]


@pytest.fixture(scope="module")
def checked(quick_compile_module):
    return EXPERIMENT.checks(CPU)


@pytest.fixture
def experiment(checked):
    """The experiment with its examples computed once for all worlds."""
    return dataclasses.replace(EXPERIMENT, checks=lambda preset: checked)


def world(arm, point, seed):
    """One in which every claim holds."""
    lost = {("fp16_gradients", "shrunk"): 2.0, ("fp16_weights", "low"): 0.2, ("int8_moments", "usual"): 0.5}
    loss = 2.0 + lost.get((arm, point), 0.0) + 0.05 * (arm == "ring")
    return {"loss": loss, "grad_error": {"ring": 4e-3, "stochastic": 2e-3}.get(arm, 1e-3)}


def test_claims_and_controls(check_that_claims_can_hold, experiment):
    check_that_claims_can_hold(experiment, world)


def test_a_world_in_which_bits_do_the_opposite(verdicts, experiment):
    def other(arm, point, seed):
        bad = arm in ("bf16_gradients", "bf16_moments", "dynamic8_moments", "stochastic") or point == "scaled"
        return {"loss": 2.0 + 0.1 * bad, "grad_error": 1e-3 * (1 + bad)}

    found = [v for v in verdicts(experiment, CPU, other) if v.n is not None]
    assert len(found) == 18 and all(v.label in ("contradicted", "not supported") for v in found)


def test_where_only_the_gradient_is_better_the_claim_on_the_loss_fails(verdicts, experiment):
    labels = {v.variant: v.label for v in verdicts(experiment, CPU, lambda *at: world(*at) | {"loss": 2.0})}
    assert labels["gradient error, xs"] == "supported" and labels["loss, xs"] == "not supported"


def test_the_examples(checked):
    found = {name: value for run in checked if run.point in ("format", "state") for name, value in run.metrics.items()
             if run.arm in ("fp16", "b0.999", "int8")}  # fmt: skip
    assert found["zero_mismatches"] == found["changed"] == 0
    assert found["zero_mismatches_subnormal"] > 0 < found["changed_small_scale"]
    assert found["left_of_moment"] == 1
    # Below 1/254 of the largest: the entries 10^-6 .. 10^0 in 255 equal steps of the exponent.
    assert found["zeros"] == np.sum(10 ** np.linspace(-6, 0, 256) < 1 / 254)


def test_sums_against_numpy():
    parts = np.random.default_rng(3).normal(size=(8, 50)).astype(np.float32)
    bf16 = parts.astype(ml_dtypes.bfloat16)
    running = bf16[0]
    for part in bf16[1:]:
        running = (running.astype(np.float32) + part.astype(np.float32)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(M.ring_sum(jnp.asarray(parts)), running.astype(np.float32))
    pairs = bf16
    while len(pairs) > 1:
        pairs = (pairs[0::2].astype(np.float32) + pairs[1::2].astype(np.float32)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(M.tree_sum(jnp.asarray(parts)), pairs[0].astype(np.float32))
    assert not np.array_equal(running, pairs[0])
    once = np.asarray(M.stochastic_sum(jnp.asarray(parts), jax.random.key(0)))
    spacing = 2.0 ** (np.frexp(np.abs(parts))[1] - 8.0)
    assert np.all(np.abs(once - parts.sum(0)) <= spacing.sum(0)) and not np.array_equal(once, running)


def test_the_form_of_a_ring():
    """A walk with uniform errors, drawn: 1/12 per rounding of a spacing that is sqrt(k) for k shards."""
    rng = np.random.default_rng(0)
    for shards in (4, 64):
        of_ring = rng.uniform(-0.5, 0.5, (20000, 2 * shards - 1))
        of_ring *= np.concatenate([np.ones(shards), np.sqrt(np.arange(2, shards + 1))])
        up = rng.uniform(size=(20000, shards))
        stochastic = (rng.uniform(size=up.shape) < up) - up
        ratio = np.sqrt(np.mean(of_ring.sum(1) ** 2) / np.mean(stochastic.sum(1) ** 2))
        assert ratio == pytest.approx(M.ring_form(shards), rel=0.03)
        assert M.flat_form(shards) < 0.85 * ratio


def program(**settings):
    """The program, and a state with made-up weights, on batches of four windows."""
    config = with_settings(dataclasses.replace(EXPERIMENT.presets["smoke"].config("w32"), batch_size=4), settings)
    own, rng = config.program_class()(config), np.random.default_rng(0)
    state = jax.eval_shape(own.init, jnp.uint32(0))
    params = jax.tree.map(lambda w: jnp.asarray(0.2 * rng.normal(size=w.shape), w.dtype), state.params)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    return config, own, dataclasses.replace(state, params=params, step=jnp.int32(1))


def test_rounded_gradients():
    """A loss scale lifts FP16 over its underflow; BF16 needs none; float16 of NumPy agrees."""
    g = np.float32(10) ** np.random.default_rng(0).uniform(-6, 0, 200).astype(np.float32)
    got = {}
    for fmt in ("fp16", "bf16"):
        config, own, _ = program(gradient_format=fmt)
        for shrink, scale in ((1.0, 1.0), (M.SHRINK, 1.0), (M.SHRINK, M.LOSS_SCALE)):
            numbers = config.numbers_type()(0.01, 0.0, jnp.inf, 0.0, shrink, scale)
            got[fmt, shrink * scale] = np.asarray(own.rounded({"w": jnp.asarray(g)}, numbers)["w"])
    for factor in (1.0, M.SHRINK, M.SHRINK * M.LOSS_SCALE):
        by_numpy = (g * np.float32(factor)).astype(np.float16).astype(np.float32) / np.float32(factor)
        np.testing.assert_array_equal(got["fp16", factor], by_numpy)
    assert np.array_equal(got["bf16", 1.0], got["bf16", M.SHRINK])
    lost = {key: np.mean(value == 0) for key, value in got.items()}
    assert lost["fp16", M.SHRINK] > 0.5 and lost["fp16", 1.0] == lost["fp16", 16.0] == lost["bf16", M.SHRINK] == 0


def test_a_step_with_fp16_weights_and_gradients(monkeypatch):
    config, own, state = program(gradient_format="fp16", fp16_weights=True)
    assert not all(np.array_equal(w, np.asarray(w).astype(np.float16)) for w in jax.tree.leaves(state.params))
    monkeypatch.setattr(Program, "init", lambda self, seed, state=state: state)
    state = own.init(jnp.uint32(0))
    window = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, config.length + 1)), jnp.int32)
    numbers = lambda rate, shrink: config.numbers_type()(rate, 0.0, jnp.inf, 0.0, shrink, 1.0)
    step = jax.jit(own.step)
    after, metrics = step(state, window, numbers(0.01, 1.0))
    for tree in (state.params, after.params):
        assert all(np.array_equal(w, np.asarray(w).astype(np.float16)) for w in jax.tree.leaves(tree))
    assert 1e-5 < float(metrics["grad_error"]) < 1e-3 and float(metrics["retained"]) > 0.9
    still, small = step(state, window, numbers(1e-6, M.SHRINK))
    assert float(small["lost"]) > 0.5 > float(metrics["lost"]) and float(small["retained"]) < 0.5
    head = [np.asarray(tree.params["head_DZ"]) for tree in (state, still)]
    assert np.mean(head[0] != head[1]) < 0.1


def test_shards_have_the_gradient_of_the_batch():
    config, own, state = program(exchange="stochastic", shards=4)
    window = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, config.length + 1)), jnp.int32)

    @jax.jit
    def both(params, window):
        return own.shard_gradients(params, window, 0.0), jax.grad(lambda p: own.loss(p, window, 0.0)[0])(params)

    shards, whole = both(state.params, window)
    for one, all_ in zip(jax.tree.leaves(shards), jax.tree.leaves(whole), strict=True):
        scale = float(jnp.abs(all_).max())
        assert one.shape == (4, *all_.shape) and not np.allclose(one[0], all_, atol=0.1 * scale)
        np.testing.assert_allclose(np.mean(one, 0), all_, atol=1e-4 * scale)
    head = np.asarray(shards["head_DZ"])
    got = np.asarray(own.exchanged({"head": shards["head_DZ"]}, jax.random.key(0))["head"])
    np.testing.assert_allclose(got, head.mean(0), atol=2**-7 * np.abs(head).max())
    assert not np.array_equal(got, head.mean(0))


def test_the_plan_runs_what_claims_read():
    cells = next(EXPERIMENT.plan(CPU))
    assert len({(cell.arm, cell.point) for cell in cells}) == 13 and len(cells) == 26
    assert {cell.rate for cell in cells if cell.point == "low"} == {4e-5}
    structures = {with_settings(CPU.config(cell.size), EXPERIMENT.settings(cell)).structure() for cell in cells}
    assert len(structures) == 2 * len(EXPERIMENT.arms)
    assert {cell.arm for cell in next(EXPERIMENT.plan(EXPERIMENT.presets["smoke"]))} == {"stochastic", "ring"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shrink": 0.3, "gradient_format": "fp16"}, "power of two"),
        ({"gradient_format": "fp8"}, "fp32, fp16 or bf16"),
        ({"exchange": "tree"}, "stochastic or ring"),
        ({"loss_scale": 2.0}, "matter only where"),
        ({"exchange": "ring", "gradient_format": "bf16"}, "rounds gradients itself"),
        ({"exchange": "ring", "shards": 3}, "divide the batch"),
        ({"fp16_weights": True, "weights": "bf16"}, "set one"),
    ],
)
def test_what_a_config_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        with_settings(CPU.train, change)


def test_what_a_preset_refuses():
    with pytest.raises(ReproError, match="low_rate"):
        dataclasses.replace(CPU, low_rate=0.0)
    with pytest.raises(ReproError, match="V4-8"):
        dataclasses.replace(CPU, only=("V4-9 (loss)",))


@pytest.mark.slow
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "low-precision-updates", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
