"""How rates, initial values and outputs change with the width of a model, so that a rate tuned narrow holds wide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from repro.errors import ReproError
from repro.optim.layout import Layout, matched, path_name

WidthRule = Literal["mup", "mup_table3", "spectral"]
MatrixUpdate = Literal["adam", "orthogonal", "rms_matched"]


class WidthFactors(NamedTuple):
    """What one parameter's learning rate, initial standard deviation and output are multiplied by against the base
    model. All 1 at the base width."""

    rate: float
    init: float
    forward: float


class Fans(NamedTuple):
    """Rows and columns of a parameter's matrices, and those of the base model."""

    inputs: int
    outputs: int
    base_inputs: int
    base_outputs: int


def width_factors(
    params: Any, base: Any, layouts: Any, *, rule: WidthRule = "mup", matrices: MatrixUpdate = "adam"
) -> dict[str, WidthFactors]:
    """The factors of every parameter by its path, for a model of `params` whose rates were tuned on one of `base`
    (trees of anything with a shape, of equal paths).

    With m the ratio of the fan-ins and n that of the fan-outs, for updates whose entries are of order one (Adam, Lion):

    | parameter | rule | rate | initial sd | output |
    |---|---|---|---|---|
    | embedding, and what names no input and output axes (gains, biases) | all | 1 | 1 | 1 |
    | with input and output axes | `mup`, `mup_table3` | 1/m | 1/sqrt(m) | 1 |
    | the same | `spectral` | 1/m | ratio of min(1, sqrt(out / in)) / sqrt(in) | 1 |
    | head | `mup` | 1 | 1 | 1/m |
    | head | `mup_table3` | 1/m | 1/m | 1 |
    | head | `spectral` | 1/m | ratio of min(1, sqrt(out / in)) / sqrt(in) | 1 |

    `mup` is the form of the package `mup`, `mup_table3` that of the paper (Yang et al., arXiv 2203.03466, table 3),
    equal up to a change of variables in Adam without eps. `spectral` asks for ||W||_2 and ||dW||_2 of order
    sqrt(out / in) (Yang, Simon and Bernstein, arXiv 2310.17813). Routers and gates with axes count as matrices,
    which is this package's reading. muP also wants attention logits q.k / K instead of q.k / sqrt(K) where K grows.

    `matrices` says what the update of a parameter of role `matrix` is. `"orthogonal"`: of spectral norm one, so the
    rate is multiplied by sqrt(n / m). `"rms_matched"`: Muon's rms * sqrt(max(in, out)) times that, so it is divided by
    the ratio of these roots too. The factor 0.2 sqrt(max) matches the size of AdamW's update and does not transfer over
    width by itself.

    Raises `ReproError` for an unknown rule and for a parameter that the base model lacks.
    """
    for name, value, known in (("width rule", rule, WidthRule), ("update of matrices", matrices, MatrixUpdate)):
        if value not in get_args(known):
            raise ReproError(f"{name} {value!r} is unknown; known are {', '.join(get_args(known))}.")
    shapes = {path_name(p): jnp.shape(x) for p, x in jax.tree_util.tree_flatten_with_path(base)[0]}
    found = {}
    for name, leaf, layout in matched(params, layouts):
        if name not in shapes:
            raise ReproError(f"parameter {name} is not in the base model.")
        found[name] = _factors(layout, jnp.shape(leaf), shapes[name], rule, matrices)
    return found


def _factors(layout: Layout, shape: tuple, base: tuple, rule: WidthRule, matrices: MatrixUpdate) -> WidthFactors:
    inputs, outputs = layout.inputs, layout.outputs
    if layout.role == "head" and not inputs and len(shape) == 2:
        inputs, outputs = (0,), (1,)  # kernels are [in, out]
    if layout.role == "embedding" or not (inputs and outputs):
        return WidthFactors(1.0, 1.0, 1.0)
    fans = Fans(*(math.prod(size[a] for a in axes) for size in (shape, base) for axes in (inputs, outputs)))
    m, n = fans.inputs / fans.base_inputs, fans.outputs / fans.base_outputs
    if rule == "spectral":
        init = _spectral_sd(fans.inputs, fans.outputs) / _spectral_sd(fans.base_inputs, fans.base_outputs)
    else:
        init = 1 / m if layout.role == "head" else m**-0.5
    if layout.role == "head" and rule == "mup":
        return WidthFactors(1.0, 1.0, 1 / m)
    if layout.role != "matrix" or matrices == "adam":
        return WidthFactors(1 / m, init, 1.0)
    rate = (n / m) ** 0.5
    if matrices == "rms_matched":
        rate /= (max(fans.inputs, fans.outputs) / max(fans.base_inputs, fans.base_outputs)) ** 0.5
    return WidthFactors(rate, init, 1.0)


def _spectral_sd(inputs: int, outputs: int) -> float:
    """The entries' standard deviation at which a random matrix has a spectral norm of order sqrt(outputs / inputs)."""
    return min(1.0, (outputs / inputs) ** 0.5) / inputs**0.5


def factor_tree(params: Any, factors: Mapping[str, WidthFactors], field: Literal["rate", "init", "forward"]) -> Any:
    """One number per parameter, in a tree like `params`. Raises `ReproError` for a parameter without factors."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = [path_name(path) for path, _ in paths]
    for name in names:
        if name not in factors:
            raise ReproError(f"parameter {name} has no width factors; derive them from the whole tree.")
    return treedef.unflatten([getattr(factors[name], field) for name in names])


def scale_by_width_rule(factors: Mapping[str, WidthFactors]) -> optax.GradientTransformation:
    """Multiplies the update of each parameter by its `rate` of `width_factors`; a rate of 1 changes no bit.

    Before decay is added, decay keeps the base model's strength; behind it, the decay is multiplied too, as it is where
    parameter groups have rates of their own.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        rates = factor_tree(updates, factors, "rate")
        return jax.tree.map(lambda u, rate: u if rate == 1 else u * jnp.asarray(rate, u.dtype), updates, rates), state

    return optax.GradientTransformation(optax.init_empty_state, update)
