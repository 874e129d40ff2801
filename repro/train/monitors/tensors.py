"""Which tensors a model has: every parameter, and of stacked ones every layer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from repro.models import ModelConfig
from repro.models.pattern import stack_names
from repro.optim.layout import Layout, matched


class Tensor(NamedTuple):
    """One entry of a metric over tensors: a parameter's name, and the layer it belongs to (None: to none)."""

    parameter: str
    layer: int | None

    @property
    def name(self) -> str:
        return self.parameter if self.layer is None else f"{self.parameter}[{self.layer}]"


def tensors(model: ModelConfig, params: Any, layouts: Any) -> tuple[Tensor, ...]:
    """The entries of metrics over tensors [P], in the order of the leaves of `params` (arrays or shapes), layers
    ascending. All experts of a layer are one tensor."""
    return tuple(
        Tensor(name, layer)
        for name, leaf, layout in matched(params, layouts)
        for layer in _layers(model, name, leaf.shape, layout)
    )


def _layers(model: ModelConfig, name: str, shape: tuple[int, ...], layout: Layout) -> tuple[int | None, ...]:
    """The layers along the leading axis of a parameter."""
    if layout.layer is None:
        return (None,)
    first, (stack, child) = 0, name.split("/")[:2]
    for own, (unit, repeats) in zip(stack_names(model.segments), model.segments, strict=True):
        if own == stack:
            offset = int(child.removeprefix("block")) if len(unit) > 1 else 0
            return tuple(first + offset + len(unit) * i for i in range(repeats))
        first += len(unit) * repeats
    return tuple(range(shape[layout.layer]))  # a model of another kind


def each(f: Callable[[jax.Array, tuple[int, ...]], jax.Array], tree: Any, layouts: Any) -> jax.Array:
    """`f(leaf as float32, axes to reduce) -> [layers] or []` of every leaf, joined to [P]."""

    def own(leaf: jax.Array, layout: Layout) -> jax.Array:
        axes = tuple(axis for axis in range(leaf.ndim) if axis != layout.layer)
        return jnp.atleast_1d(f(leaf.astype(jnp.float32), axes))

    return jnp.concatenate([own(leaf, layout) for _, leaf, layout in matched(tree, layouts)])


def norms(tree: Any, layouts: Any) -> jax.Array:
    """Euclidean norms [P]."""
    return jnp.sqrt(each(lambda x, axes: jnp.sum(x * x, axes), tree, layouts))


def root_mean_squares(tree: Any, layouts: Any) -> jax.Array:
    """Root mean squares [P]."""
    return jnp.sqrt(each(lambda x, axes: jnp.mean(x * x, axes), tree, layouts))


def layer_norms(norms_P: jax.Array, entries: tuple[Tensor, ...], layers: int) -> jax.Array:
    """The norm of all tensors of each layer together, [L]; tensors of no layer are left out."""
    mine_PL = np.array([[entry.layer == layer for layer in range(layers)] for entry in entries])
    return jnp.sqrt(jnp.where(mine_PL, norms_P[:, None] ** 2, 0.0).sum(0))


def together(stacks: list[jax.Array], f: Callable[[jax.Array], Any], keys: list[Any] | None = None) -> list[Any]:
    """`f(stack [n, ...]) -> tree of arrays [n, ...]` of every stack; those of one shape (and key) are joined."""
    groups: dict[Any, list[int]] = {}
    for i, stack in enumerate(stacks):
        groups.setdefault((stack.shape[1:], None if keys is None else keys[i]), []).append(i)
    results: list[Any] = [None] * len(stacks)
    for (_, key), members in groups.items():
        joined = jnp.concatenate([stacks[i] for i in members])
        found, start = f(joined) if keys is None else f(joined, key), 0
        for i in members:
            stop = start + len(stacks[i])
            results[i] = jax.tree.map(lambda x, a=start, b=stop: x[a:b], found)
            start = stop
    return results
