"""The decoder: embedding, scanned stacks of blocks, an untied head."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from repro.errors import ReproError
from repro.models.block import Block, Unit, ends, layer_stats
from repro.models.config import ModelConfig
from repro.models.draws import Keys, KeysOf, draw, normal
from repro.models.linear import folded, linear
from repro.models.norm import block_norm, rms_norm
from repro.models.output import Output, Stats
from repro.models.parameter import declarations, parameter
from repro.models.pattern import Segment, attention_groups, stack_names
from repro.models.sigma_reparam import with_initial_vectors
from repro.quant import Precision, stored

_KEPT = {
    "nothing": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "unbatched_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def unrolled(layers: int) -> bool:
    """Whether a stack of so many layers is compiled layer by layer: on CPU an unrolled pair of blocks ran a tenth faster
    than a loop over two, and took half as long again to compile. Not where JAX is told to disable most optimisations."""
    return layers <= 4 and not jax.config.read("jax_disable_most_optimizations")


class Transformer(nnx.Module):
    """A decoder over tokens; `config` composes it.

    The layers of each segment of `config.segments` are stacked and scanned: as `blocks`, or `blocks_0`, `blocks_1`, ...
    where there are several. Matrices start as `config.std` says, the embedding as N(0, `embedding_std`^2), gains as 1.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, Z = config.width, config.vocab_size
        self.config = config
        keys = KeysOf(rngs)
        self.embedding_ZD = parameter(normal(keys.params(), (Z, D), config.embedding_std), "embedding")
        first = 0
        for name, (unit, repeats) in zip(self.stacked, config.segments, strict=True):
            make = nnx.vmap(functools.partial(_unit, config, unit), in_axes=0, out_axes=0)
            setattr(self, name, make(first + len(unit) * jnp.arange(repeats), keys.split(repeats)))
            first += len(unit) * repeats
        self.final_norm = block_norm(config)
        self.head_DZ = parameter(normal(keys.params(), (D, Z), config.head_gain / D**0.5), "head")
        self.ends = ends(config, rngs=keys)  # last, so that schemes share all other initial weights
        draw(self)

    @property
    def stacked(self) -> tuple[str, ...]:
        """Names of the children whose parameters have a leading layer axis."""
        return stack_names(self.config.segments)

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The stacks of attention parameters, where there is more than one (`attention_groups`)."""
        return attention_groups(self.config.segments)

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        hidden: bool = False,
        details: bool = False,
        key: jax.Array | None = None,
        routes: jax.Array | None = None,
    ) -> Output:
        """Next-token logits for `tokens_BT` (integers below the vocabulary size); see `Output`.

        `details` asks for the statistics that take longer (`Stats.logit_p999`, `relative_entropy`).
        `key`, a JAX random key, is needed where the config's precision rounds stochastically; `ReproError` without it.
        `routes` [layers with experts, B, T, K] are experts chosen elsewhere, such as `Output.routes` of older
        parameters (Anticipatory Routing); the gates of those experts are still of these parameters.
        """
        config = self.config
        key = key if config.dots.stochastic else None
        dtype = jnp.dtype(config.compute_dtype)
        embedded_BTD = stored(self.embedding_ZD[...], config.dots.policy("embedding"))[tokens_BT].astype(dtype)
        if config.embedding_scale != 1.0:
            embedded_BTD = embedded_BTD * jnp.asarray(config.embedding_scale, dtype)
        if config.embedding_norm:
            embedded_BTD = rms_norm(embedded_BTD, jnp.ones(()), config.norm_eps)
        carry, done, records, buffers = self.ends.enter(embedded_BTD), _Done(), [], {}
        for name, segment in zip(self.stacked, config.segments, strict=True):
            own = None if routes is None else routes[done.routed : done.routed + _routed(segment)]
            carry, found, next_buffers = self._scan(
                name, segment, done.layers, carry, tokens_BT, own, hidden, details, key
            )
            records.append(found)
            buffers |= {name: next_buffers} if next_buffers else {}
            done = _Done(done.layers + len(segment[0]) * segment[1], done.routed + _routed(segment))
        stats, states_LBTD, spread_L, routes, aux_losses = map(_joined, zip(*records, strict=True))
        stats = dataclasses.replace(stats, residual=self.ends.statistics(carry, spread_L))
        final_BTD = self.final_norm(self.ends.leave(carry))
        head_DZ = self.head_DZ[...]
        if config.dots.policy("head") is None:
            logits_BTZ = jnp.einsum("btd,dz->btz", final_BTD, head_DZ.astype(dtype), preferred_element_type=jnp.float32)
        else:  # float32 logits, also from bfloat16 activations
            logits_BTZ = linear(final_BTD.astype(jnp.float32), head_DZ, config, "head", folded(key, 0))
        states = jnp.concatenate([embedded_BTD[None], states_LBTD[:-1], final_BTD[None]]) if hidden else None
        aux_loss = jnp.zeros((), jnp.float32) if aux_losses is None else aux_losses.sum()
        return Output(logits_BTZ, aux_loss, stats, states, routes, buffers)

    def _scan(
        self, name: str, segment: Segment, first: int, carry: Any, tokens_BT: jax.Array, routes: Any, hidden: bool,
        details: bool, key: jax.Array | None,
    ) -> tuple[Any, tuple, Any]:  # fmt: skip
        """One segment: the carry after it, what `_joined` joins, and its next buffers."""
        config, (unit, repeats) = self.config, segment
        graphdef, *state = nnx.split(getattr(self, name), nnx.Param, ...)
        routed = [i for i, kind in enumerate(unit) if kind.ffn != "dense"]

        def body(carry: Any, layer: tuple[Any, jax.Array, Any]) -> tuple[Any, Any]:
            (params, buffers), number, given = layer
            module = nnx.merge(graphdef, params, buffers)
            blocks = [module] if len(unit) == 1 else [getattr(module, f"block{i}") for i in range(len(unit))]
            found, updated = [], {}
            for i, block in enumerate(blocks):
                own = given[routed.index(i)] if given is not None and i in routed else None
                carry, logit_stats, record = block(
                    carry, folded(key, number + i + 1), number + i, tokens_BT, own, details
                )
                x_BTD = self.ends.view(carry)
                stats = layer_stats(logit_stats, x_BTD, record)
                found.append(
                    (stats, x_BTD if hidden else None, self.ends.spread(carry), record.routes, record.aux_loss)
                )
                if record.buffers is not None:
                    updated |= record.buffers if len(unit) == 1 else {f"block{i}": record.buffers}
            return carry, (found, updated)

        if routes is not None:
            routes = routes.reshape(repeats, len(routed), *routes.shape[1:])
        layers = tuple(state), first + len(unit) * jnp.arange(repeats), routes
        # Quantised layers take long to compile, and gain nothing from it.
        unroll = repeats if config.dots == Precision() and unrolled(config.layers) else 1
        body = jax.checkpoint(body, policy=_KEPT[config.remat_policy]) if config.remat else body
        carry, (found, updated) = jax.lax.scan(body, carry, layers, unroll=unroll)
        return carry, _interleaved(found), updated


@dataclasses.dataclass(frozen=True)
class _Done:
    """Layers, and layers with experts, below a segment."""

    layers: int = 0
    routed: int = 0


def _unit(config: ModelConfig, unit: tuple, layer: jax.Array, key: jax.Array) -> nnx.Module:
    rngs = Keys(key)
    return Block(config, unit[0], layer, rngs=rngs) if len(unit) == 1 else Unit(config, unit, layer, rngs=rngs)


def _routed(segment: Segment) -> int:
    """Layers with experts in a segment."""
    return segment[1] * sum(kind.ffn != "dense" for kind in segment[0])


def _merged(parts: list[Any], merge: Callable[[list[jax.Array]], jax.Array]) -> Any:
    """Trees of arrays with a leading layer axis as one; of layers that lack a part the others' parts."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    if isinstance(parts[0], Stats):
        fields = [f.name for f in dataclasses.fields(Stats)]
        return Stats(**{name: _merged([getattr(part, name) for part in parts], merge) for name in fields})
    return jax.tree.map(lambda *leaves: merge(list(leaves)), *parts)


