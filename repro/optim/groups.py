"""One transform for the parameters of some roles, another for all others."""

from __future__ import annotations

from typing import Any

import jax
import optax

from repro.errors import ReproError
from repro.optim.layout import check_layouts, from_blocks, matched, to_blocks


def by_role(
    layouts: Any,
    roles: tuple[str, ...],
    inside: optax.GradientTransformation,
    outside: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`inside` for parameters whose role is among `roles`, which must name input and output axes; `outside` for others.

    Raises `ReproError` at `init` for a parameter without a layout that fits it.
    """

    def labels(params: Any) -> Any:
        found = matched(params, layouts)
        for name, _, layout in found:
            if layout.role in roles and not (layout.inputs and layout.outputs):
                raise ReproError(f"parameter {name} of role {layout.role} names no input and output axes.")
        chosen = ["inside" if layout.role in roles else "outside" for _, _, layout in found]
        return jax.tree.unflatten(jax.tree.structure(params), chosen)

    grouped = optax.partition({"inside": inside, "outside": outside}, labels)

    def init(params: Any) -> Any:
        check_layouts(params, layouts)
        return grouped.init(params)

    return optax.GradientTransformationExtraArgs(init, grouped.update)


def blocks_of(tree: Any, layouts: Any) -> list[jax.Array]:
    """The matrices [..., rows, columns] of every leaf in turn (see `Layout`)."""
    return [block for _, leaf, layout in matched(tree, layouts) for block in to_blocks(leaf, layout)]


def tree_of(blocks: list[jax.Array], like: Any, layouts: Any) -> Any:
    """The inverse of `blocks_of` for a tree like `like`, in its types."""
    pieces = iter(blocks)
    leaves = []
    for _, leaf, layout in matched(like, layouts):
        count = len(jax.eval_shape(lambda x, n=layout: to_blocks(x, n), leaf))
        own = [next(pieces) for _ in range(count)]
        leaves.append(from_blocks(own, layout, leaf.shape).astype(leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
