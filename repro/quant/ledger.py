"""How many bytes the state of a training run takes, by the role of a tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from repro.errors import ReproError
from repro.quant.formats import FORMATS
from repro.quant.recipes import RECIPES

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "weights that the model reads",
        "master": "weights that the optimizer updates, where these are others",
        "gradient": "gradients, as they are summed over micro-batches",
        "first_moment": "Adam's mean of gradients",
        "second_moment": "Adam's mean of squared gradients",
        "compute_copy": "weights once more, in the format of the matrix products",
        "ema": "running mean of the weights",
    }
)
"""The roles of a ledger, in its order, and what they are."""

_DOUBLE_GROUP, _DOUBLE_BITS = 256, 32


def storage_bits(name: str) -> Fraction:
    """Bits per value in a recipe of `RECIPES`, scales included, or a format of `FORMATS`; NF4 is the recipe.

    Blocks are taken as full, and a scale of the whole tensor as nothing: of n values in tensors with r blocks cut
    short, the exact number is larger by at most r scales, and one per tensor. MXFP4 4 + 8/32 (OCP MX v1.0, section
    6.3), NVFP4 4 + 8/16 (arXiv 2509.25149), NF4 4 + 8/64 + 32/(64 x 256) (QLoRA, arXiv 2305.14314, section 3).

    Raises `ReproError` for an unknown name, or a recipe whose blocks are as long as an axis.
    """
    if name not in RECIPES:
        if name not in FORMATS:
            raise ReproError(f"{name!r} is no format that a state is stored in; known are {', '.join(storable())}.")
        return Fraction(FORMATS[name].bits)
    recipe = RECIPES[name]
    bits = Fraction(FORMATS[recipe.element].bits)
    if recipe.block_shape is None:
        return bits
    if None in recipe.block_shape:
        raise ReproError(f"The bits of {name} depend on the length of an axis, since its blocks are as long as one.")
    block = math.prod(recipe.block_shape)
    scale = Fraction(FORMATS[recipe.scale_format].bits)
    if recipe.tensor_scale == "double":
        scale += Fraction(_DOUBLE_BITS, _DOUBLE_GROUP)
    return bits + scale / block


def storable() -> tuple[str, ...]:
    """The names that `storage_bits` takes."""
    fixed = (name for name, recipe in RECIPES.items() if recipe.block_shape is None or None not in recipe.block_shape)
    return tuple(dict.fromkeys((*FORMATS, *fixed)))


@dataclass(frozen=True)
class StatePolicy:
    """The format of every role, a name of `FORMATS` or `RECIPES`; None where the state has no such tensor.

    Activations, temporary buffers and what an allocator adds are not part of it. Raises `ReproError` for an unknown
    format, or if there are neither parameters nor a master copy.
    """

    name: str
    parameters: str | None = None
    master: str | None = None
    gradient: str | None = None
    first_moment: str | None = None
    second_moment: str | None = None
    compute_copy: str | None = None
    ema: str | None = None

    def __post_init__(self):
        if self.parameters is None and self.master is None:
            raise ReproError(f"State policy {self.name} holds no weights; give parameters, a master copy, or both.")
        for stored in self.formats().values():
            storage_bits(stored)

    def formats(self) -> dict[str, str]:
        """Role -> format of what this policy stores, in the order of `ROLES`."""
        chosen = {role: getattr(self, role) for role in ROLES}
        return {role: stored for role, stored in chosen.items() if stored is not None}

    def with_roles(self, changes: Mapping[str, str | None]) -> StatePolicy:
        """This policy with other formats for some roles. Raises `ReproError` for an unknown role."""
        for role in changes:
            if role not in ROLES:
                raise ReproError(f"State has no role {role!r}; there is {', '.join(ROLES)}.")
        return dataclasses.replace(self, **changes) if changes else self


def _policies(*policies: StatePolicy) -> Mapping[str, StatePolicy]:
    return MappingProxyType({policy.name: policy for policy in policies})


STATE_POLICIES: Mapping[str, StatePolicy] = _policies(
    # Everything in one format: 4 + 4 + 4 + 4 = 16 bytes.
    StatePolicy("fp32_adam", "fp32", None, "fp32", "fp32", "fp32"),
    # 16-bit weights and gradients beside a float32 master copy and moments: 2 + 4 + 2 + 4 + 4 = 16 bytes
    # (Micikevicius et al., arXiv 1710.03740, section 3.1; counted so in ZeRO, arXiv 1910.02054, section 3.1).
    StatePolicy("fp16_mixed", "fp16", "fp32", "fp16", "fp32", "fp32"),
    StatePolicy("bf16_mixed", "bf16", "fp32", "bf16", "fp32", "fp32"),
    # No master copy: 2 + 2 + 2 + 2 = 8 bytes; small updates of large weights are lost.
    StatePolicy("bf16_only", "bf16", None, "bf16", "bf16", "bf16"),
    # Master copy and gradients in float32, moments in bfloat16: 4 + 4 + 2 + 2 = 12 bytes, without the FP8 copies that
    # products read (DeepSeek-V3, arXiv 2412.19437, section 3.3.3).
    StatePolicy("v3", None, "fp32", "fp32", "bf16", "bf16"),
)
"""Named policies. Kimi K3's is not among them: its report does not say in which formats its optimizer keeps state."""


@dataclass(frozen=True)
class StateRow:
    """One role of a ledger: its format, and its `bytes`, rounded up."""

    role: str
    format: str
    bits_per_value: Fraction
    bytes: int


@dataclass(frozen=True)
class StateLedger:
    """The bytes of a training state: `rows` in the order of `ROLES`."""

    policy: StatePolicy
    parameters: int
    rows: tuple[StateRow, ...]

    @property
    def bytes(self) -> int:
        """All roles together."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_parameter(self) -> Fraction:
        """Exact, before rounding up."""
        return sum((row.bits_per_value for row in self.rows), Fraction()) / 8


def state_ledger(parameters: int, policy: str | StatePolicy) -> StateLedger:
    """The ledger of a number of parameters under a policy, or the name of one in `STATE_POLICIES`.

    Raises `ReproError` for a number below 1 or an unknown name.
    """
    if isinstance(parameters, bool) or not isinstance(parameters, int) or parameters < 1:
        raise ReproError(f"A state has a whole number of parameters, at least 1, not {parameters!r}.")
    if isinstance(policy, str):
        if policy not in STATE_POLICIES:
            raise ReproError(f"State policy {policy!r} is unknown; known are {', '.join(STATE_POLICIES)}.")
        policy = STATE_POLICIES[policy]
    rows = (
        StateRow(role, stored, storage_bits(stored), math.ceil(parameters * storage_bits(stored) / 8))
        for role, stored in policy.formats().items()
    )
    return StateLedger(policy, parameters, tuple(rows))
