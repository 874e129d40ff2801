"""Configurations as models, field by field, and what is refused."""

import pytest

from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig, ResidualConfig, YarnConfig, config_from_hf, released
from repro.models.hugging_face import read
from repro.models.presets import RELEASED

YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def test_deepseek_v3():
    assert config_from_hf(released("deepseek_v3")) == ModelConfig(
        vocab_size=129_280, layers=61, width=7168, heads=128, ffn=18_432, attention="mla", q_rank=1536, kv_rank=512,
        nope_size=128, rope_size=64, value_size=128, rope_interleaved=True, norm_eps=1e-6,
        yarn=YarnConfig(factor=40.0, original=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
        moe=MoEConfig(
            experts=256, active=8, ffn=2048, shared=1, dense_layers=3, groups=8, kept_groups=4, scale=2.5,
            balance="sign",
        ),
    )  # fmt: skip


def test_moonlight_has_queries_of_full_rank_and_its_own_epsilon_on_latents():
    model = config_from_hf(released("moonlight"))
    assert (model.q_rank, model.norm_eps, model.latent_norm_eps, model.rope_theta) == (0, 1e-5, 1e-6, 5e4)
    assert (model.moe.experts, model.moe.active, model.moe.shared, model.moe.scale) == (64, 6, 2, 2.446)


def test_kimi_k2_reads_as_a_deepseek_v3():
    reading = read(released("kimi_k2"))
    assert reading.family.title == "DeepSeek-V3" and not reading.fate("approximated")
    assert (reading.model.heads, reading.model.moe.experts, reading.model.moe.dense_layers) == (64, 384, 1)
    # Its YaRN has no ramp, and its text part may stand in a model with eyes.
    step = YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}
    seeing = {
        "model_type": "kimi_k25",
        "vision_config": {},
        "text_config": released("kimi_k2") | {"rope_scaling": step},
    }
    assert config_from_hf(seeing).yarn == YarnConfig(32.0, 4096, 1.0, 1.0, 1.0, 1.0)


