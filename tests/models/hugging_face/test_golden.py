"""A DeepSeek-V3 of three layers, two with experts, against what `transformers` computes from the same tensors."""

import dataclasses

import jax
import numpy as np
import pytest

import repro.models.moe
from repro.models import from_hf, init_and_apply, take_apart

pytestmark = pytest.mark.usefixtures("quick_compile_module")
TOLERANCE = 2e-5


def program(config):
    apply = init_and_apply(config)[1]
    return jax.jit(lambda params, buffers, tokens: apply(params, tokens, buffers=buffers, hidden=True))


@pytest.fixture(scope="module")
def run(golden):
    return program(from_hf(golden.config, golden.weights).config)


def errors(golden, run, model):
    """Largest errors of the logits, and of the states of every layer."""
    out = run(*take_apart(model), golden.tokens)
    return np.abs(out.logits - golden.logits).max(), np.abs(out.hidden - golden.hidden).max((1, 2, 3))


def is_off(golden, run, model):
    return errors(golden, run, model)[0] > 100 * TOLERANCE


def test_logits_and_every_hidden_state(golden, run):
    logits, hidden = errors(golden, run, from_hf(golden.config, golden.weights))
    assert logits < TOLERANCE and (hidden < TOLERANCE).all()


def separate(weights, gate_first=True, transposed=False):
    """The experts one by one, as released; or deliberately wrong."""
    found = {}
    for name, x in weights.items():
        prefix, _, what = name.partition(".experts.")
        if not what:
            found[name] = x
            continue
        for i, w in enumerate(x):
            w = w.T if transposed and w.shape[0] == w.shape[1] else w
            if what == "down_proj":
                found[f"{prefix}.experts.{i}.down_proj.weight"] = w
            else:
                halves = np.split(w, 2)
                found[f"{prefix}.experts.{i}.gate_proj.weight"] = halves[0 if gate_first else 1]
                found[f"{prefix}.experts.{i}.up_proj.weight"] = halves[1 if gate_first else 0]
    return found


def test_experts_one_by_one_are_the_same_model(golden):
    fused, released = (from_hf(golden.config, w) for w in (golden.weights, separate(golden.weights)))
    jax.tree.map(np.testing.assert_array_equal, take_apart(fused), take_apart(released))


@pytest.mark.parametrize("wrong", [{"gate_first": False}, {"transposed": True}], ids=str)
def test_wrong_experts_of_the_right_shape_are_another_model(golden, run, wrong):
    assert is_off(golden, run, from_hf(golden.config, separate(golden.weights, **wrong)))


def test_the_other_pairs_of_rope_are_another_model(golden, run):
    """Rotary rows i and i + R / 2 made neighbours, in queries and keys: half-split pairs by the interleaved program."""
    R = golden.config["qk_rope_head_dim"]
    order = np.arange(R).reshape(2, -1).T.reshape(-1)

    def halved(name, w):
        if name.endswith("kv_a_proj_with_mqa.weight"):
            return np.concatenate([w[:-R], w[-R:][order]])
        if name.endswith("q_b_proj.weight"):
            heads = w.reshape(golden.config["num_attention_heads"], -1, w.shape[1])
            return np.concatenate([heads[:, :-R], heads[:, -R:][:, order]], 1).reshape(w.shape)
        return w

    assert not from_hf(golden.config | {"rope_interleave": False}, golden.weights).config.rope_interleaved
    assert is_off(golden, run, from_hf(golden.config, {n: halved(n, w) for n, w in golden.weights.items()}))


def test_gates_with_the_selection_bias_are_another_model(golden, monkeypatch):
    biases, gates, select = [], repro.models.moe.gates, repro.models.moe.select

    def selecting(scores, bias, *args, **how):
        biases.append(bias)
        return select(scores, bias, *args, **how)

    monkeypatch.setattr(repro.models.moe, "select", selecting)
    monkeypatch.setattr(
        repro.models.moe, "gates", lambda scores, *args, **how: gates(scores + biases[-1], *args, **how)
    )
    model = from_hf(golden.config, golden.weights)
    assert is_off(golden, program(dataclasses.replace(model.config, remat=True)), model) and biases
