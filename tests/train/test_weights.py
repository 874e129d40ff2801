"""Weights stored in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.data import load_corpus
from repro.errors import ReproError
from repro.models import ModelConfig
from repro.train import Program, TrainConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = TrainConfig(
    model=ModelConfig(layers=1, width=16, heads=2, ffn=16), length=8, batch_size=2, steps=4, optimizer="adamw",
    learning_rate=1e-4, warmup=0.0, schedule="constant",
)  # fmt: skip


def after_one_step(weights: str, seed: int = 0, rate: float = 1e-4):
    config = dataclasses.replace(CONFIG, weights=weights, learning_rate=rate)
    program = Program(config)
    start = program.init(np.uint32(seed))
    window = load_corpus("kjv").batch(0, 0, batch_size=2, length=8)
    end, metrics = jax.jit(program.step)(start, jnp.asarray(window), config.numbers())
    return jax.tree.map(np.asarray, (start.params, end.params, metrics))


def on_the_grid(params):
    return all(np.array_equal(w, w.astype(jnp.bfloat16).astype(np.float32)) for w in jax.tree.leaves(params))


@pytest.mark.parametrize("weights", ["bf16", "bf16_stochastic"])
def test_stored_weights_are_bfloat16(weights):
    start, end, metrics = after_one_step(weights)
    assert on_the_grid(start) and on_the_grid(end) and metrics["retained"] > 0


def test_float32_weights_are_not():
    start, end, metrics = after_one_step("fp32")
    assert not on_the_grid(start) and "retained" not in metrics


def test_rounding_to_nearest_swallows_what_stochastic_rounding_keeps_in_the_mean():
    """Every weight moves by about the rate, up or down; weights well above it stay where they are when rounded."""
    name = ("blocks", "ffn", "up_DF")
    pick = lambda tree: tree[name[0]][name[1]][name[2]]
    start, end, metrics = after_one_step("bf16")
    large = np.abs(pick(start)) > 0.1
    assert large.sum() > 50 and (pick(end) == pick(start))[large].all() and metrics["retained"] < 0.7
    moves = np.mean([pick(after_one_step("bf16_stochastic", s)[1]) - pick(after_one_step("bf16_stochastic", s)[0])
                     for s in [0]], axis=0)  # fmt: skip
    assert (moves[large] != 0).mean() > 0.05
    # With float32 weights on the same grid the intended update is known: about the rate everywhere.
    assert np.abs(moves[large]).mean() == pytest.approx(1e-4, rel=0.6)


def test_noise_is_a_function_of_seed_and_step():
    one, again, other = (after_one_step("bf16_stochastic", seed)[1] for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), one, other)))


def test_an_unknown_format_is_refused():
    with pytest.raises(ReproError, match="bf16_stochastic"):
        dataclasses.replace(CONFIG, weights="fp8")
