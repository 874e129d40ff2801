"""What structural guards do with one run of a job, and that the others do not notice."""

import dataclasses

import jax
import numpy as np
import pytest

from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig
from repro.train import Lane, Numbers, train
from repro.train.job import Job
from repro.train.mesh import lane_mesh
from repro.train.supervisor import MOST_RETURNS

pytestmark = pytest.mark.usefixtures("quick_compile")

LANES = [Lane(Numbers(0.01, 0.0, np.inf, 0.0), 0), Lane(Numbers(0.3, 0.0, np.inf, 0.0), 1)]
"""The second run is the wild one."""


def of_lane(tree, lane, axis=0):
    return [np.take(leaf, lane, axis) for leaf in jax.tree.leaves(tree)]


def equal(a, b):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))


NEVER = "when grad_norm > 1e9 then rollback 11"
"""Programs with guards may differ in the last bit from one without: the twin of a guarded run is one that never trips."""


@pytest.fixture(scope="module")
def plain(tiny, kjv, quick_compile_module):
    return train(guarded(tiny, NEVER), LANES, kjv)


def guarded(tiny, *guards, **settings):
    return dataclasses.replace(tiny, guards=guards, **settings)


def highest(result, lane, start):
    """The step after `start` with the largest gradient norm of a run, and a threshold that only it passes."""
    curve = result.curves["grad_norm"][start:, lane]
    first, second = np.sort(curve)[[-1, -2]]
    return start + int(curve.argmax()), float((first + second) / 2)


