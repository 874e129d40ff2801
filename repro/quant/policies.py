"""Which format each operand of a linear layer's three products has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax

from repro.errors import ReproError
from repro.quant.accumulator import Accumulator
from repro.quant.formats import FORMATS
from repro.quant.recipes import RECIPES, SMALLEST_FLOOR, Recipe, recipe_of

Operand = Recipe | str | None


@dataclass(frozen=True)
class GemmPolicy:
    """How the operands of y = x w, dx = dy w^T and dw = x^T dy are quantised, each along the axis that is summed over.

    An operand is a `Recipe` or its name, `"bf16"` or `"fp16"` (rounded element by element), or None (float32).
    `dgrad_w` and `wgrad_x` may also be `"fprop"`: what the forward pass multiplied, with blocks along the forward
    pass's axis, as the straight-through derivative of a fake-quantised operand has it.
    `fprop_x`, `fprop_w` are those of the forward pass, `dgrad_dy`, `dgrad_w` of the gradient of x, `wgrad_x`,
    `wgrad_dy` of the gradient of w. `wgrad_hadamard` puts both operands of the last through `hadamard` along the
    tokens. `accumulator` makes the sums of all three those of a tensor core; None is float32.

    `cache_x` is what is kept of x until the backward pass: None x itself, `"fprop"` what the forward pass multiplied
    (DeepSeek-V3 keeps its FP8 tiles), or an operand of its own, stored along the forward pass's axis; `wgrad_x` is then
    quantised from that. `native=True` multiplies on FP8 units where `native_reason` finds them, and emulates elsewhere.
    Raises `ReproError` for an unknown name, a recipe whose scale is given or
    whose blocks lie across the summed axis, and combinations without a meaning.
    """

    fprop_x: Operand = None
    fprop_w: Operand = None
    dgrad_dy: Operand = None
    dgrad_w: Operand = None
    wgrad_x: Operand = None
    wgrad_dy: Operand = None
    wgrad_hadamard: bool = False
    cache_x: Operand = None
    accumulator: Accumulator | None = None
    native: bool = False

    def __post_init__(self):
        for operand in self._operands:
            if operand is None or operand in ("bf16", "fp16"):
                continue
            if operand == "fprop":
                raise ReproError("Only dgrad_w and wgrad_x have a counterpart in the forward pass; name a recipe.")
            if isinstance(operand, str) and operand in FORMATS and operand not in RECIPES:
                raise ReproError(f"{operand!r} has no scales; an operand is a recipe, 'bf16', 'fp16' or None.")
            if recipe_of(operand).scale_rule == "given":
                raise ReproError("A policy has no state and cannot give a scale; use a recipe that chooses its own.")
            shape = recipe_of(operand).block_shape
            if shape is not None and shape[1] == 1 and shape[0] != 1:
                raise ReproError(
                    f"Blocks of {shape[0]} x 1 lie across the axis that a product sums over, so their scales cannot "
                    f"leave the sum; blocks of 1 x {shape[0]} lie along it."
                )
        shares = "fprop" in (self.dgrad_w, self.wgrad_x, self.cache_x)
        if shares and self.accumulator is not None:
            raise ReproError("An accumulator takes elements and scales apart, so it cannot take operands from 'fprop'.")
        if self.wgrad_x == "fprop" and self.wgrad_hadamard:
            raise ReproError("A Hadamard transform comes before wgrad_x is quantised, so that cannot be 'fprop'.")
        if self.wgrad_x == "fprop" and self.cache_x not in (None, "fprop"):
            raise ReproError("x is cached in a format of its own, so the one of the forward pass is lost to wgrad_x.")
        if self.cache_x == "fprop" and self.fprop_x is None:
            raise ReproError("cache_x 'fprop' keeps the quantised x, but fprop_x is None; leave out cache_x.")

    @property
    def _operands(self) -> tuple[Operand, ...]:
        """The operands that are quantised by themselves."""
        shared = [o for o in (self.dgrad_w, self.wgrad_x, self.cache_x) if o != "fprop"]
        return (self.fprop_x, self.fprop_w, self.dgrad_dy, self.wgrad_dy, *shared)

    @property
    def stochastic(self) -> bool:
        """Whether some operand is rounded stochastically, so that `dot` needs a key."""
        return any(isinstance(o, Recipe) and o.rounding == "stochastic" for o in self._operands)


def _same(recipe: Operand, **others) -> GemmPolicy:
    names = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_x", "wgrad_dy")
    return GemmPolicy(**{name: recipe for name in names} | others)


# The floor of DeepSeek's kernels is of the size of small gradients, which a floor would round to zero.
_gradient_tile = replace(RECIPES["fp8_tile"], amax_floor=SMALLEST_FLOOR)
_gradient_block = replace(RECIPES["fp8_block"], amax_floor=SMALLEST_FLOOR)
_gradient_tensor = replace(RECIPES["fp8_tensor"], amax_floor=SMALLEST_FLOOR)
_nvfp4_noisy = replace(RECIPES["nvfp4"], rounding="stochastic")
_v3 = GemmPolicy(
    fprop_x="fp8_tile",
    fprop_w="fp8_block",
    dgrad_dy=_gradient_tile,
    dgrad_w="fp8_block",
    wgrad_x="fp8_tile",
    wgrad_dy=_gradient_tile,
)
_e5m2_tile = replace(_gradient_tile, element="e5m2")
_e5m2_tensor = replace(_gradient_tensor, element="e5m2")
_fp8_tensor = _same("fp8_tensor", dgrad_dy=_gradient_tensor, wgrad_dy=_gradient_tensor)
_mxfp4_weights = _same("bf16", fprop_w="mxfp4", dgrad_w="fprop")
_DGRAD = {
    f"dgrad_{element}_{kind}": GemmPolicy(dgrad_dy=replace(recipe, element=element))
    for element in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
    for kind, recipe in (("tile", _gradient_tile), ("block", _gradient_block))
}

POLICIES: Mapping[str, GemmPolicy] = MappingProxyType(
    {
        "fp32": GemmPolicy(),
        "bf16": _same("bf16", cache_x="bf16"),
        # DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), and its appendix B.2: blocks in place of tiles for Dgrad.
        "v3_fp8": _v3,
        "v3_fp8_block_dgrad": replace(_v3, dgrad_dy=_gradient_block),
        # What DeepSeek-V3 keeps for the backward pass: the tiles of 1 x 128, quantised again in tiles of 128 x 1.
        "v3_fp8_cached": replace(_v3, cache_x="fprop"),
        # DeepSeek-V3's recipe with the wider range of E5M2 for gradients, which it does not use.
        "v3_fp8_e5m2_grads": replace(_v3, dgrad_dy=_e5m2_tile, wgrad_dy=_e5m2_tile),
        # One scale per tensor, from the tensor itself; hybrid as in arXiv 2209.05433: E5M2 for gradients.
        "fp8_tensor": _fp8_tensor,
        "fp8_hybrid_tensor": replace(_fp8_tensor, dgrad_dy=_e5m2_tensor, wgrad_dy=_e5m2_tensor),
        # Sums of an H800's FP8 units, about 14 bits, to the end or promoted every 128 products (arXiv 2412.19437,
        # section 3.3.2); slow, since every product is aligned by itself.
        "fp8_tensor_14bit": replace(_fp8_tensor, accumulator=Accumulator(14, 32, None)),
        "fp8_tensor_14bit_promoted": replace(_fp8_tensor, accumulator=Accumulator(14, 32, 128)),
        # OCP MX, one recipe for all six operands.
        "mxfp8": _same("mxfp8"),
        "mxfp4": _same("mxfp4"),
        # Weights alone in MXFP4, straight through: the backward pass uses the weights of the forward pass.
        "mxfp4_w": _mxfp4_weights,
        # Like the post-training of Kimi K3 (report, section 4.1.4): MXFP4 expert weights, MXFP8 activations into them.
        # Not published, and our choice: E4M3 for the activations, nearest even, and the whole backward pass, which is
        # straight through with gradients in bfloat16.
        "k3_qat": replace(_mxfp4_weights, fprop_x="mxfp8", wgrad_x="fprop"),
        # "Pretraining LLMs with NVFP4" (arXiv 2509.25149): 2-D blocks for weights, noise for gradients, and the
        # Hadamard transform for the gradient of weights.
        "nvfp4": GemmPolicy(
            fprop_x="nvfp4",
            fprop_w="nvfp4_2d",
            dgrad_dy=_nvfp4_noisy,
            dgrad_w="nvfp4_2d",
            wgrad_x="nvfp4",
            wgrad_dy=_nvfp4_noisy,
            wgrad_hadamard=True,
        ),
        # Only the gradient that Dgrad takes in, in tiles of 1 x 128 or blocks of 128 x 128: what a format's range does.
        **_DGRAD,
    }
)
"""Named policies."""


def policy_of(policy: str | GemmPolicy) -> GemmPolicy:
    """The policy of a name, or the policy itself. Raises `ReproError` for an unknown name."""
    if isinstance(policy, GemmPolicy):
        return policy
    if policy not in POLICIES:
        raise ReproError(f"Policy {policy!r} is unknown; known are {', '.join(POLICIES)}.")
    return POLICIES[policy]


def key_for(operand: Recipe | str, key: jax.Array | None) -> jax.Array | None:
    """The key of an operand of a policy with random numbers, exactly where that operand takes one."""
    return key if recipe_of(operand).rounding == "stochastic" else None
