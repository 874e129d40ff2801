"""QK-Clip: rescale the query and key weights of a head whose attention logits grew too large.

Which weight takes which power of gamma follows from its declaration, `Layout.qk` or `Part.qk` for a segment of an axis:

    q         gamma^alpha        the head's own key takes the rest
    k         gamma^(1 - alpha)
    q_shared  gamma              its key is shared with other heads, which must not change
    k_shared  untouched

So q.k of a clipped head scales by exactly gamma in multi-head attention (q, k), grouped-query attention (q_shared,
k_shared) and latent attention, whose logit is the sum of both kinds, and no other head's logit changes.
Source: Kimi K2 (arXiv 2507.20534), section 2.1. It does not treat grouped queries; their rule is this package's.

S is a maximum over the whole batch. Over microbatches: `jax.tree.map(jnp.maximum, a, b)`, or `with_qk_clip` around
`optax.MultiSteps`. Over devices: nothing to do where the batch is one sharded array; `axis_name` inside `shard_map`.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.optim.layout import Layout, is_layout, matched, named_layouts

_WITH_A_HEAD = ("q", "k", "q_shared")
_PAIRS = (("q", "k"), ("q_shared", "k_shared"))


def qk_clip_factor(max_logits: jax.Array, tau: jax.Array | float) -> jax.Array:
    """gamma = tau / S where S > tau, else 1, elementwise over heads.

    S is the signed maximum of a head's logits. The comparison comes first, so a head whose maximum is negative or
    zero gets exactly 1: min(1, tau / S) would be negative there and its square root NaN. tau = inf switches the clip
    off; S = +inf also gives 1, since a head that overflowed is a guard's business and not to be zeroed.
    Source: Kimi K2 (arXiv 2507.20534), section 2.1.
    """
    over = (max_logits > tau) & jnp.isfinite(max_logits)
    return jnp.where(over, tau / jnp.where(over, max_logits, 1.0), 1.0)


def qk_clip(
    params: Any,
    max_logits: jax.Array | Mapping[str, jax.Array],
    *,
    tau: jax.Array | float,
    layouts: Any,
    alpha: jax.Array | float = 0.5,
    axis_name: Any = None,
) -> Any:
    """`params` after the clip. To be called after the optimizer's step, decay included, with the maxima of the forward
    pass of that step.

    `max_logits` is an array [L, H] ([H] where the weights have no layer axis), or a mapping from attention group to
    one. With `axis_name` the maximum over that mapped axis is taken first. The logit of a clipped head then scales by
    exactly gamma for the same inputs; heads with gamma = 1 keep their bits, and momentum is left alone.

    Raises `ReproError` if a norm on queries or keys is declared (it would undo the clip), if an attention lacks its
    query or key projection or their head axis, for `max_logits` of another shape than layers and heads (a maximum per
    layer would clip every head) or without a group, for tau <= 0 and for alpha outside [0, 1].
    """
    _check(tau, alpha)
    groups = _groups(params, layouts)
    gammas = {g: qk_clip_factor(s, tau) for g, s in _maxima(max_logits, groups, axis_name).items()}
    leaves = [
        weight if (m := _multiplier(layout, weight.shape, gammas, alpha)) is None else _scaled(weight, m)
        for _, weight, layout in matched(params, layouts)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


class QKClipState(NamedTuple):
    """`inner`: the state of the wrapped transform. `max_logits`: the maximum over the microbatches of the step so far,
    -inf after a step. `factors`: gamma of the last step. Both are shaped like the `max_logits` that `update` takes."""

    inner: Any
    max_logits: Any
    factors: Any


def with_qk_clip(
    tx: optax.GradientTransformation | optax.MultiSteps,
    *,
    tau: jax.Array | float,
    layouts: Any,
    alpha: jax.Array | float = 0.5,
    log_only: bool = False,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """`tx`, then QK-Clip, as one transform whose `update` takes `max_logits=` (see `qk_clip`, also for errors).

    `params + updates` is `qk_clip(params + updates of tx)` to 1 ulp of the larger of |p| and |p + u|, and where a head
    is not clipped, the update of `tx` itself. It belongs at the end of a chain, and outside `optax.MultiSteps`, which
    would hand on the maxima of the last microbatch alone: around it, a step is clipped by the maximum over its
    microbatches. The state holds the factors; with `log_only` nothing else happens. `tau` may be a schedule by
    `optax.inject_hyperparams(with_qk_clip)(tx, tau=schedule, ...)`.
    """
    _check(tau, alpha)
    inner = tx if isinstance(tx, optax.MultiSteps) else optax.with_extra_args_support(tx)

    def init(params: Any) -> QKClipState:
        groups = _groups(params, layouts)
        filled = lambda value: _outward({g: jnp.full(shape, value, jnp.float32) for g, shape in groups.items()})
        return QKClipState(inner.init(params), filled(-jnp.inf), filled(1.0))

    def update(
        grads: Any, state: QKClipState, params: Any = None, *, max_logits: Any = None, **extra: Any
    ) -> tuple[Any, QKClipState]:
        if params is None or max_logits is None:
            raise ReproError("with_qk_clip needs update(grads, state, params, max_logits=...).")
        groups = _groups(params, layouts)
        updates, new_inner = inner.update(grads, state.inner, params, **extra)
        taken, stepped = _progress(state.inner, new_inner)
        before = _maxima(state.max_logits, groups, None)
        now = _maxima(max_logits, groups, axis_name)
        maxima = {g: jnp.where(taken, jnp.maximum(s, now[g].astype(s.dtype)), s) for g, s in before.items()}
        factors = {g: qk_clip_factor(s, tau) for g, s in maxima.items()}
        if not log_only:
            gammas = {g: jnp.where(stepped, gamma, 1.0) for g, gamma in factors.items()}
            pieces = zip(matched(params, layouts), jax.tree.leaves(updates), strict=True)
            leaves = [_clipped_update(p, u, _multiplier(n, p.shape, gammas, alpha)) for (_, p, n), u in pieces]
            updates = jax.tree.unflatten(jax.tree.structure(updates), leaves)
        last = _maxima(state.factors, groups, None)
        return updates, QKClipState(
            new_inner,
            _outward({g: jnp.where(stepped, -jnp.inf, s) for g, s in maxima.items()}),
            _outward({g: jnp.where(stepped, gamma, last[g]) for g, gamma in factors.items()}),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check(tau: Any, alpha: Any) -> None:
    if callable(tau):
        raise ReproError("tau is a function; give a number, or wrap with_qk_clip in optax.inject_hyperparams.")
    if isinstance(tau, numbers.Real) and not tau > 0:
        raise ReproError(f"tau is {tau}; it must be positive, or inf for no clip.")
    if isinstance(alpha, numbers.Real) and not 0 <= alpha <= 1:
        raise ReproError(f"alpha is {alpha}; it must lie in [0, 1].")


def _segments(layout: Layout, shape: tuple[int, ...]) -> list[tuple[str, int]]:
    """(qk, heads) of each segment of the layout's parts, or of the one that is everything."""
    heads = None if layout.head is None else shape[layout.head]
    if layout.parts is None:
        return [(layout.qk, heads)]
    return [
        (part.qk or layout.qk, part.size if layout.parts.axis == layout.head else heads)
        for part in layout.parts.segments
    ]


