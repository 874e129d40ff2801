"""Rules from their text, what is refused, and what each action does to the numbers of a step."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import repro.train
from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig
from repro.train import Program, TrainConfig
from repro.train.guards import ACTIONS, EMA_DECAY, FOREVER, WARM, check_signals, parse
from repro.train.watch import Watch, initial_memory

TINY = TrainConfig(
    model=ModelConfig(layers=1, width=16, heads=2, ffn=16), length=8, batch_size=2, steps=30, eval_windows=4
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("when loss > ema + 0.5 then skip", ("loss", "over_mean", 0.5, "skip", None, 1)),
        (
            "when grad_norm > 4 ema then clip_gradient 1 for 10",
            ("grad_norm", "times_mean", 4.0, "clip_gradient", 1.0, 10),
        ),
        ("when  entropy_min < 1e-2 then lower_rate .5", ("entropy_min", "below", 0.01, "lower_rate", 0.5, FOREVER)),
        ("when max_logit > 100 then qk_clip 100 for 50", ("max_logit", "above", 100.0, "qk_clip", 100.0, 50)),
        (
            "when grad_norm nonfinite then scale_loss 1024 for 7",
            ("grad_norm", "nonfinite", 0.0, "scale_loss", 1024.0, 7),
        ),
        ("when grad_norm nonfinite then scale_loss 1024", ("grad_norm", "nonfinite", 0.0, "scale_loss", 1024.0, 2000)),
        ("when loss > 7 then rewarm for 20", ("loss", "above", 7.0, "rewarm", None, 20)),
        ("when loss > 7 then precision v3 for 5", ("loss", "above", 7.0, "precision", "v3", 5)),
        ("when loss nonfinite then quarantine 20 for 3", ("loss", "nonfinite", 0.0, "quarantine", 20, 3)),
        ("when loss > 7 then decouple 5 for 40", ("loss", "above", 7.0, "decouple", 5, 40)),
    ],
)
def test_rules_from_text(text, expected):
    rule = parse(text)
    assert (rule.signal, rule.test, rule.value, rule.action, rule.amount, rule.steps) == expected
    assert parse(rule.text) == rule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("skip when loss > 3", "is not a rule; write `when"),
        ("when loss > 3 then", "is not a rule"),
        ("when loss >= 3 then skip", "is not a rule"),
        ("when loss > 3 then hope", "action 'hope'; known are skip,"),
        ("when loss > ema + 2 ema then skip", "a running mean is used as"),
        ("when loss < 2 ema then skip", "a running mean is used as"),
        ("when loss > inf then skip", "can never fire: its threshold must be finite"),
        ("when loss > nan then skip", "can never fire"),
        ("when loss > 1 ema then skip", "would trip at values like those before"),
        ("when loss > ema + 0 then skip", "would trip at values like those before"),
        ("when loss > 3 then skip 4", "skip takes no value"),
        ("when loss > 3 then clip_gradient", "takes a largest norm, such as `clip_gradient 1`"),
        ("when loss > 3 then clip_gradient -1", "must be positive, not -1"),
        ("when loss > 3 then lower_rate 1.5", "must be a number between 0 and 1"),
        ("when loss > 3 then rollback 2.5", "must be a whole number above 0"),
        ("when loss > 3 then rollback 20 for 3", "takes no `for 3`"),
        ("when loss > 3 then skip for 0", "takes no `for 0`"),
        ("when loss > 3 then rewarm", "must say for how long"),
        ("when loss > 3 then decouple 20", "must say for how long"),
    ],
)
def test_what_is_no_rule_is_refused(text, said):
    with pytest.raises(ReproError) as error:
        parse(text)
    assert said in str(error.value) and repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"guards": ("when loss < 0 then skip",)}, "can never fire: loss is never below 0"),
        ({"guards": ("when clipped_share > 1 then skip",)}, "can never fire: clipped_share is at most 1"),
        ({"guards": ("when entropy_min > 2.1 then skip",)}, "can never fire: entropy_min is at most 2.079"),
        ({"guards": ("when loss > 2 ema then skip",), "steps": 20}, "a running mean needs 20 values"),
        ({"guards": ("when loss > 3 then scale_loss 8",)}, "answers overflow"),
        ({"guards": ("when loss > 3 then rollback 31",)}, "goes back 31 steps in a run of 30"),
        ({"guards": ("when loss > 3 then decouple 3 for 9",)}, "the model has no experts"),
        ({"guards": ("when loss > 3 then precision fp3",)}, "fp3"),
        ({"guards": ("when max_logit > 9 then qk_clip 9",), "model": ModelConfig(qk_norm="rms")}, "rule QK-Clip out"),
        ({"guards": ("when loss > 9 then clamp 9",), "model": ModelConfig(glu="situ")}, "a clamp is for SwiGLU"),
        ({"guards": ("when loss > 9 then clamp 10.5",), "model": ModelConfig(glu="clamped")}, "clamps at 10 already"),
        ({"guards": ("when grad_norm nonfinite then scale_loss 8",) * 2}, "a run has one loss scale"),
        ({"routing_lag": 3}, "positive in a model with experts"),
    ],
)
def test_what_can_never_act_is_refused(changes, said):
    with pytest.raises(ReproError) as error:
        dataclasses.replace(TINY, **changes)
    assert said in str(error.value)


def test_an_unknown_signal_is_refused_with_those_there_are():
    shapes = {"loss": jax.ShapeDtypeStruct((), jnp.float32), "head_logits": jax.ShapeDtypeStruct((1, 2), jnp.float32)}
    check_signals((parse("when loss > 3 then skip"),), shapes)
    for name in ("max_violation", "head_logits"):
        with pytest.raises(ReproError, match=f"watches '{name}', which is no scalar signal of this run; there is loss"):
            check_signals((parse(f"when {name} > 3 then skip"),), shapes)


def follow(text, values):
    """Steps at which one rule fires and acts, over a curve of its signal."""
    rules = (parse(text),)

    def step(carry, value):
        memory, at = carry
        watch = Watch(rules, memory, at)
        watch.look({rules[0].signal: value})
        found = watch.metrics()
        return (watch.memory(), at + 1), (found["guard_fired"][0], found["guard_active"][0])

    start = initial_memory(rules), jnp.zeros((), jnp.int32)
    fired, active = jax.jit(lambda v: jax.lax.scan(step, start, v)[1])(jnp.asarray(values, jnp.float32))
    return np.flatnonzero(fired).tolist(), np.flatnonzero(active).tolist()


@pytest.mark.parametrize(
    ("text", "values", "fired", "active"),
    [
        ("when loss > 3 then skip", [1, 3, 3.5, 2, 9], [2, 4], [2, 4]),
        ("when loss > 3 then skip for 2", [1, 4, 4, 4, 1], [1, 3], [1, 2, 3, 4]),
        ("when loss < 3 then skip", [3, 2, math.nan], [1, 2], [1, 2]),
        ("when loss > 3 then skip", [math.nan, math.inf, -math.inf], [0, 1], [0, 1]),
        ("when loss nonfinite then skip", [1, math.nan, math.inf, -math.inf, 2], [1, 2, 3], [1, 2, 3]),
        ("when loss > 3 then lower_rate 0.5", [1, 4, 1, 4], [1], [1, 2, 3]),
        ("when loss > 2 ema then skip", [1] * 19 + [9], [], []),
        ("when loss > 2 ema then skip", [1] * 20 + [2.001, 2.09, 2.3], [20, 22], [20, 22]),
        ("when loss > ema + 1 then skip", [5] * 20 + [5.9, 6.1], [21], [21]),
    ],
)
def test_when_a_rule_fires(text, values, fired, active):
    assert follow(text, values) == (fired, active)


@settings(deadline=None)
@given(st.lists(st.floats(0.125, 8, width=32), min_size=2 * WARM, max_size=2 * WARM))
def test_the_running_mean_follows_its_definition(values):
    """Against float64: m <- 0.95 m + 0.05 min(x, 2 m), where the first value is the mean and the first 20 count whole."""
    mean, clear, expected = values[0], set(), set()
    for i, value in enumerate(values):
        bound = 2 * mean if i >= WARM else math.inf
        expected |= {i} if value > bound else set()
        clear |= {i} if i < WARM or abs(value - bound) > 1e-4 else set()
        mean = EMA_DECAY * mean + (1 - EMA_DECAY) * min(value, bound) if i else value
    fired, found = _mean_of(jnp.asarray(values, jnp.float32))
    assert {*np.flatnonzero(fired).tolist()} & clear == expected & clear
    np.testing.assert_allclose(found, mean, rtol=1e-4)


@jax.jit
def _mean_of(values):
    rules = (parse("when loss > 2 ema then skip"),)

    def step(carry, value):
        memory, at = carry
        watch = Watch(rules, memory, at)
        watch.look({"loss": value})
        return (watch.memory(), at + 1), watch.metrics()["guard_fired"][0]

    (memory, _), fired = jax.lax.scan(step, (initial_memory(rules), jnp.zeros((), jnp.int32)), values)
    return fired, memory["mean"][0]


def test_a_level_that_stays_is_learnt():
    """A signal that has moved for good does not trip its rule for ever: what is beyond the bound counts as the bound."""
    fired, _ = follow("when loss > 1.5 ema then skip", [1.0] * 30 + [4.0] * 200)
    assert fired[0] == 30 and 4 < len(fired) < 60


def acting(*texts, step=5):
    """A watch in which all of these rules have just fired on a signal of their own."""
    rules = tuple(parse(text) for text in texts)
    watch = Watch(rules, initial_memory(rules), jnp.asarray(step))
    watch.look({rule.signal: jnp.asarray(1e6) for rule in rules})
    return watch


def test_each_action_in_the_step():
    tree = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    clip = acting("when loss > 3 then clip_gradient 1")
    np.testing.assert_allclose(clip.gradients(tree, jnp.asarray(5.0))["b"], [[0.8]], rtol=1e-6)
    assert clip.gradients(tree, jnp.asarray(0.5))["a"][0] == 3.0, "what is below the norm stays"
    assert clip.updates(tree, jnp.asarray(5.0)) is tree
    np.testing.assert_allclose(
        acting("when loss > 3 then clip_update 2").updates(tree, jnp.asarray(5.0))["a"], [1.2, 0]
    )
    assert acting("when loss > 3 then lower_rate 0.25").rate(jnp.asarray(0.5)) == 0.125
    assert acting("when loss > 3 then qk_clip 50").tau(jnp.asarray(100.0)) == 50
    assert acting("when loss > 3 then qk_clip 50").tau(jnp.asarray(20.0)) == 20
    assert jax.tree.all(jax.tree.map(lambda a, b: a is not b, acting("when loss > 3 then skip").kept(tree, tree), tree))
    zero = jax.tree.map(jnp.zeros_like, tree)
    assert acting("when loss > 3 then skip").kept(tree, zero)["a"].tolist() == [3, 0]
    assert acting("when loss > 3 then clip_gradient 1").kept(tree, zero) is zero


def test_the_rate_rises_again_over_the_steps_of_a_rewarm():
    rules = (parse("when loss > 3 then rewarm for 4"),)
    memory, seen = initial_memory(rules), []
    for step, loss in enumerate([1, 9, 1, 1, 1, 1]):
        watch = Watch(rules, memory, jnp.asarray(step))
        watch.look({"loss": jnp.asarray(float(loss))})
        seen.append(float(watch.rate(jnp.asarray(1.0))))
        memory = watch.memory()
    assert seen == [1, 0, 0.25, 0.5, 0.75, 1]


def test_the_loss_scale_halves_with_a_skipped_step_and_doubles_after_clean_ones():
    rules = (parse("when grad_norm nonfinite then scale_loss 8 for 2"),)
    memory, scales, skipped = initial_memory(rules), [], []
    for step, norm in enumerate([1.0, math.inf, math.nan, 1.0, 1.0, 1.0]):
        watch = Watch(rules, memory, jnp.asarray(step))
        scales.append(float(watch.scaled(jnp.asarray(1.0))))
        assert watch.unscaled(jnp.asarray(scales[-1] * 3.0)) == 3.0
        watch.look({"grad_norm": jnp.asarray(norm)})
        skipped.append(float(watch.kept(jnp.asarray(0.0), jnp.asarray(1.0))) == 0)
        memory = watch.memory()
    assert scales == [8, 8, 4, 2, 2, 4] and skipped == [False, True, True, False, False, False]


def test_without_rules_nothing_is_touched():
    watch, tree = Watch((), {}, jnp.asarray(0)), {"a": jnp.ones(2)}
    watch.look({"loss": jnp.asarray(jnp.nan)})
    norm = jnp.asarray(5.0)
    assert all(x is tree for x in (watch.gradients(tree, norm), watch.updates(tree, norm), watch.kept(None, tree)))
    assert watch.metrics() == {} and watch.memory() == {} and watch.scaled(norm) is watch.rate(norm) is norm


def test_a_skipped_step_leaves_parameters_and_optimizer_bit_identical(kjv, quick_compile):
    model = ModelConfig(layers=1, width=16, heads=2, ffn=16, moe=MoEConfig(experts=4, active=2, ffn=8, balance="sign"))
    guards = ("when loss > 1e-6 then skip", "when grad_norm nonfinite then scale_loss 8")
    config = dataclasses.replace(TINY, model=model, guards=guards)
    program, window = Program(config), kjv.batch(0, 0, batch_size=2, length=8)
    before = jax.jit(program.init)(np.uint32(0))
    after, metrics = jax.jit(program.step)(before, window, config.numbers())
    assert metrics["guard_fired"].tolist() == [True, False] and metrics["update_norm"] > 0
    for old, new in zip(jax.tree.leaves((before.params, before.opt_state, before.buffers)),
                        jax.tree.leaves((after.params, after.opt_state, after.buffers)), strict=True):  # fmt: skip
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()
    assert after.step == before.step + 1


def test_the_table_of_actions_is_that_of_the_readme():
    page = (Path(repro.train.__file__).parent / "README.md").read_text()
    cells = [line.split("|")[1].strip() for line in page.split("## Guards")[1].splitlines() if line.startswith("| `")]
    rows = [cell.strip("`") for cell in cells]
    assert [row.split()[0] for row in rows] == [*ACTIONS]
    for row in rows:
        action, words = ACTIONS[row.split()[0]], row.replace("[", "").replace("]", "").split()
        assert (action.amount != "") == (len(words) > 1 and words[1] != "for")
        assert action.lasts == ("optional" if "[for N]" in row else "always" if "for N" in row else "")
