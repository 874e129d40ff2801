"""The same inputs through this package, qwix, torchao, gfloat and ml_dtypes: a Markdown table of who gives what.

What a result should be is written down here from the definitions, not taken from any of the libraries. Prints nothing
else; docs/formats-compared.md holds a stored copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import gfloat
import gfloat.formats
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from repro.quant import RECIPES, Recipe, fake_quantize, round_to

Side = Callable[[], object]
COLUMNS = ("repro", "qwix", "torchao", "gfloat", "ml_dtypes")


@dataclass(frozen=True)
class Row:
    """One input. `right` is what the definition gives, None where it leaves the choice."""

    what: str
    right: Sequence[float] | float | None
    why: str
    sides: Mapping[str, Side]


# ---- One call per library.


def gfloat_of(name: str, x: object, **options) -> np.ndarray:
    return gfloat.round_ndarray(
        getattr(gfloat.formats, f"format_info_ocp_{name}"), np.asarray(x, np.float64), **options
    )


def gfloat_e8m0(x: float) -> float:
    info = gfloat.formats.format_info_ocp_e8m0
    return gfloat.decode_float(info, gfloat.encode_float(info, gfloat.round_float(info, x, sat=True))).fval


def ml_dtypes_of(name: str, x: object) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(getattr(ml_dtypes, name)).astype(np.float32)


def qwix_of(qtype: str, block: int, x: object) -> np.ndarray:
    from qwix._src.core import qarray

    how = qarray.HowToQuantize(qtype=qtype, channelwise_axes=(0,), tiled_axes={1: block})
    return np.asarray(qarray.dequantize(qarray.quantize(jnp.asarray(x, jnp.float32), how)))


def qwix_noise(x: np.ndarray) -> np.ndarray:
    """E2M1 with the scale 1 and a noise function, as qwix takes it for stochastic rounding."""
    from qwix._src.core import qarray

    noise = lambda shape: jax.random.uniform(jax.random.key(0), shape, minval=-0.5, maxval=0.5)
    q = qarray.quantize_with_scale_zero_point(jnp.asarray(x), "mxfp4", jnp.ones((1, 1)), None, noise)
    return np.asarray(qarray.dequantize(q))


def torchao_mx(element: str, x: object) -> np.ndarray:
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    dtype = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2}[element]
    return MXTensor.to_mx(torch.tensor(np.asarray(x, np.float32)), dtype, 32).dequantize(torch.float32).numpy()


def torchao_nvfp4(x: object) -> np.ndarray:
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    source = torch.tensor(np.asarray(x, np.float32))
    scale = per_tensor_amax_to_scale(source.abs().max())
    return NVFP4Tensor.to_nvfp4(source, per_tensor_scale=scale).dequantize(torch.float32).numpy()


def torch_cast(x: object) -> np.ndarray:
    import torch

    return torch.tensor(np.asarray(x)).to(torch.float8_e4m3fn).to(torch.float32).numpy()


def gfloat_mx(element: str, x: np.ndarray) -> np.ndarray:
    info = {"e4m3": gfloat.formats.format_info_mxfp8_e4m3, "e2m1": gfloat.formats.format_info_mxfp4_e2m1}[element]
    blocks = np.asarray(x, np.float64).reshape(-1, 32)
    return np.stack([gfloat.quantize_block(info, b, gfloat.compute_scale_amax) for b in blocks]).reshape(np.shape(x))


# ---- Definitions, in float64.


def mx_by_definition(x: np.ndarray, mantissa: int, emax: int, emin: int, largest: float) -> np.ndarray:
    """OCP MX v1.0, section 6.3: blocks of 32, scale 2^(floor(log2 amax) - emax), nearest even, saturated."""
    out = np.empty(x.shape)
    for row, start in np.ndindex(x.shape[0], x.shape[1] // 32):
        block = x[row, 32 * start : 32 * start + 32].astype(np.float64)
        scale = 2.0 ** (math.frexp(np.abs(block).max())[1] - 1 - emax)
        mag = np.abs(block) / scale
        step = 2.0 ** (np.maximum(np.frexp(mag)[1] - 1, emin) - mantissa)
        out[row, 32 * start : 32 * start + 32] = (
            np.copysign(np.minimum(np.rint(mag / step) * step, largest), block) * scale
        )
    return out


def differing(theirs: np.ndarray, right: np.ndarray) -> float:
    return float(np.mean(np.asarray(theirs, np.float64) != right))


def relative(theirs: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(theirs, np.float64) - x) / np.linalg.norm(x))


def one_block(*numbers: float, size: int = 32) -> np.ndarray:
    return np.float32([[*numbers, *([0.0] * (size - len(numbers)))]])


def first(call: Callable[[object], np.ndarray], x: np.ndarray, count: int) -> Side:
    return lambda: np.asarray(call(x)).ravel()[:count]


def blocks(name: str, element: str, x: np.ndarray, count: int, *, oracle: bool = True) -> dict[str, Side]:
    """The first `count` numbers of one MX block from every library that has MX."""
    sides = {
        "repro": first(lambda x: fake_quantize(x, name), x, count),
        "qwix": first(lambda x: qwix_of(name, 32, x), x, count),
        "torchao": first(lambda x: torchao_mx(element, x), x, count),
    }
    return sides | ({"gfloat": first(lambda x: gfloat_mx(element, x), x, count)} if oracle else {})


def kept_powers(call: Callable[[np.ndarray], np.ndarray]) -> Side:
    """For how many k the block (6, 0.5) 2^k, which MXFP4 holds exactly, does not come back."""
    powers = range(-60, 61)
    return lambda: float(
        sum(not np.array_equal(call(x), x) for x in (one_block(6 * 2.0**k, 2.0**k / 2) for k in powers))
    )


def rows() -> list[Row]:
    tiny, nan, inf = 2.0**-120, math.nan, math.inf
    gaussian = np.random.default_rng(0).normal(size=(16, 256)).astype(np.float32)
    small = (gaussian * 1e-4).astype(np.float32)
    mxfp4, mxfp8 = mx_by_definition(gaussian, 1, 2, 0, 6.0), mx_by_definition(gaussian, 3, 8, -6, 448.0)
    deep = np.zeros((2, 16), np.float32)
    deep[0, 0], deep[1, :3] = 2688.0, np.float32([6, 3, 1]) * 2.0**-8
    noise, ragged = np.full((1, 4096), 2.25, np.float32), np.ones((2, 40), np.float32)
    nf4 = Recipe("nf4", (1, 64), "fp32", "amax", None, 2.0**-80, "nearest_even")
    e8m0 = lambda x: {
        "repro": lambda: round_to(jnp.float32(x), "e8m0"),
        "gfloat": lambda: gfloat_e8m0(x),
        "ml_dtypes": lambda: ml_dtypes_of("float8_e8m0fnu", np.float32(x)),
    }
    wide = 1 + 2.0**-4 + 2.0**-40
    own_noise = lambda: round_to(noise, "e2m1", rounding="stochastic", key=jax.random.key(0)).mean()
    gradient = lambda f: lambda: jax.vjp(f, jnp.ones((1, 32)))[1](jnp.full((1, 32), 1000.0))[0][0, 0]
    return [
        Row("1000 as E4M3, saturating", 448.0, "no cast of ml_dtypes saturates an FP8", {
            "repro": lambda: round_to(1000.0, "e4m3"), "torchao": lambda: torch_cast(1000.0),
            "gfloat": lambda: gfloat_of("e4m3", [1000.0], sat=True),
            "ml_dtypes": lambda: ml_dtypes_of("float8_e4m3fn", np.float32(1000))}),
        Row("float64 1 + 2^-4 + 2^-40 as E4M3", 1.125, "rounded twice, by way of float32; repro takes float32 only", {
            "repro": lambda: round_to(wide, "e4m3"), "gfloat": lambda: gfloat_of("e4m3", [wide]),
            "ml_dtypes": lambda: ml_dtypes_of("float8_e4m3fn", np.float64([wide]))}),
        Row("NaN as E2M1, which has none, under jit", nan, "a NaN must not become a number", {
            "repro": lambda: jax.jit(lambda x: round_to(x, "e2m1"))(nan), "gfloat": lambda: gfloat_of("e2m1", [nan]),
            "ml_dtypes": lambda: ml_dtypes_of("float4_e2m1fn", np.float32(nan))}),
        Row("2^-128 as E8M0, saturating", 2.0**-127, "encoded as NaN by gfloat (its issue 62)", e8m0(2.0**-128)),
        Row("1.25 * 2^-127 as E8M0", 2.0**-127, "2^-127 is nearer", e8m0(1.25 * 2.0**-127)),
        Row("3 as E8M0, a tie", None, "up, or to the even code", e8m0(3.0)),
        Row("2.25 as E2M1, stochastic, mean of 4096", None, "2.25 expected; qwix ignores noise for float types", {
            "repro": own_noise, "qwix": lambda: qwix_noise(noise).mean()}),
        Row("MXFP4, floor rule: 7, 3 in a block", (6.0, 3.0), "qwix rounds the scale up, so it is not this rule",
            blocks("mxfp4", "e2m1", one_block(7, 3), 2)),
        Row("MXFP4 of 4096 normal numbers: fraction that differs", 0.0, "as above", {
            "repro": lambda: differing(fake_quantize(gaussian, "mxfp4"), mxfp4),
            "qwix": lambda: differing(qwix_of("mxfp4", 32, gaussian), mxfp4),
            "torchao": lambda: differing(torchao_mx("e2m1", gaussian), mxfp4),
            "gfloat": lambda: differing(gfloat_mx("e2m1", gaussian), mxfp4)}),
        Row("MXFP8 of the same: fraction that differs", 0.0, "as above", {
            "repro": lambda: differing(fake_quantize(gaussian, "mxfp8"), mxfp8),
            "qwix": lambda: differing(qwix_of("mxfp8", 32, gaussian), mxfp8),
            "torchao": lambda: differing(torchao_mx("e4m3", gaussian), mxfp8),
            "gfloat": lambda: differing(gfloat_mx("e4m3", gaussian), mxfp8)}),
        Row("MXFP4: of the blocks (6, 0.5) 2^k, k = -60 to 60, how many change", 0.0,
            "a power of two by `log2` and `2**`, which XLA computes inexactly", {
            "repro": kept_powers(lambda x: fake_quantize(x, replace(RECIPES["mxfp4"], scale_rule="rceil"))),
            "qwix": kept_powers(lambda x: qwix_of("mxfp4", 32, x)),
            "torchao": kept_powers(lambda x: torchao_mx("e2m1", x)),
            "gfloat": kept_powers(lambda x: gfloat_mx("e2m1", x))}),
        Row("MXFP8: infinity, 1 in a block", (nan, nan), "open in MX; a number hides the overflow",
            blocks("mxfp8", "e4m3", one_block(inf, 1), 2)),
        Row("MXFP8: NaN, 1 in a block", (nan, nan), "the scale of the block is NaN",
            blocks("mxfp8", "e4m3", one_block(nan, 1), 2)),
        Row("MXFP8: 2^-120, 2^-121 in a block", (tiny, tiny / 2), "scale code 0 in torchao, a threshold in qwix",
            blocks("mxfp8", "e4m3", one_block(tiny, tiny / 2), 2)),
        Row("MXFP4, 40 columns", 1.0, "a last block of 8", {
            "repro": first(lambda x: fake_quantize(x, "mxfp4"), ragged, 1),
            "qwix": first(lambda x: qwix_of("mxfp4", 32, x), ragged, 1),
            "torchao": first(lambda x: torchao_mx("e2m1", x), ragged, 1)}),
        Row("NVFP4 of normal numbers of size 1: relative error", None, "one level suffices here", {
            "repro": lambda: relative(fake_quantize(gaussian, "nvfp4"), gaussian),
            "qwix": lambda: relative(qwix_of("nvfp4", 16, gaussian), gaussian),
            "torchao": lambda: relative(torchao_nvfp4(gaussian), gaussian)}),
        Row("NVFP4 of normal numbers of size 1e-4: relative error", None,
            "as above; qwix has no tensor scale and makes zeros", {
            "repro": lambda: relative(fake_quantize(small, "nvfp4"), small),
            "qwix": lambda: relative(qwix_of("nvfp4", 16, small), small),
            "torchao": lambda: relative(torchao_nvfp4(small), small)}),
        Row("NVFP4: (6, 3, 1) 2^-8 in a tensor with largest 2688", tuple(deep[1, :3].tolist()),
            "needs a block scale of 2^-8; torchao's are at least 2^-6", {
            "repro": lambda: fake_quantize(deep, "nvfp4")[1, :3], "qwix": lambda: qwix_of("nvfp4", 16, deep)[1, :3],
            "torchao": lambda: torchao_nvfp4(deep)[1, :3]}),
        Row("NF4 with float32 scales: fraction of 4096 that differs from qwix", 0.0, "the same table and ties", {
            "repro": lambda: differing(fake_quantize(gaussian, nf4), qwix_of("nf4", 64, gaussian))}),
        Row("Gradient 1000 through E4M3", 1000.0, "a cast casts the gradient too (column ml_dtypes: JAX's `astype`)", {
            "repro": gradient(lambda x: fake_quantize(x, "fp8_tensor")),
            "ml_dtypes": gradient(lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32))}),
    ]  # fmt: skip


# ---- The table.


def number(x: float) -> str:
    if x != 0 and math.isfinite(x) and math.frexp(x)[0] in (0.5, -0.5) and not 1e-3 < abs(x) < 1e4:
        return f"{'-' if x < 0 else ''}2^{math.frexp(x)[1] - 1}"
    return f"{x:.4g}"


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.all((a == b) | (np.isnan(a) & np.isnan(b))))


def cell(row: Row, column: str) -> str:
    side = row.sides.get(column)
    if side is None:
        return ""
    if importlib.util.find_spec(column) is None:
        return "not installed"
    try:
        values = np.atleast_1d(np.asarray(side(), np.float64)).ravel()
    except (ValueError, AssertionError) as refusal:
        return f"refused ({type(refusal).__name__})"
    text = ", ".join(number(float(v)) for v in values)
    agrees = row.right is None or same(values, np.atleast_1d(np.asarray(row.right, np.float64)))
    return text if agrees else f"**{text}**"


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    found = [f"{name} {version(name)}" for name in COLUMNS[1:] if importlib.util.find_spec(name) is not None]
    print(f"jax {jax.__version__}, {', '.join(found)}, on a CPU.\n")
    print(f"| input | right | {' | '.join(COLUMNS)} | why |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    for row in rows():
        right = "open" if row.right is None else ", ".join(number(float(v)) for v in np.atleast_1d(row.right))
        print(f"| {row.what} | {right} | {' | '.join(cell(row, c) for c in COLUMNS)} | {row.why} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
