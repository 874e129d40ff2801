"""What each parameter is, and which of its axes mean what.

Optimizers here never guess from `ndim`: a parameter tree comes with a tree of `Layout`s whose paths are the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from repro.errors import ReproError

Role = Literal["matrix", "embedding", "head", "norm", "bias", "router", "gate", "static"]
ROLES: tuple[str, ...] = Role.__args__

QK = Literal["", "q", "k", "q_shared", "k_shared"]
"""How a weight enters the attention logit: as query or key of a pair that each head owns, or of one whose key several
heads share (grouped-query attention, and the rotary part of multi-head latent attention)."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A named segment of an axis: `size` entries of it, and how they enter the attention logit."""

    name: str
    size: int
    qk: QK = ""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The segments of one axis, in order. With `split` each is orthogonalised as a matrix of its own."""

    axis: int
    segments: tuple[Part, ...]
    split: bool = True

    def __post_init__(self) -> None:
        if not self.segments or any(part.size < 1 for part in self.segments):
            raise ReproError(f"parts of axis {self.axis} must be at least one segment, each of size 1 or more.")

    @property
    def size(self) -> int:
        return sum(part.size for part in self.segments)


def equal_parts(axis: int, size: int, count: int) -> Parts:
    """`count` segments of equal size, as in a kernel that folds its heads into one axis of `size`.

    Raises `ReproError` where `count` does not divide `size`.
    """
    if count < 1 or size % count:
        raise ReproError(f"axis {axis} of size {size} does not divide into {count} equal parts.")
    return Parts(axis, tuple(Part(str(i), size // count) for i in range(count)))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The role of one parameter and its axes.

    Only the role `matrix` is orthogonalised, unless an optimizer is told otherwise. `inputs` and `outputs` name the axes
    that together form the rows and the columns of its matrix; every other axis (`head` unless it is listed there too,
    `expert`, `layer`) is a batch axis: its slices are separate matrices. `parts` names segments of one axis. `qk` says
    how the weight enters the attention logit, and `group` in which attention (the key of its `max_logits`).
    """

    role: Role
    inputs: tuple[int, ...] | None = None
    outputs: tuple[int, ...] | None = None
    head: int | None = None
    expert: int | None = None
    layer: int | None = None
    parts: Parts | None = None
    qk: QK = ""
    group: str = ""

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
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
        for qk in (self.qk, *(part.qk for part in (self.parts.segments if self.parts else ()))):
            if qk not in QK.__args__:
                raise ReproError(f"qk {qk!r} is unknown; known are {', '.join(map(repr, QK.__args__))}.")

    def axes(self) -> tuple[int, ...]:
        """Every axis that is named."""
        singles = (self.head, self.expert, self.layer, self.parts.axis if self.parts else None)
        return tuple(dict.fromkeys((*self.inputs, *self.outputs, *(a for a in singles if a is not None))))


def path_name(path: tuple) -> str:
    """A tree path as `blocks/attention/q_DHK`; the value inside an NNX variable has the name of the variable."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_layout(x: Any) -> bool:
    return isinstance(x, Layout)


def map_layouts(f: Any, layouts: Any) -> Any:
    """`jax.tree.map` over a tree whose leaves are Layouts."""
    return jax.tree.map(f, layouts, is_leaf=is_layout)


def named_layouts(layouts: Any) -> dict[str, Any]:
    """The layouts by path name; a flat mapping by path names is a tree too."""
    return {path_name(p): v for p, v in jax.tree_util.tree_flatten_with_path(layouts, is_leaf=is_layout)[0]}


def matched(tree: Any, layouts: Any) -> list[tuple[str, Any, Layout]]:
    """(name, leaf, layout) of every leaf of `tree`, which may be a plain dict, a Linen or an NNX tree, by path name.

    Raises `ReproError` naming a leaf without a layout. Layouts without a leaf are passed over, since a transform may see
    only a part of the tree.
    """
    declared = named_layouts(layouts)
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        layout = declared.get(name := path_name(path))
        if not is_layout(layout):
            raise ReproError(f"parameter {name} has no layout; declare its role and axes with Layout(...).")
        found.append((name, leaf, layout))
    return found


def check_layouts(params: Any, layouts: Any) -> None:
    """Raises `ReproError` naming the first parameter without a layout, or whose layout does not fit its shape."""
    found = matched(params, layouts)
    for name, value, layout in found:
        shape = jnp.shape(value)
        for axis in layout.axes():
            if not 0 <= axis < len(shape):
                raise ReproError(
                    f"parameter {name} of shape {shape} has no axis {axis} that its layout names; axes count from 0."
                )
        if layout.parts and layout.parts.size != shape[layout.parts.axis]:
            raise ReproError(
                f"parameter {name} of shape {shape} has {shape[layout.parts.axis]} entries on axis {layout.parts.axis}, "
                f"and the parts of its layout {layout.parts.size}."
            )
    unknown = set(named_layouts(layouts)) - {name for name, _, _ in found}
    if unknown:
        raise ReproError(f"layout {min(unknown)} belongs to no parameter; remove it or rename it.")


def from_declarations(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Layouts from the nested dict of declarations that a model gives (leaves are dicts with a `role`; `parts` is
    `(axis, ((name, size, qk), ...), split)` or None)."""

    def layout(node: Mapping[str, Any]) -> Layout:
        parts = node.get("parts")
        if parts is not None:
            axis, segments, split = parts
            parts = Parts(axis, tuple(Part(*segment) for segment in segments), split)
        return Layout(**{**node, "parts": parts})

    return {
        name: layout(node) if isinstance(node.get("role"), str) else from_declarations(node)
        for name, node in tree.items()
    }


