"""Checkpoints there and back, in memory and as files, and what is wrong with one."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig, ResidualConfig, YarnConfig, from_hf, load_hf, save_hf, to_hf
from repro.models.hugging_face import describe, take_apart

LITE = {
    "model_type": "deepseek_v2", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": None, "kv_lora_rank": 4, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 6, "n_routed_experts": 3, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
"""As DeepSeek-V2-Lite: queries of full rank, softmax affinities without a bias."""


def same(a, b):
    assert a.config == b.config
    jax.tree.map(np.testing.assert_array_equal, take_apart(a), take_apart(b))


@pytest.fixture(scope="module")
def model(golden):
    return from_hf(golden.config, golden.weights)


@pytest.fixture(scope="module")
def released(model):
    return to_hf(model)


def test_the_released_layout(golden, model, released):
    config, weights = released
    said = {name: value for name, value in golden.config.items() if name != "max_position_embeddings"}
    assert config["model_type"] == "deepseek_v3" and {name: config[name] for name in said} == said
    shared = golden.weights.keys() & weights.keys()
    assert all((weights[n] == golden.weights[n]).all() for n in shared) and len(shared) == len(golden.weights) - 4
    fused = golden.weights["model.layers.2.mlp.experts.gate_up_proj"]
    assert (weights["model.layers.2.mlp.experts.5.gate_proj.weight"] == fused[5, :32]).all()
    assert (weights["model.layers.2.mlp.experts.5.up_proj.weight"] == fused[5, 32:]).all()
    down = golden.weights["model.layers.1.mlp.experts.down_proj"]
    assert (weights["model.layers.1.mlp.experts.0.down_proj.weight"] == down[0]).all()
    same(from_hf(config, weights), model)


@pytest.fixture(scope="module")
def lite():
    rng, D, F = np.random.default_rng(0), 8, 6
    shapes = {
        "model.embed_tokens": (11, D), "model.norm": (D,), "lm_head": (11, D),
        **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in {
            "input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (12, D),
            "self_attn.kv_a_proj_with_mqa": (6, D), "self_attn.kv_a_layernorm": (4,), "self_attn.kv_b_proj": (20, 4),
            "self_attn.o_proj": (D, 12),
        }.items()},
        **{f"model.layers.0.mlp.{n}_proj": (12, D) for n in ("gate", "up")}, "model.layers.0.mlp.down_proj": (D, 12),
        **{f"model.layers.1.mlp.experts.{i}.{n}_proj": (F, D) for i in range(3) for n in ("gate", "up")},
        **{f"model.layers.1.mlp.experts.{i}.down_proj": (D, F) for i in range(3)},
        **{f"model.layers.1.mlp.shared_experts.{n}_proj": (2 * F, D) for n in ("gate", "up")},
        "model.layers.1.mlp.shared_experts.down_proj": (D, 2 * F), "model.layers.1.mlp.gate": (3, D),
    }  # fmt: skip
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_deepseek_v2_lite_there_and_back(lite):
    model = from_hf(LITE, lite)
    assert model.config.moe.affinity == "softmax" and not model.config.moe.normalise
    config, weights = to_hf(model)
    assert config["model_type"] == "deepseek_v2" and "rope_interleave" not in config
    assert weights.keys() == lite.keys() and all((weights[n] == lite[n]).all() for n in lite)
    model.blocks_1.ffn.bias_E[...] += 1.0
    with pytest.raises(ReproError, match="DeepSeek-V2 has no selection bias"):
        to_hf(model)


def test_folders(model, released, tmp_path):
    save_hf(model, tmp_path / "own")
    same(load_hf(tmp_path / "own"), model)
    with pytest.raises(ReproError, match="exists; give an empty folder"):
        save_hf(model, tmp_path / "own")
    # As released: bfloat16, in several files with an index.
    config, weights = released
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    low = {n: x.astype(ml_dtypes.bfloat16) for n, x in weights.items()}
    names = [list(low)[::2], list(low)[1::2]]
    for i, part in enumerate(names):
        save_file({n: low[n] for n in part}, folder / f"model-{i}.safetensors")
    index = {"weight_map": {n: f"model-{i}.safetensors" for i, part in enumerate(names) for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    same(load_hf(folder), from_hf(config, {n: x.astype(np.float32) for n, x in low.items()}))


def test_folders_that_cannot_be_read(released, tmp_path):
    config, weights = released
    with pytest.raises(ReproError, match="config.json cannot be read"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ReproError, match="is not JSON"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReproError, match="model.safetensors cannot be read"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the sort")
    with pytest.raises(ReproError, match="is not a safetensors file"):
        load_hf(tmp_path)
    save_file({"lm_head.weight": np.zeros((2, 2), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ReproError, match="lm_head.weight is stored as I8; store it as one of F64"):
        load_hf(tmp_path)


NORM, HEAD, GATE = "model.norm.weight", "lm_head.weight", "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, f"The checkpoint lacks {NORM}."),
        ({GATE: None}, "experts.0.up_proj.weight, model.layers.1.mlp.experts.1.gate_proj.weight"),
        ({"model.rotary": np.ones(3)}, "has the unknown model.rotary."),
        ({HEAD: np.ones((64, 97))}, f"has {HEAD} [64, 97] in place of [97, 64]"),
        ({GATE: np.ones((8, 32, 64))}, f"{GATE} of shape [8, 32, 64]; it must be [8, 64, 64]"),
        ({NORM: None, "norm.weight": np.ones(64)}, f"lacks {NORM}, and has the unknown norm.weight."),
        ({"lm_head.weight_scale_inv": np.ones(1)}, "Its weights are quantised"),
        ({"model.layers.3.eh_proj.weight": np.ones(1)}, "Layer 3 predicts a second token"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(golden, change, message):
    weights = {n: x for n, x in (golden.weights | change).items() if x is not None}
    with pytest.raises(ReproError) as refused:
        from_hf(golden.config, weights)
    assert message in str(refused.value)


LATENT = ModelConfig(attention="mla", kv_rank=8, nope_size=8, rope_size=4, value_size=8, rope_interleaved=True)
EXPERTS = MoEConfig(experts=4, active=2, ffn=8, scale=2.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": "mha", "kv_rank": 0, "nope_size": 0, "rope_size": 0, "value_size": 0}, "attention is mha"),
        ({"glu": "situ"}, "no field for model.glu situ"),
        ({"residual": ResidualConfig(kind="gain")}, "no field for model.residual"),
        ({"moe": MoEConfig(experts=4, active=2, ffn=8, latent=16)}, "no field for model.moe.latent 16"),
        ({"moe": MoEConfig(experts=4, active=2, ffn=8, hash_layers=1)}, "no field for model.moe.hash_layers 1"),
        ({"moe": MoEConfig(experts=4, active=2, ffn=8, affinity="sqrt_softplus")}, "affinity sqrt_softplus"),
        ({"moe": MoEConfig(experts=8, ffn=8, affinity="softmax", normalise=False, groups=4, kept_groups=2)},
         "another topk_method"),
        ({"moe": EXPERTS, "pattern": "moe, dense"}, "no field for model.pattern"),
        ({"position": "none"}, "no field for model.position"),
        ({"norm_eps": 1e-3}, "no field for model.latent_norm_eps"),
        ({"rope_interleaved": False, "moe": MoEConfig(experts=4, ffn=8, affinity="softmax", normalise=False)},
         "no field for model.rope_interleaved"),
    ],
)  # fmt: skip
def test_a_model_that_the_layout_has_no_field_for_is_refused(change, message):
    with pytest.raises(ReproError, match=message):
        describe(ModelConfig(**vars(LATENT) | change))


def test_how_a_model_starts_and_is_trained_is_no_part_of_the_layout():
    config = ModelConfig(**vars(LATENT) | {"moe": EXPERTS, "yarn": YarnConfig(factor=4.0, mscale=0.7)})
    trained = ModelConfig(
        **vars(config)
        | {"moe": MoEConfig(**vars(EXPERTS) | {"balance": "sign", "sequence_loss": 0.1, "dispatch": "dense"})}
        | {"init": "small", "head_gain": 0.1, "compute_dtype": "bfloat16", "remat": True}
    )
    assert describe(config) == describe(trained)
    assert describe(config)["rope_scaling"]["original_max_position_embeddings"] == 4096
