"""The named models: what they are, how they start, and how a run asks for them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.models import MODELS, SIZES, ModelConfig, init_and_apply, released
from repro.models.config import SIZES as SHAPES
from repro.models.presets import RELEASED
from repro.train import TrainConfig
from repro.train.config import at_size

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_the_names():
    assert tuple(MODELS) == RELEASED and [*SIZES] == [*SHAPES, *MODELS]
    assert all((m.width, m.layers, m.vocab_size, m.moe.active) == (128, 4, 256, 4) for m in MODELS.values())
    with pytest.raises(TypeError):
        MODELS["mine"] = ModelConfig()
    with pytest.raises(ReproError, match="model 'deepseek_v5' is unknown; known are deepseek_v3, deepseek_v4"):
        released("deepseek_v5")


def test_what_makes_each():
    moe = {
        name: (m.moe.experts, m.moe.balance, m.moe.balance_centred, m.moe.sequence_loss) for name, m in MODELS.items()
    }
    assert moe == {
        "deepseek_v3": (128, "sign", False, 1e-4), "deepseek_v4": (170, "sign", False, 1e-4),
        "kimi_k2": (192, "sign", False, 0.0), "kimi_k3": (224, "quantile", False, 0.0),
        "moonlight": (42, "sign", True, 0.0),
    }  # fmt: skip
    v4, k3 = MODELS["deepseek_v4"], MODELS["kimi_k3"]
    assert (v4.residual.kind, v4.glu, v4.qk_norm, v4.kv_heads, v4.moe.hash_layers) == (
        "manifold",
        "clamped",
        "v4",
        1,
        1,
    )
    assert (k3.residual.kind, k3.glu, k3.position, k3.moe.latent) == ("block_attention", "situ", "none", 64)


def test_a_run_asks_for_one_by_name_and_keeps_its_own_switches():
    run = at_size(TrainConfig(), "kimi_k3")
    assert (run.model, run.length, run.batch_size) == (MODELS["kimi_k3"], 128, 16)
    asked = ModelConfig(vocab_size=500, compute_dtype="bfloat16", soft_cap=30.0, width=32)
    own = {"vocab_size": 500, "compute_dtype": "bfloat16", "soft_cap": 30.0}
    assert SIZES["kimi_k3"].apply(asked) == dataclasses.replace(MODELS["kimi_k3"], **own)


UNMOVED = {
    # AttnRes starts with zero queries. A key's gain is multiplied by its query; the first sublayer has one source,
    # whose weight is 1 whatever the query.
    "kimi_k3": {
        "blocks_0.attention_link.key_gain_D", "blocks_0.attention_link.query_D", "blocks_0.ffn_link.key_gain_D",
        "blocks_1.attention_link.key_gain_D", "blocks_1.ffn_link.key_gain_D", "ends.key_gain_D",
    },
}  # fmt: skip
"""Parameters without a gradient at the first step, and why."""


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4", "kimi_k3"])
def test_the_first_loss_is_near_ln_z_and_every_parameter_moves(name):
    """Kimi K2 and Moonlight are DeepSeek-V3 with other numbers. At two layers, one of each kind, and fewer iterations
    of Sinkhorn, which compiles in half the time; what counts is at the ends of the model."""
    model = dataclasses.replace(MODELS[name], layers=2)
    if model.residual.kind == "manifold":
        model = dataclasses.replace(model, residual=dataclasses.replace(model.residual, iterations=3))
    init, apply = init_and_apply(model)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 33)).astype(np.int32)

    def loss(params):
        out = apply(params, tokens[:, :-1])
        own = jnp.take_along_axis(jax.nn.log_softmax(out.logits), tokens[:, 1:, None], -1)
        return out.aux_loss - own.mean()

    @jax.jit
    def at(moved):  # the initial parameters inside, so that one program is compiled
        return jax.value_and_grad(loss)(jax.tree.map(jnp.add, init(jax.random.key(0)), moved))

    first, gradients = at(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(init, jax.random.key(0))))
    assert abs(first / math.log(256) - 1) < 0.05
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    assert all(np.isfinite(g).all() for _, g in leaves)
    unmoved = {jax.tree_util.keystr(path, simple=True, separator=".") for path, g in leaves if not np.any(g)}
    assert unmoved == UNMOVED.get(name, set())
    assert at(jax.tree.map(lambda g: -1e-3 * np.sign(g), gradients))[0] < first - 0.1