def declare(params: Any, rules: Mapping[str, Layout]) -> Any:
    """Layouts for a tree from elsewhere: each path (`decoder/layer_0/kernel`) gets the layout of the first regular
    expression in `rules` that is found in it.

    Raises `ReproError` for a path that no rule matches, a rule that matches no path, or a layout that does not fit.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    used, found = set(), {}
    for path, _ in flat:
        name = path_name(path)
        rule = next((pattern for pattern in rules if re.search(pattern, name)), None)
        if rule is None:
            raise ReproError(f"no rule matches parameter {name}; the rules are {', '.join(rules)}.")
        used.add(rule)
        found[name] = rules[rule]
    for rule in rules:
        if rule not in used:
            raise ReproError(
                f"rule {rule!r} decides no parameter; remove it, or put it before the rules that match first."
            )
    check_layouts(params, found)
    return found


def per_head(layouts: Any) -> Any:
    """The same layouts with each head of a query, key or value projection its own matrix: Per-Head Muon (Kimi K3 report,
    section 2.5). Projections out of the heads, whose head axis is an input, stay whole."""

    def split(layout: Layout) -> Layout:
        if layout.head is None or layout.role != "matrix" or layout.head not in layout.outputs:
            return layout
        return dataclasses.replace(layout, outputs=tuple(a for a in layout.outputs if a != layout.head))

    return map_layouts(split, layouts)


def split_parts(layouts: Any, names: Iterable[str] | None = None, *, split: bool = True) -> Any:
    """The same layouts with the named segments (all, without names) orthogonalised apart, or with `split=False`
    together: `split_parts(layouts, ("nope", "rope"))`. A layout changes if any of its segments is named."""
    wanted = None if names is None else set(names)

    def changed(layout: Layout) -> Layout:
        if layout.parts is None or wanted is not None and not wanted & {p.name for p in layout.parts.segments}:
            return layout
        return dataclasses.replace(layout, parts=dataclasses.replace(layout.parts, split=split))

    return map_layouts(changed, layouts)


def _segments(layout: Layout, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(start, size) along the axis of the parts, or one segment of everything where nothing is split."""
    if layout.parts is None or not layout.parts.split:
        return [(0, 0)]
    sizes = [part.size for part in layout.parts.segments]
    return list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))


def to_matrices(x: jax.Array, layout: Layout) -> jax.Array:
    """`x` as [..., rows, columns]: batch axes first, input axes merged into rows, output axes into columns."""
    batch = [a for a in range(x.ndim) if a not in layout.inputs + layout.outputs]
    y = jnp.transpose(x, (*batch, *layout.inputs, *layout.outputs))
    rows = math.prod(x.shape[a] for a in layout.inputs)
    columns = math.prod(x.shape[a] for a in layout.outputs)
    return y.reshape(*(x.shape[a] for a in batch), rows, columns)


def from_matrices(y: jax.Array, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_matrices` for a parameter of `shape`."""
    batch = [a for a in range(len(shape)) if a not in layout.inputs + layout.outputs]
    order = (*batch, *layout.inputs, *layout.outputs)
    return jnp.transpose(y.reshape([shape[a] for a in order]), sorted(range(len(order)), key=order.__getitem__))


def to_blocks(x: jax.Array, layout: Layout) -> list[jax.Array]:
    """The matrices of one parameter, [..., rows, columns]: one array, or one for every segment that is split."""
    pieces = []
    for start, size in _segments(layout, x.shape):
        piece = jax.lax.slice_in_dim(x, start, start + size, axis=layout.parts.axis) if size else x
        pieces.append(to_matrices(piece, layout))
    return pieces


def from_blocks(blocks: list[jax.Array], layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_blocks` for a parameter of `shape`."""
    pieces = []
    for block, (_, size) in zip(blocks, _segments(layout, shape), strict=True):
        piece_shape = list(shape)
        if size:
            piece_shape[layout.parts.axis] = size
        pieces.append(from_matrices(block, layout, tuple(piece_shape)))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, layout.parts.axis)


def describe(params: Any, layouts: Any) -> str:
    """One line per parameter: its path, shape, role and how it is orthogonalised, if at all."""
    check_layouts(params, layouts)
    lines = []
    for name, value, layout in matched(params, layouts):
        rule = "AdamW"
        if layout.role == "matrix":
            blocks = jax.eval_shape(lambda v, n=layout: to_blocks(v, n), value)
            rule = "Muon on " + " and ".join(
                f"{math.prod(block.shape[:-2])} of {block.shape[-2]} x {block.shape[-1]}" for block in blocks
            )
        lines.append(f"{name} {tuple(jnp.shape(value))} {layout.role}: {rule}")
    return "\n".join(lines)
