"""The ten ledgers N1-N10: what a run did with its numbers, by tensor role, in words."""

from __future__ import annotations

import math
from typing import Any

from repro.models import ModelConfig
from repro.quant import GemmPolicy
from repro.quant.native import native_reason
from repro.quant.precision import operand_words
from repro.train.config import TrainConfig
from repro.train.monitors import MonitorConfig

TITLES = {
    "N1": "representation", "N2": "scaling", "N3": "compute", "N4": "accumulation", "N5": "storage and communication",
    "N6": "update", "N7": "parametrisation", "N8": "stability", "N9": "recovery", "N10": "evidence and cost",
}  # fmt: skip


def ledgers(config: TrainConfig, evidence: dict[str, str]) -> dict[str, dict[str, Any]]:
    """`{"N1": {"title": ..., "rows": {role: text}}, ...}` for one arm; `evidence` becomes N10."""
    model, compute = config.model, config.model.compute_dtype
    matrices, others = _optimizer_words(config)
    decay = f"{config.weight_decay:g}, {config.decay}" if config.weight_decay else "none"
    clip = f"QK-Clip per head at tau {config.tau:g}, alpha 0.5, after the step" if math.isfinite(config.tau) else "none"
    rows = {
        "N1": {
            "parameters": {
                "fp32": "float32", "bf16": "bfloat16, no float32 copy, rounded to nearest after each step",
                "bf16_stochastic": "bfloat16, no float32 copy, rounded stochastically after each step",
            }[config.weights],
            "activations": compute, "gradients": "float32", "optimizer state": {
                "fp32": "float32", "bf16": "bfloat16, to nearest", "bf16_stochastic": "bfloat16, stochastically",
                "e4m3": "FP8 E4M3, blocks of 256", "int8": "linear 8-bit integers, blocks of 256",
                "dynamic8": "dynamic 8-bit codes, blocks of 256",
            }[config.optim.state],
            "attention logits and loss": "float32",
        },
        "N2": {"all other tensors": "no quantisation scale"},
        "N3": {"matrix products": compute, "softmax, norms, loss": "float32", "Newton-Schulz": "float32"},
        "N4": {"matrix products": "float32 accumulator, no promotion", "sums over a batch": "float32"},
        "N5": {
            "kept for backward": "recomputed per block" if model.remat else f"all activations, {compute}",
            "sent between devices": "nothing; each run stays on one device", "checkpoint": "float32",
        },
        "N6": {
            "matrices": matrices, "embedding, head, gains": others,
            "weight decay": f"{decay}; on every parameter" if config.weight_decay else decay,
            "rate": f"warm-up over {config.warmup:.3g} of the steps, then {config.schedule}"
            + (f" to {config.final_fraction:g}" if config.schedule == "cosine" else "") + " of the peak",
            "gradient clipping": f"global norm {config.optim.gradient_clip:g}"
            if math.isfinite(config.optim.gradient_clip) else "none",
            "after the step": clip,
        },
        "N7": {
            "shape": f"{model.layers} layers, width {model.width}, {_attention_words(model)}, feed-forward {model.ffn}, "
            f"vocabulary {model.vocab_size}",
            "initialisation": "matrices N(0, 1/fan-in), residual writers / sqrt(2 layers), embedding N(0, 1), gains 1",
            "tying": "head untied; no biases",
        } | ({"routing": f"experts by the parameters of {config.routing_lag} steps ago"} if config.routing_lag else {}),
        "N8": {
            "monitors": "loss, logit maxima per head, attention entropy, activation maximum and RMS, gradient and update "
            "norms, every step" + _monitor_words(config.monitors),
            "bounds": "; ".join(
                b for b in (_NORM_WORDS[model.qk_norm], f"soft-cap {model.soft_cap:g}" if model.soft_cap else "",
                            _SIGMA if model.sigma_reparam else "", clip if clip != "none" else "", f"z-loss {config.z_loss:g}" if config.z_loss else "") if b
            ) or "none",
        },
        "N9": {
            "checkpoints": "whole state at chunk boundaries with SHA-256 of every file; the two newest and the best kept",
            "skip, roll back": "; ".join(config.guards) or "not armed",
        },
        "N10": evidence,
    }  # fmt: skip
    dots, experts, own = _quantised(model), _expert_rows(model), config.ledger_rows()
    return {
        key: {"title": title, "rows": dots.get(key, {}) | rows[key] | experts.get(key, {}) | own.get(key, {})}
        for key, title in TITLES.items()
    }


