"""`config.json` of DeepSeek-V4, as far as it is built here.

Sizes: DeepSeek-V4 (arXiv 2606.19348, section 4.2.1); field names: those of the released configurations, and the newer
ones of DeepseekV4Config in `transformers`. Built are the residual streams (mHC), hash layers, square-root-of-softplus
affinities, the clamped GLU, the attention sink, one key and value head, and the norms of queries and keys. Not built
are compressed and windowed attention (CSA, HCA), the low-rank projections of queries and outputs, the key that is its
own value, and RoPE on a part of a head; what takes their place is in the notes.
"""

from __future__ import annotations

from repro.models.config import ModelConfig
from repro.models.hugging_face.common import shape
from repro.models.hugging_face.fields import Fields
from repro.models.moe_config import MoEConfig
from repro.models.residual_config import ResidualConfig

_FULL = "compressed and windowed attention are not built; every token sees all before it"
_UNBUILT = {
    "compress_ratios": _FULL, "compress_rates": _FULL, "compress_rate_csa": _FULL, "compress_rate_hca": _FULL,
    "layer_types": _FULL, "sliding_window": _FULL, "index_topk": _FULL, "index_head_dim": _FULL, "index_n_heads": _FULL,
    "compress_rope_theta": _FULL,
    "rope_scaling": "belongs to the compressed layers",
    "q_lora_rank": "queries are projected by one matrix",
    "o_groups": "outputs are projected by one matrix", "o_lora_rank": "outputs are projected by one matrix",
    "qk_rope_head_dim": "RoPE turns the whole head", "partial_rotary_factor": "RoPE turns the whole head",
    "rope_parameters": "RoPE turns the whole head, with the base of layers without compression",
}  # fmt: skip


def read_v4(fields: Fields) -> ModelConfig:
    """DeepSeek-V4, Flash and Pro."""
    for name, remark in _UNBUILT.items():
        fields.approximate(name, remark)
    found = shape(fields)
    fields.choose("hidden_act", {"silu": "clamped"}, "silu")
    fields.choose("topk_method", {"noaux_tc": "sign"}, "noaux_tc")
    affinities = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
    kinds = fields.keep("mlp_layer_types", list, [])
    hashed = fields.keep("num_hash_layers", int, sum(kind == "hash_moe" for kind in kinds) if kinds else 3)
    moe = MoEConfig(
        experts=fields.keep("n_routed_experts"),
        active=fields.keep("num_experts_per_tok"),
        ffn=fields.keep("moe_intermediate_size"),
        shared=fields.keep("n_shared_experts", int, 1),
        hash_layers=min(hashed, found["layers"]),
        affinity=fields.choose("scoring_func", affinities, "sqrtsoftplus"),
        normalise=fields.keep("norm_topk_prob", bool, True),
        scale=fields.keep("routed_scaling_factor", float, 1.5),
        balance="sign",
    )
    fields.drop(
        ("router_aux_loss_coef", "aux_loss_alpha", "seq_aux"), "a loss of training; see model.moe.sequence_loss"
    )
    fields.drop(("intermediate_size",), "no layer has a dense block")
    streams = fields.keep("hc_mult", int, 4)
    return ModelConfig(
        **found, attention="mha", kv_heads=fields.keep("num_key_value_heads", int, 1), head_dim=fields.keep("head_dim"),
        rope_theta=fields.keep("rope_theta", float, 10_000.0), rope_interleaved=True, qk_norm="v4", attention_sink=True,
        ffn=moe.ffn * (moe.active + moe.shared), glu="clamped", glu_limit=fields.keep("swiglu_limit", float, 10.0),
        moe=moe, residual=ResidualConfig(
            kind="manifold", streams=streams, iterations=fields.keep("hc_sinkhorn_iters", int, 20),
            eps=fields.keep("hc_eps", float, 1e-6), form="released", readout="learned",
        ),
    )  # fmt: skip
