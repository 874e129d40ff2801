"""Adalayer: Adam with one second moment per tensor instead of one per coordinate."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.optim.adamw import Decay, decayed
from repro.optim.finite import check_adam
from repro.optim.layout import ROLES, Layout
from repro.optim.tensors import map_tensors, mean_square


class AdalayerState(NamedTuple):
    """`mu`: a tree like the parameters; `nu`: per tensor one number, with axes of size 1; both float32."""

    count: jax.Array
    mu: Any
    nu: Any


def scale_by_adalayer(
    layouts: Any = None,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    coordinate_roles: tuple[str, ...] = (),
) -> optax.GradientTransformation:
    """mu / (sqrt(nu) + eps) with nu the running mean of mean(g^2) over each tensor, both debiased as in Adam (Zhao et
    al., arXiv 2407.07972). Roles among `coordinate_roles` keep one nu per coordinate, that is Adam.

    With layouts a tensor is one layer's and one expert's parameter. optax has no such transform.
    """
    check_adam(b1=b1, b2=b2, eps=eps)
    for role in coordinate_roles:
        if role not in ROLES:
            raise ReproError(f"role {role!r} is unknown; known are {', '.join(ROLES)}.")
    if coordinate_roles and layouts is None:
        raise ReproError("coordinate_roles needs layouts, which say what role a parameter has.")

    def size(layout: Layout | None, g: jax.Array) -> jax.Array:
        if layout is not None and layout.role in coordinate_roles:
            return jnp.square(g.astype(jnp.float32))
        return mean_square(g, layout)

    def init(params: Any) -> AdalayerState:
        def one(layout: Layout | None, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            nu = jax.eval_shape(lambda x: size(layout, x), w)
            return jnp.zeros(w.shape, jnp.float32), jnp.zeros(nu.shape, jnp.float32)

        return AdalayerState(jnp.zeros((), jnp.int32), *map_tensors(one, 2, layouts, params))

    def update(grads: Any, state: AdalayerState, params: Any = None) -> tuple[Any, AdalayerState]:
        del params
        count = optax.safe_increment(state.count)
        t = count.astype(jnp.float32)
        debias1, debias2 = 1 - jnp.float32(b1) ** t, 1 - jnp.float32(b2) ** t

        def one(layout, g, mu, nu):
            mu = b1 * mu + (1 - b1) * g.astype(jnp.float32)
            nu = b2 * nu + (1 - b2) * size(layout, g)
            return (mu / debias1 / (jnp.sqrt(nu / debias2) + eps)).astype(g.dtype), mu, nu

        updates, mu, nu = map_tensors(one, 3, layouts, grads, state.mu, state.nu)
        return updates, AdalayerState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def adalayer(
    learning_rate: Any,
    *,
    weight_decay: Any = 0.1,
    decay: Decay = "coupled",
    layouts: Any = None,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    coordinate_roles: tuple[str, ...] = (),
) -> optax.GradientTransformation:
    """Adalayer with decay. `coordinate_roles=("head", "norm")` is the hybrid of Zhao et al. (arXiv 2407.07972), who
    find that only the last layer and the norms need a second moment per coordinate."""
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay)
    scaled = scale_by_adalayer(layouts, b1=b1, b2=b2, eps=eps, coordinate_roles=coordinate_roles)
    return decayed(scaled, learning_rate, weight_decay, decay)