def test_deepseek_v4_as_far_as_it_is_built():
    reading = read(released("deepseek_v4"))
    model = reading.model
    assert (model.layers, model.width, model.heads, model.kv_heads, model.head_dim) == (43, 4096, 64, 1, 512)
    assert (model.qk_norm, model.attention_sink, model.glu, model.glu_limit) == ("v4", True, "clamped", 10.0)
    assert model.moe == MoEConfig(
        experts=256, active=6, ffn=2048, shared=1, hash_layers=3, affinity="sqrt_softplus", scale=1.5, balance="sign"
    )
    assert model.residual == ResidualConfig(kind="manifold", form="released", readout="learned")
    assert {"index_topk", "q_lora_rank", "o_groups", "qk_rope_head_dim"} <= {
        n.field for n in reading.fate("approximated")
    }
    newer = {n: v for n, v in released("deepseek_v4").items() if n != "num_hash_layers"}
    assert config_from_hf(newer | {"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 41}).moe.hash_layers == 2


def test_kimi_k3_as_far_as_it_is_built():
    reading = read(released("kimi_k3"))
    model = reading.model
    assert (model.layers, model.position, model.output_gate, model.glu) == (93, "none", True, "situ")
    assert (model.situ_gate, model.situ_up, model.latent_norm_eps, model.norm_eps) == (4.0, 25.0, 1e-6, 1e-5)
    assert model.moe == MoEConfig(
        experts=896, active=16, ffn=3072, shared=2, dense_layers=1, latent=3584, balance="quantile"
    )
    assert model.residual == ResidualConfig(kind="block_attention", block_layers=12)
    assert [n.field for n in reading.fate("approximated")] == ["linear_attn_config"]


def test_deepseek_v2_takes_groups_only_where_it_says_so():
    lite = {
        "model_type": "deepseek_v2", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "kv_lora_rank": 4,
        "num_hidden_layers": 2, "num_attention_heads": 2, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "n_group": 4, "topk_group": 2,
    }  # fmt: skip
    moe = config_from_hf(lite).moe
    assert (moe.affinity, moe.normalise, moe.balance, moe.groups) == ("softmax", False, "none", 1)
    grouped = read(lite | {"topk_method": "group_limited_greedy"})
    assert (grouped.model.moe.groups, [n.field for n in grouped.fate("approximated")]) == (4, ["topk_method"])
    dense = {n: v for n, v in lite.items() if n != "n_routed_experts"}
    assert config_from_hf(dense).moe == MoEConfig()


def test_every_field_has_a_note():
    for name in RELEASED:
        config = released(name)
        fields = set(config) | set(config.get("text_config", {}))
        assert fields - {"text_config"} == {note.field for note in read(config).notes}


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_positions(name):
    base = {n: v for n, v in released("deepseek_v3").items() if n not in ("rope_scaling", "rope_theta")}
    model = config_from_hf(base | {name: YARN | {"rope_theta": 7.0}})
    assert (model.rope_theta, model.yarn.factor) == (7.0, 40.0)
    assert config_from_hf(base | {name: {"rope_type": "default", "rope_theta": 9.0}}).rope_theta == 9.0
    bare = {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64}
    assert config_from_hf(base | {name: bare}).yarn == YarnConfig(2.0, 64, mscale=1.0, mscale_all_dim=0.0)
    for wrong, message in (({"type": "linear"}, "'linear' are not built"), (YARN | {"attn": 1}, "attn of rope_scaling"),
                           (YARN | {"factor": "4"}, "factor of rope_scaling is '4'")):  # fmt: skip
        with pytest.raises(ReproError, match=message):
            config_from_hf(base | {name: wrong})


V3 = released("deepseek_v3")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (V3 | {"model_type": "qwen3_moe"}, "qwen3_moe is not among the architectures .* look like DeepSeek-V3"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}, "LlamaForCausalLM .* look like none of them"),
        ({"hidden_size": 8}, "names neither model_type nor architectures"),
        (released("kimi_k3")["text_config"] | {"model_type": "new"}, "look like Kimi K3"),
        (V3 | {"hc_mult": 4}, "field hc_mult is unknown for DeepSeek-V3; it looks like DeepSeek-V4"),
        (V3 | {"n_routed_expert": 4}, "perhaps n_routed_experts was meant"),
        (V3 | {"warp": 9}, "field warp is unknown .* the other fields look like DeepSeek-V3"),
        (V3 | {"hidden_size": None}, "no hidden_size"),
        (V3 | {"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a whole number"),
        (V3 | {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (V3 | {"hidden_act": "relu"}, "hidden_act 'relu' is not built"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not built"),
        (V3 | {"attention_bias": True}, "attention_bias is True and must be False"),
        (V3 | {"tie_word_embeddings": True}, "the head has weights of its own"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (V3 | {"num_key_value_heads": 8}, "num_key_value_heads is 8 and must be 128"),
        (V3 | {"num_experts_per_tok": 300}, "active is 300 of model.moe.experts 256"),
        (V3 | {"n_group": 7}, "groups 7 does not divide"),
        (V3 | {"kv_lora_rank": 9000}, "kv_rank 9000 exceeds model.width 7168"),
        (V3 | {"qk_rope_head_dim": 63}, "rope_size is 63; it must be even"),
        (released("kimi_k3")["text_config"] | {"activation_situ_beta": None}, "no activation_situ_beta"),
    ],
)  # fmt: skip
def test_refusals(config, message):
    with pytest.raises(ReproError, match=message):
        config_from_hf(config)


def test_a_config_without_a_name_is_known_by_its_fields():
    nameless = {n: v for n, v in V3.items() if n not in ("model_type", "architectures")}
    assert config_from_hf(nameless) == config_from_hf(V3)
    for name in ("deepseek_v4", "kimi_k3"):
        whole = released(name)
        nameless = {
            n: v for n, v in whole.get("text_config", whole).items() if n not in ("model_type", "architectures")
        }
        assert config_from_hf(nameless) == config_from_hf(whole)


def test_weights_of_what_is_not_built_are_refused():
    from repro.models import from_hf

    for name, what in (("deepseek_v4", "DeepSeek-V4 .* index_topk"), ("kimi_k3", "Kimi K3 .* Kimi Delta Attention")):
        with pytest.raises(ReproError, match=what):
            from_hf(released(name), {})
