"""Lanes: a run's bits are its own, whatever runs beside it and wherever it sits."""

import dataclasses

import jax
import numpy as np
import pytest

from repro.data import Corpus
from repro.errors import ReproError
from repro.train import Lane, Numbers, Program, lane_mesh, prepare, train
from repro.train import compiled as programs
from repro.train.mesh import Seats

A = Lane(Numbers(0.02, 0.0, 2.0, 0.0), 3)
B = Lane(Numbers(0.05, 0.1, np.inf, 1e-3), 4)
C = Lane(Numbers(0.001, 0.0, np.inf, 0.0), 3)


def of_lane(result, lane):
    """Everything that a job says of one lane, by name."""
    parameters = {jax.tree_util.keystr(p): v[lane] for p, v in jax.tree_util.tree_flatten_with_path(result.params)[0]}
    return (
        parameters
        | {f"final {n}": v[lane] for n, v in result.final.items()}
        | {n: v[:, lane] for n, v in result.curves.items()}
    )


def same(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and np.array_equal(a[n], b[n], equal_nan=True) for n in a
    )


def check_bits(config, corpus, one_device):
    alone = of_lane(train(config, [A], corpus), 0)
    in_company = train(config, [B, A, C], corpus)
    assert same(alone, of_lane(in_company, 1))
    assert not same(alone, of_lane(in_company, 0)) and not same(alone, of_lane(in_company, 2))
    assert same(of_lane(in_company, 0), of_lane(train(config, [C, B, A, A, C, B, C], corpus), 1))
    if one_device:
        assert len(jax.devices()) == 2
        single = train(config, [C, A], corpus, mesh=lane_mesh(jax.devices()[:1]))
        assert same(alone, of_lane(single, 1)) and same(of_lane(in_company, 2), of_lane(single, 0))


def test_company_order_and_number_change_no_bit(tiny, kjv, quick_compile):
    check_bits(tiny, kjv, one_device=False)


@pytest.mark.slow
def test_bits_on_one_and_two_devices_with_every_optimisation(tiny, kjv):
    check_bits(dataclasses.replace(tiny, steps=20), kjv, one_device=True)


def test_equal_to_a_plain_loop_over_the_batches_of_the_corpus(tiny, kjv, quick_compile):
    result = train(tiny, [B, A], kjv)
    program = Program(tiny)
    step, state = jax.jit(program.step), program.init(np.uint32(A.seed))
    losses = []
    for i in range(tiny.steps):
        window = kjv.batch(A.seed, i, batch_size=tiny.batch_size, length=tiny.length)
        state, metrics = step(state, window, jax.tree.map(np.float32, A.numbers))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(result.curves["loss"][:, 1], losses, rtol=1e-4)
    assert not np.allclose(result.curves["loss"][:, 0], losses, rtol=1e-2), "another seed sees other text"
    assert not np.allclose(result.curves["loss"][:-1, 1], losses[1:], rtol=1e-2), "and another step too"
    for found, wanted in zip(jax.tree.leaves(result.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(found[1], wanted, rtol=1e-3, atol=1e-4)
    held_out = program.evaluate(state.params, kjv.validation(tiny.eval_windows, tiny.length))
    assert result.final["loss"][1] == pytest.approx(float(held_out["loss"]), rel=1e-4)


def test_numbers_are_data(tiny, kjv, quick_compile):
    train(tiny, [A], kjv)
    events = []
    listener = lambda name, seconds, **_: events.append(name) if "compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    before = len(programs._compiled)
    try:
        other = Lane(Numbers(0.3, 0.5, 1.0, 0.1), 99)
        changed = dataclasses.replace(tiny, learning_rate=0.3, weight_decay=0.5, tau=1.0, z_loss=0.1)
        result = train(changed, [other, A, B, C], kjv)
        assert len(programs._compiled) == before and events == []
        jax.jit(lambda x: x * 3.25)(np.float32(1))
        assert events, "the listener hears a compilation"
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not same(of_lane(result, 0), of_lane(result, 1))
    heard = []
    prepare([(tiny, 2), (changed, 1)], kjv, on_start=heard.append)
    assert heard == []
    assert not programs.is_compiled(dataclasses.replace(tiny, batch_size=3), Seats(1, lane_mesh()), kjv)


def test_structures_share_the_programs_that_they_have_in_common(tiny, kjv, quick_compile):
    seats = Seats(2, lane_mesh())
    one, other, third = (
        programs.compiled(c, seats, kjv)
        for c in (tiny, dataclasses.replace(tiny, schedule="constant"), dataclasses.replace(tiny, eval_windows=2))
    )
    assert one.init is other.init is third.init and one.evaluate is other.evaluate
    assert one.evaluate is not third.evaluate
    length = programs.steps_per_chunk(tiny, lane_mesh())
    assert one.chunk(length) is not other.chunk(length)


def test_a_result_survives_later_jobs(tiny, kjv, quick_compile):
    """States are donated from chunk to chunk; nothing that was handed out may lie in that memory."""
    chunks = []
    first = train(tiny, [A, B], kjv, on_chunk=lambda p: chunks.append((p, {n: v.copy() for n, v in p.metrics.items()})))
    copies = [jax.tree.map(np.array, of_lane(first, i)) for i in range(2)]
    train(tiny, [C, C], kjv)
    assert all(same(copies[i], of_lane(first, i)) for i in range(2))
    assert [(p.step, p.steps, p.lanes) for p, _ in chunks] == [(10, 30, 2), (20, 30, 2), (30, 30, 2)]
    for progress, copy in chunks:
        assert all(np.array_equal(progress.metrics[n], copy[n]) for n in copy) and progress.tokens_per_second > 0
    joined = np.concatenate([p.metrics["loss"] for p, _ in chunks])
    np.testing.assert_array_equal(joined, first.curves["loss"])


def test_metrics_have_steps_before_lanes(tiny, kjv, quick_compile):
    result = train(tiny, [A, B, C], kjv)
    assert result.curves["loss"].shape == (30, 3) and result.curves["head_logits"].shape == (30, 3, 1, 2)
    assert result.final["loss"].shape == (3,) and all(v.shape[0] == 3 for v in jax.tree.leaves(result.params))


@pytest.mark.parametrize("lanes", [1, 2, 5, 32, 33])
def test_seats_are_shared_evenly_and_give_back_what_they_took(lanes):
    seats = Seats(lanes, lane_mesh())
    values = np.arange(lanes, dtype=np.float32)
    np.testing.assert_array_equal(seats.take(seats.put(values)), values)
    counts = np.asarray(seats.counts)
    assert counts.sum() == lanes and counts.max() - counts.min() <= 1
    assert seats.total == (32 if lanes <= 32 else 34)


def short(tokens):
    return Corpus("short", np.zeros(tokens, np.uint8), 256, "", "made up", tokens - tokens // 20)


def test_what_a_corpus_must_have(tiny, kjv):
    narrow = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, vocab_size=200))
    with pytest.raises(
        ReproError, match="has 256 token ids and the model 200; set train.model.vocab-size to at least 256"
    ):
        train(narrow, [A], kjv)
    with pytest.raises(ReproError, match="training split of short has 5 tokens"):
        train(tiny, [A], short(5))
    with pytest.raises(ReproError, match="validation split of short has 9 tokens"):
        train(tiny, [A], short(180))
    with pytest.raises(ReproError, match="2 different validation windows"):
        train(tiny, [A], short(200))
