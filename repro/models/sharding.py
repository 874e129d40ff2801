"""How a mesh may hold the parameters: by the letters in their names.

A parameter is called after its axes, `gate_EDF`, and a stack of layers has a leading L. So the letters are the logical
axis names, and a rule says which mesh axis holds each: experts over `expert`, heads, hidden units and the vocabulary
over `tensor`, the width over `fsdp`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

RULES: Mapping[str, str] = MappingProxyType({"E": "expert", "H": "tensor", "F": "tensor", "Z": "tensor", "D": "fsdp"})
"""Mesh axis of a logical axis; others stay whole on every device."""


def axis_letters(path: tuple[Any, ...], ndim: int) -> tuple[str | None, ...]:
    """The logical name of each axis of the parameter at `path` of a parameter tree: a letter of the README's list, L for
    the layers of a stack, None for an axis without a name (the gain of a norm)."""
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    stem, _, letters = names[-1].rpartition("_")
    own = tuple(letters) if stem and letters.isupper() else ()
    stacked = names[0].startswith("blocks")
    rest = ndim - stacked
    own = own if len(own) == rest else (None,) * rest
    return ("L",) * stacked + own


def partition_specs(params: Any, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Any:
    """The `PartitionSpec` of every parameter. A mesh axis holds at most one axis of a parameter (the first that `rules`
    gives it), and an axis that it does not divide stays whole."""

    def spec(path: tuple[Any, ...], leaf: Any) -> P:
        taken: list[str | None] = []
        for letter, size in zip(axis_letters(path, leaf.ndim), leaf.shape, strict=True):
            axis = rules.get(letter or "")
            devices = mesh.shape.get(axis, 1)
            fits = devices > 1 and axis not in taken and size % devices == 0
            taken.append(axis if fits else None)
        return P(*taken)

    return jax.tree_util.tree_map_with_path(spec, params)


def shard(params: Any, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Any:
    """`params` laid over the mesh."""
    specs = partition_specs(params, mesh, rules)
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)


def bytes_per_device(params: Any, mesh: Mesh, rules: Mapping[str, str] = RULES) -> int:
    """Bytes of parameters that one device holds."""
    specs = partition_specs(params, mesh, rules)
    share = lambda x, spec: x.size * x.dtype.itemsize // math.prod(mesh.shape[a] for a in spec if a is not None)
    return sum(jax.tree.leaves(jax.tree.map(share, params, specs)))
