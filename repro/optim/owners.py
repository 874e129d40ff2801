"""Which device orthogonalises which matrix, and how shards get to it and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from repro.errors import ReproError
from repro.optim.layout import Layout, to_blocks


def assign(costs: Sequence[float], devices: int, allowed: Sequence[Sequence[int]] | None = None) -> list[int]:
    """The device of every item, one of `allowed` where that is given: the most expensive item first, each to the device
    with the least to do so far (Graham, "Bounds on multiprocessing timing anomalies", 1969: without restrictions the
    largest load is at most 4/3 of the best possible)."""
    loads = [0.0] * devices
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[item] = min(range(devices) if allowed is None else allowed[item], key=loads.__getitem__)
        loads[owners[item]] += costs[item]
    return owners


def newton_schulz_flops(small: int, large: int, steps: int) -> int:
    """Operations of `steps` steps on one matrix in the direct form: two products with the long side and one without."""
    return steps * (4 * small**2 * large + 2 * small**3)


def spec_names(spec: P, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that split each of `ndim` axes."""
    named = lambda entry: () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    return [named(entry) for entry in (*spec, *(None,) * (ndim - len(spec)))]


def check_spec(name: str, spec: P, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Raises `ReproError` for a partition with an axis that the mesh does not have or along which runs are independent, or
    that does not divide `shape`."""
    if len(spec) > len(shape):
        raise ReproError(f"parameter {name} has {len(shape)} axes, and its PartitionSpec {spec} names {len(spec)}.")
    for axis, names in enumerate(spec_names(spec, len(shape))):
        if "seed" in names:
            raise ReproError(
                f"parameter {name}: the mesh axis seed separates runs, and cannot split one run's parameter."
            )
        for unknown in set(names) - set(mesh.axis_names):
            raise ReproError(
                f"parameter {name}: the mesh has no axis {unknown!r}; it has {', '.join(mesh.axis_names)}."
            )
        if shape[axis] % (parts := math.prod(mesh.shape[n] for n in names)):
            raise ReproError(
                f"parameter {name} of shape {shape}: axis {axis} does not divide by the {parts} of {names}."
            )


@dataclasses.dataclass(frozen=True)
class Placed:
    """One parameter over a mesh: `entries` names the mesh axes that split each of its axes, `axes` all mesh axes along
    which there are owners."""

    shape: tuple[int, ...]
    layout: Layout
    entries: tuple[tuple[str, ...], ...]
    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def matrix(self) -> tuple[int, ...]:
        """The axes that are inside a matrix; along all others lie separate slices."""
        return tuple(a for a in range(len(self.shape)) if a in self.layout.inputs + self.layout.outputs)

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(a for a in range(len(self.shape)) if a not in self.matrix)

    @property
    def across(self) -> tuple[str, ...]:
        """Mesh axes along which one matrix is split."""
        return tuple(n for n in self.axes if any(n in self.entries[a] for a in self.matrix))

    @property
    def copies(self) -> tuple[str, ...]:
        """Mesh axes along which the parameter is repeated."""
        return tuple(n for n in self.axes if not any(n in entry for entry in self.entries))

    def sizes(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.mesh.shape[n] for n in names)

    def local(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Sizes of a shard along `axes`."""
        return tuple(self.shape[a] // math.prod(self.sizes(self.entries[a])) for a in axes)

    def slice_layout(self) -> Layout:
        """The layout of slices [n, axes inside the matrix]."""
        at = {axis: 1 + i for i, axis in enumerate(self.matrix)}
        parts, moved = self.layout.parts, lambda axes: tuple(at[a] for a in axes)
        parts = dataclasses.replace(parts, axis=at[parts.axis]) if parts and parts.axis in at else None
        return Layout(self.layout.role, moved(self.layout.inputs), moved(self.layout.outputs), parts=parts)

    def flops(self, steps: int) -> int:
        """What one slice costs its owner."""
        one = jax.ShapeDtypeStruct((1, *(self.shape[a] for a in self.matrix)), jnp.float32)
        blocks = jax.eval_shape(lambda x: to_blocks(x, self.slice_layout()), one)
        return sum(newton_schulz_flops(*sorted(block.shape[-2:]), steps) for block in blocks)

    def slices(self) -> list[tuple[int, list[int]]]:
        """Of every slice its position in the shards that hold it, and the devices that do."""
        coordinates = np.indices(self.sizes(self.axes)).reshape(len(self.axes), -1)
        found = []
        for index in np.ndindex(*(self.shape[a] for a in self.batch)):
            holds = np.ones(coordinates.shape[1], bool)
            for i, axis, size in zip(index, self.batch, self.local(self.batch), strict=True):
                entry = self.entries[axis]
                where = np.unravel_index(i // size, self.sizes(entry)) if entry else ()
                for name, at in zip(entry, where, strict=True):
                    holds &= coordinates[self.axes.index(name)] == at
            inside = [i % size for i, size in zip(index, self.local(self.batch), strict=True)]
            place = int(np.ravel_multi_index(inside, self.local(self.batch))) if inside else 0
            found.append((place, np.flatnonzero(holds).tolist()))
        return found

    def table(self, owners: Sequence[int]) -> np.ndarray:
        """[device, owner along `across`, slot] to the position in the device's shard of the slice that goes there; empty
        slots are beyond the shard."""
        empty = math.prod(self.local(self.batch))
        counts = np.bincount(owners, minlength=math.prod(self.sizes(self.axes)))
        table = np.full((len(counts), math.prod(self.sizes(self.across)), max(1, counts.max())), empty, np.int32)
        coordinates = np.indices(self.sizes(self.axes)).reshape(len(self.axes), -1).T
        along = np.array([n in self.across for n in self.axes], bool)
        filled = np.zeros(len(counts), int)
        for owner, (place, _) in zip(owners, self.slices(), strict=True):
            group = (coordinates[:, ~along] == coordinates[owner, ~along]).all(1)
            ahead = tuple(coordinates[owner, along])
            column = int(np.ravel_multi_index(ahead, self.sizes(self.across))) if ahead else 0
            table[group, column, filled[owner]] = place
            filled[owner] += 1
        return table

    def to_owners(self, x: jax.Array, places: jax.Array) -> jax.Array:
        """A shard to the slices [slot, axes inside the matrix] that this device owns; zero where a slot is empty."""
        x = jnp.transpose(x, self.batch + self.matrix).reshape(-1, *self.local(self.matrix))
        x = jnp.take(x, places, axis=0, mode="fill", fill_value=0)  # [owner, slot, ...]
        if self.across:
            x = jax.lax.all_to_all(x, self.across, 0, 0, tiled=True)
        x = x.reshape(*self.sizes(self.across), *x.shape[1:])
        x = jnp.transpose(x, self._whole_order())
        return x.reshape(x.shape[0], *(self.shape[a] for a in self.matrix))

    def from_owners(self, y: jax.Array, places: jax.Array) -> jax.Array:
        """The inverse: this device's slices to its shard of the whole parameter."""
        split = [size for a in self.matrix for size in (*self.sizes(self.entries[a]), *self.local([a]))]
        y = jnp.transpose(y.reshape(y.shape[0], *split), np.argsort(self._whole_order()))
        y = y.reshape(-1, *y.shape[len(self.across) :])
        if self.across:
            y = jax.lax.all_to_all(y, self.across, 0, 0, tiled=True)
        empty = jnp.zeros((math.prod(self.local(self.batch)), *self.local(self.matrix)), y.dtype)
        x = empty.at[places].set(y, mode="drop")
        if self.copies:  # each copy has met only the owners among its own devices
            x = jax.lax.psum(x, self.copies)
        x = x.reshape(self.local(self.batch + self.matrix))
        return jnp.transpose(x, np.argsort(self.batch + self.matrix))

    def _whole_order(self) -> tuple[int, ...]:
        """[mesh axes across, slot, axes of a shard] to [slot, then for each axis its mesh axes and itself]."""
        first = len(self.across)
        order = [first]
        for i, axis in enumerate(self.matrix):
            order += [*(self.across.index(n) for n in self.entries[axis]), first + 1 + i]
        return tuple(order)
