"""What is counted in a training state, and that the rules refuse other ledgers."""

import sys

import jax.numpy as jnp
import optax
import pytest

from repro import catalogue
from repro.claims import Run, decide, decide_all, gather
from repro.errors import ReproError

EXPERIMENT = catalogue.load("state-ledger")
MODULE = sys.modules["repro.experiments.state_ledger"]
pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def measured():
    """The runs of the smoke preset, and what was measured for them: {size: {arm: bytes by role}}."""
    kept, inner = {}, MODULE.held_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "held_bytes", lambda size, moments: kept.setdefault(size, inner(size, moments)))
        return gather(EXPERIMENT, EXPERIMENT.presets["smoke"], list), kept


@pytest.fixture
def runs(measured):
    return measured[0]


def test_every_claim_has_a_control_that_fails(runs):
    for verdict in decide_all(EXPERIMENT.claims_for(EXPERIMENT.presets["smoke"]), runs):
        assert verdict.label in ("supported", "contradicted") and verdict.control_label == "contradicted"


def test_bytes_are_those_of_the_arrays(measured):
    held = measured[1]["w32"]["first_moment_only"]
    values = held["values"]
    assert values == 256 * 32 * 2 + 2 * (4 * 32 * 32 + 3 * 32 * 86 + 2 * 32) + 32
    wanted = {"weights": 4, "gradient": 4, "first_moment": 2, "second_moment": 4}
    assert {role: held[role] / values for role in wanted} == wanted
    assert 0 < held["counters"] <= 16


def test_the_ledger_counts_the_master_copy_as_weights():
    assert MODULE.ledger_bytes(10, "v3") == {
        "weights": 40, "gradient": 40, "first_moment": 20, "second_moment": 20,
    }  # fmt: skip
    assert MODULE.ledger_bytes(10, "bf16_mixed")["weights"] == 60


def test_moments_in_bfloat16_are_those_of_adam_rounded():
    """One step of the narrow optimizer against Adam from the same, rounded, moments."""
    params = {"w": jnp.arange(1.0, 5.0)}
    grads = {"w": jnp.array([0.1, -0.2, 0.3, 1e-3])}
    inner = optax.adam(0.1)
    narrow = MODULE.stored_in(inner, jnp.bfloat16, jnp.bfloat16)
    state = narrow.init(params)
    widened = inner.init(params)
    for _ in range(3):
        got, state = narrow.update(grads, state, params)
        wanted, widened = inner.update(grads, widened, params)
        assert jnp.array_equal(got["w"], wanted["w"])
        for name in ("mu", "nu"):
            rounded = optax.tree_utils.tree_get(widened, name)["w"].astype(jnp.bfloat16)
            assert jnp.array_equal(optax.tree_utils.tree_get(state, name)["w"], rounded)
            widened = optax.tree_utils.tree_set(widened, **{name: {"w": rounded.astype(jnp.float32)}})


def test_a_byte_too_many_contradicts(runs):
    claim = EXPERIMENT.claims[2]
    assert decide(claim, runs).label == "supported"
    off = [Run(r.arm, r.seed, r.metrics | {"off_by_bytes": 1.0}) if r.arm == "v3" else r for r in runs]
    assert decide(claim, type(runs)(off)).label == "contradicted"


@pytest.mark.parametrize("sizes", [(), ("huge",)])
def test_presets_without_a_meaning(sizes):
    with pytest.raises(ReproError, match="sizes is .*; give one or more of tiny, w32"):
        MODULE.Preset(sizes=sizes)
