"""The tensors of a DeepSeek-V2 or V3 checkpoint, and the parameters here: names, orientation, which way RoPE pairs.

Released kernels are `[out, in]` with heads folded into rows; here kernels are `[in, out]` with heads as an axis. The
rows of `q_b_proj` are, head by head, K without position and then R rotary ones; those of `kv_b_proj` K of the key and
then V of the value; those of `kv_a_proj_with_mqa` the latent and then the shared rotary key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from repro.errors import ReproError
from repro.models.config import ModelConfig
from repro.models.pattern import Kind

Tensors = dict[str, Any]


def layers(config: ModelConfig) -> Iterator[tuple[str, int, Kind]]:
    """Where each layer stands: the name of its stack and its place in it, with its kind. Only for segments of one
    block, which all these models have."""
    several = len(config.segments) > 1
    for i, ((kind,), repeats) in enumerate(config.segments):
        for place in range(repeats):
            yield f"blocks_{i}" if several else "blocks", place, kind


def tensors_of(params: Mapping[str, Any], buffers: Mapping[str, Any], config: ModelConfig) -> Tensors:
    """All tensors of a model, from its parameters and buffers as nested dicts, in the released layout (an expert's
    matrices by themselves)."""
    found = {
        "model.embed_tokens.weight": params["embedding_ZD"],
        "model.norm.weight": params["final_norm"]["gain"],
        "lm_head.weight": params["head_DZ"].T,
    }
    for number, (stack, place, kind) in enumerate(layers(config)):
        block = jax.tree.map(lambda x, place=place: x[place], params[stack])
        if kind.ffn == "moe":
            bias_E = buffers[stack]["ffn"]["bias_E"][place]
            parts = _experts(block["ffn"], bias_E, config)
        else:
            parts = _dense(block["ffn"], "mlp")
        parts |= _attention(block["attention"], config) | {
            "input_layernorm": block["attention_norm"]["gain"],
            "post_attention_layernorm": block["ffn_norm"]["gain"],
        }
        found |= {f"model.layers.{number}.{_weight(name)}": x for name, x in parts.items()}
    return found


def parameters_of(tensors: Mapping[str, np.ndarray], config: ModelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inverse of `tensors_of`: parameters and buffers as nested dicts, float32. Every tensor must be there."""
    at = lambda name: np.asarray(tensors[name], np.float32)
    stacks: dict[str, list] = {}
    for number, (stack, _, kind) in enumerate(layers(config)):
        own = lambda name, number=number: at(f"model.layers.{number}.{_weight(name)}")
        block = {
            "attention": _attention_of(own, config),
            "attention_norm": {"gain": own("input_layernorm")},
            "ffn": _experts_of(own, config) if kind.ffn == "moe" else _dense_of(own, "mlp"),
            "ffn_norm": {"gain": own("post_attention_layernorm")},
        }
        stacks.setdefault(stack, []).append(block)
    params = {
        "embedding_ZD": at("model.embed_tokens.weight"),
        "final_norm": {"gain": at("model.norm.weight")},
        "head_DZ": at("lm_head.weight").T,
    }
    buffers: dict[str, Any] = {}
    for stack, blocks in stacks.items():
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)
        if "bias_E" in stacked["ffn"]:
            buffers[stack] = {"ffn": {"bias_E": stacked["ffn"].pop("bias_E")}}
        params[stack] = stacked
    return params, buffers


