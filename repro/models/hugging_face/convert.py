"""Models from Hugging Face configurations and tensors, and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from repro.errors import ReproError
from repro.models.config import ModelConfig
from repro.models.hugging_face.families import read
from repro.models.hugging_face.layout import parameters_of, separate_experts, tensors_of
from repro.models.moe_config import MoEConfig
from repro.models.transformer import Transformer, abstract, initial_buffers

_SHOWN = 6
"""Tensors that a refusal names before it only counts."""

_FREE = (
    "moe.sequence_loss", "moe.router_z_loss", "moe.dispatch", "moe.balance", "moe.balance_rate", "moe.balance_centred",
    "init", "head_gain", "embedding_std", "compute_dtype", "precision", "remat", "remat_policy",
)  # fmt: skip
"""Settings that a `config.json` does not have, and that the same weights are the same model without: how it starts, is
trained, and in which types it is computed."""


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model of a `config.json` at full size.

    Known are DeepSeek-V2, DeepSeek-V3, Kimi K2 and Moonlight, which are built whole, and DeepSeek-V4 and Kimi K3 as far
    as they are built; `read` says field by field what became of them. Raises `ReproError` for an unknown architecture
    or field, with the family that it looks like, and for sizes that do not fit.
    """
    return read(config).model


def from_hf(config: Mapping[str, Any], weights: Mapping[str, Any]) -> Transformer:
    """The model of a `config.json` with the tensors of its checkpoint, float32.

    Experts may be fused or separate. Raises `ReproError` as `config_from_hf` does, for a model that is not built whole,
    and for tensors that are missing, left over or of another shape, by name.
    """
    reading = read(config)
    unbuilt = reading.fate("approximated")
    if unbuilt or not reading.family.whole:
        said = "; ".join(f"{note.field}: {note.remark}" for note in unbuilt[:3])
        raise ReproError(
            f"Weights of this {reading.family.title} cannot be loaded, since it is not built whole"
            f"{f' ({said})' if said else ''}."
        )
    return _filled(reading.model, weights)


def _filled(config: ModelConfig, weights: Mapping[str, Any]) -> Transformer:
    tensors = separate_experts(weights, config)
    with nnx.set_graph_mode(False):
        _check(tensors, config, *map(nnx.to_pure_dict, _structure(config)[1:]))
    return assemble(config, *parameters_of(tensors, config))


def assemble(config: ModelConfig, params: Mapping[str, Any], buffers: Mapping[str, Any] | None = None) -> Transformer:
    """The module with the given parameters and buffers, nested dicts as `init_and_apply` and training have them;
    without buffers with those of the start."""
    with nnx.set_graph_mode(False):
        graphdef, *states = _structure(config)
        states = [jax.tree.map(lambda leaf: leaf, state) for state in states]
        values = params, initial_buffers(config) if buffers is None else buffers
        for state, given in zip(states, values, strict=True):
            nnx.replace_by_pure_dict(state, jax.tree.map(jax.numpy.asarray, given))
        return nnx.merge(graphdef, *states)


@functools.lru_cache(maxsize=8)
def _structure(config: ModelConfig) -> tuple[Any, ...]:
    """Graph, parameters and buffers, with shapes in place of arrays."""
    with nnx.set_graph_mode(False):
        return nnx.split(abstract(config), nnx.Param, ...)


