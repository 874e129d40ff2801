"""StableAdamW: AdamW whose rate shrinks where the second moment is out of date."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.optim.adamw import Decay, decayed
from repro.optim.finite import check_adam, check_positive
from repro.optim.layout import Layout
from repro.optim.tensors import map_tensors, tensor_axes


class StableAdamState(NamedTuple):
    """`mu`, `nu`: debiased moments, trees like the parameters. `rms`: RMS_t of the last step per tensor, with axes of
    size 1 (layers and experts excepted). All float32."""

    count: jax.Array
    mu: Any
    nu: Any
    rms: Any


def scale_by_stable_adam(
    *, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8, weight_decay: Any = 0.0, layouts: Any = None
) -> optax.GradientTransformation:
    """(mu / (sqrt(nu) + eps) + weight_decay W) / max(1, RMS_t), RMS_t = sqrt(mean(g^2 / max(nu, eps^2))) per tensor
    (Wortsman et al., arXiv 2304.13013).

    Moments are debiased inside: the old one has the weight b (1 - b^(t-1)) / (1 - b^t) in step t from 1. nu already
    holds the current g. With layouts a tensor is one layer's and one expert's parameter. optax has no such transform.
    """
    check_adam(b1=b1, b2=b2, weight_decay=weight_decay)
    check_positive(eps=eps)

    def init(params: Any) -> StableAdamState:
        def one(layout: Layout | None, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            own = tensor_axes(w.ndim, layout)
            shape = tuple(1 if axis in own else size for axis, size in enumerate(w.shape))
            return tuple(jnp.zeros(size, jnp.float32) for size in (w.shape, w.shape, shape))

        return StableAdamState(jnp.zeros((), jnp.int32), *map_tensors(one, 3, layouts, params))

    def update(grads: Any, state: StableAdamState, params: Any) -> tuple[Any, StableAdamState]:
        count = optax.safe_increment(state.count)
        t = count.astype(jnp.float32)
        old1, old2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (jnp.float32(b1), jnp.float32(b2)))

        def one(layout, grad, mu, nu, w):
            g = grad.astype(jnp.float32)
            mu = old1 * mu + (1 - old1) * g
            nu = old2 * nu + (1 - old2) * jnp.square(g)
            ratio = jnp.square(g) / jnp.maximum(nu, eps**2)
            rms = jnp.sqrt(jnp.mean(ratio, axis=tensor_axes(g.ndim, layout), keepdims=True))
            u = mu / (jnp.sqrt(nu) + eps) + weight_decay * w.astype(jnp.float32)
            return (u / jnp.maximum(1.0, rms)).astype(grad.dtype), mu, nu, rms

        updates, mu, nu, rms = map_tensors(one, 4, layouts, grads, state.mu, state.nu, params)
        return updates, StableAdamState(count, mu, nu, rms)

    return optax.GradientTransformation(init, update)


def stable_adamw(
    learning_rate: Any,
    *,
    weight_decay: Any = 0.1,
    decay: Decay = "coupled",
    layouts: Any = None,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """StableAdamW (Wortsman et al., arXiv 2304.13013): the rate of each tensor is divided by max(1, RMS_t), and so is
    the coupled decay, as published. No gradient clipping is needed beside it."""
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay)
    inside = weight_decay if decay == "coupled" else 0.0
    scaled = scale_by_stable_adam(b1=b1, b2=b2, eps=eps, weight_decay=inside, layouts=layouts)
    return decayed(scaled, learning_rate, weight_decay, "none" if decay == "coupled" else decay)
