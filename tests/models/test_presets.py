"""The named models: what they are, how they start, and how a run asks for them."""

import dataclasses
import math

import jax
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


@pytest.mark.parametrize("name", MODELS)
def test_the_first_loss_is_near_ln_z_and_every_parameter_moves(name):
    """At two layers, one of each kind, which compiles in half the time; what counts is at the ends of the model."""
    model = dataclasses.replace(MODELS[name], layers=2)
    init, apply = init_and_apply(model)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 33)).astype(np.int32)

    def first(key):
        def loss(params):
            out = apply(params, tokens[:, :-1])
            own = -jax.nn.log_softmax(out.logits)
            return jax.numpy.take_along_axis(own, tokens[:, 1:, None], -1).mean() + out.aux_loss

        return jax.value_and_grad(loss)(init(key))

    loss, gradients = jax.jit(first)(jax.random.key(0))
    assert abs(loss / math.log(256) - 1) < 0.05
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    assert all(np.isfinite(g).all() for _, g in leaves)
    unmoved = {jax.tree_util.keystr(path, simple=True, separator=".") for path, g in leaves if not np.any(g)}
    assert unmoved == UNMOVED.get(name, set())
