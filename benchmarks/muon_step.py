"""A whole Muon step on the parameters of a model: against optax, against its own matrix products, and in training.

One process measures all of it: time and compile time against `optax.contrib.muon`, time against the matrix products
alone, the Gram side of Newton-Schulz against the direct form, Per-Head Muon against whole matrices, memory, and the
share of the optimizer in a training step.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from engine_overhead import EngineSteps
from timing import interleaved, judged, machine, ratios, spread

from repro.data import load_corpus
from repro.models import SIZES, ModelConfig, abstract, declarations, init_and_apply
from repro.optim import Layout, from_declarations, muon, newton_schulz, orthogonalise, per_head
from repro.optim.layout import map_layouts, matched, to_blocks
from repro.train import TrainConfig, at_size, lane_mesh
from repro.train.optimizer import OptimizerConfig
from repro.train.step import Program

RATE, DECAY, RMS = 1e-3, 0.1, 0.2
_SETTLED = 1_000_000  # a step count at which optax's bias corrections are exactly 1
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Allowed root mean square of the difference of two updates, relative to that of the update."""


# ---- What is optimised.


@dataclasses.dataclass(frozen=True)
class Tree:
    """Parameters with their layouts, and gradients of the same shapes."""

    params: Any
    layouts: Any
    grads: Any


def stacked_tree(model: ModelConfig, dtype: str) -> Tree:
    """The model's own tree: every parameter of the blocks has a leading layer axis."""
    random, _ = init_and_apply(model)
    init = jax.jit(lambda key: jax.tree.map(lambda x: x.astype(dtype), random(key)))
    params, grads = (init(jax.random.key(i)) for i in (0, 1))  # of different sizes per parameter, as gradients are
    return Tree(params, from_declarations(declarations(abstract(model))), grads)


def unstacked_tree(tree: Tree) -> Tree:
    """The same parameters with a leaf of its own for every layer."""

    def moved(layout: Layout) -> Layout:
        down = lambda axes: tuple(a - 1 for a in axes)
        single = {n: None if (a := getattr(layout, n)) is None else a - 1 for n in ("head", "expert")}
        parts = layout.parts and dataclasses.replace(layout.parts, axis=layout.parts.axis - 1)
        return dataclasses.replace(
            layout, inputs=down(layout.inputs), outputs=down(layout.outputs), layer=None, parts=parts, **single
        )

    def layers(node: dict[str, Any]) -> dict[str, Any]:
        count = jax.tree.leaves(node["blocks"])[0].shape[0]
        apart = {str(i): jax.tree.map(lambda x, i=i: x[i], node["blocks"]) for i in range(count)}
        return node | {"blocks": apart}

    count = jax.tree.leaves(tree.params["blocks"])[0].shape[0]
    one = map_layouts(moved, tree.layouts["blocks"])
    layouts = tree.layouts | {"blocks": {str(i): one for i in range(count)}}
    return Tree(layers(tree.params), layouts, layers(tree.grads))


def matrices_of(tree: Tree) -> Any:
    """The tree without what is not orthogonalised."""
    found = matched(tree.grads, tree.layouts)
    return {name: leaf for name, leaf, layout in found if layout.role == "matrix"}


def matrix_layouts(tree: Tree) -> dict[str, Layout]:
    return {name: layout for name, _, layout in matched(tree.grads, tree.layouts) if layout.role == "matrix"}


def groups_of(tree: Tree) -> dict[tuple[int, int], int]:
    """How many matrices there are of each shape (small side, large side)."""
    found: dict[tuple[int, int], int] = collections.Counter()
    for _, leaf, layout in matched(tree.grads, tree.layouts):
        if layout.role == "matrix":
            for block in jax.eval_shape(lambda x, n=layout: to_blocks(x, n), leaf):
                found[tuple(sorted(block.shape[-2:]))] += math.prod(block.shape[:-2])
    return found


# ---- The two optimizers.


def ours(layouts: Any, dtype: str) -> optax.GradientTransformation:
    return muon(RATE, layouts=layouts, weight_decay=DECAY, rms=RMS, dtype=dtype)


def peer(layouts: Any) -> optax.GradientTransformation:
    """`optax.contrib.muon` with the same settings. By itself it takes only arrays of two axes, and sends kernels with a
    layer or head axis to Adam; with dimension numbers it does the same work. What is not a matrix gets NAdam there."""
    dimensions = map_layouts(
        lambda n: optax.contrib.MuonDimensionNumbers(n.inputs, n.outputs) if n.role == "matrix" else None, layouts
    )
    return optax.contrib.muon(
        RATE, weight_decay=DECAY, consistent_rms=RMS, adam_b2=0.95, adam_weight_decay=DECAY,
        muon_weight_dimension_numbers=dimensions,
    )  # fmt: skip


