"""Recipes: which elements share which scale, and how the scale is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from repro.errors import ReproError
from repro.quant.formats import format_of
from repro.quant.rounding import Rounding

ScaleRule = Literal["amax", "floor", "ceil", "rceil", "even", "given"]
TensorScale = Literal["amax", "double"]

SMALLEST_FLOOR = 2.0**-80
"""The least `amax_floor` of scales that are not powers of two: every number on the way is then a normal float32, and
every subnormal input rounds to zero, whether or not a backend flushes subnormals."""

_ELEMENTS = ("e4m3", "e5m2", "e5m6", "e3m2", "e2m3", "e2m1", "int8", "int4", "nf4")


@dataclass(frozen=True)
class Recipe:
    """Block scaling: x_hat = element * scale (* tensor scale), one scale per block.

    - `element`: the name of the format of the elements.
    - `block_shape`: `(across, along)`: the size of a block along the quantisation axis and across it, that is along the
      other one of the last two axes (or along the last axis, if the quantisation axis is an earlier one). `None` in
      place of a size is the whole axis; `None` in place of the pair is one block for the whole tensor. Blocks at the
      end of an axis may be shorter.
    - `scale_format`: `"fp32"`, `"e8m0"` or `"e4m3"`.
    - `scale_rule`, with amax the largest magnitude of the block and max that of the element format:
      `"amax"` amax / max by IEEE division; with `"e8m0"` 2^(floor(log2 amax) - floor(log2 max)) (`"floor"`), the same
      with log2 amax rounded up (`"ceil"`), amax * fl(1 / max) rounded up to a power of two (`"rceil"`), or floor after
      amax is rounded to the element's mantissa (`"even"`); `"given"` by the caller. A power of two above 2^127 becomes
      2^127, one below 2^-127 becomes 2^-127, and so does that of a block of zeros.
    - `tensor_scale`: None; `"amax"`, a float32 scale of the whole tensor so that block scales fill E4M3 (NVFP4); or
      `"double"`, block scales themselves stored in E4M3, less their mean, in groups of 256 (NF4).
    - `amax_floor`: amax is at least this, in the unit of x; with `tensor_scale="amax"` that of the tensor. At least
      2^-80 unless the scale is a power of two or given.
    - `rounding` of the elements: as in `round_to`.

    Raises `ReproError` for a combination without a meaning.
    """

    element: str
    block_shape: tuple[int | None, int | None] | None
    scale_format: str
    scale_rule: ScaleRule
    tensor_scale: TensorScale | None
    amax_floor: float
    rounding: Rounding

    def __post_init__(self):
        if self.element not in _ELEMENTS:
            raise ReproError(f"Blocks cannot hold {self.element!r}; elements are {', '.join(_ELEMENTS)}.")
        if self.scale_rule not in get_args(ScaleRule):
            raise ReproError(f"Scale rule {self.scale_rule!r} is unknown; known are {', '.join(get_args(ScaleRule))}.")
        if self.rounding not in get_args(Rounding):
            raise ReproError(f"Rounding {self.rounding!r} is unknown; known are {', '.join(get_args(Rounding))}.")
        if format_of(self.element).codebook and (self.rounding != "nearest_even" or self.power_of_two):
            raise ReproError(f"{self.element} is a table: it needs rounding nearest_even and the scale rule amax.")
        self._check_scale()
        self._check_block()

    def _check_scale(self) -> None:
        if self.tensor_scale not in (None, *get_args(TensorScale)):
            raise ReproError(f"tensor_scale {self.tensor_scale!r} is unknown; known are None, 'amax' and 'double'.")
        if self.power_of_two:
            needed, level = "e8m0", None
        else:
            needed = "fp32" if self.tensor_scale is None else "e4m3"
            level = self.tensor_scale if self.scale_rule == "amax" else None
        if self.scale_format != needed or self.tensor_scale != level:
            raise ReproError(
                f"Scale rule {self.scale_rule!r} with scale_format {self.scale_format!r} and tensor_scale "
                f"{self.tensor_scale!r} has no meaning; it takes 'e8m0' and None for a power of two, 'fp32' and None "
                "otherwise, or 'e4m3' and a tensor scale with the rule 'amax'."
            )
        if self.tensor_scale == "amax" and format_of(self.element).max < 4:
            raise ReproError(
                f"Block scales of {self.element} under a tensor scale can exceed 2^126, and their reciprocals are then "
                "no normal float32; elements must reach 4, as those of e2m1 do."
            )
        if self.scale_rule == "amax" and not self.amax_floor >= SMALLEST_FLOOR:
            raise ReproError(f"amax_floor {self.amax_floor} is too small; the rule 'amax' needs at least 2^-80.")
        if not 0 <= self.amax_floor < float("inf"):
            raise ReproError(f"amax_floor {self.amax_floor} is not a magnitude; give a finite number of at least 0.")
        if self.scale_rule == "given" and (self.amax_floor != 0 or self.block_shape is not None):
            raise ReproError("A given scale is one number; it needs block_shape None and amax_floor 0.")

    def _check_block(self) -> None:
        shape = self.block_shape
        if shape is None:
            return
        if len(shape) != 2 or not all(size is None or (isinstance(size, int) and size > 0) for size in shape):
            raise ReproError(f"Block shape {shape} is not a pair of positive sizes (across, along) or Nones.")

    @property
    def power_of_two(self) -> bool:
        """Whether the scale is a power of two, so that scaling is exact."""
        return self.scale_rule not in ("amax", "given")


def _recipe(element, block_shape, scale_format, scale_rule, amax_floor=0.0, tensor_scale=None) -> Recipe:
    return Recipe(element, block_shape, scale_format, scale_rule, tensor_scale, amax_floor, "nearest_even")


def _mx(element: str) -> Recipe:
    return _recipe(element, (1, 32), "e8m0", "floor")


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        # One scale per tensor: from its own amax, or from earlier ones (Micikevicius et al., arXiv 2209.05433).
        "fp8_tensor": _recipe("e4m3", None, "fp32", "amax", 1e-12),
        "fp8_delayed": _recipe("e4m3", None, "fp32", "given"),
        # DeepSeek-V3 (arXiv 2412.19437, section 3.3.2); the floor is that of its published kernels.
        "fp8_tile": _recipe("e4m3", (1, 128), "fp32", "amax", 1e-4),
        "fp8_tile_pow2": _recipe("e4m3", (1, 128), "e8m0", "rceil", 1e-4),
        "fp8_block": _recipe("e4m3", (128, 128), "fp32", "amax", 1e-4),
        # OCP Microscaling Formats v1.0, sections 5 and 6.3.
        "mxfp8": _mx("e4m3"),
        "mxfp8_e5m2": _mx("e5m2"),
        "mxfp6_e3m2": _mx("e3m2"),
        "mxfp6_e2m3": _mx("e2m3"),
        "mxfp4": _mx("e2m1"),
        "mxint8": _mx("int8"),
        # NVIDIA, "Pretraining LLMs with NVFP4" (arXiv 2509.25149), in TransformerEngine's order of operations.
        "nvfp4": _recipe("e2m1", (1, 16), "e4m3", "amax", SMALLEST_FLOOR, "amax"),
        "nvfp4_2d": _recipe("e2m1", (16, 16), "e4m3", "amax", SMALLEST_FLOOR, "amax"),
        # Symmetric integers: one scale per channel, or per group of 128.
        "int8_channel": _recipe("int8", (1, None), "fp32", "amax", SMALLEST_FLOOR),
        "int4_group": _recipe("int4", (1, 128), "fp32", "amax", SMALLEST_FLOOR),
        # QLoRA (arXiv 2305.14314, section 3), with double quantisation of the scales.
        "nf4": _recipe("nf4", (1, 64), "e4m3", "amax", SMALLEST_FLOOR, "double"),
    }
)
"""Named recipes."""


def recipe_of(recipe: str | Recipe) -> Recipe:
    """The recipe of a name, or the recipe itself. Raises `ReproError` for an unknown name."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ReproError(f"Recipe {recipe!r} is unknown; known are {', '.join(RECIPES)}.")
    return RECIPES[recipe]
