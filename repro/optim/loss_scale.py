"""Dynamic loss scaling: gradients of a scaled loss, and no step where they overflow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.optim.finite import check_range


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The rule of the scale: times `growth` after `interval` finite steps in a row, times `backoff` after a step that
    overflowed, within [smallest, largest] (Micikevicius et al., arXiv 1710.03740, section 3.2). `initial`, `growth`,
    `backoff` and `interval` are by default those of PyTorch's `GradScaler`.

    Unscaling is exact for powers of two. Raises `ReproError` for numbers that would not grow or shrink the scale.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    smallest: float = 2.0**-14
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        for field in ("initial", "smallest", "largest"):
            if not 0 < getattr(self, field) < math.inf:
                raise ReproError(f"loss scale {field} is {getattr(self, field)}; it must be positive and finite.")
        if not self.smallest <= self.initial <= self.largest:
            raise ReproError(f"loss scale {self.initial} is outside [{self.smallest}, {self.largest}].")
        if not 1 < self.growth < math.inf:
            raise ReproError(f"loss scale growth is {self.growth}; it must be above 1 and finite.")
        if not 0 < self.backoff < 1:
            raise ReproError(f"loss scale backoff is {self.backoff}; it must lie between 0 and 1.")
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise ReproError(f"loss scale interval is {self.interval!r}; it must be a whole number, at least 1.")
        check_range(1, 2**31 - 1, interval=self.interval)

    def init(self) -> ScaleState:
        """The state before the first step."""
        zero = jnp.zeros((), jnp.int32)
        return ScaleState(jnp.asarray(self.initial, jnp.float32), zero, zero + 0, zero + 0)

    def after(self, state: ScaleState, finite: jax.Array) -> ScaleState:
        """The state after a step whose gradients were `finite` (a boolean) or not."""
        clean = jnp.where(finite, state.clean + 1, 0)
        grows = clean >= self.interval
        factor = jnp.where(finite, jnp.where(grows, self.growth, 1.0), self.backoff)
        scale = jnp.clip(state.scale * factor, self.smallest, self.largest)
        done = finite.astype(jnp.int32)
        return ScaleState(scale, jnp.where(grows, 0, clean), state.taken + done, state.skipped + 1 - done)


class ScaleState(NamedTuple):
    """`scale` float32; `clean`: finite steps since the last change; `taken` and `skipped` steps in all; int32."""

    scale: jax.Array
    clean: jax.Array
    taken: jax.Array
    skipped: jax.Array


class LossScaleState(NamedTuple):
    """`scale`: the scale of the next loss and its counters; `inner`: the state of the wrapped transform."""

    scale: ScaleState
    inner: Any


def all_finite(tree: Any) -> jax.Array:
    """Whether no element of any leaf is NaN or infinite."""
    return jnp.all(jnp.stack([jnp.array(True), *(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree))]))


def with_loss_scale(
    tx: optax.GradientTransformation, rule: LossScale | None = None
) -> optax.GradientTransformationExtraArgs:
    """`tx` for gradients of `loss * state.scale.scale`: they are divided by the scale in float32, and if one of them is
    not finite the step is skipped. Without `rule` that of `LossScale()`.

    A skipped step leaves the parameters and the state of `tx` as they are, to the bit, counters of its schedules
    included: updates are then -0, which `optax.apply_updates` adds without a trace (but for subnormal numbers where a
    backend takes them for zero). Clipping belongs inside `tx`, since a threshold means unscaled gradients. One scale
    must hold for all microbatches of a step.
    """
    rule = LossScale() if rule is None else rule
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(rule.init(), tx.init(params))

    def update(grads: Any, state: LossScaleState, params: Any = None, **extra: Any) -> tuple[Any, LossScaleState]:
        plain = jax.tree.map(lambda g: g.astype(jnp.float32) / state.scale.scale, grads)
        finite = all_finite(plain)
        updates, inner = tx.update(plain, state.inner, params, **extra)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, jnp.full_like(u, -0.0)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner, state.inner)
        return updates, LossScaleState(rule.after(state.scale, finite), inner)

    return optax.GradientTransformationExtraArgs(init, update)