class Step:
    """The whole step, compiled: new parameters and state from gradients. Calling it continues from its last result."""

    def __init__(self, tx: optax.GradientTransformation, tree: Tree) -> None:
        self._state = (jax.tree.map(jnp.copy, tree.params), tx.init(tree.params))
        self._grads = tree.grads
        self.compiled = lowered(tx, tree, *self._state).compile()

    def __call__(self) -> None:
        self._state = self.compiled(self._grads, *self._state)
        jax.block_until_ready(self._state)

    def temporaries(self) -> int:
        """Bytes beside arguments and results, in XLA's own plan."""
        return self.compiled.memory_analysis().temp_size_in_bytes


def lowered(tx: optax.GradientTransformation, tree: Tree, params: Any, state: Any) -> jax.stages.Lowered:
    def step(grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(1, 2)).lower(tree.grads, params, state)


def check(tree: Tree, dtype: str) -> float:
    """The largest relative difference of the two sides' updates of a matrix parameter over two steps.

    Optax's momentum is a mean with bias correction, here it is a sum; late in a run the two differ by a factor alone,
    which Newton-Schulz removes. Hence the step count of a late step.
    """
    updates = []
    for tx in (ours(tree.layouts, dtype), peer(tree.layouts)):
        state, update, seen = optax.tree.set(tx.init(tree.params), count=jnp.int32(_SETTLED)), jax.jit(tx.update), []
        for grads in (tree.grads, tree.params):  # the parameters as a second gradient
            update_of, state = update(grads, state, tree.params)
            seen.append({name: u for name, u, n in matched(update_of, tree.layouts) if n.role == "matrix"})
        updates.append(seen)
    mine, theirs = jax.tree.map(lambda x: np.asarray(x, np.float32), updates)
    apart = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), mine, theirs)
    return max(float(x) for x in jax.tree.leaves(apart))


# ---- Matrix products alone.


@contextlib.contextmanager
def direct_form() -> Iterator[None]:
    """While tracing: no iteration on the Gram side."""
    with mock.patch.object(importlib.import_module("repro.optim.newton_schulz"), "_GRAM_FROM", math.inf):
        yield


Product = tuple[tuple[int, ...], tuple[int, ...], str, Any]
"""Shapes of both operands, their type, and the dimension numbers."""


def products_of(f: Callable[..., Any], *args: Any) -> collections.Counter[Product]:
    """Every matrix product in the program of f, read from its jaxpr."""
    found: collections.Counter[Product] = collections.Counter()

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                a, b = (v.aval for v in eqn.invars)
                found[a.shape, b.shape, str(a.dtype), eqn.params["dimension_numbers"]] += 1
            for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    walk(getattr(value, "jaxpr", value))

    walk(jax.make_jaxpr(lambda *a: f(*a))(*args).jaxpr)  # a new function, since JAX remembers what it has traced
    return found


def flops(product: Product) -> int:
    a, b, _, ((_, contracted), (_, batch)) = product
    kept = [size for axis, size in enumerate(b) if axis not in (*contracted, *batch)]
    return 2 * math.prod(a) * math.prod(kept)


class Products:
    """All products of one shape, one call after another."""

    def __init__(self, product: Product, count: int) -> None:
        a, b, dtype, dimensions = product
        self._operands = tuple(
            jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate((a, b))
        )
        self._count = count
        self._call = jax.jit(
            lambda a, b: jax.lax.dot_general(a, b, dimensions, "highest", preferred_element_type=jnp.float32)
        )

    def __call__(self) -> None:
        jax.block_until_ready([self._call(*self._operands) for _ in range(self._count)])


# ---- The sections.


