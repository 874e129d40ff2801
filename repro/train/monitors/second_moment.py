"""Finds the moments in an optimizer's state, whatever the optimizer, and compares them with the gradient."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.optim import OPTIMIZERS, per_head
from repro.optim.adafactor import AdafactorState, Factors, matrix_layout
from repro.optim.adalayer import AdalayerState
from repro.optim.layout import Layout, from_matrices, matched, path_name, to_blocks
from repro.optim.low_precision_state import Packed, unpack
from repro.optim.shampoo import times, turned
from repro.optim.soap import SoapState
from repro.optim.stable_adamw import StableAdamState

_FIRST = ("mu", "momentum", "trace", "ema")
_SECOND = ("nu", "second")


class Moment(NamedTuple):
    """A second moment of one parameter, ready to be compared: `square [...]` the gradient's squares as this optimizer
    sees them, `mean` its debiased running mean (shapes broadcast), `floor` what it is not to fall below. The layer axis
    is the first where the parameter has one."""

    square: jax.Array
    mean: jax.Array
    floor: float


def restored(opt_state: Any) -> Any:
    """The state with arrays in place of codes in few bits."""
    packed = lambda x: isinstance(x, Packed)
    return jax.tree.map(lambda x: unpack(x) if packed(x) else x, opt_state, is_leaf=packed)


def states(tree: Any) -> Iterator[Any]:
    """Every named tuple of a state, outer ones first."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if not isinstance(tree, (tuple, list)):
        return
    if hasattr(tree, "_fields"):
        yield tree
    for child in tree:
        yield from states(child)


def moments(opt_state: Any, fields: tuple[str, ...]) -> list[jax.Array]:
    """The arrays of the named fields of every state, float32."""
    found = [getattr(state, name) for state in states(opt_state) for name in fields if name in state._fields]
    return [leaf.astype(jnp.float32) for tree in found for leaf in jax.tree.leaves(tree)]


def first_moments(opt_state: Any) -> list[jax.Array]:
    """Means of the gradient, as stored."""
    return moments(opt_state, _FIRST)


def second_moments(opt_state: Any) -> list[jax.Array]:
    """Means of its square, as stored; Adafactor's by rows and by columns."""
    return moments(opt_state, _SECOND)


def seen_gradients(grads: Any, config: Any, numbers: Any, params: Any) -> Any:
    """The gradients as the second moment saw them: after the clip of their norm, and with decay that is a part of
    them."""
    clip = config.optim.gradient_clip
    if clip < float("inf"):
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.where(norm > clip, clip / norm, 1.0), grads)
    if config.decay == "l2":
        grads = jax.tree.map(lambda g, w: g + numbers.weight_decay * w, grads, params)
    return grads


def _adam_settings(config: Any) -> tuple[float, float]:
    """b2 and eps of the AdamW inside an optimizer."""
    known = inspect.signature(OPTIMIZERS[config.optimizer]).parameters
    if "adamw_b2" in known:
        return known["adamw_b2"].default, inspect.signature(OPTIMIZERS["adamw"]).parameters["eps"].default
    return config.optim.b2, config.optim.eps


def second_moments_by_name(opt_state: Any, grads: Any, config: Any, layouts: Any) -> dict[str, list[Moment]]:
    """The second moments of every parameter that has one, by its name; several where it is several matrices. `grads`
    are those of `seen_gradients`, `opt_state` is `restored` and follows the step, so it holds the current gradient."""
    by_name = {name: (g.astype(jnp.float32), layout) for name, g, layout in matched(grads, layouts)}
    found: dict[str, list[Moment]] = {}
    for state in states(opt_state):
        match state:
            case optax.ScaleByAdamState() | AdalayerState():
                b2, eps = _adam_settings(config)
                debias = 1 - jnp.float32(b2) ** state.count.astype(jnp.float32)
                found |= {
                    name: [Moment(by_name[name][0] ** 2, nu.astype(jnp.float32) / debias, eps**2)]
                    for name, nu in _named(state.nu)
                }
            case StableAdamState():  # debiased inside
                eps = _adam_settings(config)[1]
                found |= {
                    name: [Moment(by_name[name][0] ** 2, nu.astype(jnp.float32), eps**2)]
                    for name, nu in _named(state.nu)
                }
            case AdafactorState():  # its weights 1 - t^-0.8 need no debiasing
                factored = lambda x: isinstance(x, Factors)
                for name, second in _named(state.second, factored):
                    g, layout = by_name[name]
                    mean = _whole(second, layout, g.shape) if factored(second) else second
                    found[name] = [Moment(g**2, mean, _ADAFACTOR_FLOOR)]
            case SoapState():
                found |= _of_soap(state, by_name, config)
    return found


_ADAFACTOR_FLOOR = 1e-30  # what Adafactor adds to every square


def _named(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]


def _whole(second: Factors, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """R C / mean(R), in the parameter's shape."""
    rows = second.rows / second.rows.mean(-1, keepdims=True)
    return from_matrices(rows[..., None] * second.columns[..., None, :], matrix_layout(shape, layout), shape)


def _of_soap(state: SoapState, by_name: dict[str, tuple], config: Any) -> dict[str, list[Moment]]:
    """In the eigenbasis, where SOAP's second moment lives; its first step has none. In a step that turns the basis, the
    new one."""
    b2, floor = config.optim.b2, config.optim.eps**2
    steps = (state.count - 1).astype(jnp.float32)
    debias = jnp.where(steps > 0, 1 - jnp.float32(b2) ** steps, 1.0)
    blocks, found = iter(state.blocks), {}
    for name, (g, layout) in by_name.items():
        if layout.role != "matrix":
            continue
        own = per_head({name: layout})[name] if config.optim.per_head else layout
        found[name] = []
        for matrix in to_blocks(g, own):
            block = next(blocks)
            projected = times(times(turned(block.row_basis), matrix), block.column_basis)
            # Before there is a second moment, the gradient counts as expected.
            square = projected**2
            found[name].append(Moment(square, jnp.where(steps > 0, block.nu / debias, square), floor))
    return found


def staleness(found: list[Moment], layered: bool) -> jax.Array:
    """RMS_t = sqrt(mean(g^2 / max(v, floor))) of one parameter, per layer where it has layers (StableAdamW, Wortsman et
    al., arXiv 2304.13013): about 1 where the second moment is up to date, more where it underestimates."""
    total, count = 0.0, 0
    for moment in found:
        ratio = moment.square / jnp.maximum(moment.mean, moment.floor)
        axes = tuple(range(1 if layered else 0, ratio.ndim))
        total = total + ratio.sum(axes)
        count += ratio.size // (ratio.shape[0] if layered else 1)
    return jnp.sqrt(total / count)
