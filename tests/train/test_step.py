"""One step of one run against a reference written out by hand, and wrong variants that the reference refuses."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import repro.train.step as step_module
from repro.models import ModelConfig
from repro.train import Numbers, Program, TrainConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = TrainConfig(
    model=ModelConfig(vocab_size=24, layers=2, width=16, heads=2, ffn=12), length=8, batch_size=3, steps=10, warmup=0.3
)
MUON, ADAMW = CONFIG, dataclasses.replace(CONFIG, optimizer="adamw", decay="independent")
NUMBERS = Numbers(0.03, 0.2, 1.0, 1e-3)
STEPS = 4
WINDOWS = np.random.default_rng(0).integers(0, 20, (STEPS, 3, 9)).astype(np.uint16)  # ids 20 to 23 never occur


@functools.cache
def program(config):
    return Program(config)


@functools.cache
def stepper(config):
    return jax.jit(program(config).step)


def trajectory(config, numbers):
    """States and metrics of the first steps, the initial state first."""
    states, metrics = [program(config).init(jnp.uint32(5))], []
    for window in WINDOWS:
        state, found = stepper(config)(states[-1], window, jax.tree.map(np.float32, numbers))
        states.append(state)
        metrics.append(jax.tree.map(np.asarray, found))
    return states, metrics


def flat(tree):
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(v, np.float64)
            for p, v in jax.tree_util.tree_flatten_with_path(tree)[0]}  # fmt: skip


@functools.cache
def reference_gradient(config):
    def loss(params, window, z_loss):
        logits = program(config).apply(params, window[:, :-1]).logits.astype(jnp.float32)
        log_z = jnp.log(jnp.exp(logits).sum(-1))
        right = jnp.take_along_axis(logits, window[:, 1:, None], -1)[..., 0]
        return jnp.mean(log_z - right) + z_loss * jnp.mean(log_z**2)

    return jax.jit(
        lambda params, window, z: (jax.grad(loss)(params, window, z), program(config).apply(params, window[:, :-1]))
    )


def orthogonalised(matrix):
    x = matrix / np.linalg.norm(matrix)
    x = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def muon_update(name, ahead):
    """The update of one parameter, layer by layer; the rows of its matrices are the inputs."""
    if name.endswith("o_HVD"):
        as_matrix = lambda w: w.reshape(-1, w.shape[-1])
    else:
        as_matrix = lambda w: w.reshape(w.shape[0], -1)
    layers = [0.2 * math.sqrt(max(as_matrix(w).shape)) * orthogonalised(as_matrix(w)).reshape(w.shape) for w in ahead]
    return np.stack(layers)


def schedule(step):  # ten steps, three of them warm-up, a cosine down to a tenth
    if step < 3:
        return (step + 1) / 3
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 7))


def reference(config, numbers, clip="after", nesterov=True):
    """Parameters after `STEPS` steps, in NumPy with float64 beside the gradient. `clip`: "after" the optimizer's step
    with the S of its forward pass; wrong variants are "before" it, "stale" (S of the step before) and "off"."""
    tree = program(config).init(jnp.uint32(5)).params
    treedef, params = jax.tree.structure(tree), flat(tree)
    first, second, summed = ({name: np.zeros_like(v) for name, v in params.items()} for _ in range(3))
    previous = np.zeros((2, 2))
    for step, window in enumerate(WINDOWS.astype(np.int32)):
        now = jax.tree.unflatten(treedef, [jnp.asarray(v, jnp.float32) for v in params.values()])
        grads, output = reference_gradient(config)(now, window, numbers.z_loss)
        top = np.asarray(output.stats.max_logit, np.float64)
        used = previous if clip == "stale" else top
        gamma = np.where(used > numbers.tau, numbers.tau / np.maximum(used, 1e-30), 1.0)[:, None, :, None]

        def clipped():
            return {n: v * np.sqrt(gamma) if n.endswith(("q_DHK", "k_DHK")) else v for n, v in params.items()}

        if clip == "before":
            params = clipped()
        rate = numbers.learning_rate * schedule(step)
        decay = numbers.weight_decay * (rate if config.decay == "coupled" else schedule(step))
        for name, gradient in flat(grads).items():
            if config.optimizer == "muon" and name.startswith("blocks") and "norm" not in name:
                summed[name] = 0.95 * summed[name] + gradient
                update = muon_update(name, gradient + 0.95 * summed[name] if nesterov else summed[name])
            else:
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.95 * second[name] + 0.05 * gradient**2
                mean, square = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.95 ** (step + 1))
                update = mean / (np.sqrt(square) + 1e-8)
            params[name] = params[name] - rate * update - decay * params[name]
        if clip in ("after", "stale"):
            params = clipped()
        previous = top
    return params


def distance(found, wanted):
    """Largest difference over all parameters, relative to the largest change of that parameter since the start."""
    start = flat(program(MUON).init(jnp.uint32(5)).params)
    return max(np.abs(found[n] - wanted[n]).max() / np.abs(wanted[n] - start[n]).max() for n in wanted)


@pytest.mark.parametrize("config", [MUON, ADAMW], ids=["muon", "adamw"])
def test_steps_equal_the_reference(config):
    states, metrics = trajectory(config, NUMBERS)
    assert 0 < np.mean([m["clipped_share"] for m in metrics]) < 1, "some heads are clipped and some are not"
    assert distance(flat(states[-1].params), reference(config, NUMBERS)) < 3e-3


@pytest.mark.parametrize("wrong", [{"clip": "before"}, {"clip": "stale"}, {"clip": "off"}, {"nesterov": False}])
def test_the_reference_refuses_other_orders(wrong):
    states, _ = trajectory(MUON, NUMBERS)
    assert distance(flat(states[-1].params), reference(MUON, NUMBERS, **wrong)) > 0.02


def test_metrics_are_those_of_the_forward_pass_before_the_step():
    states, metrics = trajectory(MUON, NUMBERS)
    for state, after, window, found in zip(states, states[1:], WINDOWS.astype(np.int32), metrics, strict=False):
        grads, output = reference_gradient(MUON)(state.params, window, NUMBERS.z_loss)
        logits = np.asarray(output.logits, np.float64)
        log_z = np.log(np.exp(logits).sum(-1))
        ce = np.mean(log_z - np.take_along_axis(logits, window[:, 1:, None], -1)[..., 0])
        stats = jax.tree.map(np.asarray, output.stats)
        wanted = {
            "loss": ce, "max_logit": stats.max_logit.max(), "max_abs_logit": stats.max_abs_logit.max(),
            "max_capped_logit": stats.max_capped_logit.max(), "entropy_mean": stats.entropy.mean(),
            "entropy_min": stats.entropy.min(), "clipped_share": (stats.max_logit > NUMBERS.tau).mean(),
            "activation_max": stats.activation_max.max(), "activation_rms": stats.activation_rms[-1],
            "grad_norm": math.sqrt(sum((g**2).sum() for g in flat(grads).values())), "head_logits": stats.max_logit,
            "hidden_max": stats.hidden_max.max(), "hidden_rms": stats.hidden_rms.max(),
            "log_z_rms": math.sqrt((log_z**2).mean()),
        }  # fmt: skip
        assert set(found) == {*wanted, "update_norm"}
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        assert int(after.step) == int(state.step) + 1
    later = reference_gradient(MUON)(states[1].params, WINDOWS[0].astype(np.int32), 0.0)[1].stats.max_logit
    assert not np.allclose(metrics[0]["head_logits"], later, rtol=1e-3), "statistics of the new weights would differ"


def test_update_norm_is_the_length_of_the_step():
    states, metrics = trajectory(MUON, NUMBERS._replace(tau=math.inf))
    before, after = flat(states[1].params), flat(states[2].params)
    length = math.sqrt(sum(((after[n] - before[n]) ** 2).sum() for n in after))
    assert metrics[1]["update_norm"] == pytest.approx(length, rel=1e-4)


def test_no_threshold_is_no_clip_bit_for_bit(monkeypatch, fusion_emitters):
    def last(tau):
        made = Program(MUON)
        state, step = made.init(jnp.uint32(5)), jax.jit(made.step)
        for window in WINDOWS:
            state, _ = step(state, window, jax.tree.map(np.float32, NUMBERS._replace(tau=tau)))
        return state

    infinite, unreached = (trajectory(MUON, NUMBERS._replace(tau=tau))[0][-1] for tau in (math.inf, 1e30))
    with fusion_emitters():
        never = last(math.inf)
        monkeypatch.setattr(step_module, "qk_clip", lambda params, *args, **settings: params)
        without = last(math.inf)
    for name, value in flat(infinite).items():
        np.testing.assert_array_equal(value, flat(unreached)[name])
        np.testing.assert_array_equal(flat(never)[name], flat(without)[name], err_msg=name)
    clipped = trajectory(MUON, NUMBERS)[0][-1]
    assert any((flat(clipped)[name] != value).any() for name, value in flat(infinite).items())


@pytest.mark.parametrize("config", [MUON, ADAMW], ids=["coupled", "independent"])
def test_decay_of_a_parameter_without_gradient(config):
    """Embedding rows of tokens that never occur only shrink: by rate * decay per step, or by decay * schedule."""
    states, _ = trajectory(config, NUMBERS)
    unseen = slice(20, 24)
    start, end = (np.asarray(s.params["embedding_ZD"], np.float64)[unseen] for s in (states[0], states[-1]))
    parts = np.array([schedule(step) for step in range(STEPS)])
    coupled = np.prod(1 - NUMBERS.learning_rate * parts * NUMBERS.weight_decay)
    independent = np.prod(1 - parts * NUMBERS.weight_decay)
    right, wrong = (coupled, independent) if config.decay == "coupled" else (independent, coupled)
    np.testing.assert_allclose(end, start * right, rtol=1e-5)
    assert not np.allclose(end, start * wrong, rtol=1e-3)


def test_z_loss_adds_the_mean_squared_log_z():
    p, window = program(MUON), jnp.asarray(WINDOWS[0], jnp.int32)
    params = p.init(jnp.uint32(5)).params
    plain, (ce, _, output) = p.loss(params, window, 0.0)
    total, (ce_again, *_) = p.loss(params, window, 0.5)
    logits = np.asarray(output.logits, np.float64)
    penalty = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    assert float(plain) == float(ce) == float(ce_again)
    assert float(total) == pytest.approx(float(ce) + 0.5 * penalty, rel=1e-5)
    assert penalty != pytest.approx(np.mean(np.log(np.exp(logits).sum(-1))) ** 2, rel=1e-3), "not the squared mean"


def test_evaluation_is_the_mean_over_all_windows():
    p = program(MUON)
    params = p.init(jnp.uint32(5)).params
    windows = WINDOWS.reshape(-1, 9)
    found = jax.jit(p.evaluate)(params, windows)
    each = [p.evaluate(params, window[None]) for window in windows]
    assert float(found["loss"]) == pytest.approx(np.mean([float(e["loss"]) for e in each]), rel=1e-5)
    assert float(found["eval_max_logit"]) == pytest.approx(max(float(e["eval_max_logit"]) for e in each), rel=1e-5)


@pytest.mark.parametrize(("settings", "clips"), [({}, True), ({"qk_norm": "rms"}, False), ({"soft_cap": 30.0}, False)])
def test_the_clip_is_left_out_where_something_else_bounds_the_logits(monkeypatch, settings, clips):
    called = []
    monkeypatch.setattr(step_module, "qk_clip", lambda params, *args, **_: called.append(1) or params)
    p = Program(dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, **settings)))
    state = jax.eval_shape(p.init, jnp.uint32(0))
    jax.eval_shape(p.step, state, jax.ShapeDtypeStruct((3, 9), jnp.uint16), Numbers(*[jnp.float32(1)] * 4))
    assert bool(called) == clips