def _groups(params: Any, layouts: Any) -> dict[str, tuple[int, ...]]:
    """The shape of the maxima of every attention group, (layers, heads) or (heads,)."""
    for name, layout in named_layouts(layouts).items():
        if is_layout(layout) and layout.qk and layout.role == "norm":
            raise ReproError(f"QK-Clip is refused beside a norm on queries or keys, {name}, which would undo it.")
    kinds: dict[str, set[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight, layout in matched(params, layouts):
        for qk, heads in _segments(layout, weight.shape):
            if not qk:
                continue
            kinds.setdefault(layout.group, set()).add(qk)
            if qk not in _WITH_A_HEAD:
                continue
            if heads is None:
                raise ReproError(f"QK-Clip needs a head axis in the layout of {name}.")
            shape = (heads,) if layout.layer is None else (weight.shape[layout.layer], heads)
            if shapes.setdefault(layout.group, shape) != shape:
                raise ReproError(
                    f"{name} has {shape} layers and heads, and another weight of its attention {shapes[layout.group]}."
                )
    for group, found in kinds.items():
        for pair in _PAIRS:
            if len(found & set(pair)) == 1:
                raise ReproError(f"QK-Clip found no query and key projection, but {sorted(found)} alone{_of(group)}.")
    if not shapes:
        raise ReproError("QK-Clip found no query and key projection; mark them with Layout(..., qk='q') and qk='k'.")
    return shapes


def _of(group: str) -> str:
    return f" of group {group!r}" if group else ""


def _maxima(given: Any, groups: Mapping[str, tuple[int, ...]], axis_name: Any) -> dict[str, jax.Array]:
    """`max_logits` by group, of the right shapes, maximum over the mapped axis."""
    if not isinstance(given, Mapping):
        if len(groups) > 1:
            raise ReproError(f"max_logits must be a mapping of the attention groups {', '.join(sorted(groups))}.")
        given = dict.fromkeys(groups, given)
    if set(given) != set(groups):
        odd = min(set(given) ^ set(groups))
        raise ReproError(f"max_logits and the layouts name different attention groups: {odd!r} is in one alone.")
    for group, shape in groups.items():
        if jnp.shape(given[group]) != shape:
            raise ReproError(
                f"QK-Clip got max_logits of shape {jnp.shape(given[group])} for {shape} layers and heads{_of(group)}."
            )
    found = {group: jnp.asarray(given[group]) for group in groups}
    return found if axis_name is None else jax.lax.pmax(found, axis_name)


def _outward(by_group: dict[str, jax.Array]) -> Any:
    """An array where there is one group without a name, else the mapping."""
    return by_group[""] if set(by_group) == {""} else by_group


def _power(gamma: jax.Array, exponent: Any) -> jax.Array:
    """gamma ** exponent, and exactly 1 at 1."""
    if isinstance(exponent, numbers.Real) and exponent in (0.5, 1.0):  # sqrt, not pow: correctly rounded
        return jnp.sqrt(gamma) if exponent == 0.5 else gamma
    return jnp.where(gamma < 1.0, gamma**exponent, 1.0)


def _multiplier(
    layout: Layout, shape: tuple[int, ...], gammas: Mapping[str, jax.Array], alpha: Any
) -> jax.Array | None:
    """What a weight of `shape` is multiplied by, broadcastable to it; None for a weight that takes no part."""
    segments = _segments(layout, shape)
    if all(qk not in _WITH_A_HEAD for qk, _ in segments):
        return None
    gamma = gammas[layout.group]
    exponents = {"q": alpha, "k": 1.0 - alpha, "q_shared": 1.0}
    axis, layer = layout.parts.axis if layout.parts else None, layout.layer
    pieces = []
    for index, (qk, heads) in enumerate(segments):
        piece = [1] * len(shape)
        if layer is not None:
            piece[layer] = shape[layer]
        piece[layout.head] = heads
        factor = jnp.ones((), gamma.dtype)
        if qk in exponents:
            factor = _power(gamma, exponents[qk])
            factor = (factor if layer is None or layer < layout.head else factor.T).reshape(piece)
        if axis is not None:
            piece[axis] = layout.parts.segments[index].size
        pieces.append(jnp.broadcast_to(factor, piece))
    return pieces[0] if axis is None else jnp.concatenate(pieces, axis)


def _scaled(weight: jax.Array, multiplier: jax.Array) -> jax.Array:
    """The product in at least float32, in the type of the weight."""
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    return (weight.astype(wide) * multiplier.astype(wide)).astype(weight.dtype)


def _clipped_update(p: jax.Array, u: jax.Array, multiplier: jax.Array | None) -> jax.Array:
    """The update that leads from p to the clipped p + u; u itself where the multiplier is 1."""
    if multiplier is None:
        return u
    wide = jnp.promote_types(p.dtype, u.dtype)
    # Without the barrier the product and the difference may be contracted into one rounding.
    clipped = jax.lax.optimization_barrier(_scaled((p + u).astype(p.dtype), multiplier))
    return jnp.where(multiplier == 1.0, u.astype(wide), clipped.astype(wide) - p.astype(wide))


def _progress(before: Any, after: Any) -> tuple[Any, Any]:
    """Whether the microbatch counts (`MultiSteps` may skip one) and whether the optimizer has made a step with it."""
    is_multi = lambda x: isinstance(x, optax.MultiStepsState)
    old, new = ([x for x in jax.tree.leaves(s, is_leaf=is_multi) if is_multi(x)] for s in (before, after))
    if not new:
        return True, True
    stepped = new[0].gradient_step != old[0].gradient_step
    return stepped | (new[0].mini_step != old[0].mini_step), stepped
