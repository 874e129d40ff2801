"""Every fault does what it says at its step and nothing before; a run without one is the engine's own to the bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.drills.faults import FaultConfig, FaultProgram, flipped, poisoned
from repro.errors import ReproError
from repro.models import ModelConfig
from repro.train import Program, TrainConfig

pytestmark = pytest.mark.usefixtures("quick_compile_module")

MODEL = ModelConfig(layers=2, width=16, heads=2, ffn=16)
SHARED = dict(model=MODEL, length=8, batch_size=4, steps=20, warmup=0.0, schedule="constant", optimizer="adamw")
PLAIN, CONFIG = TrainConfig(**SHARED), FaultConfig(**SHARED, coordinate=5)
WINDOWS = np.random.default_rng(0).integers(0, 256, (3, 4, 9))


class Walk:
    """Three steps of one compiled program each."""

    def __init__(self):
        self.program, plain = FaultProgram(CONFIG), Program(PLAIN)
        self.step, self._plain = jax.jit(self.program.step), jax.jit(plain.step)
        self.start = plain.init(np.uint32(3))
        self.loss = jax.jit(lambda params, window: plain.loss(params, window, 0.0)[1][0])
        self.plain = self._walk(self._plain, TrainConfig.numbers_type()(*map(np.float32, PLAIN.numbers())))

    def _walk(self, step, numbers):
        found, state = [], self.start
        for window in WINDOWS:
            state, metrics = step(state, window, numbers)
            found.append(jax.tree.map(np.asarray, (state, metrics)))
        return found

    def __call__(self, **fault):
        numbers = dataclasses.replace(CONFIG, **fault).numbers()
        return self._walk(self.step, type(numbers)(*map(np.float32, numbers)))


@pytest.fixture(scope="module")
def walk(quick_compile_module, fusion_emitters):
    with fusion_emitters():
        walk = Walk()
        walk()
    return walk


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


FAULTS = {
    "random": {"random_tokens": 0.5},
    "repeated": {"repeated_token": 1.0},
    "nan": {"nan_gradient": 1.0},
    "bit": {"flipped_bit": 30.0},
    "outlier": {"outlier": 50.0},
}


def test_without_a_fault_all_bits_are_the_engines(walk):
    for (state, metrics), (own, seen) in zip(walk(), walk.plain, strict=True):
        assert same(state, own) and same(metrics, seen)
    # Strengths without a step, and a step without a strength, are no fault.
    strong = {name: value for fault in FAULTS.values() for name, value in fault.items()}
    assert same(walk(**strong)[-1], walk.plain[-1]) and same(walk(fault_step=1.0)[-1], walk.plain[-1])


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_acts_at_its_step_and_not_before(walk, fault):
    found = walk(fault_step=1.0, **fault)
    assert same(found[0], walk.plain[0])
    assert not same(found[1][0].params, walk.plain[1][0].params)
    assert walk.step._cache_size() == 1  # one program for all


def test_a_bad_batch(walk):
    before = walk.plain[0][0].params
    window = WINDOWS[1].copy()
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(np.uint32(3)), 0x746F6B65), 1)
    window[:2] = np.asarray(jax.random.randint(key, window.shape, 0, 256))[:2]
    assert walk(fault_step=1.0, random_tokens=0.5)[1][1]["loss"] == pytest.approx(
        float(walk.loss(before, window)), 1e-5
    )
    assert len(np.unique(window[:2])) > 12
    window = np.broadcast_to(WINDOWS[1][0, 0], WINDOWS[1].shape)
    repeated = walk(fault_step=1.0, repeated_token=1.0)[1][1]["loss"]
    assert repeated == pytest.approx(float(walk.loss(before, window)), 1e-5)


def test_a_gradient_that_is_not_a_number(walk):
    state, metrics = walk(fault_step=1.0, nan_gradient=1.0)[1]
    assert metrics["loss"] == walk.plain[1][1]["loss"] and np.isnan(metrics["grad_norm"])
    bad = np.isnan(state.params["blocks"]["ffn"]["up_DF"])
    assert bad.reshape(-1).nonzero()[0].tolist() == [5]
    rest = jax.tree.map(np.asarray, state.params)
    rest["blocks"]["ffn"]["up_DF"] = np.where(bad, 0, rest["blocks"]["ffn"]["up_DF"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(rest))
    # The identity, and a wrong one whose forward pass is touched too.
    x, place = jnp.arange(3.0), jnp.array([False, True, False])
    value, gradient = jax.value_and_grad(lambda x: (2 * poisoned(x, place)).sum())(x)
    assert value == 6.0 and np.array_equal(gradient, [2.0, np.nan, 2.0], equal_nan=True)
    assert np.isnan(jnp.where(place, jnp.nan, x).sum())


@pytest.mark.parametrize("bit", [0, 22, 25, 31])
def test_a_flipped_bit(walk, bit):
    x = np.asarray(walk.start.params["blocks"]["ffn"]["up_DF"])
    expected = x.copy()
    expected.reshape(-1).view(np.uint32)[5] ^= np.uint32(1 << bit)
    assert np.array_equal(np.asarray(flipped(x, 5, bit)).view(np.uint32), expected.view(np.uint32))
    assert np.array_equal(flipped(flipped(x, 5, bit), 5, bit), x)
    found = np.asarray(walk(fault_step=0.0, flipped_bit=float(bit))[0][0].params["blocks"]["ffn"]["up_DF"])
    # It stays flipped: a step of Adam moves a number by about the rate.
    assert abs(found.reshape(-1)[5] - expected.reshape(-1)[5]) <= 0.011 + 1e-6 * abs(expected.reshape(-1)[5])


def test_an_outlier(walk):
    before = jax.tree.map(np.array, walk.plain[0][0].params)
    before["blocks"]["ffn"]["up_DF"][-1, :, 0] *= 50
    state, metrics = walk(fault_step=1.0, outlier=50.0)[1]
    assert metrics["loss"] == pytest.approx(float(walk.loss(before, WINDOWS[1])), rel=1e-5)
    assert metrics["hidden_max"] > 5 * walk.plain[1][1]["hidden_max"]
    assert np.abs(state.params["blocks"]["ffn"]["up_DF"]).max() < 5  # the weight itself is not larger


def test_after_a_return_only_bad_data_come_again():
    program = FaultProgram(dataclasses.replace(CONFIG, guards=("when grad_norm nonfinite then rollback 2",)))
    numbers = dataclasses.replace(CONFIG, fault_step=7.0).numbers()
    state = dataclasses.replace(program.init(np.uint32(0)), step=np.int32(7))
    at = lambda program, until: tuple(
        map(bool, program._now(dataclasses.replace(state, guards={"until": np.array([until])}), numbers))
    )
    assert at(program, 0) == (True, True)
    assert at(program, 9) == (True, False)  # it tripped at step 8 and went back
    program = FaultProgram(dataclasses.replace(CONFIG, guards=("when loss > 4 then quarantine 2 for 2",)))
    assert at(program, 9) == (False, False)  # it tripped at step 7, whose batch was replaced
    assert at(program, 10) == (True, False)  # at step 8: the wrong batch


def test_refusals():
    for settings, said in (
        ({"random_tokens": 1.5}, "share"),
        ({"nan_gradient": 0.5}, "0 or 1"),
        ({"flipped_bit": 32.0}, "bit"),
        ({"target": "blocks.ffn.nothing"}, "no parameter"),
        ({"coordinate": 512}, "holds 512"),
    ):
        with pytest.raises(ReproError, match=said):
            FaultProgram(dataclasses.replace(CONFIG, **settings))
