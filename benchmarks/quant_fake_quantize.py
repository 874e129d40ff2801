"""What quantising and dequantising a tensor costs, against `x * 2` on it (the memory limit), qwix and torchao."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from importlib.metadata import version

import jax
import numpy as np
from timing import interleaved, judged, machine, ratios, spread

from repro.quant import fake_quantize

RECIPES = {"FP8 tile": "fp8_tile", "MXFP4": "mxfp4"}


def own(recipe: str, x: jax.Array) -> Callable[[], object]:
    return lambda: fake_quantize(x, recipe).block_until_ready()


def qwix(recipe: str, x: jax.Array) -> Callable[[], object]:
    """qwix under jit: the same blocks, in its own scale rules."""
    from qwix._src.core import qarray

    kinds = {"fp8_tile": ("float8_e4m3fn", 128), "mxfp4": ("mxfp4", 32)}
    qtype, block = kinds[recipe]
    how = qarray.HowToQuantize(qtype=qtype, channelwise_axes=(0,), tiled_axes={1: block})
    call = jax.jit(lambda x: qarray.dequantize(qarray.quantize(x, how)))
    return lambda: call(x).block_until_ready()


def torchao(recipe: str, x: jax.Array) -> Callable[[], object]:
    """torchao's `to_mx`, run eagerly, which is all it has on a CPU: for the FP8 tile, MXFP8 in blocks of 32."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    element = {"fp8_tile": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}[recipe]
    source = torch.from_numpy(np.array(x))
    return lambda: MXTensor.to_mx(source, element, 32).dequantize(torch.float32)


PEERS: dict[str, tuple[Callable[[str, jax.Array], Callable[[], object]], float]] = {
    "qwix": (qwix, 1.6),
    "torchao": (torchao, 5.0),
}


def relative_error(y: object, x: jax.Array) -> float:
    y = np.asarray(y, np.float32)
    return float(np.linalg.norm(y - np.asarray(x)) / np.linalg.norm(np.asarray(x)))


def extra_memory(recipe: str, x: jax.Array) -> float:
    """Bytes of the result and of what is allocated on the way, over those of `x`, by XLA's own plan."""
    plan = jax.jit(lambda x: fake_quantize(x, recipe)).lower(x).compile().memory_analysis()
    return (plan.temp_size_in_bytes + plan.output_size_in_bytes) / x.nbytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns (default: 4096)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: 15)")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    x = jax.random.normal(jax.random.key(0), (args.size, args.size))
    print(f"{machine()}; float32 {args.size} x {args.size}")
    double = jax.jit(lambda x: x * 2)
    for title, recipe in RECIPES.items():
        error = relative_error(fake_quantize(x, recipe), x)
        sides: dict[str, Callable[[], object]] = {
            "x * 2": lambda: double(x).block_until_ready(),
            "repro": own(recipe, x),
        }
        print(f"\n{title}: relative error {error:.4f}")
        for name, (build, _) in PEERS.items():
            if importlib.util.find_spec(name) is None:
                print(f"  {name} is not installed (pip install {name}) and is left out.")
                continue
            other = " (MXFP8)" if (name, recipe) == ("torchao", "fp8_tile") else ""
            sides[f"{name} {version(name)}{other}"] = build(recipe, x)
        seconds = interleaved(sides, args.rounds)
        for name, values in seconds.items():
            print(f"  {name}: {spread(values, 'ms', 1e3, 1)}")
        print("  " + judged("repro over x * 2", ratios(seconds["repro"], seconds["x * 2"]), at_most=1.5))
        for name, values in seconds.items():
            if name.split()[0] in PEERS:
                target = PEERS[name.split()[0]][1]
                print("  " + judged(f"{name} over repro", ratios(values, seconds["repro"]), at_least=target))
        print("  " + judged("extra memory over the tensor", [extra_memory(recipe, x)], at_most=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