class Sections:
    def __init__(self, model: ModelConfig, size: str, dtype: str, rounds: int) -> None:
        self.model, self.size, self.dtype, self.rounds = model, size, dtype, rounds
        self.stacked = stacked_tree(model, dtype)
        self.unstacked = unstacked_tree(self.stacked)

    def against_optax(self) -> None:
        for name, tree in {"stacked": self.stacked, "unstacked": self.unstacked}.items():
            apart = check(tree, self.dtype)
            print(f"  {name} tree: updates of matrices differ by {apart:.1e} (allowed {TOLERANCE[self.dtype]:g})")
            if not apart <= TOLERANCE[self.dtype]:
                raise SystemExit("the two sides do not compute the same thing; a ratio would mean nothing.")
            sides = {"repro": Step(ours(tree.layouts, self.dtype), tree), "optax": Step(peer(tree.layouts), tree)}
            seconds = interleaved(sides, self.rounds)
            for side, values in seconds.items():
                print(f"  {name} tree, {side}: {spread(values, 'ms', 1e3)}")
            print("  " + judged(f"{name} tree, repro over optax", ratios(*seconds.values()), at_most=1.0))
            self.memory(name, sides["repro"], sides["optax"])

    def memory(self, name: str, own: Step, other: Step) -> None:
        largest = max(n * math.prod(shape) * 4 for shape, n in groups_of(self.stacked).items())
        mine, theirs = own.temporaries(), other.temporaries()
        print(f"  {name} tree, temporaries: repro {mine / 1e6:.2f} MB, optax {theirs / 1e6:.2f} MB")
        print(f"  one batch of the largest shape: {largest / 1e6:.2f} MB, so repro takes {mine / largest:.2f} of them")
        extra = (mine - theirs) / largest
        print("  " + judged(f"{name} tree, batches that repro takes beyond optax", [extra], at_most=1.0))

    def against_products(self) -> None:
        tree = matrices_of(self.stacked)
        layouts = matrix_layouts(self.stacked)
        run = lambda x: orthogonalise(x, layouts, schedule="muon5", rms=RMS, dtype=self.dtype)
        executed = products_of(run, tree)
        with direct_form():
            direct = products_of(run, tree)
        total = lambda found: sum(n * flops(p) for p, n in found.items())
        shapes = ", ".join(f"{n} of {s} x {large}" for (s, large), n in groups_of(self.stacked).items())
        print(f"  matrices: {shapes}")
        sides: dict[Any, Any] = {"step": Step(ours(self.stacked.layouts, self.dtype), self.stacked)}
        alone = jax.jit(run)
        sides["orthogonalisation"] = lambda: jax.block_until_ready(alone(tree))
        sides |= {("executed", p): Products(p, n) for p, n in executed.items()}
        sides |= {("direct", p): Products(p, n) for p, n in direct.items() if p not in executed or n != executed[p]}
        seconds = interleaved(sides, self.rounds)
        seconds |= {("direct", p): seconds["executed", p] for p in direct if ("direct", p) not in seconds}
        need = {
            form: [sum(s) for s in zip(*(seconds[form, p] for p in found), strict=True)]
            for form, found in {"executed": executed, "direct": direct}.items()
        }
        for product, n in executed.items():
            rate = flops(product) * n / statistics.median(seconds["executed", product]) / 1e9
            print(f"    {n} products {product[0]} by {product[1]}: {rate:,.1f} GFLOP/s")
        for form, found in {"executed": executed, "direct": direct}.items():
            print(f"  products of the {form} form: {total(found) / 1e9:.3f} GFLOP, {spread(need[form], 'ms', 1e3)}")
        for side in ("orthogonalisation", "step"):
            print(f"  {side}: {spread(seconds[side], 'ms', 1e3)}")
            print(f"  {side} over the products of the direct form: {spread(ratios(seconds[side], need['direct']))}")
            label = f"{side} over the products it executes"
            found = ratios(seconds[side], need["executed"])
            print("  " + (judged(label, found, at_most=1.25) if side == "step" else f"{label}: {spread(found)}"))

    def compile_time(self) -> None:
        def timed(tx: Callable[[Any], optax.GradientTransformation], tree: Tree) -> Callable[[], object]:
            made = tx(tree.layouts)
            state = jax.eval_shape(made.init, tree.params)
            return lambda: lowered(made, tree, tree.params, state).compile()  # tracing is part of it

        mine = lambda layouts: ours(layouts, self.dtype)
        for name, tree in {"unstacked": self.unstacked, "stacked": self.stacked}.items():
            seconds = interleaved({"repro": timed(mine, tree), "optax": timed(peer, tree)}, min(self.rounds, 3))
            for side, values in seconds.items():
                print(f"  {name} tree, compilation, {side}: {spread(values, 's')}")
            found = ratios(seconds["repro"], seconds["optax"])
            label = f"{name} tree, compilation, repro over optax"
            print("  " + (judged(label, found, at_most=0.5) if name == "unstacked" else f"{label}: {spread(found)}"))

    def gram_side(self) -> None:
        small, count = self.model.width, 4 * self.model.layers
        x = jax.random.normal(jax.random.key(0), (count, small, 4 * small))
        program = lambda: jax.jit(lambda x: newton_schulz(x)).lower(x).compile()
        gram = program()
        with direct_form():
            direct = program()
        apart = float(jnp.abs(gram(x) - direct(x)).max())
        print(f"  {count} of {small} x {4 * small}, float32: entries differ by at most {apart:.1e}")
        sides = {n: lambda f=f: jax.block_until_ready(f(x)) for n, f in {"direct": direct, "Gram side": gram}.items()}
        seconds = interleaved(sides, self.rounds)
        for side, values in seconds.items():
            print(f"  {side}: {spread(values, 'ms', 1e3)}")
        print("  " + judged("direct form over Gram side", ratios(*seconds.values()), at_least=1.3))

    def by_head(self) -> None:
        tree = self.stacked
        layouts = {"per head": per_head(tree.layouts), "whole": tree.layouts}
        seconds = interleaved({n: Step(ours(v, self.dtype), tree) for n, v in layouts.items()}, self.rounds)
        for side, values in seconds.items():
            print(f"  {side}: {spread(values, 'ms', 1e3)}")
        print("  " + judged("Per-Head Muon over whole matrices", ratios(*seconds.values()), at_most=1.0))

    def in_training(self) -> None:
        base = at_size(HalfMuon(model=self.model) if self.dtype == "bfloat16" else TrainConfig(), self.size)
        plain = OptimizerConfig(momentum=0.0, nesterov=False)
        optimizers = {"muon": OptimizerConfig(), "adamw": OptimizerConfig(), "sgd": plain}
        corpus, mesh, steps = load_corpus("kjv"), lane_mesh(jax.devices()[:1]), 5
        sides = {
            name: EngineSteps(dataclasses.replace(base, optimizer=name, optim=optim), [0], corpus, mesh, steps)
            for name, optim in optimizers.items()
        }
        seconds = interleaved(sides, self.rounds)
        for side, values in seconds.items():
            print(f"  training step, {side}: {spread(values, 'ms', 1e3 / steps)}")
        for other in ("sgd", "adamw"):
            share = [1 - x for x in ratios(seconds[other], seconds["muon"])]
            label = f"share of a step that Muon adds to {'plain SGD' if other == 'sgd' else 'AdamW'}"
            print("  " + (judged(label, share, at_most=0.2) if other == "sgd" else f"{label}: {spread(share)}"))

    def all(self) -> dict[str, Callable[[], None]]:
        return {
            "Whole step against optax.contrib.muon": self.against_optax,
            "Against its matrix products": self.against_products,
            "Compile time": self.compile_time,
            "Gram side, aspect ratio 4": self.gram_side,
            "Per-Head Muon": self.by_head,
            "In a training step": self.in_training,
        }


