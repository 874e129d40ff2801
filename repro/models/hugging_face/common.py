"""Fields that all families have."""

from __future__ import annotations

from typing import Any

from repro.errors import ReproError
from repro.models.config import YarnConfig
from repro.models.hugging_face.fields import Fields

LATENT_EPS = 1e-6
"""Epsilon of the norms on latents in the released code, whatever `rms_norm_eps` says."""


def shape(fields: Fields) -> dict[str, Any]:
    """Vocabulary, layers, width, heads, and the epsilon of norms."""
    found = {
        "vocab_size": fields.keep("vocab_size"),
        "layers": fields.keep("num_hidden_layers"),
        "width": fields.keep("hidden_size"),
        "heads": fields.keep("num_attention_heads"),
        "norm_eps": fields.keep("rms_norm_eps", float, LATENT_EPS),
    }
    fields.fixed("tie_word_embeddings", False, "the head has weights of its own here")
    for name in ("attention_bias", "mlp_bias"):
        fields.fixed(name, False, "linear layers have no biases here")
    fields.drop(("num_nextn_predict_layers",), "prediction of several tokens is not built")
    return found


def latent_attention(fields: Fields, heads: int, norm_eps: float) -> dict[str, Any]:
    """Ranks and head sizes of multi-head latent attention."""
    fields.fixed("num_key_value_heads", heads, "latent attention has a key and a value for every query head")
    return {
        "attention": "mla",
        "q_rank": fields.keep("q_lora_rank", int, 0),
        "kv_rank": fields.keep("kv_lora_rank"),
        "nope_size": fields.keep("qk_nope_head_dim"),
        "rope_size": fields.keep("qk_rope_head_dim"),
        "value_size": fields.keep("v_head_dim"),
        "latent_norm_eps": 0.0 if norm_eps == LATENT_EPS else LATENT_EPS,
    }


def positions(fields: Fields) -> dict[str, Any]:
    """The base of RoPE and YaRN, from `rope_theta` and `rope_scaling` or the newer `rope_parameters`.

    Absent m factors are DeepSeek's: 1 for `mscale`, 0 for `mscale_all_dim`.
    """
    newer = fields.keep("rope_parameters", dict, {})
    older = fields.keep("rope_scaling", dict, {})
    found = {"rope_theta": 10_000.0, **newer, **older}
    found["rope_theta"] = fields.keep("rope_theta", float, found["rope_theta"])
    kind = found.pop("rope_type", found.pop("type", "default"))
    found.pop("type", None)
    theta = float(found.pop("rope_theta"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "yarn":
        raise ReproError(f"config.json: positions of type {kind!r} are not built; known are default and yarn.")
    names = {
        "factor": "factor", "original_max_position_embeddings": "original", "beta_fast": "beta_fast",
        "beta_slow": "beta_slow", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
    }  # fmt: skip
    unknown = [name for name in found if name not in names]
    if unknown:
        raise ReproError(f"config.json: {unknown[0]} of rope_scaling is unknown; known are {', '.join(names)}.")
    given = {"mscale": 1.0, "mscale_all_dim": 0.0} | {names[n]: v for n, v in found.items() if v is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ReproError(f"config.json: {name} of rope_scaling is {value!r}; it must be a number.")
    given = {n: int(v) if n == "original" else float(v) for n, v in given.items()}
    return {"rope_theta": theta, "yarn": YarnConfig(**given)}
