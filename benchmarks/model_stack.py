"""The decoder itself: compile time over depth, and what its statistics cost."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from timing import interleaved, judged, machine, ratios, spread

from repro.models import SIZES, ModelConfig, init_and_apply

DEPTHS = (6, 24)


def gradient(config: ModelConfig, *, statistics: bool) -> Callable[..., Any]:
    """Loss gradient of one batch of tokens, with the statistics of the forward pass or without (XLA then drops them)."""
    apply = init_and_apply(config)[1]

    def loss(params: Any, tokens_BT: jax.Array) -> tuple[jax.Array, Any]:
        out = apply(params, tokens_BT)
        chosen = jnp.take_along_axis(out.logits[:, :-1], tokens_BT[:, 1:, None], -1)
        return jnp.mean(jax.nn.logsumexp(out.logits[:, :-1], -1) - chosen[..., 0]), out.stats if statistics else None

    return jax.grad(loss, has_aux=True)


def inputs(config: ModelConfig, length: int, batch: int) -> tuple[Any, jax.Array]:
    params = jax.jit(init_and_apply(config)[0])(jax.random.key(0))
    return params, jax.random.randint(jax.random.key(1), (batch, length), 0, config.vocab_size)


def compile_seconds(config: ModelConfig, length: int, batch: int) -> float:
    """Tracing and compiling one gradient, nothing taken from a cache."""
    shapes = jax.eval_shape(init_and_apply(config)[0], jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(gradient(config, statistics=True)).lower(shapes, tokens).compile()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="s", help="model size (default: s)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: 9)")
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_compilation_cache", False)
    size = SIZES[args.size]
    config = size.apply(ModelConfig())
    print(machine())
    print(f"Size {args.size}, gradient of one batch of {size.batch_size} x {size.length}")

    of = {depth: dataclasses.replace(config, layers=depth) for depth in DEPTHS}
    compile_seconds(of[DEPTHS[0]], size.length, size.batch_size)  # the first compilation of a process is slower
    found: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(min(args.rounds, 5)):
        for depth, model in of.items():
            found[depth].append(compile_seconds(model, size.length, size.batch_size))
    for depth, values in found.items():
        print(f"  compiling {depth} layers: {spread(values, 's')}")
    print("  " + judged("compiling 24 layers over 6", ratios(found[24], found[6]), at_most=1.3))

    params, tokens = inputs(config, size.length, size.batch_size)
    sides = {}
    for name, statistics in (("with statistics", True), ("without", False)):
        step = jax.jit(gradient(config, statistics=statistics))
        sides[name] = lambda step=step: jax.block_until_ready(step(params, tokens))
    seconds = interleaved(sides, args.rounds)
    for name, values in seconds.items():
        print(f"  {name}: {spread(values, 'ms', 1e3)}")
    print("  " + judged("with statistics over without", ratios(*seconds.values()), at_most=1.05))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
