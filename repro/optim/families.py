"""Optimizers by name, with one interface: `f(learning_rate, *, weight_decay, decay, ...)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import optax

from repro.errors import ReproError
from repro.optim.adafactor import adafactor
from repro.optim.adalayer import adalayer
from repro.optim.adamw import Decay, adamw, decayed
from repro.optim.finite import check_adam
from repro.optim.muon import muon
from repro.optim.shampoo import shampoo
from repro.optim.soap import soap
from repro.optim.stable_adamw import stable_adamw


def sgd(
    learning_rate: Any,
    *,
    weight_decay: Any = 0.0,
    decay: Decay = "l2",
    momentum: float | None = 0.9,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """M = momentum M + G; W <- W - lr M; `optax.sgd` with decay, by default in the gradient."""
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay, momentum=momentum)
    if momentum is None and nesterov:
        raise ReproError("Nesterov's form needs a momentum.")
    scaled = optax.identity() if momentum is None else optax.trace(momentum, nesterov=nesterov)
    return decayed(scaled, learning_rate, weight_decay, decay)


def adam(
    learning_rate: Any,
    *,
    weight_decay: Any = 0.0,
    decay: Decay = "l2",
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """`optax.adam` (Kingma and Ba, arXiv 1412.6980), with decay in the gradient by default, where it is divided by
    sqrt(v) like the gradient; `adamw` is the decoupled form."""
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2, eps=eps)
    return decayed(optax.scale_by_adam(b1=b1, b2=b2, eps=eps), learning_rate, weight_decay, decay)


def lion(
    learning_rate: Any, *, weight_decay: Any = 0.1, decay: Decay = "coupled", b1: float = 0.9, b2: float = 0.99
) -> optax.GradientTransformation:
    """U = sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g; `optax.lion` (Chen et al., arXiv 2302.06675). The
    update has a root mean square of exactly the rate, so it wants a smaller rate and a larger decay than AdamW."""
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2)
    return decayed(optax.scale_by_lion(b1=b1, b2=b2), learning_rate, weight_decay, decay)


def signum(
    learning_rate: Any, *, weight_decay: Any = 0.1, decay: Decay = "coupled", b1: float = 0.9
) -> optax.GradientTransformation:
    """U = sign(m), m <- b1 m + (1 - b1) g before it; `optax.signum` (Bernstein et al., arXiv 1802.04434) with decay."""
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1)
    scaled = optax.chain(optax.ema(b1, debias=False), optax.scale_by_sign())
    return decayed(scaled, learning_rate, weight_decay, decay)


OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = MappingProxyType(
    {
        "sgd": sgd,
        "adam": adam,
        "adamw": adamw,
        "adafactor": adafactor,
        "lion": lion,
        "signum": signum,
        "stable_adamw": stable_adamw,
        "adalayer": adalayer,
        "muon": muon,
        "shampoo": shampoo,
        "soap": soap,
    }
)
"""Constructors by name."""


def optimizer(name: str, learning_rate: Any, *, layouts: Any = None, **options: Any) -> optax.GradientTransformation:
    """The optimizer of a name of `OPTIMIZERS`; `layouts` goes to those that tell parameters apart, `options` are its
    own.

    Raises `ReproError` for an unknown name or option, and where an optimizer needs layouts and there are none.
    """
    if name not in OPTIMIZERS:
        raise ReproError(f"optimizer {name!r} is unknown; known are {', '.join(OPTIMIZERS)}.")
    known = inspect.signature(OPTIMIZERS[name]).parameters
    for option in options:
        if option not in known:
            raise ReproError(f"optimizer {name} has no option {option!r}; it has {', '.join(list(known)[1:])}.")
    if "layouts" in known:
        if layouts is None and known["layouts"].default is inspect.Parameter.empty:
            raise ReproError(f"optimizer {name} needs layouts, which say what is a matrix.")
        options["layouts"] = layouts
    return OPTIMIZERS[name](learning_rate, **options)