def _monitor_words(monitors: MonitorConfig) -> str:
    names = lambda dear: ", ".join(monitor.name for monitor in monitors.chosen(dear=dear))
    cheap, dear = names(False), names(True)
    return (f"; {cheap}, every step" if cheap else "") + (f"; {dear}, every {monitors.interval} steps" if dear else "")


def _expert_rows(model: ModelConfig) -> dict[str, dict[str, str]]:
    """What a mixture of experts adds; nothing without one."""
    moe = model.moe
    if not moe.experts:
        return {}
    latent = f", in a latent of {moe.latent}" + (" with a norm on the sum" if moe.latent_norm else "")
    groups = f", from {moe.kept_groups} of {moe.groups} groups" if moe.kept_groups < moe.groups else ""
    affinity = {"sigmoid": "sigmoid", "softmax": "softmax", "sqrt_softplus": "square root of softplus"}[moe.affinity]
    losses = [f"sequence-wise balance loss {moe.sequence_loss:g}"] if moe.sequence_loss else []
    losses += [f"router z-loss {moe.router_z_loss:g}"] if moe.router_z_loss else []
    centred = ", less their mean" if moe.balance_centred else ""
    update = {
        "sign": f"steps of {moe.balance_rate:g} against the sign of the load's excess{centred}",
        "quantile": "the exact quantile of the last step's margins",
        "histogram": "the quantile of the last step's margins, from 1,000 bins",
    }
    return {
        "N3": {} if model.dots.policy("router") is not None else {"router": "float32"},
        "N6": {"selection bias": f"float32, {update[moe.balance]}"} if moe.balance in update else {},
        "N7": {
            "experts": f"{moe.experts} of {moe.ffn} hidden units{latent if moe.latent else ''}, {moe.active} per token"
            f"{groups}, {moe.shared} shared; scores: {affinity}, gates {'of sum' if moe.normalise else 'times'} "
            f"{moe.scale:g}; no token dropped"
        },
        "N8": {"auxiliary losses": ", ".join(losses)} if losses else {},
    }


_NORM_WORDS = {
    "none": "", "rms": "RMSNorm on queries and keys", "layer": "LayerNorm on queries and keys",
    "rms_plain": "RMSNorm without gain on queries and keys",
    "l2": "queries and keys of unit length, one learned scale of the logits",
    "v4": "RMSNorm on queries, without gain, and on keys, with a gain",
}  # fmt: skip
_SIGMA = "spectral norms of attention and feed-forward matrices learned (sigma-reparametrisation)"


def _attention_words(model: ModelConfig) -> str:
    turned = "RoPE on the latter" if model.position == "rope" else "no position on either"
    if model.attention == "mla":
        queries = f"query rank {model.q_rank}" if model.q_rank else "queries of full rank"
        words = (
            f"{model.heads} latent heads ({queries}, key and value rank {model.kv_rank}, {model.nope_size} + "
            f"{model.rope_size} components with {turned}, values of {model.value_size})"
        )
    else:
        shared = f" sharing {model.kv_heads} of keys and values" if 0 < model.kv_heads < model.heads else ""
        size = f" of {model.head_dim}" if model.head_dim else ""
        words = f"{model.heads} heads{size}{shared}" + (" without positions" if model.position == "none" else "")
    yarn = f"RoPE stretched {model.yarn.factor:g} times from {model.yarn.original} tokens (YaRN)"
    others = ((model.yarn.factor > 1, yarn), (model.output_gate, "a sigmoid output gate"),
              (model.attention_sink, "a sink logit per head"))  # fmt: skip
    return ", ".join([words, *(text for on, text in others if on)])


