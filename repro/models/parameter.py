"""Parameters that say what they are.

Every parameter declares its `role` and the meaning of each of its axes, so that an optimizer, a weight-clip or a
mesh never has to guess from a shape. Roles: matrix, embedding, head, norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def parameter(
    value: jax.Array,
    role: str,
    *,
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    head: int | None = None,
    qk: str = "",
) -> nnx.Param:
    """An `nnx.Param` with its declaration as metadata. Axes count within one layer; `qk` is "q" or "k" for the
    two projections whose product is the attention logit."""
    return nnx.Param(value, declaration=(role, inputs, outputs, head, qk))


def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int, *, gain: float = 1.0) -> jax.Array:
    """Gaussian float32 with standard deviation gain / sqrt(fan_in)."""
    return jax.random.normal(key, shape, jnp.float32) * (gain / fan_in**0.5)


def declarations(module: nnx.Module) -> dict[str, Any]:
    """The declaration of every parameter, as a nested dict like `nnx.to_pure_dict` gives for the values.

    A leaf is a dict with `role inputs outputs head qk layer`. Below a module that stacks its layers (attribute
    `stacked` names such children) the leading axis is `layer` and the other axes move up by one.
    """
    stacked = set(getattr(module, "stacked", ()))

    def describe(path: tuple, variable: nnx.Variable) -> dict[str, Any]:
        role, inputs, outputs, head, qk = variable.get_metadata()["declaration"]
        shift = 1 if path[0] in stacked else 0
        return {
            "role": role,
            "inputs": tuple(a + shift for a in inputs),
            "outputs": tuple(a + shift for a in outputs),
            "head": None if head is None else head + shift,
            "qk": qk,
            "layer": 0 if shift else None,
        }

    tree: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(nnx.split(module)[1]):
        node: Mapping[str, Any] = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = describe(path, variable)
    return tree
