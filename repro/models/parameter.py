"""Parameters that say what they are.

Every parameter declares its `role` and the meaning of each of its axes, so that an optimizer, a weight-clip or a
mesh never has to guess from a shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flax import nnx

from repro.models.draws import normal


def parameter(
    value: Any,
    role: str,
    *,
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    head: int | None = None,
    expert: int | None = None,
    parts: tuple[int, tuple[tuple[str, int, str], ...], bool] | None = None,
    qk: str = "",
    group: str = "",
) -> nnx.Param:
    """An `nnx.Param` with its declaration as metadata. Axes count within one layer.

    `qk` is "q" or "k" for the two projections whose product is the attention logit, "q_shared" and "k_shared" where
    several heads share that key (also of the gain of a norm on them), and `group` names the attention. `parts` is
    `(axis, ((name, size, qk), ...), split)` for an axis of named segments; `split` says whether an optimizer treats
    them as separate matrices.
    """
    declaration = {
        "role": role, "inputs": inputs, "outputs": outputs, "head": head, "expert": expert, "parts": parts, "qk": qk,
        "group": group,
    }  # fmt: skip
    return nnx.Param(value, declaration=tuple(declaration.items()))


class Buffer(nnx.Variable):
    """What a module carries from step to step that no optimizer sees, such as the selection bias of a router. A forward
    pass does not change it; it returns the next value as `Output.buffers`."""


def matrix(
    config: Any, key: Any, shape: tuple[int, ...], inputs: int = 1, *, writer: bool = False, branch: bool = False
) -> Any:
    """A Gaussian matrix (`normal`) whose first `inputs` axes are inputs, with the standard deviation `config.std` gives
    it."""
    fan_in, fan_out = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    return normal(key, shape, config.std(fan_in, fan_out, writer=writer, branch=branch))


def declarations(module: nnx.Module) -> dict[str, Any]:
    """The declaration of every parameter, as a nested dict like `nnx.to_pure_dict` gives for the values.

    A leaf is a dict with `role inputs outputs head expert parts qk group layer`. Below a module that stacks its layers
    (attribute `stacked` names such children) the leading axis is `layer` and the other axes move up by one. Where it has
    several stacks of attention (attribute `groups`) each is a group.
    """
    stacked, groups = set(getattr(module, "stacked", ())), getattr(module, "groups", {})

    def group_of(path: tuple) -> str:
        names = "/".join(map(str, path))
        return next((group for group in groups if names.startswith(f"{group}/")), "")

    def describe(path: tuple, variable: nnx.Variable) -> dict[str, Any]:
        declared = dict(variable.get_metadata()["declaration"])
        shift = 1 if path[0] in stacked else 0
        moved = lambda axis: None if axis is None else axis + shift
        parts = declared["parts"]
        return declared | {
            "inputs": tuple(map(moved, declared["inputs"])),
            "outputs": tuple(map(moved, declared["outputs"])),
            "head": moved(declared["head"]),
            "expert": moved(declared["expert"]),
            "parts": None if parts is None else (moved(parts[0]), *parts[1:]),
            "group": declared["group"] or group_of(path),
            "layer": 0 if shift else None,
        }

    tree: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(nnx.split(module, nnx.Param, ...)[1]):
        node: Mapping[str, Any] = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = describe(path, variable)
    return tree
