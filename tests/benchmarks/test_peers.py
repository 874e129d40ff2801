"""The hand-written sides of the benchmarks compute what the engine computes."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import jax
import pytest

from repro.data import load_corpus
from repro.models import ModelConfig
from repro.train import TrainConfig, lane_mesh

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 4


def script(name: str):
    """A benchmark as a module; scripts import each other by name, as they do when run."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module(name)


# Compilation is all that takes time here, and what is checked does not depend on how fast the programs run.
pytestmark = pytest.mark.usefixtures("quick_compile")

# Muon for the matrices, AdamW for all else: one structure, so that the engine is compiled once.
TINY = TrainConfig(
    model=ModelConfig(layers=2, width=16, heads=2, ffn=24), length=12, batch_size=3, steps=STEPS, eval_windows=4,
    optimizer="muon", learning_rate=0.03, weight_decay=0.1, tau=2.0, warmup=0.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus():
    return load_corpus("kjv")


@pytest.mark.parametrize(("form", "seeds"), [("scan", (3,)), ("step", (3,)), ("map", (1, 2))])
def test_hand_written_loop_equals_the_engine(corpus, form, seeds):
    overhead, mesh = script("engine_overhead"), lane_mesh(jax.devices()[:1])
    peer = overhead.HandWritten(TINY, seeds, corpus, form, jax.devices()[:1], chunk=STEPS)
    losses, statistics, clipped = overhead.differences(peer, mesh, STEPS)
    assert losses <= 1e-5
    assert statistics <= 1e-4
    assert 0 < clipped < 1  # the clip took part


def test_torch_model_equals_the_engine(corpus):
    pytest.importorskip("torch", reason="the extra [peers] is not installed")
    losses, statistics = script("torch_peer").differences(TINY, corpus, STEPS)
    assert losses <= 1e-4
    assert statistics <= 1e-3


@pytest.mark.parametrize(("name", "words"), [("gpu_checks", []), ("muon_step", ["--gpu"])])
def test_what_needs_a_gpu_says_so(name, words, capsys):
    if jax.default_backend() != "cpu":
        pytest.skip("there is an accelerator")
    assert script(name).main(words) == 2
    assert "GPU" in capsys.readouterr().err


def test_muon_equals_optax_on_a_tree_with_a_leaf_per_layer():
    muon_step = script("muon_step")
    model = dataclasses.replace(TINY.model, layers=1)  # time here is compilation, leaf by leaf
    tree = muon_step.unstacked_tree(muon_step.stacked_tree(model, "float32"))
    assert muon_step.groups_of(tree) == {(16, 16): 4, (16, 24): 3}
    assert muon_step.check(tree, "float32") <= 1e-4
