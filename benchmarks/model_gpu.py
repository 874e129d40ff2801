"""On one GPU: how much of the measured bfloat16 peak a training step of about 350M parameters reaches, and where the rest
goes; and what hyper-connections cost beside the plain residual. Under five minutes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from timing import interleaved, judged, machine, ratios, spread

from repro.models import SIZES, ModelConfig, ResidualConfig, Size, abstract, declarations, init_and_apply
from repro.optim import from_declarations
from repro.train.optimizer import OptimizerConfig, build


def peak_flops(size: int, rounds: int) -> float:
    """Floating-point operations per second of a square bfloat16 product, best round."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in (0, 1))
    product = jax.jit(lambda a, b: a @ b)
    seconds = interleaved({"product": lambda: jax.block_until_ready(product(a, b))}, 3 * rounds)["product"]
    return 2 * size**3 / min(seconds)


def step_flops(config: ModelConfig, size: Size) -> float:
    """Operations of forward and backward: 6 per weight of a matrix and token, and 12 D per pair of positions and layer
    for the two products of attention, whose masked half is computed too. Recomputed blocks are not counted."""
    tokens = size.batch_size * size.length
    weights = sum(x.size for x in jax.tree.leaves(abstract(config))) - config.vocab_size * config.width
    return tokens * (6.0 * weights + 12.0 * config.layers * config.width * size.length)


class Sides:
    """Parts of one training step of a model, each a call that ends when its work is done."""

    def __init__(self, config: ModelConfig, size: Size) -> None:
        init, self.apply = init_and_apply(config)
        self.params = jax.jit(init)(jax.random.key(0))
        shape = (size.batch_size, size.length)
        self.tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
        self.layouts = from_declarations(declarations(abstract(config)))

    def loss(self, params: Any, statistics: bool) -> tuple[jax.Array, Any]:
        out = self.apply(params, self.tokens)
        chosen = jnp.take_along_axis(out.logits[:, :-1], self.tokens[:, 1:, None], -1)
        loss = jnp.mean(jax.nn.logsumexp(out.logits[:, :-1], -1) - chosen[..., 0])
        return loss, out.stats if statistics else None

    def forward(self) -> Callable[[], Any]:
        run = jax.jit(lambda params: self.loss(params, False)[0])
        return lambda: jax.block_until_ready(run(self.params))

    def gradient(self, *, statistics: bool) -> Callable[[], Any]:
        run = jax.jit(jax.grad(lambda params: self.loss(params, statistics), has_aux=True))
        return lambda: jax.block_until_ready(run(self.params))

    def step(self, optimizer: str, *, statistics: bool = False) -> Callable[[], Any]:
        tx = build(optimizer, OptimizerConfig(), self.layouts, 1e-4, 0.0, "coupled")

        def step(params: Any, state: Any) -> tuple[Any, Any, Any]:
            grads, stats = jax.grad(lambda p: self.loss(p, statistics), has_aux=True)(params)
            updates, state = tx.update(grads, state, params)
            return jax.tree.map(jnp.add, params, updates), state, stats

        run = jax.jit(step, donate_argnums=(0, 1))
        carried = [jax.tree.map(jnp.copy, self.params), jax.jit(tx.init)(self.params)]

        def call() -> None:
            params, state, stats = run(*carried)
            carried[:] = params, state
            jax.block_until_ready((params, stats))

        return call


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allow-cpu", action="store_true", help="without a GPU, run at a tiny size to try the script")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    args = parser.parse_args(argv)
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not args.allow_cpu:
        print(
            "This needs a GPU that JAX can use (pip install 'repro[cuda]' on a machine with one), and JAX sees only "
            f"{jax.default_backend()}.",
            file=sys.stderr,
        )
        return 2
    name, vocabulary = ("medium", 32_000) if on_gpu else ("tiny", 64)
    size = SIZES[name]
    config = size.apply(ModelConfig(vocab_size=vocabulary, compute_dtype="bfloat16", remat=on_gpu))
    print(machine())
    peak = peak_flops(8192 if on_gpu else 256, args.rounds)
    flops = step_flops(config, size)
    count = sum(x.size for x in jax.tree.leaves(abstract(config)))
    print(
        f"Size {name}: {count / 1e6:,.1f}M parameters, {flops / 1e12:,.2f} TFLOP a step; peak {peak / 1e12:,.1f} TFLOP/s"
    )

    sides = Sides(config, size)
    parts = {
        "forward": sides.forward(),
        "forward and backward": sides.gradient(statistics=False),
        "the same, with statistics": sides.gradient(statistics=True),
        "step with AdamW": sides.step("adamw"),
        "step with Muon": sides.step("muon"),
        "step with Muon and statistics": sides.step("muon", statistics=True),
    }
    seconds = interleaved(parts, args.rounds)
    for part, values in seconds.items():
        print(f"  {part:<32} {spread(values, 'ms', 1e3)}")
    for part in ("step with AdamW", "step with Muon"):
        print("  " + judged(f"{part} over the peak", [flops / s / peak for s in seconds[part]], at_least=0.4))

    small = SIZES["s" if on_gpu else "tiny"]
    plain = small.apply(ModelConfig(compute_dtype="bfloat16"))
    streams = dataclasses.replace(plain, residual=ResidualConfig(kind="manifold"))
    pair = {k: Sides(c, small).gradient(statistics=False) for k, c in (("mHC", streams), ("plain", plain))}
    seconds = interleaved(pair, 3 * args.rounds)
    print("  " + judged("mHC over the plain residual, size s", ratios(seconds["mHC"], seconds["plain"]), at_most=1.35))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
