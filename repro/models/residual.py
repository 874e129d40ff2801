"""How one sublayer reads from the residual stream and writes into it, with a single stream.

Every scheme has two classes. A *link* stands around one sublayer and is called as `link(carry, norm, f, position)`, where
`norm` is the sublayer's RMSNorm, `f(x_BTD) -> (y_BTD, record)` the sublayer and `position` its number from 0 (two per
layer); it returns the carry after the sublayer and f's record. The *ends* turn the embedding into the carry, the carry
into what the final norm reads, and say what a figure should show of it. The carry has one structure for all layers, so
that a scan can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.output import ResidualStats
from repro.models.parameter import parameter

Sublayer = Callable[[jax.Array], tuple[jax.Array, Any]]


class Link(nnx.Module):
    """x + f(norm(x)), the pre-norm residual (Xiong et al., arXiv 2002.04745); base of the other links."""

    def __init__(self, config: ModelConfig, position: jax.Array | int, *, rngs: nnx.Rngs) -> None:
        self.config = config

    def __call__(self, carry: Any, norm: nnx.Module, f: Sublayer, position: jax.Array) -> tuple[Any, Any]:
        y_BTD, record = f(norm(carry))
        return carry + y_BTD, record


class PostNormLink(Link):
    """norm(alpha x + f(x)): Post-LN with alpha 1, DeepNorm with `config.deep_norm` (arXiv 2203.00555, section 4.1)."""

    def __call__(self, carry: Any, norm: nnx.Module, f: Sublayer, position: jax.Array) -> tuple[Any, Any]:
        y_BTD, record = f(carry)
        return norm(self.config.deep_norm[0] * carry + y_BTD), record


class GainLink(Link):
    """x + 2 sigmoid(b) f(norm(x)) with one learned b per sublayer, 0 at first: what is left of mHC with a single stream.

    The control for residual streams: a gain that this one shows too needs no streams.
    """

    def __init__(self, config: ModelConfig, position: jax.Array | int, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, position, rngs=rngs)
        self.write = parameter(jnp.zeros((), jnp.float32), "static")

    def __call__(self, carry: Any, norm: nnx.Module, f: Sublayer, position: jax.Array) -> tuple[Any, Any]:
        y_BTD, record = f(norm(carry))
        return carry + (2 * jax.nn.sigmoid(self.write[...])).astype(y_BTD.dtype) * y_BTD, record


class Ends(nnx.Module):
    """The entry and the exit of a single stream, which is the carry itself; base of the other ends."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config

    def enter(self, x_BTD: jax.Array) -> Any:
        """The carry before the first layer."""
        return x_BTD

    def leave(self, carry: Any) -> jax.Array:
        """What the final norm reads, [B, T, D]."""
        return carry

    def view(self, carry: Any) -> jax.Array:
        """The residual stream [B, T, D] as statistics and `Output.hidden` show it."""
        return carry

    def spread(self, carry: Any) -> jax.Array | None:
        """Statistic `spread` of the carry, where there are several streams."""
        return None

    def statistics(self, carry: Any, spread_L: jax.Array | None) -> ResidualStats | None:
        """Statistics of the carry after the last layer, where there are several streams."""
        return None