def separate_experts(tensors: Mapping[str, Any], config: ModelConfig) -> Tensors:
    """`tensors` with fused experts, `gate_up_proj [E, 2F, D]` (the gate first) and `down_proj [E, D, F]`, one by one.

    Where 2F = D a shape cannot tell an axis from the other; then the order is taken on trust. Raises `ReproError` for
    fused experts of another shape.
    """
    E, F, D = config.moe.experts, config.moe.ffn, config.width
    found: Tensors = {}
    for name, x in tensors.items():
        fused = re.fullmatch(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(?:\.weight)?", name)
        if fused is None:
            found[name] = x
            continue
        wanted = (E, 2 * F, D) if fused[2] == "gate_up_proj" else (E, D, F)
        if np.shape(x) != wanted:
            raise ReproError(f"The checkpoint has {name} of shape {list(np.shape(x))}; it must be {list(wanted)}.")
        for i in range(E):
            if fused[2] == "down_proj":
                found[f"{fused[1]}.{i}.down_proj.weight"] = x[i]
            else:
                found[f"{fused[1]}.{i}.gate_proj.weight"], found[f"{fused[1]}.{i}.up_proj.weight"] = x[i][:F], x[i][F:]
    return found


def _weight(name: str) -> str:
    return name if name.endswith("e_score_correction_bias") else f"{name}.weight"


def _attention(block: Mapping[str, Any], config: ModelConfig) -> Tensors:
    rows = lambda w: w.reshape(w.shape[0], -1).T  # heads folded
    if config.q_rank:
        queries = {
            "q_a_proj": block["q_down_DC"].T, "q_a_layernorm": block["q_norm"]["gain"],
            "q_b_proj": rows(block["q_up_CHJ"]),
        }  # fmt: skip
    else:
        queries = {"q_proj": rows(block["q_DHJ"])}
    # Plain arrays stay plain: a checkpoint is no program to compile.
    joined = (np if isinstance(block["k_rope_DR"], np.ndarray) else jnp).concatenate
    own = queries | {
        "kv_a_proj_with_mqa": joined([block["kv_down_DC"], block["k_rope_DR"]], 1).T,
        "kv_a_layernorm": block["kv_norm"]["gain"],
        "kv_b_proj": rows(joined([block["k_up_CHK"], block["v_up_CHV"]], 2)),
        "o_proj": block["o_HVD"].reshape(-1, config.width).T,
    }
    return {f"self_attn.{name}": x for name, x in own.items()}


def _attention_of(own: Any, config: ModelConfig) -> dict[str, Any]:
    at = lambda name: own(f"self_attn.{name}")
    heads = lambda w: w.T.reshape(w.shape[1], config.heads, -1)
    C, K = config.kv_rank, config.nope_size
    down_DC, up_CHE = at("kv_a_proj_with_mqa").T, heads(at("kv_b_proj"))
    if config.q_rank:
        queries = {
            "q_down_DC": at("q_a_proj").T, "q_norm": {"gain": at("q_a_layernorm")}, "q_up_CHJ": heads(at("q_b_proj"))
        }  # fmt: skip
    else:
        queries = {"q_DHJ": heads(at("q_proj"))}
    return queries | {
        "kv_down_DC": down_DC[:, :C],
        "k_rope_DR": down_DC[:, C:],
        "kv_norm": {"gain": at("kv_a_layernorm")},
        "k_up_CHK": up_CHE[..., :K],
        "v_up_CHV": up_CHE[..., K:],
        "o_HVD": at("o_proj").T.reshape(config.heads, config.value_size, config.width),
    }


def _dense(block: Mapping[str, Any], prefix: str) -> Tensors:
    return {f"{prefix}.{name}_proj": block[own].T for name, own in _DENSE}


def _dense_of(own: Any, prefix: str) -> dict[str, Any]:
    return {name: own(f"{prefix}.{released}_proj").T for released, name in _DENSE}


_DENSE = (("gate", "gate_DF"), ("up", "up_DF"), ("down", "down_FD"))
_EXPERTS = (("gate", "gate_EDF"), ("up", "up_EDF"), ("down", "down_EFD"))


def _experts(block: Mapping[str, Any], bias_E: Any, config: ModelConfig) -> Tensors:
    found = {"mlp.gate": block["router_DE"].T}
    if config.moe.affinity == "sigmoid":  # DeepSeek-V2 has no selection bias
        found["mlp.gate.e_score_correction_bias"] = bias_E
    for i in range(config.moe.experts):
        found |= {f"mlp.experts.{i}.{name}_proj": block[own][i].T for name, own in _EXPERTS}
    return found | (_dense(block["shared"], "mlp.shared_experts") if config.moe.shared else {})


def _experts_of(own: Any, config: ModelConfig) -> dict[str, Any]:
    E = config.moe.experts
    found = {
        name: np.stack([own(f"mlp.experts.{i}.{released}_proj").T for i in range(E)]) for released, name in _EXPERTS
    }
    biased = config.moe.affinity == "sigmoid"
    found["router_DE"] = own("mlp.gate").T
    found["bias_E"] = own("mlp.gate.e_score_correction_bias") if biased else np.zeros(E, np.float32)
    return found | ({"shared": _dense_of(own, "mlp.shared_experts")} if config.moe.shared else {})
