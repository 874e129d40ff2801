"""Parameters laid over a mesh by the letters in their names; two CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from repro.models import ModelConfig, init_and_apply
from repro.models.sharding import axis_letters, bytes_per_device, partition_specs, shard
from repro.train.mesh import AXES

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = ModelConfig(vocab_size=32, layers=2, width=16, heads=2, ffn=24)


def mesh_with(axis):
    return Mesh(np.array(jax.devices()[:2]).reshape([2 if name == axis else 1 for name in AXES]), AXES)


@pytest.fixture(scope="module")
def params(quick_compile_module):
    return jax.jit(init_and_apply(CONFIG)[0])(jax.random.key(0))


def test_every_axis_of_every_matrix_has_a_letter(params):
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        letters = axis_letters(path, leaf.ndim)
        assert len(letters) == leaf.ndim
        assert (None in letters) == (path[-1].key == "gain")
    of = lambda name: axis_letters((jax.tree_util.DictKey("blocks"), jax.tree_util.DictKey(name)), 4)
    assert of("gate_EDF") == ("L", "E", "D", "F") and of("gate_DF") == ("L", None, None, None)


def test_each_rule_shards_its_axis_and_what_does_not_divide_stays_whole(params):
    specs = partition_specs(params, mesh_with("tensor"))
    assert specs["blocks"]["attention"]["q_DHK"] == P(None, None, "tensor", None)
    assert specs["blocks"]["ffn"]["down_FD"] == P(None, "tensor", None)
    assert specs["head_DZ"] == P(None, "tensor")
    odd = jax.tree.map(lambda x: x, params) | {"head_DZ": np.zeros((16, 31), np.float32)}
    assert partition_specs(odd, mesh_with("tensor"))["head_DZ"] == P(None, None)
    assert partition_specs(params, mesh_with("fsdp"))["embedding_ZD"] == P(None, "fsdp")
    assert partition_specs(params, mesh_with("fsdp"), rules={})["embedding_ZD"] == P(None, None)


@pytest.mark.parametrize("axis", ["tensor", "fsdp", "data"])
def test_sharded_and_whole_parameters_give_the_same_logits(params, axis):
    tokens, apply, mesh = jnp.arange(24).reshape(2, 12), jax.jit(init_and_apply(CONFIG)[1]), mesh_with(axis)
    whole = apply(params, tokens)
    laid = shard(params, mesh)
    out = apply(laid, jax.device_put(tokens, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(out.logits, whole.logits, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out.stats.max_logit, whole.stats.max_logit, rtol=2e-5)
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    share = bytes_per_device(params, mesh) / total
    assert share == 1.0 if axis == "data" else 0.5 <= share < 0.6, "all but the gains of norms"
