"""What each parameter is, and which of its axes mean what.

Optimizers here never guess from `ndim`: a parameter tree comes with a tree of `Layout`s of the same structure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from repro.errors import ReproError

Role = Literal["matrix", "embedding", "head", "norm", "bias", "router", "gate"]
ROLES: tuple[str, ...] = Role.__args__


@dataclasses.dataclass(frozen=True)
class Layout:
    """The role of one parameter and its axes.

    Only the role `matrix` is orthogonalised. `inputs` and `outputs` name the axes that together form the rows and the
    columns of its matrix; every other axis (`head` unless it is listed there too, `expert`, `layer`) is a batch axis:
    its slices are separate matrices. `qk` marks the two projections whose product is the attention logit.
    """

    role: Role
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    head: int | None = None
    expert: int | None = None
    layer: int | None = None
    qk: Literal["", "q", "k"] = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ReproError(f"role {self.role!r} is unknown; known are {', '.join(ROLES)}.")
        if self.role == "matrix" and not (self.inputs and self.outputs):
            raise ReproError("a parameter of role matrix must name its input axes and its output axes.")
        if set(self.inputs) & set(self.outputs):
            raise ReproError(f"axes {sorted(set(self.inputs) & set(self.outputs))} are both input and output.")
        single = (*self.inputs, *self.outputs, *(a for a in (self.expert, self.layer) if a is not None))
        if len(set(single)) < len(single):
            raise ReproError(
                f"an axis is named twice among inputs {self.inputs}, outputs {self.outputs}, expert {self.expert} and "
                f"layer {self.layer}; only a head axis may also be an input or an output."
            )


def path_name(path: tuple) -> str:
    """A tree path as `blocks/attention/q_DHK`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_layout(x: Any) -> bool:
    return isinstance(x, Layout)


def map_layouts(f: Any, layouts: Any, *trees: Any) -> Any:
    """`jax.tree.map` over a tree whose leaves are Layouts, with `trees` of the same structure."""
    return jax.tree.map(f, layouts, *trees, is_leaf=is_layout)


def check_layouts(params: Any, layouts: Any) -> None:
    """Raises `ReproError` naming the first parameter without a layout, or whose layout does not fit its shape."""
    declared = {path_name(p): v for p, v in jax.tree_util.tree_flatten_with_path(layouts, is_leaf=is_layout)[0]}
    for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = path_name(path)
        layout = declared.pop(name, None)
        if not is_layout(layout):
            raise ReproError(f"parameter {name} has no layout; declare its role and axes with Layout(...).")
        axes = [
            *layout.inputs,
            *layout.outputs,
            *(a for a in (layout.head, layout.expert, layout.layer) if a is not None),
        ]
        for axis in axes:
            if not 0 <= axis < jnp.ndim(value):
                raise ReproError(
                    f"parameter {name} of shape {jnp.shape(value)} has no axis {axis} that its layout names; "
                    "axes count from 0."
                )
    if declared:
        raise ReproError(f"layout {next(iter(declared))} belongs to no parameter; remove it or rename it.")


def from_declarations(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Layouts from the nested dict of declarations that a model gives (leaves are dicts with a `role`)."""
    return {
        name: Layout(**node) if isinstance(node.get("role"), str) else from_declarations(node)
        for name, node in tree.items()
    }


def per_head(layouts: Any) -> Any:
    """The same layouts with each head its own matrix: Per-Head Muon (Kimi K3 report, section 2.5)."""

    def split(layout: Layout) -> Layout:
        if layout.head is None or layout.role != "matrix" or not layout.qk and layout.head not in layout.outputs:
            return layout
        drop = lambda axes: tuple(a for a in axes if a != layout.head)
        return dataclasses.replace(layout, inputs=drop(layout.inputs), outputs=drop(layout.outputs))

    return map_layouts(split, layouts)


def to_matrices(x: jax.Array, layout: Layout) -> jax.Array:
    """`x` as [..., rows, columns]: batch axes first, input axes merged into rows, output axes into columns."""
    batch = [a for a in range(x.ndim) if a not in layout.inputs + layout.outputs]
    y = jnp.transpose(x, (*batch, *layout.inputs, *layout.outputs))
    rows = math.prod(x.shape[a] for a in layout.inputs)
    return y.reshape(*(x.shape[a] for a in batch), rows, -1)


def from_matrices(y: jax.Array, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_matrices` for a parameter of `shape`."""
    batch = [a for a in range(len(shape)) if a not in layout.inputs + layout.outputs]
    order = (*batch, *layout.inputs, *layout.outputs)
    return jnp.transpose(y.reshape([shape[a] for a in order]), sorted(range(len(order)), key=order.__getitem__))


def describe(params: Any, layouts: Any) -> str:
    """One line per parameter: its path, shape, role and how it is orthogonalised, if at all."""
    check_layouts(params, layouts)
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    lines = []
    for (path, value), layout in zip(flat, jax.tree.leaves(layouts, is_leaf=is_layout), strict=True):
        rule = "AdamW"
        if layout.role == "matrix":
            *batch, rows, columns = jax.eval_shape(lambda v, n=layout: to_matrices(v, n), value).shape
            rule = f"Muon on {math.prod(batch)} of {rows} x {columns}"
        lines.append(f"{path_name(path)} {tuple(jnp.shape(value))} {layout.role}: {rule}")
    return "\n".join(lines)
