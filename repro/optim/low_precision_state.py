"""An optimizer whose state is stored in few bits between steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.optim.dynamic_code import DynamicCodes, encode_dynamic
from repro.quant import QTensor, Recipe, quantize, round_to
from repro.quant.recipes import SMALLEST_FLOOR

StateFormat = Literal["bf16", "e4m3", "e5m2", "int8", "dynamic8", "dynamic8_unsigned"]
StateRounding = Literal["nearest_even", "stochastic"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("data",), meta_fields=("shape",))
@dataclass(frozen=True)
class Packed:
    """An array of `shape` in eight-bit codes: its elements in a row, in blocks with a float32 scale each."""

    data: QTensor | DynamicCodes
    shape: tuple[int, ...]


class LowPrecisionState(NamedTuple):
    """`count`: steps so far; `inner`: the wrapped state, its moments as bfloat16 arrays or `Packed`."""

    count: jax.Array
    inner: Any


def pack(x: jax.Array, fmt: StateFormat, block: int, key: jax.Array | None) -> jax.Array | Packed:
    """`x` (float32, at least one axis) as it is stored; stochastic rounding with a key."""
    rounding = "nearest_even" if key is None else "stochastic"
    if fmt == "bf16":
        return round_to(x, "bf16", rounding=rounding, key=key, overflow="ieee").astype(jnp.bfloat16)
    if fmt in ("dynamic8", "dynamic8_unsigned"):
        return Packed(encode_dynamic(x.ravel(), signed=fmt == "dynamic8", block=block, key=key), x.shape)
    recipe = Recipe(fmt, (1, block), "fp32", "amax", None, SMALLEST_FLOOR, rounding)
    codes = quantize(x.ravel(), recipe, key=key)
    # How it was rounded does not matter any more, and one tree structure must serve the first state and all others.
    return Packed(replace(codes, recipe=replace(recipe, rounding="nearest_even")), x.shape)


def unpack(x: jax.Array | Packed) -> jax.Array:
    """The float32 array of what `pack` stored."""
    return x.data.dequantize().reshape(x.shape) if isinstance(x, Packed) else x.astype(jnp.float32)


def with_low_precision_state(
    tx: optax.GradientTransformation,
    fmt: StateFormat | Mapping[str, StateFormat],
    *,
    rounding: StateRounding = "nearest_even",
    seed: int | jax.Array = 0,
    block: int = 256,
) -> optax.GradientTransformationExtraArgs:
    """`tx` with the arrays of its state stored in `fmt` after every step; a step itself is float32, and its update is
    that of the moments before they are rounded.

    - `fmt`: `"bf16"` (DeepSeek-V3, arXiv 2412.19437, section 3.3.3); `"e4m3"`, `"e5m2"` or `"int8"` in blocks of
      `block` elements with a float32 scale, amax / max; `"dynamic8"` or for what is never negative
      `"dynamic8_unsigned"` (Dettmers et al., arXiv 2110.02861) with a scale of amax. Every floating-point array with at
      least one axis is stored so: counters and single numbers are not. A mapping such as `{"mu": "e4m3", "nu": "e5m2"}`
      names the fields of the state that are, each with its format; others stay float32.
    - `rounding`: `"stochastic"` makes the stored value right on average; its noise is a function of `seed`, the step
      and the leaf. With `"nearest_even"` a running mean stops where a step changes it by less than half a spacing of
      the format: in bfloat16 a second moment with b2 = 0.999 never falls.
    - Codes of `"int8"` are linear: entries below 1/254 of the largest of their block become 0, and Adam then divides
      by eps alone. That is what the dynamic codes are for.

    Optax has `mu_dtype` only, for first moments and by rounding to nearest. Raises `ReproError` for an unknown format
    or rounding, for a block below 1, and at `init` for a field that the state does not have.
    """
    known = get_args(StateFormat)
    for name in fmt.values() if isinstance(fmt, Mapping) else (fmt,):
        if name not in known:
            raise ReproError(f"state format {name!r} is unknown; known are {', '.join(known)}.")
    if rounding not in get_args(StateRounding):
        raise ReproError(f"state rounding {rounding!r} is unknown; known are {', '.join(get_args(StateRounding))}.")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ReproError(f"block is {block!r}; it must be a whole number of elements, at least 1.")
    tx = optax.with_extra_args_support(tx)

    def format_at(path: tuple, leaf: Any) -> str | None:
        if not isinstance(leaf, Packed) and not (jnp.ndim(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return None
        if not isinstance(fmt, Mapping):
            return fmt
        parts = [jax.tree_util.keystr((part,), simple=True) for part in path]
        return next((fmt[part] for part in parts if part in fmt), None)

    def leaves_of(state: Any) -> tuple[list, Any]:
        found, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, Packed))
        return [(leaf, format_at(path, leaf)) for path, leaf in found], treedef

    def stored(state: Any, key: jax.Array | None) -> Any:
        found, treedef = leaves_of(state)
        packed = []
        for i, (leaf, name) in enumerate(found):
            own = None if key is None else jax.random.fold_in(key, i)
            packed.append(leaf if name is None else pack(leaf.astype(jnp.float32), name, block, own))
        return treedef.unflatten(packed)

    def restored(state: Any) -> Any:
        found, treedef = leaves_of(state)
        return treedef.unflatten([leaf if name is None else unpack(leaf) for leaf, name in found])

    def init(params: Any) -> LowPrecisionState:
        state = tx.init(_wide(params))
        if isinstance(fmt, Mapping):
            used = {
                jax.tree_util.keystr((part,), simple=True)
                for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]
                for part in path
            }
            for name in fmt:
                if name not in used:
                    raise ReproError(f"the optimizer's state has no field {name!r} to store in {fmt[name]}.")
        return LowPrecisionState(jnp.zeros((), jnp.int32), stored(state, None))

    def update(grads: Any, state: LowPrecisionState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        wide = None if params is None else _wide(params)
        updates, inner = tx.update(_wide(grads), restored(state.inner), wide, **extra)
        key = jax.random.fold_in(jax.random.key(seed), state.count) if rounding == "stochastic" else None
        updates = jax.tree.map(lambda u, g: u.astype(g.dtype), updates, grads)
        return updates, LowPrecisionState(optax.safe_increment(state.count), stored(inner, key))

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
