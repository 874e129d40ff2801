"""Which policy the linear layers of each part of a model follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax

from repro.errors import ReproError
from repro.quant.fake import fake_quantize
from repro.quant.policies import POLICIES, GemmPolicy, policy_of
from repro.quant.recipes import recipe_of
from repro.quant.rounding import as_float32, round_to

PLAIN = "plain"
"""Not quantised: a product in the model's own compute type."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """The policy of every role, by its name in `POLICIES`, or `"plain"`.

    `attention`: projections of queries, keys, values and outputs. `ffn`: gate, up and down of blocks and experts that see
    every token, and the projections of LatentMoE. `embedding`: the table, in the format that the policy gives to weights,
    as it is looked up (the gradient passes straight through). `head`: the output head. `norm`: gains, kept likewise.
    `experts`: gate, up and down of routed experts. `router`: its logits, which are otherwise a float32 product. Softmax,
    norms, logits of attention and the loss are never quantised. Raises `ReproError` for an unknown policy.
    """

    attention: str = PLAIN
    ffn: str = PLAIN
    embedding: str = PLAIN
    head: str = PLAIN
    norm: str = PLAIN
    experts: str = PLAIN
    router: str = PLAIN

    def __post_init__(self) -> None:
        for name in self.roles().values():
            if name != PLAIN:
                policy_of(name)

    def roles(self) -> dict[str, str]:
        """Role -> name of its policy."""
        return dataclasses.asdict(self)

    def policy(self, role: str) -> GemmPolicy | None:
        """The policy of a role; None where the role is not quantised."""
        name = getattr(self, role)
        return None if name == PLAIN else POLICIES[name]

    @property
    def stochastic(self) -> bool:
        """Whether some role rounds stochastically, so that the model needs a key."""
        return any(policy.stochastic for role in self.roles() if (policy := self.policy(role)) is not None)


def _blocks(policy: str) -> Precision:
    return Precision(attention=policy, ffn=policy, experts=policy)


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        PLAIN: Precision(),
        "bf16": Precision("bf16", "bf16", head="bf16", experts="bf16"),
        # DeepSeek-V3 (arXiv 2412.19437, section 3.3.1): linear layers in FP8; embedding, head, router, norms and
        # attention not.
        "v3": _blocks("v3_fp8"),
        "fp8_14bit": _blocks("fp8_tensor_14bit"),
        "fp8_14bit_promoted": _blocks("fp8_tensor_14bit_promoted"),
        "mxfp8": _blocks("mxfp8"),
        "mxfp4_w": _blocks("mxfp4_w"),
        # "Pretraining LLMs with NVFP4" (arXiv 2509.25149), without its high-precision layers at the ends of the stack.
        "nvfp4": _blocks("nvfp4"),
        # In a dense model its feed-forward block stands for the experts; with experts Kimi K3 quantises those alone.
        "k3_qat": Precision(attention="bf16", ffn="k3_qat", head="bf16", experts="k3_qat"),
        "k3_qat_experts": Precision(attention="bf16", ffn="bf16", head="bf16", experts="k3_qat"),
    }
)
"""Named precisions."""


def precision_of(text: str) -> Precision:
    """A precision from its name, or from roles: `"v3"`, `"ffn=mxfp4,head=bf16"` (other roles are plain).

    Raises `ReproError` for an unknown name, role or policy.
    """
    if text in PRECISIONS:
        return PRECISIONS[text]
    chosen: dict[str, str] = {}
    known = [field.name for field in dataclasses.fields(Precision)]
    for part in text.split(","):
        role, sign, policy = (word.strip() for word in part.partition("="))
        if not sign or role not in known or role in chosen:
            raise ReproError(
                f"precision {text!r} is unknown; give one of {', '.join(PRECISIONS)}, or roles such as "
                f"ffn=mxfp4,head=bf16 (each once; roles are {', '.join(known)})."
            )
        chosen[role] = policy
    return Precision(**chosen)


def stored(w: jax.Array, policy: GemmPolicy | None) -> jax.Array:
    """`w` [..., D] in the format in which a policy keeps weights, blocks along the last axis; straight-through gradient."""
    if policy is None or policy.fprop_w is None:
        return w
    if policy.fprop_w in ("bf16", "fp16"):
        w = as_float32(w)
        return w + jax.lax.stop_gradient(round_to(w, policy.fprop_w) - w)
    return fake_quantize(w, policy.fprop_w)


def operand_words(operand: object) -> str:
    """An operand of a `GemmPolicy` in words: format, blocks and scale."""
    if operand == "fprop":
        return "as the forward pass multiplied it"
    if operand is None:
        return "float32"
    if operand in ("bf16", "fp16"):
        return {"bf16": "bfloat16", "fp16": "float16"}[operand]
    recipe = recipe_of(operand)
    if recipe.block_shape is None:
        blocks = "one scale per tensor"
    else:
        across, along = ("all" if size is None else size for size in recipe.block_shape)
        blocks = f"scale per {across}x{along}"
    scale = {"fp32": "float32", "e8m0": "power of two", "e4m3": "E4M3"}[recipe.scale_format]
    levels = {None: "", "amax": " under a float32 tensor scale", "double": ", itself in groups of 256"}
    noise = ", stochastic rounding" if recipe.rounding == "stochastic" else ""
    return f"{recipe.element.upper()}, {blocks}, {scale}{levels[recipe.tensor_scale]}{noise}"
