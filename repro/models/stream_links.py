"""Several residual streams: the links that read and write them, and their two ends."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.draws import normal
from repro.models.hyper_connections import (
    Maps,
    head_weights,
    hyper_maps,
    lite_maps,
    manifold_maps,
    read_streams,
    write_streams,
)
from repro.models.output import ResidualStats
from repro.models.parameter import parameter
from repro.models.residual import Ends, Link, Sublayer


class Streams(NamedTuple):
    """The carry. Streams persist through the whole stack: they are made once at the entry and read once at the exit."""

    x_BTND: jax.Array
    product_NNBT: jax.Array
    """Product of the mixing matrices of all sublayers so far, float32, without gradient."""
    read_NBT: jax.Array | None
    """Reading weights of the last sublayer, where the readout uses them."""


class StreamLink(Link):
    """x <- res x + post^T f(norm(pre x)) with the coefficients of `maps`; base of the links below."""

    def maps(self, x_BTND: jax.Array) -> Maps:
        """(pre_NBT, post_NBT, res_NNBT)."""
        raise NotImplementedError

    def __call__(self, carry: Streams, norm: nnx.Module, f: Sublayer, position: jax.Array) -> tuple[Streams, Any]:
        x_BTND, product_NNBT, read_NBT = carry
        with jax.named_scope("stream_maps"):
            pre_NBT, post_NBT, res_NNBT = self.maps(x_BTND)
        y_BTD, record = f(norm(read_streams(x_BTND, pre_NBT)))
        with jax.named_scope("stream_write"):
            x_BTND = write_streams(x_BTND, y_BTD, post_NBT, res_NNBT)
        product_NNBT = _composed(jax.lax.stop_gradient(res_NNBT), product_NNBT)
        return Streams(x_BTND, product_NNBT, None if read_NBT is None else pre_NBT), record


def _composed(res_NNBT: jax.Array, product_NNBT: jax.Array) -> jax.Array:
    return sum(res_NNBT[:, j, None] * product_NNBT[None, j] for j in range(len(res_NNBT)))


class HyperConnections(StreamLink):
    """Hyper-Connections, `hyper_maps`, from the paper's own start (arXiv 2409.19606, eq. 14): sublayer k reads stream
    k mod N, writes with 1 into each, streams do not mix, theta is 0. With copies of the embedding in all streams this
    is the plain pre-norm residual at step 0."""

    def __init__(self, config: ModelConfig, position: jax.Array | int, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, position, rngs=rngs)
        N = config.residual.streams
        start = (jax.nn.one_hot(position % N, N), jnp.ones(N), jnp.eye(N).reshape(-1))
        self.theta_DM = parameter(jnp.zeros((config.width, 2 + N)), "matrix", inputs=(0,), outputs=(1,))
        self.bias = parameter(jnp.concatenate(start), "static")
        self.alpha = parameter(jnp.full(3, config.residual.alpha), "static")

    def maps(self, x_BTND: jax.Array) -> Maps:
        return hyper_maps(
            x_BTND, self.theta_DM[...], self.bias[...], self.alpha[...], norm_eps=self.config.norm_eps
        )  # fmt: skip


class ManifoldHyperConnections(StreamLink):
    """mHC: Hyper-Connections whose mixing matrices are doubly stochastic, by `mhc_maps`, or as mHC-lite by `lite_maps`.

    The paper states the initial alpha and nothing of phi and of the biases, so `config.residual.start` chooses. phi is
    N(0, 1 / (N D)), or 0 for `symmetric`. Biases are 0, so that reading weights are 1/2, writing weights 1 and mixing
    is even; `one_hot` makes them +4 for the stream k mod N that sublayer k reads and -4 for the others, and gives the
    diagonal of the mixing logits (mHC-lite: the identity permutation) `identity`.
    """

    def __init__(self, config: ModelConfig, position: jax.Array | int, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, position, rngs=rngs)
        residual, lite = config.residual, config.residual.kind == "manifold_lite"
        N = residual.streams
        read, mix = jnp.zeros(N), jnp.zeros(math.factorial(N) if lite else N * N)
        if residual.start == "one_hot":
            read = 8.0 * jax.nn.one_hot(position % N, N) - 4.0
            mix = residual.identity * (jnp.zeros_like(mix).at[0].set(1.0) if lite else jnp.eye(N).reshape(-1))
        self.phi_NDM = _phi(config, 2 * N + len(mix), rngs)
        self.bias = parameter(jnp.concatenate([read, jnp.zeros(N), mix]), "static")
        self.alpha = parameter(jnp.full(3, residual.alpha), "static")
        self.lite = lite

    def maps(self, x_BTND: jax.Array) -> Maps:
        residual, eps = self.config.residual, self.config.norm_eps
        own = _flat(self.phi_NDM), self.bias[...], self.alpha[...]
        if self.lite:
            return lite_maps(x_BTND, *own, norm_eps=eps)
        return manifold_maps(
            x_BTND, *own, iterations=residual.iterations, eps=residual.eps, norm_eps=eps, form=residual.form
        )


def _phi(config: ModelConfig, outputs: int, rngs: nnx.Rngs) -> nnx.Param:
    """The projection of all streams of a token, which a symmetric start leaves at zero."""
    N, D = config.residual.streams, config.width
    std = 0.0 if config.residual.start == "symmetric" else 1.0 / (N * D) ** 0.5
    value = normal(rngs.params(), (N, D, outputs), std)
    return parameter(value, "matrix", inputs=(0, 1), outputs=(2,))


def _flat(phi_NDM: nnx.Param) -> jax.Array:
    return phi_NDM[...].reshape(-1, phi_NDM.shape[-1])


class StreamEnds(Ends):
    """N copies of the embedding at the entry. At the exit the sum of the streams (Hyper-Connections, arXiv 2409.19606,
    section 3), a learned reading (DeepSeek-V4's head), or the reading weights of the last sublayer (DeepSeek-V4.1)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        if config.residual.readout == "learned":
            N = config.residual.streams
            self.phi_NDM = _phi(config, N, rngs)
            self.bias = parameter(jnp.zeros(N), "static")
            self.alpha = parameter(jnp.full((), config.residual.alpha), "static")

    def enter(self, x_BTD: jax.Array) -> Streams:
        (B, T, _), N = x_BTD.shape, self.config.residual.streams
        product_NNBT = jnp.broadcast_to(jnp.eye(N)[:, :, None, None], (N, N, B, T))
        read_NBT = jnp.zeros((N, B, T)) if self.config.residual.readout == "last" else None
        return Streams(jnp.stack([x_BTD] * N, 2), product_NNBT, read_NBT)

    def leave(self, carry: Streams) -> jax.Array:
        residual = self.config.residual
        if residual.readout == "sum":
            return carry.x_BTND.sum(2)
        read_NBT = carry.read_NBT
        if residual.readout == "learned":
            own = _flat(self.phi_NDM), self.bias[...], self.alpha[...]
            eps = residual.eps if residual.form == "released" else 0.0
            read_NBT = head_weights(carry.x_BTND, *own, eps=eps, norm_eps=self.config.norm_eps)
        return read_streams(carry.x_BTND, read_NBT)

    def view(self, carry: Streams) -> jax.Array:
        """The sum of the streams."""
        return carry.x_BTND.sum(2)

    def spread(self, carry: Streams) -> jax.Array:
        x_BTND = jax.lax.stop_gradient(carry.x_BTND).astype(jnp.float32)
        return jnp.sqrt(jnp.mean(jnp.var(x_BTND, 2)) / jnp.maximum(jnp.mean(x_BTND * x_BTND), 1e-37))

    def statistics(self, carry: Streams, spread_L: jax.Array) -> ResidualStats:
        rows_NBT, columns_NBT = (jnp.abs(carry.product_NNBT.sum(axis)) for axis in (1, 0))
        return ResidualStats(
            forward_max=rows_NBT.max(0).mean(), forward_min=rows_NBT.min(0).mean(),
            backward_max=columns_NBT.max(0).mean(), backward_min=columns_NBT.min(0).mean(), spread=spread_L,
        )  # fmt: skip
