"""Adafactor: a second moment of one row and one column, and an update whose size is clipped."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from repro.optim.adamw import Decay, decayed
from repro.optim.finite import check_adam, check_positive
from repro.optim.layout import Layout, from_matrices, to_matrices
from repro.optim.tensors import map_tensors, mean_square, tensor_axes


class Factors(NamedTuple):
    """Means of g^2 over columns, [..., rows], and over rows, [..., columns], for every matrix of a leaf."""

    rows: jax.Array
    columns: jax.Array


class AdafactorState(NamedTuple):
    """`second`: per parameter `Factors`, or the whole second moment where it is no matrix; float32."""

    count: jax.Array
    second: Any


def matrix_layout(shape: tuple[int, ...], layout: Layout | None) -> Layout | None:
    """Which axes of a leaf are rows and columns: those that its layout names, or else the two axes of its tensor;
    without a layout the last two. None where the leaf is no matrix."""
    if layout is not None and layout.inputs and layout.outputs:
        return dataclasses.replace(layout, parts=None)
    axes = tensor_axes(len(shape), layout)
    if len(axes) < 2 or layout is not None and len(axes) > 2:
        return None
    return Layout("matrix", inputs=(axes[-2],), outputs=(axes[-1],))


def scale_by_adafactor(
    layouts: Any = None,
    *,
    exponent: float = 0.8,
    eps: float = 1e-30,
    threshold: float = 1.0,
) -> optax.GradientTransformation:
    """U = G / sqrt(V), divided by max(1, RMS(U) / threshold) (Shazeer and Stern, arXiv 1804.04235, sections 3 to 6).

    V = R C / mean(R) with R and C the running means of G^2 + eps over columns and over rows; in step t (from 1) the
    old ones keep the weight 1 - t^-exponent. The state of an n x m matrix is n + m numbers. The clip is on the update
    of each tensor: one layer's and one expert's parameter.

    `optax.scale_by_factored_rms` with `optax.clip_by_block_rms` computes the same for one matrix. It is not used: it
    factors the two *largest* axes of a leaf, so layers, heads or experts of a stack may become rows, leaves matrices
    with a side below 128 whole, clips a whole stack by one number, and keeps its state in the type of the parameters.
    """
    check_positive(exponent=exponent, eps=eps, threshold=threshold)

    def zero(layout: Layout | None, leaf: jax.Array) -> tuple[Any]:
        rule = matrix_layout(leaf.shape, layout)
        if rule is None:
            return (jnp.zeros(leaf.shape, jnp.float32),)
        matrices = jax.eval_shape(lambda x: to_matrices(x, rule), leaf).shape
        rows, columns = matrices[:-1], (*matrices[:-2], matrices[-1])
        return (Factors(jnp.zeros(rows, jnp.float32), jnp.zeros(columns, jnp.float32)),)

    def init(params: Any) -> AdafactorState:
        return AdafactorState(jnp.zeros((), jnp.int32), *map_tensors(zero, 1, layouts, params))

    def update(grads: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        del params
        count = optax.safe_increment(state.count)
        kept = 1 - count.astype(jnp.float32) ** -exponent

        def one(layout: Layout | None, grad: jax.Array, second: Any) -> tuple[jax.Array, Any]:
            g = grad.astype(jnp.float32)
            square = jnp.square(g) + eps
            rule = matrix_layout(g.shape, layout)
            if rule is None:
                second = kept * second + (1 - kept) * square
                u = g * second**-0.5
            else:
                matrices = to_matrices(square, rule)
                rows = kept * second.rows + (1 - kept) * jnp.mean(matrices, axis=-1)
                columns = kept * second.columns + (1 - kept) * jnp.mean(matrices, axis=-2)
                second = Factors(rows, columns)
                of_row = (rows / jnp.mean(rows, axis=-1, keepdims=True)) ** -0.5
                u = to_matrices(g, rule) * of_row[..., None] * (columns**-0.5)[..., None, :]
                u = from_matrices(u, rule, g.shape)
            u = u / jnp.maximum(1.0, jnp.sqrt(mean_square(u, layout)) / threshold)
            return u.astype(grad.dtype), second

        updates, second = map_tensors(one, 2, layouts, grads, state.second)
        return updates, AdafactorState(count, second)

    return optax.GradientTransformation(init, update)


def scale_by_parameter_size(layouts: Any = None, *, least: float = 1e-3) -> optax.GradientTransformation:
    """Multiplies the update of each tensor by max(least, RMS(W)) (Shazeer and Stern, arXiv 1804.04235, section 8);
    `optax.scale_by_param_block_rms` per layer of a stack."""
    check_positive(least=least)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        def one(layout: Layout | None, u: jax.Array, w: jax.Array) -> tuple[jax.Array]:
            return ((u * jnp.maximum(least, jnp.sqrt(mean_square(w, layout)))).astype(u.dtype),)

        return map_tensors(one, 1, layouts, updates, params)[0], state

    return optax.GradientTransformation(optax.init_empty_state, update)


def adafactor(
    learning_rate: Any,
    *,
    weight_decay: Any = 0.1,
    decay: Decay = "coupled",
    layouts: Any = None,
    b1: float | None = None,
    exponent: float = 0.8,
    threshold: float = 1.0,
    relative: bool = False,
) -> optax.GradientTransformation:
    """Adafactor with update clipping (Shazeer and Stern, arXiv 1804.04235): `scale_by_adafactor`, with `relative` times
    the size of the parameter, with `b1` averaged (not debiased), then rate and decay. The paper's own schedule of the
    rate is the caller's."""
    check_adam(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1)
    steps = [scale_by_adafactor(layouts, exponent=exponent, threshold=threshold)]
    if relative:
        steps.append(scale_by_parameter_size(layouts))
    if b1 is not None:
        steps.append(optax.ema(b1, debias=False, accumulator_dtype=jnp.float32))
    return decayed(optax.chain(*steps), learning_rate, weight_decay, decay)
