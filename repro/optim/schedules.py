"""Schedules as fractions of the peak rate: `fraction(step)` for the 0-based step, from pieces of optax.

A warm-up reaches 1 on its last step and does not start at zero; a decay reaches its end on the last step. (optax's own
`warmup_cosine_decay_schedule` spends its first step at zero and reaches its end value one step after the last.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax.numpy as jnp
import optax

from repro.errors import ReproError

Fraction = Callable[[Any], Any]
DecayShape = Literal["linear", "cosine", "sqrt"]


def warmup_constant_cosine(steps: int, *, warmup: int = 0, constant: int = 0, final: float = 0.1) -> Fraction:
    """Linear over `warmup` steps, 1 for `constant` more, then half a cosine down to `final` on step `steps - 1`
    (Loshchilov and Hutter, arXiv 1608.03983, without restarts)."""
    return _three_pieces(steps, warmup, constant, final, "cosine")


def warmup_stable_decay(
    steps: int, *, warmup: int = 0, decay: int, final: float = 0.0, shape: DecayShape = "linear"
) -> Fraction:
    """Linear over `warmup` steps, 1, and over the last `decay` steps down to `final`: WSD (Hu et al., arXiv
    2404.06395).

    `shape` with p the part of the decay that is done: `"linear"` 1 - p, `"sqrt"` 1 - sqrt(p) (Hägele et al., arXiv
    2405.18392), or `"cosine"`.
    """
    _whole("decay", decay, least=1)
    _whole("steps", steps, least=1)
    _whole("warmup", warmup)
    if warmup + decay > steps:
        raise ReproError(f"warmup {warmup} and decay {decay} exceed the {steps} steps.")
    return _three_pieces(steps, warmup, steps - warmup - decay, final, shape)


def warmup_multistep(*, warmup: int = 0, milestones: Mapping[int, float]) -> Fraction:
    """Linear over `warmup` steps, then 1, and from every step that `milestones` names the fraction that it gives."""
    _whole("warmup", warmup)
    factors, before, last = {}, 1.0, warmup - 1
    for step, value in milestones.items():
        _whole("milestone", step)
        _fraction(f"the fraction from step {step} on", value)
        if step <= last or value == 0:
            raise ReproError("milestones must ascend, lie behind the warm-up and have fractions above 0.")
        factors[step], before, last = value / before, value, step
    stairs = optax.piecewise_constant_schedule(1.0, factors)

    def fraction(step: Any) -> Any:
        rising = (step + 1) / max(1, warmup)
        return jnp.where(step < warmup, rising, stairs(step)).astype(jnp.float32)

    return fraction


def _three_pieces(steps: int, warmup: int, constant: int, final: float, shape: DecayShape) -> Fraction:
    _whole("steps", steps, least=1)
    _whole("warmup", warmup)
    _whole("constant", constant)
    _fraction("final", final)
    if shape not in get_args(DecayShape):
        raise ReproError(f"decay shape {shape!r} is unknown; known are {', '.join(get_args(DecayShape))}.")
    decay = steps - warmup - constant
    if decay < 1:
        raise ReproError(f"warmup {warmup} and constant {constant} leave none of the {steps} steps to the decay.")
    falling = {
        "linear": optax.linear_schedule(1.0, final, decay),
        "cosine": optax.cosine_decay_schedule(1.0, decay, alpha=final),
        "sqrt": lambda count: 1 - (1 - final) * jnp.sqrt(jnp.clip(count / decay, 0.0, 1.0)),
    }[shape]
    pieces, ends = [optax.constant_schedule(1.0), falling], [warmup + constant]
    if warmup:
        pieces, ends = [optax.linear_schedule(0.0, 1.0, warmup), *pieces], [warmup, *ends]
    joined = optax.join_schedules(pieces, ends)
    return lambda step: jnp.asarray(joined(step + 1), jnp.float32)


def _whole(name: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ReproError(f"{name} is {value!r}; it must be a whole number of steps, at least {least}.")


def _fraction(name: str, value: Any) -> None:
    if not 0 <= value <= 1:
        raise ReproError(f"{name} is {value}; it must lie in [0, 1].")
