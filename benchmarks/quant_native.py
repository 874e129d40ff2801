"""On a GPU with FP8 units: the native product of FP8 codes and the emulated one against the bfloat16 product."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from timing import interleaved, judged, machine, ratios, spread

from repro.quant import POLICIES, GemmPolicy, QTensor, dot, native_reason, quantize
from repro.quant.native import product_of_codes

TOLERANCE = 1e-3  # of sums: FP8 units may keep fewer bits than float32


def layer(policy: str | GemmPolicy, x: jax.Array, w: jax.Array, dy: jax.Array) -> Callable[[], object]:
    """One linear layer, forwards and backwards, operands quantised on the way."""

    def step(x, w, dy):
        y, back = jax.vjp(lambda x, w: dot(x, w, policy), x, w)
        return y, back(dy)

    call = jax.jit(step)
    return lambda: jax.block_until_ready(call(x, w, dy))


def codes_of(x: jax.Array) -> QTensor:
    return jax.jit(lambda x: quantize(x, "fp8_tensor"))(x)


def relative(a: object, b: object) -> float:
    return max(
        float(np.linalg.norm(np.asarray(p) - np.asarray(q)) / np.linalg.norm(np.asarray(q)))
        for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=8192, help="rows, columns and inner size (default: 8192)")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default: 10)")
    parser.add_argument("--allow-cpu", action="store_true", help="without FP8 units, run anyway to try the script")
    args = parser.parse_args(argv)
    native = replace(POLICIES["fp8_tensor"], native=True)
    reason = native_reason(native)
    print(machine())
    if reason is not None and not args.allow_cpu:
        print(reason, file=sys.stderr)
        return 2
    print(f"{args.size}^3; {reason or 'products on FP8 units'}")
    x, w, dy = (jax.random.normal(key, (args.size,) * 2) for key in jax.random.split(jax.random.key(0), 3))
    policies = {"bf16": "bf16", "native": native, "emulated": "fp8_tensor", "FP8 tile": "v3_fp8"}
    layers = {name: layer(policy, x, w, dy) for name, policy in policies.items()}
    apart = relative(layers["native"](), layers["emulated"]())
    print(f"check: the native layer and the emulated one differ by {apart:.1e} (allowed {TOLERANCE:g})")
    if not apart <= TOLERANCE:
        raise SystemExit("The native product and the emulation do not compute the same thing; a ratio means nothing.")

    a, b, wide = codes_of(x), codes_of(w), (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    product, codes = jax.jit(lambda x, w: dot(x, w, "bf16")), jax.jit(product_of_codes)
    products = {
        "bf16": lambda: product(*wide).block_until_ready(),
        "codes": lambda: codes(a, b).block_until_ready(),
    }
    seconds = interleaved(products, args.rounds)
    print(f"  product alone: bf16 {spread(seconds['bf16'], 'ms', 1e3)}, codes {spread(seconds['codes'], 'ms', 1e3)}")
    print("  " + judged("bf16 over the product of codes", ratios(seconds["bf16"], seconds["codes"]), at_least=1.4))
    seconds = interleaved(layers, args.rounds)
    for name, values in seconds.items():
        print(f"  layer, {name}: {spread(values, 'ms', 1e3)}")
    print("  " + judged("emulated tiles over bf16", ratios(seconds["FP8 tile"], seconds["bf16"]), at_most=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
