"""Muon under a mesh: momentum in shards, and every matrix orthogonalised whole by one device.

Newton–Schulz needs whole matrices, so the shards of a matrix have to meet. Here they meet on one device, its owner, and
nowhere else: owners fetch the missing shards of their own matrices, and no device gathers a whole parameter (ownership as
in the Kimi K3 report; momentum in shards over data-parallel devices as in Moonlight, arXiv 2502.16982, section 2.3). What a
matrix is follows from layouts and global shapes alone, never from the shape of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from repro.errors import ReproError
from repro.optim.adamw import Decay, decayed
from repro.optim.adamw import adamw as adamw_for_all
from repro.optim.finite import check_finite
from repro.optim.groups import by_role
from repro.optim.layout import matched, path_name
from repro.optim.muon import RMS, MuonState, accumulate, orthogonalise
from repro.optim.newton_schulz import Schedule, newton_schulz, schedule_table
from repro.optim.owners import Placed, assign, check_spec, spec_names

ZERO_AXES = ("data", "fsdp")
"""Mesh axes over which momentum is split even where the parameter is not."""


def momentum_spec(spec: P, shape: tuple[int, ...], mesh: Mesh, axes: Sequence[str] = ZERO_AXES) -> P:
    """The partition of a parameter's momentum: that of the parameter, and each of `axes` that it leaves unused on the first
    axis of `shape` that divides; a parameter without such an axis keeps a copy on every device."""
    entries = spec_names(spec, len(shape))
    used = {name for entry in entries for name in entry}
    for axis in axes:
        if mesh.shape.get(axis, 1) == 1 or axis in used:
            continue
        for i, size in enumerate(shape):
            if size % (math.prod(mesh.shape[n] for n in entries[i]) * mesh.shape[axis]) == 0:
                entries[i] += (axis,)
                break
    return P(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in entries))


def by_owners(
    tree: Any, layouts: Any, specs: Any, mesh: Mesh, table: Schedule, rms: Any, dtype: str | jnp.dtype
) -> Any:
    """`orthogonalise` on a tree laid out by `specs`, each matrix by its owner; the result is laid out in the same way."""
    axes = tuple(n for n in mesh.axis_names if n != "seed")
    laid = jax.tree.leaves(specs, is_leaf=_is_spec)
    placed = [
        Placed(leaf.shape, layout, tuple(spec_names(spec, leaf.ndim)), mesh, axes)
        for (_, leaf, layout), spec in zip(matched(tree, layouts), laid, strict=True)
    ]
    devices = math.prod(mesh.shape[n] for n in axes)
    found = [p.slices() for p in placed]
    costs = [p.flops(len(table)) for p, slices in zip(placed, found, strict=True) for _ in slices]
    owners = iter(assign(costs, devices, [holders for slices in found for _, holders in slices]))
    tables = [p.table([next(owners) for _ in slices]) for p, slices in zip(placed, found, strict=True)]
    leaves, treedef = jax.tree.flatten(tree)
    names = [str(i) for i in range(len(leaves))]
    own_layouts = {name: p.slice_layout() for name, p in zip(names, placed, strict=True)}

    def iterate(stacks: list[jax.Array]) -> list[jax.Array]:
        step = lambda x: newton_schulz(x, table, dtype=dtype)
        # One at a time, so that an empty slot, which is zero, costs its device nothing.
        return [jax.lax.map(lambda x: jax.lax.cond(jnp.any(x != 0), step, lambda x: x, x), stack) for stack in stacks]

    def local(places: list[jax.Array], shards: list[jax.Array]) -> list[jax.Array]:
        own = [p.to_owners(x, at[0]) for p, x, at in zip(placed, shards, places, strict=True)]
        own = dict(zip(names, own, strict=True))
        done = orthogonalise(own, own_layouts, schedule=table, rms=rms, dtype=dtype, iterate=iterate)
        return [p.from_owners(done[name], at[0]) for p, name, at in zip(placed, names, places, strict=True)]

    by_device = [P(axes)] * len(leaves)
    run = jax.shard_map(local, mesh=_current(mesh), in_specs=(by_device, laid), out_specs=laid, check_vma=False)
    return jax.tree.unflatten(treedef, run([jnp.asarray(t) for t in tables], leaves))


def _current(mesh: Mesh) -> Any:
    """The mesh as the surrounding program sees it: inside `auto_axes` its axes are no longer explicit."""
    context = jax.sharding.get_abstract_mesh()
    return mesh if context.empty else context


def _constrain(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(_current(mesh), spec))


def _in_auto_mode(f: Callable[..., Any], mesh: Mesh, out_specs: Any) -> Callable[..., Any]:
    """`f` with results laid out by `out_specs`, traced with the partitioner free to choose, also on an explicit mesh."""
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs, is_leaf=_is_spec)
        return jax.sharding.auto_axes(f, axes=mesh.axis_names, out_sharding=out)

    def constrained(*args: Any) -> Any:
        return jax.tree.map(lambda spec, x: _constrain(x, mesh, spec), out_specs, f(*args), is_leaf=_is_spec)

    return constrained


def _is_spec(x: Any) -> bool:
    return isinstance(x, P | NamedSharding)


def scale_by_distributed_muon(
    layouts: Any,
    specs: Any,
    mesh: Mesh,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    schedule: str | Schedule = "muon5",
    rms: float | RMS = 0.2,
    dtype: str | jnp.dtype = "float32",
) -> optax.GradientTransformation:
    """`scale_by_muon` for parameters that `specs` (a `PartitionSpec` or `NamedSharding` per parameter) lays over `mesh`, in
    auto or explicit mode.

    Updates have the layout of the parameters, momentum that of `momentum_spec`. Every device may be an owner; along a mesh
    axis `seed`, where runs are independent, all do the same. Raises `ReproError` for a parameter without a spec, for a mesh
    axis that does not exist and for one that does not divide.
    """
    table = schedule_table(schedule)
    check_finite(momentum=momentum, rms=rms)
    flat = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)[0]
    declared = {path_name(path): s.spec if isinstance(s, NamedSharding) else s for path, s in flat}

    def specs_of(tree: Any) -> tuple[Any, Any]:
        """The specs of parameters and of momentum, as trees like `tree`."""

        def find(path: tuple, leaf: Any) -> P:
            if (name := path_name(path)) not in declared:
                raise ReproError(
                    f"parameter {name} has no PartitionSpec among the specs; P() keeps it whole everywhere."
                )
            check_spec(name, declared[name], leaf.shape, mesh)
            return declared[name]

        own = jax.tree_util.tree_map_with_path(find, tree)
        return own, jax.tree.map(lambda x, s: momentum_spec(s, x.shape, mesh), tree, own)

    def init(params: Any) -> MuonState:
        _, sharded = specs_of(params)
        zeros = lambda x, spec: jnp.zeros(x.shape, x.dtype, device=NamedSharding(mesh, spec))
        return MuonState(jax.tree.map(zeros, params, sharded))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        own, sharded = specs_of(grads)
        shard = lambda tree: jax.tree.map(lambda x, spec: _constrain(x, mesh, spec), tree, sharded)

        def step(grads: Any, before: Any) -> tuple[Any, Any]:
            grads = shard(grads)
            summed, ahead = accumulate(grads, before, momentum, nesterov)
            return by_owners(shard(ahead), layouts, sharded, mesh, table, rms, dtype), summed

        updates, summed = _in_auto_mode(step, mesh, (own, sharded))(grads, state.momentum)
        return updates, MuonState(summed)

    return optax.GradientTransformation(init, update)


def distributed_muon(
    learning_rate: Any,
    *,
    layouts: Any,
    specs: Any,
    mesh: Mesh,
    weight_decay: Any = 0.1,
    decay: Decay = "coupled",
    roles: tuple[str, ...] = ("matrix",),
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    adamw: optax.GradientTransformation | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """`muon` for parameters that `specs` lays over `mesh`; `options` are those of `scale_by_distributed_muon`. AdamW's
    moments take the layout of their parameters."""
    check_finite(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2, eps=eps)
    orthogonalised = scale_by_distributed_muon(layouts, specs, mesh, **options)
    if adamw is None:
        adamw = adamw_for_all(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, decay=decay)
    return by_role(layouts, roles, decayed(orthogonalised, learning_rate, weight_decay, decay), adamw)
