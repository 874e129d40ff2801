"""What one tensor of a published rule is: a leaf, or in a stack of layers or experts each of its slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from repro.optim.layout import Layout, matched


def tensor_axes(ndim: int, layout: Layout | None) -> tuple[int, ...]:
    """The axes of a leaf that belong to one tensor: all but those of layers and experts, which only stack tensors."""
    stacked = () if layout is None else (layout.layer, layout.expert)
    return tuple(axis for axis in range(ndim) if axis not in stacked)


def mean_square(x: jax.Array, layout: Layout | None) -> jax.Array:
    """The mean of x^2 over each tensor, float32, with axes of size 1 where the mean was taken."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=tensor_axes(x.ndim, layout), keepdims=True)


def map_tensors(f: Callable[..., tuple], outputs: int, layouts: Any, tree: Any, *rest: Any) -> tuple[Any, ...]:
    """`f(layout, leaf, *parts of rest) -> tuple of outputs` at every leaf of `tree`, as that many trees.

    `layout` is None if `layouts` is; the other trees may have subtrees where `tree` has leaves. Raises `ReproError` for
    a leaf that the layouts do not name.
    """
    leaves, treedef = jax.tree.flatten(tree)
    found = [None] * len(leaves) if layouts is None else [layout for _, _, layout in matched(tree, layouts)]
    others = [treedef.flatten_up_to(other) for other in rest]
    results = [f(*arguments) for arguments in zip(found, leaves, *others, strict=True)]
    return tuple(treedef.unflatten([result[i] for result in results]) for i in range(outputs))
