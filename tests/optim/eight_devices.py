"""Muon on eight CPU devices, in auto and explicit mode; run by test_distributed.py, prints what it saw as JSON."""

import contextlib
import json
import math
import os
import re
import sys

os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from repro.optim import Layout, muon
from repro.optim.distributed import distributed_muon, momentum_spec
from repro.optim.layout import Part, Parts
from repro.train.mesh import AXES

MATRIX = Layout("matrix", (0,), (1,))
SHAPES = {
    "rows": (16, 24), "columns": (24, 16), "experts": (4, 16, 24), "heads": (2, 16, 4, 8), "fused": (16, 32),
    "whole": (6, 10), "bias": (16,),
}  # fmt: skip
LAYOUTS = {
    "rows": MATRIX, "columns": MATRIX, "whole": MATRIX, "bias": Layout("bias"),
    "experts": Layout("matrix", (1,), (2,), expert=0),
    "heads": Layout("matrix", (1,), (3,), head=2, layer=0),
    "fused": Layout("matrix", (0,), (1,), parts=Parts(1, (Part("nope", 24), Part("rope", 8)))),
}  # fmt: skip
# In "fused" a boundary between shards of 16 columns lies inside a segment.
SPECS = {
    "rows": P("fsdp"), "columns": P(None, ("fsdp", "tensor")), "experts": P("expert"), "heads": P(None, None, "tensor"),
    "fused": P("fsdp", "tensor"), "whole": P(), "bias": P("tensor"),
}  # fmt: skip
MESHES = {AxisType.Auto: (1, 2, 2, 2, 1), AxisType.Explicit: (1, 2, 1, 2, 2)}


def tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def step_of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def products(jaxpr):
    """Shapes of the operands of every matrix product."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.add(tuple(v.aval.shape for v in eqn.invars))
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                found |= products(getattr(value, "jaxpr", value))
    return found


def collectives(text):
    """(kind, largest bytes of one result) of every collective in compiled text."""
    size = lambda shape: 4 * math.prod(map(int, filter(None, shape.split(","))))
    lines = re.findall(r"= (.+?) (all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text)
    return [(kind, max(size(s) for s in re.findall(r"f32\[([\d,]*)\]", shapes))) for shapes, kind in lines]


def case(kind, params, grads, want):
    mesh = jax.make_mesh(MESHES[kind], AXES, axis_types=(kind,) * len(AXES))
    put = lambda tree: {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in tree.items()}
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        tx = distributed_muon(0.1, layouts=LAYOUTS, specs=SPECS, mesh=mesh)
        got = put(params)
        state = tx.init(got)
        traced = jax.jit(step_of(tx)).trace(got, state, put(grads[0]))
        compiled = traced.lower().compile()
        for g in grads:
            got, state = compiled(got, state, put(g))
    momentum = state.inner_states["inside"].inner_state[0].momentum
    wanted = {name: momentum_spec(SPECS[name], SHAPES[name], mesh) for name in momentum if name != "bias"}
    lies = lambda x, spec: x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    return {
        "apart": {name: float(np.abs(np.asarray(got[name]) - want[name]).max()) for name in got},
        "parameters_stay": all(lies(x, SPECS[name]) for name, x in got.items()),
        "momentum_sharded": all(lies(momentum[name], spec) for name, spec in wanted.items()),
        "shard_of_momentum": {n: math.prod(momentum[n].addressable_shards[0].data.shape) for n in wanted},
        "products": sorted(products(traced.jaxpr.jaxpr)),
        "collectives": collectives(compiled.as_text()),
    }


def main():
    jax.config.update("jax_disable_most_optimizations", True)
    params, grads = tree(0), [tree(1), tree(2)]
    tx = muon(0.1, layouts=LAYOUTS)
    step, want, state = jax.jit(step_of(tx)), params, tx.init(params)
    for g in grads:
        want, state = step(want, state, g)
    want = {name: np.asarray(x) for name, x in want.items()}
    json.dump({kind.name: case(kind, params, grads, want) for kind in MESHES}, sys.stdout)


if __name__ == "__main__":
    main()
