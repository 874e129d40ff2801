"""Sigma-reparametrisation: weights whose spectral norm is a learned scalar, and the entropy that this guarantees.

Zhai et al., arXiv 2303.06296, sections 3.1 and 3.2; the form of the released vision code: gamma starts as sigma(W), so
that the first weights are W itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from repro.decompositions import svd
from repro.models.parameter import Buffer, parameter

_TINY = 1e-12


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), _TINY)


def _matrices(w: jax.Array, declared: Mapping[str, Any]) -> jax.Array:
    """[..., inputs, outputs] from a parameter and its declaration; layers and experts are leading axes."""
    batch = [declared[name] for name in ("layer", "expert") if declared.get(name) is not None]
    inputs, outputs = declared["inputs"], declared["outputs"]
    w = jnp.transpose(w, (*batch, *inputs, *outputs))
    lead = w.shape[: len(batch)]
    return w.reshape(*lead, math.prod(w.shape[len(batch) : len(batch) + len(inputs)]), -1)


def _spread(scalars: jax.Array, w: jax.Array, declared: Mapping[str, Any]) -> jax.Array:
    """One scalar per matrix of `_matrices` in a shape that broadcasts over the parameter (of one layer)."""
    shape = [1] * w.ndim
    if declared.get("expert") is not None:
        shape[declared["expert"]] = w.shape[declared["expert"]]
    return scalars.reshape(shape)


def dominant(w_IO: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest singular value [...] of matrices [..., I, O], and its left singular vector [..., I]."""
    u, s, _ = svd(w_IO)
    return s[..., 0], u[..., 0]


def power_iteration(w_IO: jax.Array, u_I: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sigma, next u): v = u W / |.|, u = W v / |.|, sigma = u W v, of matrices [..., I, O]. The gradient of sigma
    flows through W alone, so it is the outer product of u and v."""
    fixed = jax.lax.stop_gradient(w_IO)
    v_O = _unit(jnp.einsum("...i,...io->...o", u_I, fixed))
    u_I = _unit(jnp.einsum("...io,...o->...i", fixed, v_O))
    return jnp.einsum("...i,...io,...o->...", u_I, w_IO, v_O), u_I


class Spectral(nnx.Module):
    """The scalar gamma of one weight, and the vector u that its power iteration carries (one of each per expert)."""

    def __init__(self, w: jax.Array, declared: Mapping[str, Any]) -> None:
        sigma, u_I = dominant(_matrices(w, declared))
        expert = None if declared["expert"] is None else 0
        self.gamma = parameter(sigma, "norm", expert=expert)
        self.u = Buffer(u_I)


class SigmaReparam(nnx.Module):
    """gamma / sigma(W) W in place of W, for every weight of role `matrix` in the modules given.

    A child per weight, named by its path (`attention_q_DHK`), holds gamma and u. Each pass makes one power iteration.
    """

    def __init__(self, modules: Mapping[str, nnx.Module]) -> None:
        for path, variable, declared in _weights(modules):
            setattr(self, "_".join(path), Spectral(variable[...], declared))

    def __call__(self, modules: Mapping[str, nnx.Module]) -> tuple[dict[str, nnx.Module], dict[str, Any]]:
        """The modules with other weights (those given stay as they are), and the next buffers."""
        scaled: dict[str, Any] = {name: {} for name in modules}
        buffers = {}
        for path, variable, declared in _weights(modules):
            own, w = getattr(self, "_".join(path)), variable[...]
            sigma, u_I = power_iteration(_matrices(w, declared), own.u[...])
            node = scaled
            for name in path[:-1]:
                node = node.setdefault(name, {})
            node[path[-1]] = w * _spread(own.gamma[...] / jnp.maximum(sigma, _TINY), w, declared)
            buffers["_".join(path)] = {"u": u_I}
        return {name: _with(module, scaled[name]) for name, module in modules.items()}, buffers


def _weights(modules: Mapping[str, nnx.Module]) -> Iterator[tuple[tuple[str, ...], nnx.Param, dict[str, Any]]]:
    """Path, variable and declaration of every matrix of the modules."""
    for name, module in modules.items():
        for path, variable in nnx.to_flat_state(nnx.split(module, nnx.Param, ...)[1]):
            declared = dict(variable.get_metadata()["declaration"])
            if declared["role"] == "matrix":
                yield (name, *map(str, path)), variable, declared


def _with(module: nnx.Module, values: dict[str, Any]) -> nnx.Module:
    """A copy of a module in which some parameters have other values."""
    graphdef, state = nnx.split(module)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy: the original keeps its values
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graphdef, state)


def with_initial_vectors(
    buffers: Mapping[str, Any], params: Mapping[str, Any], declared: Mapping[str, Any]
) -> dict[str, Any]:
    """A model's buffers with the dominant left singular vectors of its parameters in every `SigmaReparam` (attribute
    `sigma`). All three are nested dicts of the same paths; `declared` is that of `repro.models.declarations`."""
    found = {}
    for key, below in buffers.items():
        if key == "sigma":
            found[key] = {child: {"u": _vectors(child, params, declared)} for child in below}
        elif isinstance(below, Mapping):
            found[key] = with_initial_vectors(below, params[key], declared[key])
        else:
            found[key] = below
    return found


def _vectors(child: str, params: Mapping[str, Any], declared: Mapping[str, Any]) -> jax.Array:
    """u of the weight whose path, joined by `_`, is `child`."""
    flat = jax.tree_util.tree_flatten_with_path(dict(params))[0]
    ((path, w),) = [(path, w) for path, w in flat if "_".join(node.key for node in path) == child]
    for node in path:
        declared = declared[node.key]
    return dominant(_matrices(w, declared))[1]


def entropy_bound(norm: float | np.ndarray, length: int) -> np.ndarray:
    """The least entropy in nats of a softmax over `length` logits which, less their mean, have at most this Euclidean
    norm (theorem 3.1, there with the norm that spectral norms guarantee): with b = exp(-norm sqrt(T / (T - 1))),

    log(1 + (T - 1) b) + norm sqrt(T (T - 1)) b / (1 + (T - 1) b),

    about norm T exp(-norm) for a large norm. `extremal_row` attains it.
    """
    norm, T = np.asarray(norm, np.float64), length
    if T == 1:
        return np.zeros_like(norm)
    b = np.exp(-norm * math.sqrt(T / (T - 1)))
    return np.log1p((T - 1) * b) + norm * math.sqrt(T * (T - 1)) * b / (1 + (T - 1) * b)


def extremal_row(norm: float, length: int) -> np.ndarray:
    """`length` logits with mean 0 and this Euclidean norm whose softmax has the least entropy: one high, all others
    equal."""
    row = np.full(length, -norm / math.sqrt(length * (length - 1)))
    row[0] = norm * math.sqrt((length - 1) / length)
    return row
