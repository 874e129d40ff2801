"""Whether the machine did what it was told: a checksum of bits, and the first number that is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from repro.errors import ReproError
from repro.optim.layout import path_name
from repro.train.monitors.monitor import Metrics, Monitor, Observation

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig

_TREES = {"gradient": "grads", "update": "updates", "parameter": "new_params"}


def _bits(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32, one entry per number."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return words.astype(jnp.uint32)


def checksum(tree: Any) -> jax.Array:
    """sum of bits_i * (2 i + 1) modulo 2^32, uint32, over all numbers of a tree in order (types of at most 32 bits).

    Sums of integers do not depend on their order, so the result is the same eagerly, under jit, under vmap and on any
    number of devices. One changed bit always changes it, since the factors are odd; that they differ shows numbers that
    changed places.
    """
    total, first = jnp.zeros((), jnp.uint32), 0
    for leaf in map(jnp.asarray, jax.tree.leaves(tree)):
        place = jax.lax.iota(jnp.uint32, leaf.size) + jnp.uint32(first % 2**32)
        total += jnp.sum(_bits(leaf).reshape(-1) * (2 * place + 1), dtype=jnp.uint32)
        first += leaf.size
    return total


def watched_names(params: Any) -> tuple[str, ...]:
    """What `first_nonfinite` counts through, in order of computation; `params` are arrays or shapes."""
    leaves = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    return ("attention logits", "activations", "hidden units", "loss") + tuple(
        f"{kind} {leaf}" for kind in _TREES for leaf in leaves
    )


def nonfinite_name(index: int, params: Any) -> str | None:
    """The name of an index of `first_nonfinite`; None for -1. Raises `ReproError` for an index that does not exist."""
    names = watched_names(params)
    if not -1 <= index < len(names):
        raise ReproError(f"there is no tensor {index} among the {len(names)} that first_nonfinite watches.")
    return None if index == -1 else names[index]


def _first_nonfinite(seen: Observation) -> jax.Array:
    stats = seen.output.stats
    forward = (stats.max_abs_logit, stats.activation_max, stats.hidden_max, seen.loss)
    leaves = [*forward, *(leaf for field in _TREES.values() for leaf in jax.tree.leaves(getattr(seen, field)))]
    wrong = jnp.stack([~jnp.isfinite(leaf).all() for leaf in leaves])
    return jnp.where(wrong.any(), jnp.argmax(wrong), -1).astype(jnp.int32)


def _nonfinite(config: MonitorConfig, seen: Observation) -> Metrics:
    return {"first_nonfinite": _first_nonfinite(seen)}


def _checksum(config: MonitorConfig, seen: Observation) -> Metrics:
    return {"checksum": checksum(seen.new_params), "state_checksum": checksum(seen.opt_state)}


CHECKSUM = Monitor(
    name="checksum",
    group="system",
    dear=False,
    sees="hardware, a kernel or a collective that does not repeat itself: the step in which two runs or a replay part",
    cannot_prove="that data and algorithm are right: a wrong step repeats itself too",
    metrics={
        "checksum": "uint32, sum of bits_i (2 i + 1) over all parameters as the step computed them, skipped or not",
        "state_checksum": "uint32, the same of the optimizer's state",
    },
    measure=_checksum,
)

NONFINITE = Monitor(
    name="nonfinite",
    group="system",
    dear=False,
    sees="where NaN or infinity enters: the first tensor in order of computation that holds one",
    cannot_prove="that data and algorithm are right; within a forward pass only maxima are watched",
    metrics={"first_nonfinite": "int32, number of that tensor in `watched_names(params)`; -1 if all are finite"},
    measure=_nonfinite,
)

MONITORS = (CHECKSUM, NONFINITE)
