"""What a format would make, or makes, of weights, residual activations and gradients."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from repro.optim.adafactor import matrix_layout
from repro.optim.layout import Layout, matched, to_matrices
from repro.quant import FORMATS, Recipe, decode, round_to
from repro.quant.bits import magnitude
from repro.quant.blocks import blocks_of
from repro.quant.precision import Precision
from repro.quant.qtensor import dequantized
from repro.quant.recipes import recipe_of
from repro.quant.scales import float_scale, scales_of
from repro.train.monitors.monitor import Metrics, Monitor, Observation
from repro.train.monitors.tensors import together

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig

Operand = Recipe | str

EXACT_DB = 150.0
"""The signal-to-noise ratio of values that a format holds exactly, and the largest that is reported."""

_ROUNDING = 1 + 2.0**-20  # a scale is itself rounded, so the largest element times it may miss the largest magnitude


class Reading(NamedTuple):
    """What a format did to one tensor, float32."""

    saturation: jax.Array
    """Share of the numbers beyond the largest element times their scale."""
    underflow: jax.Array
    """Share of the numbers other than 0 that become 0."""
    snr: jax.Array
    """10 log10(sum x^2 / sum (x - x_hat)^2), at most `EXACT_DB`; that too where there is nothing but zeros."""
    scale_min: jax.Array
    """log2 of the smallest decode scale of a block that is not all zeros, inf without one; NaN without scales."""
    scale_max: jax.Array
    """The same of the largest, -inf without one."""


def reading(x: jax.Array, operand: Operand, axis: int = -1) -> Reading:
    """What `operand` (a recipe, its name, `bf16` or `fp16`) does to x [..., A, B] in blocks along `axis`. Stochastic
    recipes round to nearest here, so that the reading has no noise."""
    x = x.astype(jnp.float32)
    if operand in ("bf16", "fp16"):
        x_hat = round_to(x, operand)
        saturated = jnp.abs(x) > FORMATS[operand].max
        return Reading(*_shares(x, x_hat, saturated), *jnp.full(2, jnp.nan))
    recipe = dataclasses.replace(recipe_of(operand), rounding="nearest_even")
    x_hat, kept = dequantized(x, None, None, recipe, axis, True)
    saturated = ~kept & (jnp.abs(x) > jnp.abs(x_hat) * _ROUNDING)
    blocks = blocks_of(x.shape, recipe, axis)
    amax = blocks.reduce_max(magnitude(blocks.view(x))).reshape(blocks.counts)
    scales = scales_of(amax, recipe)
    if recipe.power_of_two:
        scale = decode(scales.block, recipe.scale_format)
    else:
        scale = float_scale(scales.block, scales.tensor, recipe)
    used = (amax > 0) & (scale > 0)
    logs = jnp.log2(jnp.where(used, scale, 1.0))
    low, high = jnp.where(used, logs, jnp.inf).min(), jnp.where(used, logs, -jnp.inf).max()
    return Reading(*_shares(x, x_hat, saturated), low, high)


def _shares(x: jax.Array, x_hat: jax.Array, saturated: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    nonzero = x != 0
    lost = jnp.sum(nonzero & (x_hat == 0)) / jnp.maximum(jnp.sum(nonzero), 1)
    top = jnp.abs(x).max()  # in units of it squares neither vanish nor overflow
    unit = jnp.where(top > 0, top, 1.0)
    signal, noise = jnp.mean((x / unit) ** 2), jnp.mean(((x - x_hat) / unit) ** 2)
    least = signal * 10 ** (-EXACT_DB / 10)
    ratio = jnp.where(signal > 0, signal, 1.0) / jnp.where(
        signal > 0, jnp.maximum(noise, least), 10 ** (-EXACT_DB / 10)
    )
    return saturated.mean(), lost, 10 * jnp.log10(ratio)


def precision_role(name: str, layout: Layout) -> str | None:
    """Which role of `repro.quant.Precision` the product with a parameter has; None for parameters without one."""
    if layout.role in ("embedding", "head", "norm", "router"):
        return layout.role
    if layout.role != "matrix":
        return None
    if layout.expert is not None:
        return "experts"
    parts = name.split("/")
    return "attention" if "attention" in parts else "ffn" if "ffn" in parts else None


def operand_of(dots: Precision, role: str | None, field: str, recipe: str) -> Operand | None:
    """The recipe of an operand (a field of `GemmPolicy`) of a role; `recipe` where no role is quantised at all, None
    where this one is not."""
    if role is None:
        return None
    if dots == Precision():
        return recipe
    policy = dots.policy(role)
    return None if policy is None else getattr(policy, field)


def _parameter_readings(config: MonitorConfig, seen: Observation, tree: Any, field: str) -> list[Reading]:
    """One reading [tensors] per parameter of a tree like the parameters: weights along the inputs, which a product sums
    over, gradients along the outputs, and rows of the embedding and gains along themselves."""
    stacks, keys = [], []
    for name, leaf, layout in matched(tree, seen.layouts):
        role = precision_role(name, layout)
        operand = operand_of(seen.config.model.dots, role, field, config.recipe)
        if operand is None:
            continue
        rule = matrix_layout(leaf.shape, layout)
        x = leaf[..., None, :] if rule is None else to_matrices(leaf, rule)
        inputs = field == "fprop_w" and role not in ("embedding", "norm")
        stacks.append(x.reshape(-1, *x.shape[-2:]))
        keys.append((operand, -2 if inputs else -1))
    return together(stacks, lambda stack, key: jax.vmap(lambda x: reading(x, *key))(stack), keys)


def _activation_readings(config: MonitorConfig, seen: Observation) -> list[Reading]:
    dots = seen.config.model.dots
    operands = (operand_of(dots, role, "fprop_x", config.recipe) for role in ("ffn", "attention", "experts"))
    operand = next((o for o in operands if o is not None), None)
    if operand is None:
        return []
    states = seen.probe.hidden
    return [jax.vmap(lambda x: reading(x, operand))(states.reshape(states.shape[0], -1, states.shape[-1]))]


def _measure(config: MonitorConfig, seen: Observation) -> Metrics:
    kinds = {
        "weight": _parameter_readings(config, seen, seen.params, "fprop_w"),
        "activation": _activation_readings(config, seen),
        "gradient": _parameter_readings(config, seen, seen.grads, "dgrad_dy"),
    }
    metrics = {}
    for kind, found in kinds.items():
        if not found:
            continue
        every = Reading(*(jnp.concatenate(values) for values in zip(*found, strict=True)))
        metrics |= {
            f"{kind}_saturation": every.saturation.max(),
            f"{kind}_underflow": every.underflow.max(),
            f"{kind}_snr": every.snr.min(),
            f"{kind}_scale_min": _range(every.scale_min, jnp.nanmin),
            f"{kind}_scale_max": _range(every.scale_max, jnp.nanmax),
        }
    return metrics


def _range(values: jax.Array, reduce: Any) -> jax.Array:
    """Over tensors with scales; NaN where none has one."""
    return jnp.where(jnp.isfinite(reduce(values)), reduce(values), jnp.nan)


_KINDS = {
    "weight": "weights (operand fprop_w of each role)",
    "activation": "the residual stream on the validation windows (fprop_x of ffn, attention or experts)",
    "gradient": "gradients of weights (under dgrad_dy, whose own operand, the gradient of the output, is out of sight)",
}

QUANTISATION = Monitor(
    name="quantisation",
    group="quantisation",
    dear=True,
    sees="that a format or its scales fail: numbers above or below their range, noise, and scales that wander",
    cannot_prove=(
        "that operators in high precision are in order, nor what the products saw: norms come between the "
        "residual stream and a layer; under full precision it is what `recipe` would do"
    ),
    metrics={
        name: text
        for kind, what in _KINDS.items()
        for name, text in (
            (
                f"{kind}_saturation",
                f"share of numbers beyond the largest element times their scale, worst tensor; {what}",
            ),
            (f"{kind}_underflow", f"share of the numbers other than 0 that become 0, worst tensor; {what}"),
            (f"{kind}_snr", f"signal over quantisation noise, dB, worst tensor, at most {EXACT_DB:g}; {what}"),
            (f"{kind}_scale_min", f"log2 of the smallest block scale; NaN for a format without; {what}"),
            (f"{kind}_scale_max", f"log2 of the largest; NaN for a format without; {what}"),
        )
    },
    measure=_measure,
    probes=True,
)

MONITORS = (QUANTISATION,)
