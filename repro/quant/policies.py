"""Which format each operand of a linear layer's three products has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from repro.errors import ReproError
from repro.quant.accumulator import Accumulator
from repro.quant.formats import FORMATS
from repro.quant.recipes import RECIPES, SMALLEST_FLOOR, Recipe, recipe_of

Operand = Recipe | str | None


@dataclass(frozen=True)
class GemmPolicy:
    """How the operands of y = x w, dx = dy w^T and dw = x^T dy are quantised, each along the axis that is summed over.

    An operand is a `Recipe` or its name, `"bf16"` or `"fp16"` (rounded element by element), or None (float32).
    `fprop_x`, `fprop_w` are those of the forward pass, `dgrad_dy`, `dgrad_w` of the gradient of x, `wgrad_x`,
    `wgrad_dy` of the gradient of w. `wgrad_hadamard` puts both operands of the last through `hadamard` along the
    tokens. `accumulator` makes the sums of all three those of a tensor core; None is float32.
    Raises `ReproError` for an unknown name, and for a recipe whose scale is given.
    """

    fprop_x: Operand = None
    fprop_w: Operand = None
    dgrad_dy: Operand = None
    dgrad_w: Operand = None
    wgrad_x: Operand = None
    wgrad_dy: Operand = None
    wgrad_hadamard: bool = False
    accumulator: Accumulator | None = None

    def __post_init__(self):
        for operand in self._operands:
            if operand is None or operand in ("bf16", "fp16"):
                continue
            if isinstance(operand, str) and operand in FORMATS and operand not in RECIPES:
                raise ReproError(f"{operand!r} has no scales; an operand is a recipe, 'bf16', 'fp16' or None.")
            if recipe_of(operand).scale_rule == "given":
                raise ReproError("A policy has no state and cannot give a scale; use a recipe that chooses its own.")

    @property
    def _operands(self) -> tuple[Operand, ...]:
        return (self.fprop_x, self.fprop_w, self.dgrad_dy, self.dgrad_w, self.wgrad_x, self.wgrad_dy)

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
_nvfp4_noisy = replace(RECIPES["nvfp4"], rounding="stochastic")
_v3 = GemmPolicy(
    fprop_x="fp8_tile",
    fprop_w="fp8_block",
    dgrad_dy=_gradient_tile,
    dgrad_w="fp8_block",
    wgrad_x="fp8_tile",
    wgrad_dy=_gradient_tile,
)

POLICIES: Mapping[str, GemmPolicy] = MappingProxyType(
    {
        "fp32": GemmPolicy(),
        "bf16": _same("bf16"),
        # DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), and its appendix B.2: blocks in place of tiles for Dgrad.
        "v3_fp8": _v3,
        "v3_fp8_block_dgrad": replace(_v3, dgrad_dy=_gradient_block),
        # OCP MX, one recipe for all six operands.
        "mxfp8": _same("mxfp8"),
        "mxfp4": _same("mxfp4"),
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