def _interleaved(found: list[tuple]) -> tuple:
    """What the blocks of a unit reported, [repeats, ...] each, in the order of the layers."""
    merge = lambda leaves: jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:])
    return tuple(_merged(list(parts), merge) for parts in zip(*found, strict=True))


def _joined(parts: tuple) -> Any:
    return _merged(list(parts), lambda leaves: leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves))


def by_group(config: ModelConfig, values_LH: jax.Array) -> jax.Array | dict[str, jax.Array]:
    """Values per layer and head as `repro.optim.qk_clip` takes them: by attention group where there are several."""
    groups = attention_groups(config.segments)
    return {name: values_LH[jnp.asarray(layers)] for name, layers in groups.items()} if groups else values_LH


def abstract(config: ModelConfig) -> Transformer:
    """The module with shapes in place of arrays, for its structure and declarations."""
    with nnx.set_graph_mode(False):
        return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=0)))


def init_and_apply(
    config: ModelConfig,
) -> tuple[Callable[[jax.Array], dict[str, Any]], Callable[..., Output]]:
    """`init(key) -> params` and `apply(params, tokens_BT, **options) -> Output` (the options of a call) over plain
    nested dicts, for jit, vmap and scan.

    `apply` takes `buffers=` too, what the model carries between steps beside its parameters (`Output.buffers`); without
    them those of `initial_buffers`. The module lives only at trace time, so both compose with every JAX transformation.
    """
    with nnx.set_graph_mode(False):
        graphdef, params_state, buffers_state = nnx.split(abstract(config), nnx.Param, ...)

    def init(key: jax.Array) -> dict[str, Any]:
        with nnx.set_graph_mode(False):
            return nnx.to_pure_dict(nnx.split(Transformer(config, rngs=nnx.Rngs(params=key)), nnx.Param, ...)[1])

    def apply(params: dict[str, Any], tokens_BT: jax.Array, *, buffers: Any = None, **options: Any) -> Output:
        buffers = initial_buffers(config, params) if buffers is None else buffers
        with nnx.set_graph_mode(False):
            states = [jax.tree.map(lambda leaf: leaf, state) for state in (params_state, buffers_state)]
            for state, values in zip(states, (params, buffers), strict=True):
                nnx.replace_by_pure_dict(state, values)
            return nnx.merge(graphdef, *states)(tokens_BT, **options)

    return init, apply


def initial_buffers(config: ModelConfig, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the model carries beside its parameters before the first step, in the form of `Output.buffers`: an empty dict
    without experts and sigma-reparametrisation. The latter needs `params`, and raises `ReproError` without them."""
    with nnx.set_graph_mode(False):
        module = abstract(config)
        shapes = nnx.to_pure_dict(nnx.split(module, nnx.Param, ...)[2])
        if not shapes:
            return {}
        if config.sigma_reparam and params is None:
            raise ReproError("initial_buffers of a model with sigma_reparam needs its parameters.")
        # Compiled, so that the parameters, which are made on the way, cost nothing.
        make = lambda: nnx.to_pure_dict(nnx.split(Transformer(config, rngs=nnx.Rngs(params=0)), nnx.Param, ...)[2])
        buffers = jax.jit(make)()
        return with_initial_vectors(buffers, params, declarations(module)) if config.sigma_reparam else buffers
