"""Products on the FP8 units of the hardware, for policies whose scales lie outside the sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from repro.quant.policies import GemmPolicy, Operand, key_for, policy_of
from repro.quant.qtensor import QTensor, quantize
from repro.quant.recipes import recipe_of


def native_reason(policy: str | GemmPolicy) -> str | None:
    """Why `dot` emulates this policy here, in one sentence for a run record; None where FP8 units multiply.

    They do for `native=True` on NVIDIA GPUs of compute capability 8.9 and later (Hopper: 9.0), if both operands of all
    three products are E4M3 or E5M2, not both E5M2, with one scale per tensor.
    """
    policy = policy_of(policy)
    if not policy.native:
        return "The policy does not ask for native products (native=True)."
    return _policy_reason(policy) or hardware_reason()


def _policy_reason(policy: GemmPolicy) -> str | None:
    if policy.accumulator is not None:
        return "The sums of an accumulator model are emulated."
    if "fprop" in (policy.dgrad_w, policy.wgrad_x, policy.cache_x):
        return "Operands shared between the forward and the backward pass are emulated."
    products = {
        "Fprop": (policy.fprop_x, policy.fprop_w),
        "Dgrad": (policy.dgrad_dy, policy.dgrad_w),
        "Wgrad": (policy.wgrad_x, policy.wgrad_dy),
    }
    for name, operands in products.items():
        if any(o is None or o in ("bf16", "fp16") for o in operands):
            return f"{name} has an operand that is not FP8."
        recipes = [recipe_of(o) for o in operands]
        if any(r.element not in ("e4m3", "e5m2") for r in recipes):
            return f"{name} has elements other than E4M3 and E5M2, which this path does not multiply."
        if any(r.block_shape is not None for r in recipes):
            return f"{name} has block scales, which lie inside the sums; only one scale per tensor is native."
        if all(r.element == "e5m2" for r in recipes):
            return f"{name} multiplies E5M2 by E5M2, which the hardware does not."
    return None


def hardware_reason() -> str | None:
    """Why the default device has no FP8 units that this path uses, or None."""
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return f"The backend {device.platform} has no FP8 units that XLA uses; products are emulated in float32."
    capability = str(getattr(device, "compute_capability", "unknown"))
    try:
        enough = float(capability) >= 8.9
    except ValueError:  # AMD's GPUs name theirs in letters
        enough = False
    if not enough:
        return f"The GPU's compute capability {capability} is not 8.9 or later, so it has no FP8 units; emulated."
    return None


def native_product(a_MK: jax.Array, b_KN: jax.Array, a_format: Operand, b_format: Operand, keys) -> jax.Array:
    """The product of two matrices, each quantised with one scale, on FP8 units: float32 [M, N]."""
    return product_of_codes(
        quantize(a_MK, a_format, key=key_for(a_format, keys[0])),
        quantize(b_KN, b_format, key=key_for(b_format, keys[1])),
    )


def product_of_codes(a_MK: QTensor, b_KN: QTensor) -> jax.Array:
    """The product of the FP8 codes of two matrices with one scale each, times the scales: float32 [M, N]."""
    # "highest" asks for sums in float32; by default XLA lets the FP8 units keep fewer bits.
    sums = lax.dot_general(
        a_MK.codes, b_KN.codes, (((1,), (0,)), ((), ())), precision="highest", preferred_element_type=jnp.float32
    )
    return sums * (a_MK.scale * b_KN.scale)
