"""How the runs of one structure are laid over devices.

Each run ("lane") is a program of its own: nothing is ever summed across lanes, so a lane's bits depend neither on its
company nor on the number of devices of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("seed", "data", "fsdp", "tensor", "expert")

_CPU_SEATS = 32
"""Lanes on all CPU devices together that one program has room for; jobs of up to so many share one compilation."""


def lane_mesh(devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh of all devices with everything on the `seed` axis."""
    devices = jax.devices() if devices is None else devices
    return jax.sharding.Mesh(np.array(devices).reshape(-1, 1, 1, 1, 1), AXES)


def batched(mesh: jax.sharding.Mesh) -> bool:
    """Whether a device runs its lanes as one batch (accelerators) or one after another (CPU)."""
    return mesh.devices.flat[0].platform != "cpu"


class Seats:
    """Where each of `lanes` lanes sits: lane i on device i mod D, so that devices share the work evenly.

    Arrays on the mesh have a leading axis of D x seats; seats without a lane hold copies of the last lane.
    """

    def __init__(self, lanes: int, mesh: jax.sharding.Mesh) -> None:
        devices = mesh.shape["seed"]
        per_device = -(-lanes // devices)
        self.mesh, self.lanes = mesh, lanes
        self.seats = per_device if batched(mesh) else max(per_device, _CPU_SEATS // devices)
        self.total = devices * self.seats
        lane = np.arange(lanes)
        self._seat_of = (lane % devices) * self.seats + lane // devices
        self._lane_at = np.full(self.total, lanes - 1)
        self._lane_at[self._seat_of] = lane
        self.counts = place(np.bincount(lane % devices, minlength=devices).astype(np.int32), mesh)

    def put(self, tree: Any) -> Any:
        """Host arrays [lanes, ...] onto the mesh as [seats, ...]."""
        return place(jax.tree.map(lambda x: np.ascontiguousarray(np.asarray(x)[self._lane_at]), tree), self.mesh)

    def take(self, tree: Any) -> Any:
        """Device arrays [seats, ...] as host arrays [lanes, ...]."""
        return jax.tree.map(lambda x: np.asarray(x)[self._seat_of], tree)


def over_lanes(
    f: Callable[..., Any], mesh: jax.sharding.Mesh, *, shared: int = 0, carried: bool = False
) -> Callable[..., Any]:
    """`f` of one lane as a function `(counts, *args)` of all seats: every argument but the last `shared` ones gains a
    leading seat axis, sharded over `seed`; so does every result. `counts` is `Seats.counts`. With `carried` f returns a
    pair whose first part continues its first argument, and may take its memory.

    On an accelerator a device runs its lanes as one batch (`vmap`). A CPU device runs them one after another, and only
    the seats that are taken: at these sizes one lane fills its caches, and 24 lanes of size `xs` took 2.6 times as long
    batched. The number of lanes is then data, not structure, so one compilation serves jobs of any size.
    """

    f = jax.jit(f, inline=True)  # traced once, not once more for the shapes of its results

    def local(count_1: jax.Array, *args: Any) -> Any:
        own, common = (args[:-shared], args[-shared:]) if shared else (args, ())
        if batched(mesh):
            return jax.vmap(lambda *lane: f(*lane, *common))(*own)
        at = lambda tree, i: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)
        seats = jax.tree.leaves(own)[0].shape[0]
        one = jax.eval_shape(lambda lane: f(*lane, *common), jax.eval_shape(lambda: at(own, 0)))
        empty = jax.tree.map(lambda x: jnp.zeros((seats, *x.shape), x.dtype), one)

        def lane(i: jax.Array, out: Any) -> Any:
            # What is carried is read where it is written, so that the loop needs no second copy of all seats.
            args = (at(out[0], i), *at(own[1:], i)) if carried else at(own, i)
            return jax.tree.map(lambda o, n: jax.lax.dynamic_update_index_in_dim(o, n, i, 0), out, f(*args, *common))

        return jax.lax.fori_loop(0, count_1[0], lane, (own[0], empty[1]) if carried else empty)

    def mapped(counts: jax.Array, *args: Any) -> Any:
        specs = tuple(P("seed") if i < len(args) - shared else P() for i in range(len(args)))
        return jax.shard_map(local, mesh=mesh, in_specs=(P("seed"), *specs), out_specs=P("seed"), check_vma=False)(
            counts, *args
        )

    return mapped


def place(tree: Any, mesh: jax.sharding.Mesh, *, lanes: bool = True) -> Any:
    """Host arrays onto the mesh, split by their leading axis, or whole on every device."""
    return jax.device_put(tree, NamedSharding(mesh, P("seed") if lanes else P()))
