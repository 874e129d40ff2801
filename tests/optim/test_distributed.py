"""Muon under a mesh equals Muon without one, and each matrix is one device's."""

import collections
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from repro.errors import ReproError
from repro.optim import Layout, newton_schulz
from repro.optim.distributed import momentum_spec, scale_by_distributed_muon
from repro.optim.owners import Placed, assign, newton_schulz_flops
from repro.train.mesh import AXES

MESH = AbstractMesh((1, 2, 2, 2, 1), AXES)
OWNERS = AXES[1:]
MATRIX = Layout("matrix", (0,), (1,))


@pytest.fixture(scope="module")
def seen():
    """Per mode what `eight_devices.py` saw: JAX's number of devices is fixed before its start."""
    script = Path(__file__).parent / "eight_devices.py"
    done = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_equals_the_unsharded_update_in_the_same_layout(seen, mode):
    apart = seen[mode]["apart"]
    assert set(apart) == {"rows", "columns", "experts", "heads", "fused", "whole", "bias"}
    assert max(apart.values()) <= 1e-5
    assert seen[mode]["parameters_stay"]


def test_a_shard_orthogonalised_by_itself_would_be_seen(quick_compile):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 24)), jnp.float32)
    assert jnp.abs(newton_schulz(x)[:8] - newton_schulz(x[:8])).max() > 0.05


def test_momentum_is_split_where_the_parameter_is_not(seen):
    assert seen["Auto"]["momentum_sharded"] and seen["Explicit"]["momentum_sharded"]
    # Two data-parallel times two fsdp devices: a quarter of a parameter that every device has whole.
    assert seen["Auto"]["shard_of_momentum"]["whole"] == 6 * 10 // 4
    assert seen["Auto"]["shard_of_momentum"]["rows"] == 16 * 24 // 4


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_every_product_is_of_one_whole_matrix_on_one_device(seen, mode):
    whole = {(6, 10), (8, 16), (16, 24)}
    allowed = (
        {((s, s), (s, s)) for s, _ in whole}
        | {((s, n), (n, s)) for s, n in whole}
        | {((s, s), (s, n)) for s, n in whole}
    )
    assert {(tuple(a), tuple(b)) for a, b in seen[mode]["products"]} == allowed


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_nothing_larger_than_a_batch_of_the_largest_shape_is_gathered(seen, mode):
    one = 16 * 24 * 4
    batch = 7 * one  # rows, columns, four experts and a segment of "fused"
    largest = collections.defaultdict(int)
    for kind, size in seen[mode]["collectives"]:
        largest[kind] = max(largest[kind], size)
    assert largest["all-to-all"] <= one  # a slice on its way to its owner or back
    assert largest["all-reduce"] <= 2 * one
    assert 0 < largest["all-gather"] <= batch  # updates, from the shards of momentum to those of parameters


def test_assignment_is_balanced_over_shapes():
    costs = [newton_schulz_flops(128, 128, 5)] * 16 + [newton_schulz_flops(128, 344, 5)] * 12  # a model of four layers
    owners = assign(costs, 8)
    loads = np.bincount(owners, costs, minlength=8)
    assert loads.max() <= 1.05 * loads.mean()
    in_turn = np.bincount(np.arange(28) % 8, costs, minlength=8)
    assert in_turn.max() > 1.15 * loads.max()
    assert assign(costs, 8) == owners
    assert np.bincount(assign([1.0] * 7, 3)).tolist() == [3, 2, 2]


def test_assignment_stays_within_bounds_of_the_best():
    rng = np.random.default_rng(0)
    for devices in (2, 5, 8):
        costs = rng.exponential(size=30)
        loads = np.bincount(assign(costs, devices), costs, minlength=devices)
        assert loads.max() <= 4 / 3 * max(costs.sum() / devices, costs.max())


def test_owners_are_among_the_devices_that_are_allowed():
    owners = assign([3.0, 2.0, 2.0, 1.0], 4, [[0, 1], [0, 1], [2, 3], [3]])
    assert owners == [0, 1, 2, 3]


def test_experts_stay_where_they_lie():
    mesh = AbstractMesh((1, 2, 1, 2, 2), AXES)
    placed = Placed((4, 16, 24), Layout("matrix", (1,), (2,), expert=0), (("expert",), (), ()), mesh, OWNERS)
    # Devices count along data, tensor, expert; shards hold experts 0 and 1, or 2 and 3.
    assert placed.slices() == [(0, [0, 2, 4, 6]), (1, [0, 2, 4, 6]), (0, [1, 3, 5, 7]), (1, [1, 3, 5, 7])]
    table = placed.table([0, 2, 5, 7])
    assert table[:, 0, 0].tolist() == [0, 2, 1, 2, 2, 0, 2, 1]  # 2 is an empty slot


def test_specs_of_momentum():
    spec = lambda p, shape: momentum_spec(p, shape, MESH)
    assert spec(P(), (6, 10)) == P("data", "fsdp")
    assert spec(P("fsdp"), (16, 24)) == P(("fsdp", "data"), None)
    assert spec(P(None, "tensor"), (3, 8)) == P(None, ("tensor", "data", "fsdp"))
    assert spec(P(), (3, 5)) == P(None, None)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({}, "parameter w has no PartitionSpec among the specs"),
        ({"w": P("model")}, "parameter w: the mesh has no axis 'model'; it has seed, data, fsdp, tensor, expert"),
        ({"w": P(("fsdp", "tensor"))}, "parameter w of shape .6, 10.: axis 0 does not divide by the 4"),
        ({"w": P("seed")}, "parameter w: the mesh axis seed separates runs"),
        ({"w": P(None, None, "fsdp")}, "parameter w has 2 axes, and its PartitionSpec .* names 3"),
    ],
)
def test_refused(specs, message):
    with pytest.raises(ReproError, match=message):
        scale_by_distributed_muon({"w": MATRIX}, specs, MESH).init({"w": jax.ShapeDtypeStruct((6, 10), jnp.float32)})
