"""AdamW on every parameter, and weight decay of each kind."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.optim.finite import check_adam

Decay = Literal["coupled", "independent", "none", "l2"]


def decayed(
    scaled: optax.GradientTransformation, learning_rate: Any, weight_decay: Any, decay: Decay
) -> optax.GradientTransformation:
    """Decay of either kind with a transform that has no learning rate yet; `"l2"` is not decoupled and adds decay * W
    to the gradient, so that Adam divides it by sqrt(v) too (Loshchilov and Hutter, arXiv 1711.05101, section 2)."""
    if decay == "coupled":  # W <- W - lr * (U + decay * W)
        return optax.chain(scaled, optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))
    if decay == "independent":  # W <- W - lr * U - decay * W; a schedule of the decay is the caller's
        return optax.chain(
            scaled,
            optax.scale_by_learning_rate(learning_rate),
            optax.add_decayed_weights(-jnp.asarray(weight_decay)),
        )
    if decay == "l2":
        return optax.chain(optax.add_decayed_weights(weight_decay), scaled, optax.scale_by_learning_rate(learning_rate))
    if decay == "none":
        return optax.chain(scaled, optax.scale_by_learning_rate(learning_rate))
    raise ReproError(f"weight decay {decay!r} is unknown; known are {', '.join(Decay.__args__)}.")


def adamw(
    learning_rate: Any,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: Any = 0.1,
    decay: Decay = "coupled",
) -> optax.GradientTransformation:
    """AdamW on every parameter (Loshchilov and Hutter, arXiv 1711.05101), gains included.

    `decay="coupled"` equals `optax.adamw` and PyTorch: the decay is multiplied by the learning rate.
    `"independent"` shrinks by `weight_decay` alone; for the rule of Wortsman et al. (arXiv 2309.14322, section 3.2.1) pass
    the decay times the schedule's fraction, as `repro.train` does.
    """
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2, eps=eps)
    return decayed(optax.scale_by_adam(b1=b1, b2=b2, eps=eps), learning_rate, weight_decay, decay)
