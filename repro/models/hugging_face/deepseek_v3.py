"""`config.json` of DeepSeek-V2, DeepSeek-V3, Kimi K2 and Moonlight.

DeepSeek-V3 (arXiv 2412.19437, section 2.1) and what follows it: latent attention, sigmoid affinities with a selection
bias, groups by the sum of their two best experts. DeepSeek-V2 (arXiv 2405.04434): softmax affinities without a bias,
groups by their best expert. Absent fields have the defaults of DeepseekV2Config and DeepseekV3Config in `transformers`.
"""

from __future__ import annotations

from typing import Any

from repro.errors import ReproError
from repro.models.config import ModelConfig
from repro.models.hugging_face.common import latent_attention, positions, shape
from repro.models.hugging_face.fields import Fields
from repro.models.moe_config import MoEConfig


def read_v3(fields: Fields) -> ModelConfig:
    """DeepSeek-V3, Kimi K2, Moonlight."""
    fields.choose("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
    fields.choose("topk_method", {"noaux_tc": "sign"}, "noaux_tc")
    normalise, scale = fields.keep("norm_topk_prob", bool, True), fields.keep("routed_scaling_factor", float, 2.5)
    groups, kept = fields.keep("n_group", int, 8), fields.keep("topk_group", int, 4)
    moe = {"groups": groups, "kept_groups": kept, "normalise": normalise, "scale": scale, "balance": "sign"}
    interleaved = fields.keep("rope_interleave", bool, True)
    return _model(fields, moe, dense_layers=3, interleaved=interleaved)


def read_v2(fields: Fields) -> ModelConfig:
    """DeepSeek-V2 and V2-Lite."""
    fields.choose("scoring_func", {"softmax": "softmax"}, "softmax")
    normalise, scale = fields.keep("norm_topk_prob", bool, False), fields.keep("routed_scaling_factor", float, 1.0)
    if normalise and scale != 1:
        raise ReproError(
            "config.json: norm_topk_prob beside routed_scaling_factor is ambiguous for DeepSeek-V2: its own code "
            "leaves the factor out, transformers does not; set one of them to its default."
        )
    groups, kept = fields.keep("n_group", int, 1), fields.keep("topk_group", int, 1)
    if fields.choose("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy"):
        if groups != kept:
            fields.note(
                "topk_method", "approximated", "groups are chosen by the sum of their two best experts, as in V3"
            )
    else:
        groups = kept = 1
    moe = {"groups": groups, "kept_groups": kept, "normalise": normalise, "scale": scale, "affinity": "softmax"}
    return _model(fields, moe, dense_layers=0, interleaved=True)


def _model(fields: Fields, moe: dict[str, Any], *, dense_layers: int, interleaved: bool) -> ModelConfig:
    found = shape(fields)
    fields.choose("hidden_act", {"silu": "swiglu"}, "silu")
    fields.fixed("moe_layer_freq", 1, "every layer above the dense ones has experts")
    experts, active = fields.keep("n_routed_experts", int, 0), fields.keep("num_experts_per_tok", int, 0)
    shared, ffn = fields.keep("n_shared_experts", int, 0), fields.keep("moe_intermediate_size", int, 0)
    dense = min(fields.keep("first_k_dense_replace", int, dense_layers), found["layers"])
    fields.drop(
        ("aux_loss_alpha", "seq_aux", "router_aux_loss_coef"), "a loss of training; see model.moe.sequence_loss"
    )
    fields.drop(("head_dim", "qk_head_dim"), "follows from the sizes of latent attention")
    experts_of = (
        MoEConfig(experts=experts, active=active, ffn=ffn, shared=shared, dense_layers=dense, **moe)
        if experts
        else MoEConfig()
    )
    return ModelConfig(
        **found, **latent_attention(fields, found["heads"], found["norm_eps"]), **positions(fields),
        ffn=fields.keep("intermediate_size"), rope_interleaved=interleaved, moe=experts_of,
    )  # fmt: skip