def test_a_rollback_repeats_the_same_steps_to_the_bit(tiny, kjv, plain):
    step, limit = highest(plain, 1, 12)
    calm = plain.curves["grad_norm"][:, 0].max()
    assert limit > calm, "the first run must not trip"
    before = plain.curves["grad_norm"][:12, 1]
    config = guarded(tiny, f"when grad_norm > {max(limit, before.max() * 1.0001):.6f} then rollback 11")
    result = train(config, LANES, kjv)
    (event,) = result.events
    assert event["lane"] == 1 and event["step"] == step and event["back_to"] == 10 * ((step - 11) // 10)
    assert event["value"] == event["after"] == plain.curves["grad_norm"][step, 1]
    assert equal(jax.tree.leaves(plain.params), jax.tree.leaves(result.params))
    measured = {name: curve for name, curve in plain.curves.items() if not name.startswith("guard_")}
    assert all(np.array_equal(curve, result.curves[name]) for name, curve in measured.items())


def test_a_quarantined_batch_is_replaced_and_only_it(tiny, kjv, plain):
    step, limit = highest(plain, 1, 0)
    result = train(guarded(tiny, f"when grad_norm > {limit:.6f} then quarantine 5"), LANES, kjv)
    first = result.events[0]
    assert (first["lane"], first["step"]) == (1, step)
    assert equal(of_lane(plain.params, 0), of_lane(result.params, 0)), "the other run keeps its bits"
    assert np.array_equal(plain.curves["loss"][:step, 1], result.curves["loss"][:step, 1])
    assert plain.curves["loss"][step, 1] != result.curves["loss"][step, 1]
    # By hand: the run alone, with the batches of these steps replaced.
    replaced = {e["step"]: 30 + e["step"] for e in result.events if "value" in e}
    job = Job(guarded(tiny, NEVER), LANES[1:], kjv, lane_mesh(), [replaced])
    state, losses = job.start(), []
    for start in (0, 10, 20):
        state, metrics = job.advance(state, start, start + 10)
        losses.append(job.take(metrics)["loss"])
    assert np.array_equal(np.concatenate(losses)[:, 0], result.curves["loss"][:, 1])
    assert equal(of_lane(job.seats.take(state.params), 0), of_lane(result.params, 1))


def test_a_clamp_acts_from_the_next_chunk_on_and_ends(tiny, kjv, plain):
    result = train(guarded(tiny, "when loss > 1 then clamp 0.01 for 10"), LANES[:1], kjv)
    assert [e["step"] for e in result.events] == [0, 20], "not judged while it acts"
    hidden = result.curves["hidden_max"][:, 0]
    assert (hidden[10:20] <= 0.01).all() and (hidden[:10] > 0.1).all() and (hidden[20:] > 0.1).all()
    np.testing.assert_allclose(result.curves["loss"][:10, 0], plain.curves["loss"][:10, 0], rtol=1e-5)


def test_a_run_does_not_go_back_for_ever(tiny, kjv):
    result = train(guarded(tiny, "when loss > 0.1 then rollback 1"), LANES[:1], kjv)
    backs = [e for e in result.events if e["action"] == "rollback"]
    assert len(backs) == MOST_RETURNS and result.events[-1]["rule"] == "the last return of this run"


def test_events_of_actions_inside_the_step(tiny, kjv):
    result = train(guarded(tiny, "when loss > 1e-6 then skip"), LANES, kjv)
    assert [(e["lane"], e["step"], e["times"]) for e in result.events] == [(0, 0, 30), (1, 0, 30)]
    assert np.ptp([leaf.std() for leaf in of_lane(result.params, 0)]) > 0
    assert np.array_equal(result.curves["guard_active"], np.ones((30, 2, 1), bool))


def test_routing_is_decoupled_for_a_while(kjv, tiny):
    """The experts of the detour are those that the parameters of so many steps before choose on the present tokens."""
    model = ModelConfig(layers=1, width=16, heads=2, ffn=16, moe=MoEConfig(experts=4, active=2, ffn=8))
    config = dataclasses.replace(tiny, model=model)
    plain = train(guarded(config, NEVER), LANES, kjv)
    step, limit = highest(plain, 1, 12)
    limit = max(limit, float(plain.curves["grad_norm"][:12, 1].max()) * 1.0001)
    watched = guarded(config, f"when grad_norm > {limit:.6f} then decouple 3 for 6")
    result = train(watched, LANES, kjv)
    assert equal(of_lane(plain.params, 0), of_lane(result.params, 0)), "the other run keeps its bits"
    event = result.events[0]
    assert event["step"] == step and event["back_to"] == 10 * ((step - 3) // 10)
    begin = event["back_to"]
    np.testing.assert_allclose(plain.curves["loss"][: begin + 1, 1], result.curves["loss"][: begin + 1, 1], rtol=1e-4)
    # A lag of one step is not the same as none, and a lag that has not begun is.
    lagging = Job(dataclasses.replace(watched, routing_lag=3), LANES[1:], kjv, lane_mesh())
    state, metrics = lagging.advance(lagging.start(), 0, 10)
    losses = lagging.take(metrics)["loss"][:, 0]
    difference = np.abs(losses - plain.curves["loss"][:10, 1])
    assert difference[0] < 1e-5 < 1e-3 < difference.max()
    assert jax.tree.leaves(state.older)[0].shape[1] == 3


class Stop(Exception):
    pass


def test_a_supervised_job_resumes_with_equal_bits(tiny, kjv, plain, tmp_path):
    step, limit = highest(plain, 1, 12)
    config = guarded(tiny, f"when grad_norm > {limit:.6f} then quarantine 11", "when loss > 5.5 then clamp 1 for 15")
    whole = train(config, LANES, kjv)
    assert len(whole.events) > 2

    def stopping(progress):
        if progress.step == 30:
            raise Stop

    with pytest.raises(Stop):
        train(config, LANES, kjv, checkpoints=tmp_path, checkpoint_seconds=0, on_chunk=stopping)
    seen = []
    again = train(config, LANES, kjv, checkpoints=tmp_path, on_chunk=lambda p: seen.append(p.step))
    assert seen == [30]
    assert equal(jax.tree.leaves(whole.params), jax.tree.leaves(again.params))
    assert all(np.array_equal(curve, again.curves[name]) for name, curve in whole.curves.items())
    assert whole.events == again.events


def test_a_signal_that_the_run_does_not_have_is_refused(tiny, kjv):
    with pytest.raises(ReproError, match="watches 'max_violation', which is no scalar signal of this run"):
        train(guarded(tiny, "when max_violation > 2 then skip"), LANES, kjv)