_STEPS = {
    "muon5": "five Newton-Schulz steps (3.4445, -4.7750, 2.0315)",
    "hybrid10": "eight Newton-Schulz steps (3.4445, -4.7750, 2.0315) and two of (2, -1.5, 0.5)",
    "polar_express": "eight Polar Express steps",
    "cubic": "thirty Newton-Schulz steps (1.5, -0.5, 0)",
}


def _optimizer_words(config: TrainConfig) -> tuple[str, str]:
    """What updates matrices, and what updates everything else."""
    name, o = config.optimizer, config.optim
    adam = f"betas {o.b1:g} and {o.b2:g}, eps {o.eps:g}"
    adamw = f"AdamW, {adam}, bias-corrected"
    nesterov = ", Nesterov" if o.nesterov else ""
    if name == "muon":
        where = "each head of queries, keys and values, else the whole matrix" if o.per_head else "the whole matrix"
        return (
            f"Muon: momentum {o.momentum:g} (sum){nesterov}, {_STEPS[o.schedule]} in float32 on {where}, times {o.rms:g} "
            "sqrt(max(rows, columns))",
            adamw,
        )
    if name in ("shampoo", "soap"):
        return f"{name.capitalize()}, {adam}", adamw
    words = {
        "adamw": adamw,
        "adam": f"Adam, {adam}",
        "sgd": f"SGD, momentum {o.momentum:g}{nesterov}",
        "lion": f"Lion, betas {o.b1:g} and {o.b2:g}",
        "signum": f"Signum, beta {o.b1:g}",
        "adafactor": f"Adafactor, beta1 {o.b1:g}, update clipping at 1",
        "stable_adamw": f"StableAdamW, {adam}",
        "adalayer": f"Adalayer, {adam}; per coordinate on: {o.coordinates or 'nothing'}",
    }[name]
    return words, words


def _quantised(model: ModelConfig) -> dict[str, dict[str, str]]:
    """What the linear layers do, role by role, where a role follows a policy."""
    rows: dict[str, dict[str, str]] = {key: {} for key in ("N1", "N2", "N3", "N4", "N5")}
    for role, name in model.dots.roles().items():
        policy = model.dots.policy(role)
        if policy is None or (role in ("experts", "router") and not model.moe.experts):
            continue
        products = {
            "Fprop": (policy.fprop_x, policy.fprop_w),
            "Dgrad": (policy.dgrad_dy, policy.dgrad_w),
            "Wgrad": (policy.wgrad_x, policy.wgrad_dy),
        }
        if role in ("embedding", "norm"):
            products = {"kept as": (policy.fprop_w,)}
        rows["N1"][f"{role} operands"] = f"policy {name}"
        for product, operands in products.items():
            rows["N2"][f"{role}, {product}"] = " times ".join(map(operand_words, operands))
        if role in ("embedding", "norm"):
            continue
        rows["N3"][role] = _where(policy)
        rows["N4"][role] = "float32" if policy.accumulator is None else str(policy.accumulator)
        kept = operand_words(policy.fprop_x if policy.cache_x == "fprop" else policy.cache_x)
        rows["N5"][f"{role}, kept for backward"] = "x in the compute type" if policy.cache_x is None else kept
    return rows


def _where(policy: GemmPolicy) -> str:
    if not policy.native:
        return "emulated: operands rounded, product in float32" if policy.fprop_x != "bf16" else "bfloat16 units"
    reason = native_reason(policy)
    return "FP8 units" if reason is None else f"emulated: {reason}"
