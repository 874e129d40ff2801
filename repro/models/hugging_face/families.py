"""Which family of models a `config.json` is of."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from repro.errors import ReproError
from repro.models.config import ModelConfig
from repro.models.hugging_face.deepseek_v3 import read_v2, read_v3
from repro.models.hugging_face.deepseek_v4 import read_v4
from repro.models.hugging_face.fields import Fields, Note
from repro.models.hugging_face.kimi_k3 import read_k3


class Family(NamedTuple):
    """Models of one layout. `read` makes a `ModelConfig` of the fields, `own` are those by which it is recognised, and
    `whole` says whether all of it is built, so that weights can be loaded."""

    title: str
    """The best-known of them."""
    architectures: tuple[str, ...]
    types: tuple[str, ...]
    read: Callable[[Fields], ModelConfig]
    own: tuple[str, ...]
    whole: bool = True


_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = (
    "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor", "scoring_func", "topk_method", "moe_layer_freq", "aux_loss_alpha",
    "seq_aux",
)  # fmt: skip
FAMILIES: tuple[Family, ...] = (
    Family(
        "DeepSeek-V3", ("DeepseekV3ForCausalLM",), ("deepseek_v3", "kimi_k2"), read_v3,
        (*_LATENT, *_EXPERTS, "rope_interleave"),
    ),
    Family("DeepSeek-V2", ("DeepseekV2ForCausalLM",), ("deepseek_v2",), read_v2, (*_LATENT, *_EXPERTS)),
    Family(
        "DeepSeek-V4", ("DeepseekV4ForCausalLM",), ("deepseek_v4",), read_v4,
        ("hc_mult", "hc_eps", "hc_sinkhorn_iters", "swiglu_limit", "num_hash_layers", "o_groups", "o_lora_rank",
         "index_topk", "index_head_dim", "index_n_heads", "compress_ratios", "compress_rates", "compress_rope_theta",
         "mlp_layer_types", "sliding_window"),
        whole=False,
    ),
    Family(
        "Kimi K3",
        ("KimiK3ForConditionalGeneration", "KimiK3ForCausalLM", "KimiK3LinearForCausalLM", "KimiLinearForCausalLM"),
        ("kimi_k3", "kimi_linear"), read_k3,
        ("linear_attn_config", "mla_use_nope", "mla_use_output_gate", "attn_res_block_size",
         "routed_expert_hidden_size", "latent_moe_use_norm", "activation_situ_beta", "activation_situ_linear_beta",
         "moe_renormalize", "moe_router_activation_func", "num_experts_per_token", "num_expert_group",
         "use_grouped_topk", "num_shared_experts"),
        whole=False,
    ),
)  # fmt: skip

_BOOKKEEPING = (
    "architectures", "model_type", "auto_map", "_name_or_path", "name_or_path", "transformers_version", "use_cache",
    "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "ep_size",
    "max_position_embeddings", "model_max_length", "initializer_range", "attention_dropout", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "id2label", "label2id", "problem_type",
    "torchscript",
    "is_encoder_decoder", "is_decoder", "add_cross_attention", "chunk_size_feed_forward", "gradient_checkpointing",
    "_attn_implementation", "attn_implementation", "router_jitter_noise", "keys_to_ignore_at_inference",
)  # fmt: skip
_QUANTISED = ("quantization_config", "expert_dtype")
_PARTS = ("vision_config", "media_placeholder_token_id", "ignore_index")


class Reading(NamedTuple):
    """A `config.json` as a model: the family, the model of full size, and a note on every field."""

    family: Family
    model: ModelConfig
    notes: tuple[Note, ...]

    def fate(self, fate: str) -> tuple[Note, ...]:
        return tuple(note for note in self.notes if note.fate == fate)


def read(config: Mapping[str, Any]) -> Reading:
    """Reads a `config.json`, or the text part of one with other parts.

    Raises `ReproError` for an architecture or a field that is not known, with the family that it looks like, and for
    values that contradict each other or ask for what is not built.
    """
    if not isinstance(config, Mapping):
        raise ReproError("config.json must hold one table of fields.")
    inner = config.get("text_config")
    whole = (
        {**{n: v for n, v in config.items() if n != "text_config"}, **inner} if isinstance(inner, Mapping) else config
    )
    family = family_of(inner if isinstance(inner, Mapping) else config, config)
    fields = Fields(whole, family.title)
    model = family.read(fields)
    fields.drop(_BOOKKEEPING, "says nothing about the forward pass of training")
    fields.drop(_QUANTISED, "how weights were stored for release")
    fields.drop(_PARTS, "not the language model")
    for name in fields.left:
        hint = _suggestion(name, family, whole)
        raise ReproError(f"config.json: field {name} is unknown for {family.title}; {hint}.")
    return Reading(family, model, tuple(fields.notes))


def family_of(config: Mapping[str, Any], outer: Mapping[str, Any] | None = None) -> Family:
    """The family that `model_type` or `architectures` names, or without both the one whose fields are there.

    Raises `ReproError` for an unknown name, with the family that its fields look like, and for too few fields.
    """
    named = False
    for part in (config, outer or {}):
        names = [part["model_type"]] if part.get("model_type") else list(part.get("architectures") or ())
        named |= bool(names)
        for family in FAMILIES:
            if any(name in family.types or name in family.architectures for name in names):
                return family
    like, hits = looks_like(config)
    if not named and hits >= 4:
        return like
    what = f"{names_of(config, outer)} is not among the architectures that are read" if named else (
        "config.json names neither model_type nor architectures"
    )  # fmt: skip
    guess = f"its fields look like {like.title}" if hits >= 4 else "its fields look like none of them"
    known = ", ".join(name for family in FAMILIES for name in family.types)
    raise ReproError(f"{what} (known are {known}); {guess}.")


def names_of(config: Mapping[str, Any], outer: Mapping[str, Any] | None) -> str:
    """How a config calls itself."""
    for part in (outer or {}, config):
        for name in ("model_type", "architectures"):
            if part.get(name):
                return part[name] if isinstance(part[name], str) else ", ".join(map(str, part[name]))
    return "this"


def looks_like(config: Mapping[str, Any]) -> tuple[Family, int]:
    """The family with most of its own fields in `config`, the first of equals, and how many these are."""
    hits = [(sum(name in config for name in family.own), -i) for i, family in enumerate(FAMILIES)]
    best = max(hits)
    return FAMILIES[-best[1]], best[0]


def _suggestion(name: str, family: Family, config: Mapping[str, Any]) -> str:
    others = [other.title for other in FAMILIES if other is not family and name in other.own]
    if others:
        return f"it looks like {' or '.join(others)}"
    close = difflib.get_close_matches(name, {field for f in FAMILIES for field in f.own} | _COMMON, n=1, cutoff=0.8)
    rest = f"the other fields look like {looks_like(config)[0].title}"
    return f"perhaps {close[0]} was meant, and {rest}" if close else rest


_COMMON = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act", "tie_word_embeddings", "num_experts_per_tok",
    "head_dim",
}  # fmt: skip
