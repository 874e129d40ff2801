"""Parameters in bfloat16 that do not lose small updates."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.quant import round_to

Weights = Literal["fp32", "bf16", "bf16_stochastic", "bf16_kahan"]


class MasterState(NamedTuple):
    """`count`: steps so far. `kept`, per parameter in turn: the float32 copy (`"fp32"`), what rounding has left over,
    in bfloat16 (`"bf16_kahan"`), or None. `inner`: the state of the wrapped transform, which sees float32."""

    count: jax.Array
    kept: tuple[jax.Array | None, ...]
    inner: Any


def with_master_weights(
    tx: optax.GradientTransformation, weights: Weights, *, seed: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    """`tx` in float32 for parameters that are stored in bfloat16; those of other types are updated as ever.

    - `"fp32"`: a float32 copy is updated, and the parameters are it, rounded to nearest (Micikevicius et al., arXiv
      1710.03740, section 3.1). 6 bytes per parameter.
    - `"bf16"`: parameter plus update, rounded to nearest: an update below half a spacing, 2^-9 to 2^-8 of the weight,
      is lost. 2 bytes.
    - `"bf16_stochastic"`: the same, rounded up or down so that the expected value is right; noise is a function of
      `seed`, the step and the parameter. 2 bytes.
    - `"bf16_kahan"`: the same as `"bf16"`, and what rounding cuts off is added in the next step (Kahan summation;
      Zamirai et al., arXiv 2010.06192). 4 bytes.

    Updates are float32 differences of two bfloat16 numbers, so that `optax.apply_updates` writes the intended one,
    unless it is below 2^-16 of the number before: then it is off by at most 2^-24 of that. Raises `ReproError` for an
    unknown name, and at `init` if no parameter is bfloat16.
    """
    if weights not in get_args(Weights):
        raise ReproError(f"weights {weights!r} is unknown; known are {', '.join(get_args(Weights))}.")
    tx = optax.with_extra_args_support(tx)

    def narrow(w: jax.Array) -> bool:
        return w.dtype == jnp.bfloat16

    def wide(params: Any, kept: tuple[jax.Array | None, ...]) -> Any:
        leaves, treedef = jax.tree.flatten(params)
        return treedef.unflatten([_intended(w, k, weights) for w, k in zip(leaves, kept, strict=True)])

    def init(params: Any) -> MasterState:
        leaves = jax.tree.leaves(params)
        if not any(map(narrow, leaves)):
            raise ReproError("no parameter is bfloat16; cast the parameters that should be before init.")
        start = {"fp32": lambda w: w.astype(jnp.float32), "bf16_kahan": jnp.zeros_like}.get(weights)
        kept = tuple(start(w) if start and narrow(w) else None for w in leaves)
        return MasterState(jnp.zeros((), jnp.int32), kept, tx.init(wide(params, kept)))

    def update(grads: Any, state: MasterState, params: Any, **extra: Any) -> tuple[Any, MasterState]:
        before = wide(params, state.kept)
        grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, before)
        updates, inner = tx.update(grads, state.inner, before, **extra)
        treedef = jax.tree.structure(params)
        key = jax.random.fold_in(jax.random.key(seed), state.count) if weights == "bf16_stochastic" else None
        steps, kept = [], []
        leaves = zip(*map(treedef.flatten_up_to, (params, before, updates)), strict=True)
        for i, (w, old, u) in enumerate(leaves):
            if not narrow(w):
                steps.append(u)
                kept.append(None)
                continue
            aim = old + u
            if key is None:
                new = round_to(aim, "bf16", overflow="ieee")
            else:
                own = jax.random.fold_in(key, i)
                new = round_to(aim, "bf16", rounding="stochastic", key=own, overflow="ieee")
            steps.append(new - w.astype(jnp.float32))
            left = {"fp32": aim, "bf16_kahan": (aim - new).astype(jnp.bfloat16)}
            kept.append(left.get(weights))
        return treedef.unflatten(steps), MasterState(optax.safe_increment(state.count), tuple(kept), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _intended(w: jax.Array, kept: jax.Array | None, weights: Weights) -> jax.Array:
    """The float32 value that a stored parameter stands for; one that is not bfloat16 stands for itself."""
    if w.dtype != jnp.bfloat16:
        return w
    if weights == "fp32":
        return kept
    return w.astype(jnp.float32) + (0 if kept is None else kept.astype(jnp.float32))
