"""`config.json` of Kimi K3, and of Kimi Linear before it, as far as they are built here.

Kimi K3 (arXiv 2607.24653, table 1 and section 2; the released configuration agrees). Built are the gated latent
attention without positions, LatentMoE with its norm, SiTU-GLU, Block AttnRes and Quantile Balancing. Not built is Kimi
Delta Attention: its layers, three of four, are latent attention here too.
"""

from __future__ import annotations

from repro.models.config import ModelConfig
from repro.models.hugging_face.common import latent_attention, positions, shape
from repro.models.hugging_face.fields import Fields
from repro.models.moe_config import MoEConfig
from repro.models.residual_config import ResidualConfig


def read_k3(fields: Fields) -> ModelConfig:
    """Kimi K3 and Kimi Linear."""
    fields.approximate("linear_attn_config", "Kimi Delta Attention is not built; its layers are latent attention too")
    found = shape(fields)
    glu = fields.choose("hidden_act", {"silu": "swiglu", "situ": "situ"}, "silu")
    betas = {}
    if glu == "situ":  # without them the released code falls back to another function, in silence
        betas["situ_gate"] = fields.keep("activation_situ_beta", float)
        betas["situ_up"] = fields.keep("activation_situ_linear_beta", float)
    fields.drop(("activation_situ_beta", "activation_situ_linear_beta"), "belongs to SiTU")
    fields.fixed("moe_layer_freq", 1, "every layer above the dense ones has experts")
    fields.choose("topk_method", {"noaux_tc": "quantile"}, "noaux_tc")
    affinities = {"sigmoid": "sigmoid", "softmax": "softmax"}
    latent = fields.keep("routed_expert_hidden_size", int, 0)
    grouped = fields.keep("use_grouped_topk", bool, True)
    groups, kept = fields.keep("num_expert_group", int, 1), fields.keep("topk_group", int, 1)
    moe = MoEConfig(
        experts=fields.keep("num_experts"),
        active=fields.keep("num_experts_per_token"),
        ffn=fields.keep("moe_intermediate_size"),
        shared=fields.keep("num_shared_experts", int, 0),
        dense_layers=min(fields.keep("first_k_dense_replace", int, 0), found["layers"]),
        latent=latent,
        latent_norm=fields.keep("latent_moe_use_norm", bool, False) if latent else True,
        groups=groups if grouped else 1,
        kept_groups=kept if grouped else 1,
        affinity=fields.choose("moe_router_activation_func", affinities, "sigmoid"),
        normalise=fields.keep("moe_renormalize", bool, True),
        scale=fields.keep("routed_scaling_factor", float, 1.0),
        balance="quantile" if latent else "sign",
    )
    block = fields.keep("attn_res_block_size", int, 0)
    unturned = fields.keep("mla_use_nope", bool, False)
    fields.drop(("head_dim",), "follows from the sizes of latent attention")
    return ModelConfig(
        **found, **latent_attention(fields, found["heads"], found["norm_eps"]), **betas, **positions(fields),
        position="none" if unturned else "rope", rope_interleaved=True,
        output_gate=fields.keep("mla_use_output_gate", bool, False), ffn=fields.keep("intermediate_size"), glu=glu,
        moe=moe, residual=ResidualConfig(kind="block_attention", block_layers=block) if block else ResidualConfig(),
    )  # fmt: skip