class _HalfMuonProgram(Program):
    """Newton-Schulz with bfloat16 operands."""

    def optimizer(self, numbers: Any, part: Any, seed: Any = 0) -> optax.GradientTransformation:
        if self.config.optimizer != "muon":
            return super().optimizer(numbers, part, seed)
        rate = numbers.learning_rate * part
        return muon(rate, layouts=self.layouts, weight_decay=numbers.weight_decay, dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class HalfMuon(TrainConfig):
    @classmethod
    def program_class(cls) -> type[Program]:
        return _HalfMuonProgram


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="s", help="model size (default: s, which the targets are for)")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds (default: 11)")
    parser.add_argument("--gpu", action="store_true", help="124M parameters in bfloat16 on a GPU, in place of --size")
    parser.add_argument("--allow-cpu", action="store_true", help="with --gpu, try the script on a CPU at size w32")
    args = parser.parse_args(argv)
    if args.gpu and jax.default_backend() != "gpu" and not args.allow_cpu:
        print(
            "--gpu needs a GPU that JAX can use (pip install 'repro[cuda]' on a machine with one), and JAX sees only "
            f"{jax.default_backend()}.",
            file=sys.stderr,
        )
        return 2
    if not args.gpu:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # compilation is one of the things that are timed
    dtype = "bfloat16" if args.gpu else "float32"
    size = ("w32" if args.allow_cpu else "gpt2") if args.gpu else args.size
    # Two tables of 25,152 rows have as many parameters as the one table of 50,304 rows that GPT-2 uses twice.
    vocabulary = 25_152 if size == "gpt2" else ModelConfig().vocab_size
    model = SIZES[size].apply(ModelConfig(vocab_size=vocabulary, compute_dtype=dtype, remat=size == "gpt2"))
    sections = Sections(model, size, dtype, args.rounds)
    parameters = sum(x.size for x in jax.tree.leaves(sections.stacked.params))
    print(machine())
    print(f"Size {size}, {parameters / 1e6:.1f}M parameters, {dtype}, schedule muon5, {args.rounds} rounds")
    start = time.perf_counter()
    for name, section in sections.all().items():
        print(f"\n{name} (at {time.perf_counter() - start:.0f} s)", flush=True)
        section()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