def take_apart(transformer: Transformer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and buffers of a module, the inverse of `assemble`."""
    with nnx.set_graph_mode(False):
        params, buffers = nnx.split(transformer, nnx.Param, ...)[1:]
        return nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


def to_hf(transformer: Transformer) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """`(config, weights)` of a model in the layout of DeepSeek-V3, or of V2 where affinities are a softmax.

    Raises `ReproError` for a model that this layout has no fields for, naming the setting.
    """
    described = describe(transformer.config)
    params, buffers = jax.tree.map(np.asarray, take_apart(transformer))
    if transformer.config.moe.affinity == "softmax" and any(np.any(x) for x in jax.tree.leaves(buffers)):
        raise ReproError("DeepSeek-V2 has no selection bias, and that of this model is not zero.")
    # In order: safetensors writes the memory of a transposed view as it lies, without a word.
    tensors = tensors_of(params, buffers, transformer.config)
    return described, {name: np.ascontiguousarray(x) for name, x in tensors.items()}


def describe(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model. Raises `ReproError` where it has no field for a setting."""
    moe, yarn = config.moe, config.yarn
    softmax = moe.affinity == "softmax"
    found: dict[str, Any] = {
        "architectures": ["DeepseekV2ForCausalLM" if softmax else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v2" if softmax else "deepseek_v3",
        "vocab_size": config.vocab_size, "hidden_size": config.width, "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "num_key_value_heads": config.heads,
        "q_lora_rank": config.q_rank or None, "kv_lora_rank": config.kv_rank, "qk_nope_head_dim": config.nope_size,
        "qk_rope_head_dim": config.rope_size, "v_head_dim": config.value_size,
        "n_routed_experts": moe.experts or None, "num_experts_per_tok": moe.active, "moe_intermediate_size": moe.ffn,
        "n_shared_experts": moe.shared, "first_k_dense_replace": moe.dense_layers, "n_group": moe.groups,
        "topk_group": moe.kept_groups, "norm_topk_prob": moe.normalise, "routed_scaling_factor": moe.scale,
        "scoring_func": moe.affinity, "topk_method": ("greedy" if moe.groups == 1 else "group_limited_greedy")
        if softmax else "noaux_tc",
        "hidden_act": "silu", "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta, "rope_scaling": None,
        "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32",
    }  # fmt: skip
    if yarn.factor != 1:
        names = {"original": "original_max_position_embeddings"}
        found["rope_scaling"] = {"type": "yarn"} | {names.get(n, n): v for n, v in dataclasses.asdict(yarn).items()}
    if not softmax:
        found["rope_interleave"] = config.rope_interleaved
    _check_described(config, found)
    return found


def _check_described(config: ModelConfig, found: dict[str, Any]) -> None:
    if config.attention != "mla":
        raise ReproError(f"DeepSeek's layout has latent attention, and model.attention is {config.attention}.")
    if config.moe.affinity == "sqrt_softplus":
        raise ReproError("DeepSeek-V3's layout has no field for model.moe.affinity sqrt_softplus.")
    again = read(found)
    for note in again.fate("approximated"):
        raise ReproError(f"DeepSeek-V2 has another {note.field}: {note.remark}.")
    for name, own, read_back in _compared(config, again.model):
        if own != read_back:
            raise ReproError(f"DeepSeek's layout has no field for model.{name} {own}; it would be read as {read_back}.")


def _compared(config: ModelConfig, again: ModelConfig) -> list[tuple[str, Any, Any]]:
    """The settings that make the model, flat, of both."""
    rows = []
    for field in dataclasses.fields(config):
        a, b = getattr(config, field.name), getattr(again, field.name)
        if isinstance(a, MoEConfig):
            rows += [(f"moe.{f.name}", getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]
        elif field.name == "pattern":
            rows.append(("pattern", config.segments, again.segments))
        elif field.name == "latent_norm_eps":
            rows.append((field.name, a or config.norm_eps, b or again.norm_eps))
        elif field.name == "yarn" and a.factor == b.factor == 1:
            continue
        else:
            rows.append((field.name, a, b))
    return [row for row in rows if row[0] not in _FREE]


def _check(tensors: Mapping[str, Any], config: ModelConfig, params: Any, buffers: Any) -> None:
    """Refuses tensors that are not those of `config`, whose parameters and buffers are given as shapes."""
    found = jax.eval_shape(lambda *trees: tensors_of(*trees, config), params, buffers)
    wanted = {name: x.shape for name, x in found.items()}
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted]
    misshapen = [
        f"{name} {list(np.shape(tensors[name]))} in place of {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and np.shape(tensors[name]) != shape
    ]
    faults = [
        f"{what} {_listed(names)}"
        for what, names in (("lacks", missing), ("has the unknown", extra), ("has", misshapen))
        if names
    ]
    if faults:
        raise ReproError(f"The checkpoint {', and '.join(faults)}.{_hint(extra, config)}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _hint(extra: list[str], config: ModelConfig) -> str:
    if any(name.endswith(("_scale_inv", "_scale", ".scale", "_packed")) for name in extra):
        return " Its weights are quantised; store them as bf16 or float32 first."
    if extra and all(name.startswith(f"model.layers.{config.layers}.") for name in extra):
        return f" Layer {config.layers} predicts a second token, which is not built; leave its tensors out."
    return ""
