"""One layer: attention and a feed-forward block, each with its norm and its link to the residual stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.attention import MultiHeadAttention
from repro.models.attention_residual import BlockAttnRes, BlockAttnResEnds
from repro.models.config import ModelConfig
from repro.models.draws import draw
from repro.models.ffn import DenseFFN, magnitudes
from repro.models.latent_attention import MultiHeadLatentAttention
from repro.models.linear import folded
from repro.models.moe import feed_forward
from repro.models.norm import block_norm
from repro.models.output import FFNRecord, Stats
from repro.models.pattern import Kind
from repro.models.residual import Ends, GainLink, Link, PostNormLink
from repro.models.sigma_reparam import SigmaReparam
from repro.models.stream_links import HyperConnections, ManifoldHyperConnections, StreamEnds

_ATTENTION = {"mha": MultiHeadAttention, "mla": MultiHeadLatentAttention}
_LINKS: dict[str, tuple[type[Link], type[Ends]]] = {
    "pre_norm": (Link, Ends),
    "post_norm": (PostNormLink, Ends),
    "deep_norm": (PostNormLink, Ends),
    "gain": (GainLink, Ends),
    "hyper": (HyperConnections, StreamEnds),
    "manifold": (ManifoldHyperConnections, StreamEnds),
    "manifold_lite": (ManifoldHyperConnections, StreamEnds),
    "block_attention": (BlockAttnRes, BlockAttnResEnds),
}


def ends(config: ModelConfig, *, rngs: nnx.Rngs) -> Ends:
    """The entry and exit that `config.residual` asks for."""
    return _LINKS[config.residual.kind][1](config, rngs=rngs)


class Block(nnx.Module):
    """Attention, then a feed-forward block; with the default residual x + attention(norm(x)), then x + ffn(norm(x)).

    `layer` is its number from 0, which some initial values depend on.
    """

    def __init__(
        self, config: ModelConfig, kind: Kind | None = None, layer: jax.Array | int = 0, *, rngs: nnx.Rngs
    ) -> None:
        kind = Kind(config.attention, "dense") if kind is None else kind
        config = dataclasses.replace(config, attention=kind.attention)
        link = _LINKS[config.residual.kind][0]
        self.attention_norm = block_norm(config)
        self.attention = _ATTENTION[kind.attention](config, rngs=rngs)
        self.ffn_norm = block_norm(config)
        self.ffn = feed_forward(config, kind.ffn, layer, rngs=rngs)
        self.attention_link = link(config, 2 * layer, rngs=rngs)
        self.ffn_link = link(config, 2 * layer + 1, rngs=rngs)
        if config.sigma_reparam:
            draw(self)  # gamma starts as the norm of the matrix itself
            self.sigma = SigmaReparam({"attention": self.attention, "ffn": self.ffn})

    def __call__(
        self,
        carry: Any,
        key: jax.Array | None = None,
        layer: jax.Array | int = 0,
        tokens_BT: jax.Array | None = None,
        routes_BTK: jax.Array | None = None,
        details: bool = False,
    ) -> tuple[Any, dict[str, jax.Array], FFNRecord]:
        """The carry after the layer, the statistics of its attention logits [H], and the record of the feed-forward
        block. `tokens_BT` are for hash routing, `routes_BTK` replace the experts that a router would choose;
        `details` asks for all statistics. The record's `buffers` are those of the whole layer, by child."""
        modules, buffers = {"attention": self.attention, "ffn": self.ffn}, {}
        if hasattr(self, "sigma"):
            modules, buffers["sigma"] = self.sigma(modules)
        experts = {} if isinstance(self.ffn, DenseFFN) else {"tokens_BT": tokens_BT, "routes_BTK": routes_BTK}
        attend = lambda x_BTD: modules["attention"](x_BTD, folded(key, 0), details)
        feed = lambda x_BTD: modules["ffn"](x_BTD, folded(key, 1), **experts)
        carry, logit_stats = self.attention_link(carry, self.attention_norm, attend, jnp.asarray(2 * layer))
        carry, record = self.ffn_link(carry, self.ffn_norm, feed, jnp.asarray(2 * layer + 1))
        buffers |= {"ffn": record.buffers} if record.buffers else {}
        return carry, logit_stats, dataclasses.replace(record, buffers=buffers or None)


class Unit(nnx.Module):
    """The blocks of one unit of a pattern, as `block0`, `block1`, ..."""

    def __init__(self, config: ModelConfig, kinds: tuple[Kind, ...], layer: jax.Array | int, *, rngs: nnx.Rngs) -> None:
        for i, kind in enumerate(kinds):
            setattr(self, f"block{i}", Block(config, kind, layer + i, rngs=rngs))


def layer_stats(logit_stats: dict[str, jax.Array], x_BTD: jax.Array, record: FFNRecord) -> Stats:
    """The statistics of one layer."""
    top, rms = magnitudes(x_BTD)
    return Stats(
        **logit_stats, activation_max=top, activation_rms=rms, hidden_max=record.hidden_max,
        hidden_rms=record.hidden_rms, moe=record.moe,
    )  # fmt: skip
