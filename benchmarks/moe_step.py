"""A training step with experts over one with a dense feed-forward block of the same active parameters.

Both sides are the engine's compiled steps (forward, backward, AdamW, all statistics) at one size. The dense block has F
hidden units, an expert F / k, so a token meets as many parameters on either side; the experts hold E / k times as many,
which the optimizer updates too. Then the blocks alone, forward and backward, with every way of dispatch.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from engine_overhead import EngineSteps
from flax import nnx
from timing import interleaved, judged, machine, ratios, spread

from repro.data import load_corpus
from repro.models import SIZES, DenseFFN, ModelConfig, MoE, MoEConfig
from repro.train import TrainConfig, at_size, lane_mesh
from repro.train.optimizer import OptimizerConfig

TOLERANCE = 1e-4
"""Allowed difference of two ways of dispatch, relative to the largest value."""


def with_experts(model: ModelConfig, experts: int, active: int, **settings: Any) -> ModelConfig:
    """`model` with experts of the same active parameters, balanced by the sign rule."""
    if model.ffn % active:
        raise SystemExit(f"{active} experts per token do not divide {model.ffn} hidden units.")
    moe = MoEConfig(experts=experts, active=active, ffn=model.ffn // active, balance="sign", **settings)
    return dataclasses.replace(model, moe=moe)


def block(module: nnx.Module, x_BTD: jax.Array) -> Callable[[], Any]:
    """Output and gradients of a feed-forward block, compiled."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    def run(params: Any, x_BTD: jax.Array) -> Any:
        def loss(params: Any, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
            y_BTD = nnx.merge(graphdef, params, rest)(x_BTD)[0]
            return jnp.sin(y_BTD).sum(), y_BTD

        (_, y_BTD), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x_BTD)
        return y_BTD, grads

    return lambda: jax.block_until_ready(run(params, x_BTD))


def blocks_alone(model: ModelConfig, batch: int, length: int, experts: int, active: int, rounds: int) -> None:
    x_BTD = jax.random.normal(jax.random.key(1), (batch, length, model.width))
    make = lambda kind, config: jax.jit(lambda: nnx.split(kind(config, rngs=nnx.Rngs(params=0))))()
    sides = {"dense block": block(nnx.merge(*make(DenseFFN, model)), x_BTD)}
    for dispatch in ("tiles", "ragged", "dense"):
        config = with_experts(model, experts, active, dispatch=dispatch)
        sides[f"experts, {dispatch}"] = block(nnx.merge(*make(MoE, config)), x_BTD)
    results = {name: jax.tree.leaves(run()) for name, run in sides.items()}
    for name in ("experts, tiles", "experts, ragged"):
        pairs = zip(results[name], results["experts, dense"], strict=True)
        apart = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        print(f"  {name}: output and gradients differ from the oracle by {apart:.1e} (allowed {TOLERANCE:g})")
        if not apart <= TOLERANCE:
            raise SystemExit("the two ways do not compute the same thing; a ratio would mean nothing.")
    seconds = interleaved(sides, rounds)
    for name, values in seconds.items():
        print(f"  {name}: {spread(values, 'ms', 1e3)}")
    for name in sides:
        if name != "dense block":
            print(f"  {name} over the dense block: {spread(ratios(seconds[name], seconds['dense block']))}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="s", help="model size (default: s)")
    parser.add_argument("--experts", type=int, default=8, help="routed experts (default: 8)")
    parser.add_argument("--active", type=int, default=2, help="experts per token (default: 2)")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds (default: 11)")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    base = at_size(TrainConfig(optimizer="adamw", optim=OptimizerConfig()), args.size)
    print(machine())
    print(
        f"Size {args.size}, {base.batch_size} x {base.length} tokens, {args.experts} experts of "
        f"{base.model.ffn // args.active} hidden units, {args.active} per token, against {base.model.ffn} units"
    )
    corpus, mesh, steps = load_corpus("kjv"), lane_mesh(jax.devices()[:1]), 5
    models = {"experts": with_experts(base.model, args.experts, args.active), "dense": base.model}
    sides = {
        name: EngineSteps(dataclasses.replace(base, model=model), [0], corpus, mesh, steps)
        for name, model in models.items()
    }
    print("\nTraining steps")
    seconds = interleaved(sides, args.rounds)
    for name, values in seconds.items():
        print(f"  {name}: {spread(values, 'ms', 1e3 / steps)}")
    print("  " + judged("step with experts over dense step", ratios(*seconds.values()), at_most=1.5))
    print("\nFeed-forward block alone, output and gradients")
    blocks_alone(base.model, base.batch_size, base.length, args.experts, args.active, args.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
