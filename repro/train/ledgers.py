"""The ten ledgers N1-N10: what a run did with its numbers, by tensor role, in words."""

from __future__ import annotations

import math
from typing import Any

from repro.models import ModelConfig
from repro.quant import GemmPolicy
from repro.quant.native import native_reason
from repro.quant.precision import operand_words
from repro.train.config import TrainConfig

TITLES = {
    "N1": "representation", "N2": "scaling", "N3": "compute", "N4": "accumulation", "N5": "storage and communication",
    "N6": "update", "N7": "parametrisation", "N8": "stability", "N9": "recovery", "N10": "evidence and cost",
}  # fmt: skip


def ledgers(config: TrainConfig, evidence: dict[str, str]) -> dict[str, dict[str, Any]]:
    """`{"N1": {"title": ..., "rows": {role: text}}, ...}` for one arm; `evidence` becomes N10."""
    model, compute = config.model, config.model.compute_dtype
    others = "AdamW, betas 0.9 and 0.95, eps 1e-8, bias-corrected"
    muon = (
        "Muon: momentum 0.95 (sum), Nesterov, five Newton-Schulz steps (3.4445, -4.7750, 2.0315) in float32 on the whole "
        "matrix, times 0.2 sqrt(max(rows, columns))"
    )
    decay = f"{config.weight_decay:g}, {config.decay}" if config.weight_decay else "none"
    clip = f"QK-Clip per head at tau {config.tau:g}, alpha 0.5, after the step" if math.isfinite(config.tau) else "none"
    bound = {"none": "none", "rms": "RMSNorm on queries and keys", "layer": "LayerNorm on queries and keys"}[
        model.qk_norm
    ]
    rows = {
        "N1": {
            "parameters": {
                "fp32": "float32", "bf16": "bfloat16, no float32 copy, rounded to nearest after each step",
                "bf16_stochastic": "bfloat16, no float32 copy, rounded stochastically after each step",
            }[config.weights],
            "activations": compute, "gradients": "float32", "optimizer state": "float32",
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
            "matrices": muon if config.optimizer == "muon" else others, "embedding, head, gains": others,
            "weight decay": f"{decay}; on every parameter" if config.weight_decay else decay,
            "rate": f"warm-up over {config.warmup:g} of the steps, then {config.schedule}"
            + (f" to {config.final_fraction:g}" if config.schedule == "cosine" else "") + " of the peak",
            "gradient clipping": "none", "after the step": clip,
        },
        "N7": {
            "shape": f"{model.layers} layers, width {model.width}, {model.heads} heads, feed-forward {model.ffn}, "
            f"vocabulary {model.vocab_size}",
            "initialisation": "matrices N(0, 1/fan-in), residual writers / sqrt(2 layers), embedding N(0, 1), gains 1",
            "tying": "head untied; no biases",
        },
        "N8": {
            "monitors": "loss, logit maxima per head, attention entropy, activation maximum and RMS, gradient and update "
            "norms, every step",
            "bounds": "; ".join(
                b for b in (bound if bound != "none" else "", f"soft-cap {model.soft_cap:g}" if model.soft_cap else "",
                            clip if clip != "none" else "", f"z-loss {config.z_loss:g}" if config.z_loss else "") if b
            ) or "none",
        },
        "N9": {"checkpoints": "whole state at chunk boundaries, newest kept", "skip, roll back": "not armed"},
        "N10": evidence,
    }  # fmt: skip
    dots, own = _quantised(model), config.ledger_rows()
    return {
        key: {"title": title, "rows": dots.get(key, {}) | rows[key] | own.get(key, {})} for key, title in TITLES.items()
    }


def _quantised(model: ModelConfig) -> dict[str, dict[str, str]]:
    """What the linear layers do, role by role, where a role follows a policy."""
    rows: dict[str, dict[str, str]] = {key: {} for key in ("N1", "N2", "N3", "N4", "N5")}
    for role, name in model.dots.roles().items():
        policy = model.dots.policy(role)
        if policy is None:
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
