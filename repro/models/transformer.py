"""The decoder: embedding, a scanned stack of pre-norm blocks, an untied head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.attention import MultiHeadAttention
from repro.models.config import ModelConfig
from repro.models.ffn import DenseFFN
from repro.models.latent_attention import MultiHeadLatentAttention
from repro.models.linear import folded, linear
from repro.models.norm import RMSNorm
from repro.models.output import Output, Stats
from repro.models.parameter import normal, parameter
from repro.quant import Precision, stored

_ATTENTION = {"mha": MultiHeadAttention, "mla": MultiHeadLatentAttention}
_UNROLL_UP_TO = 4  # layers; on CPU an unrolled pair of blocks ran a tenth faster than a loop over two


class Block(nnx.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.width, config.norm_eps, config.dots.policy("norm"))
        self.attention = _ATTENTION[config.attention](config, rngs=rngs)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps, config.dots.policy("norm"))
        self.ffn = DenseFFN(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, Stats]:
        mixed_BTD, logit_stats = self.attention(self.attention_norm(x_BTD), folded(key, 0))
        x_BTD = x_BTD + mixed_BTD
        x_BTD = x_BTD + self.ffn(self.ffn_norm(x_BTD), folded(key, 1))
        seen = jax.lax.stop_gradient(x_BTD).astype(jnp.float32)
        return x_BTD, Stats(
            **logit_stats, activation_max=jnp.abs(seen).max(), activation_rms=jnp.sqrt(jnp.mean(seen * seen))
        )


class Transformer(nnx.Module):
    """A decoder over tokens. Matrices start as N(0, 1/fan_in), those that write into the residual stream smaller by
    sqrt(2 L), the embedding as N(0, 1), gains as 1."""

    stacked = ("blocks",)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, Z = config.width, config.vocab_size
        self.config = config
        self.embedding_ZD = parameter(normal(rngs.params(), (Z, D), 1), "embedding")
        make_block = nnx.vmap(lambda r: Block(config, rngs=r), in_axes=0, out_axes=0)
        self.blocks = make_block(rngs.split(config.layers))
        self.final_norm = RMSNorm(D, config.norm_eps, config.dots.policy("norm"))
        self.head_DZ = parameter(normal(rngs.params(), (D, Z), D), "head")

    def __call__(self, tokens_BT: jax.Array, *, hidden: bool = False, key: jax.Array | None = None) -> Output:
        """Next-token logits for `tokens_BT` (integers below the vocabulary size); see `Output`.

        `key`, a JAX random key, is needed where the config's precision rounds stochastically; `ReproError` without it.
        """
        config = self.config
        key = key if config.dots.stochastic else None
        dtype = jnp.dtype(config.compute_dtype)
        graphdef, layers = nnx.split(self.blocks)

        def body(x_BTD: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, tuple[Stats, jax.Array | None]]:
            x_BTD, stats = nnx.merge(graphdef, layer[0])(x_BTD, folded(key, layer[1]))
            return x_BTD, (stats, x_BTD if hidden else None)

        layers = layers, jnp.arange(1, config.layers + 1)
        embedded_BTD = stored(self.embedding_ZD[...], config.dots.policy("embedding"))[tokens_BT].astype(dtype)
        # Quantised layers take long to compile, and gain nothing from it.
        unroll = config.layers if config.layers <= _UNROLL_UP_TO and config.dots == Precision() else 1
        body = jax.checkpoint(body) if config.remat else body
        last_BTD, (stats, states_LBTD) = jax.lax.scan(body, embedded_BTD, layers, unroll=unroll)
        final_BTD = self.final_norm(last_BTD)
        head_DZ = self.head_DZ[...]
        if config.dots.policy("head") is None:
            logits_BTZ = jnp.einsum("btd,dz->btz", final_BTD, head_DZ.astype(dtype), preferred_element_type=jnp.float32)
        else:  # float32 logits, also from bfloat16 activations
            logits_BTZ = linear(final_BTD.astype(jnp.float32), head_DZ, config, "head", folded(key, 0))
        states = jnp.concatenate([embedded_BTD[None], states_LBTD[:-1], final_BTD[None]]) if hidden else None
        return Output(logits_BTZ, jnp.zeros((), jnp.float32), stats, states)


def abstract(config: ModelConfig) -> Transformer:
    """The module with shapes in place of arrays, for its structure and declarations."""
    with nnx.set_graph_mode(False):
        return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=0)))


def init_and_apply(
    config: ModelConfig,
) -> tuple[Callable[[jax.Array], dict[str, Any]], Callable[..., Output]]:
    """`init(key) -> params` and `apply(params, tokens_BT, **options) -> Output` (the options of a call) over plain
    nested dicts, for jit, vmap and scan.

    The module lives only at trace time, so both compose with every JAX transformation.
    """
    with nnx.set_graph_mode(False):
        graphdef, state = nnx.split(abstract(config))

    def init(key: jax.Array) -> dict[str, Any]:
        with nnx.set_graph_mode(False):
            return nnx.to_pure_dict(nnx.split(Transformer(config, rngs=nnx.Rngs(params=key)))[1])

    def apply(params: dict[str, Any], tokens_BT: jax.Array, **options: Any) -> Output:
        with nnx.set_graph_mode(False):
            filled = jax.tree.map(lambda leaf: leaf, state)
            nnx.replace_by_pure_dict(filled, params)
            return nnx.merge(graphdef, filled)(tokens_BT, **options)

    return init, apply
