"""When is MXFP4 -> FP8 E4M3 lossless? The bound of DeepSeek's kernel, and the limit of the arithmetic.

DeepSeek-V4 keeps expert weights in MXFP4 (sub-blocks of 1 x 32, power-of-two scales) and multiplies them as E4M3 with
one scale per 128 x 128 block. Written before the first run:

With s the scale of a sub-block and S the largest of the block, the block's scale is S / 2^6, because 6 * 2^6 = 384 <=
448 and 6 * 2^7 is not. An element v is stored as v * 2^(6 - d), d = log2(S / s). The values of E2M1 are 0.5 * {0, 1,
2, 3, 4, 6, 8, 12}, so all of them stay multiples of E4M3's smallest number 2^-9 exactly while 0.5 * 2^(6 - d) >=
2^-9, that is d <= 14; they need one bit of mantissa, of which E4M3 has three. Down to d = 11 they stay normal numbers
too: 0.5 * 2^(6 - 11) = 2^-6. So 2^11 (asserted by the kernel) is sufficient, 2^14 is necessary and sufficient for a
block that uses all codes, and of the significands beside 1 that another scale could have only 1.25 and 1.5 keep v and
1.5 v on the grid, and they reach less far. Two sub-blocks whose ratio is larger may still be exact if they do not use
their small codes, a zero sub-block among them, whose scale the format leaves at its lowest code.
"""

import dataclasses
from collections.abc import Iterator
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import All, Arm, Claim, Control, Exact, Experiment, Run, Within
from repro.errors import ReproError
from repro.quant import FORMATS, RECIPES, QTensor, quantize
from repro.report import Dose, Reference

BOUND, LIMIT = 11, 14  # log2 of the kernel's bound and of the arithmetic limit
SIDE, SUB = 128, 32

ARMS = (
    Arm("largest", "scale = largest sub-block scale / 2^6"),
    Arm("amax", "scale = amax / 448"),
    Arm("smallest", "scale = smallest sub-block scale / 2^6"),
    Arm("recipe", "128 x 128 blocks, power of two >= amax / 448"),
)
V4 = "DeepSeek-V4, section 5.2.1, and its published kernel for the cast"
_BLOCKS = (
    "Every E2M1 code in every sub-block of a 128 x 128 block, scales of whole powers of two; bits compared, signs of "
    "zero included."
)

CLAIMS = (
    Claim(
        id="V4-6", variant="sufficient", tier="M", source=V4,
        statement="The cast is lossless for every code while the scales of the sub-blocks differ by at most 2^11, at "
        "every place of the exponent range.",
        reported="Asserted by the kernel; the report speaks of a certain threshold.", boundary=_BLOCKS,
        criterion=Exact("changed_to_bound", "largest", 0.0),
        control=Control("a block scale of amax / 448 by true division", Exact("changed_to_bound", "amax", 0.0)),
    ),
    Claim(
        id="V4-6", variant="limit", tier="M", source="derived here",
        statement="The largest ratio at which the cast is lossless for all codes is 2^14.",
        reported="2^11 is the kernel's bound; 2^14 is not published.", boundary=_BLOCKS,
        criterion=Exact("lossless_exponent", "largest", float(LIMIT)),
        control=Control("the block scale taken from the smallest sub-block",
                        Exact("lossless_exponent", "smallest", float(LIMIT))),
    ),
    Claim(
        id="V4-6", variant="reason for the bound", tier="M", source=V4,
        statement="2^11 is the largest ratio at which no nonzero element becomes a subnormal number of E4M3.",
        reported="6 * 2^6 = 384 <= 448 and 0.5 * 2^-5 = 2^-6.", boundary=_BLOCKS,
        criterion=Exact("normal_exponent", "largest", float(BOUND)),
        control=Control("subnormal numbers counted as normal ones",
                        Exact("lossless_exponent", "largest", float(BOUND))),
    ),
    Claim(
        id="V4-6", variant="no better scale", tier="M", source="derived here",
        statement="No block scale whatever reaches further: over all factors that keep every E2M1 value on E4M3's "
        "grid, the largest ratio of two that differ by a power of two is 2^14.",
        reported="Not reported.", boundary="Enumeration of all 126 positive E4M3 values in exact rational arithmetic.",
        criterion=Exact("reach_exponent", "any_scale", float(LIMIT)),
        control=Control("factors other than powers of two only",
                        Exact("reach_exponent_other", "any_scale", float(LIMIT))),
    ),
    Claim(
        id="V4-6", variant="not necessary", tier="M", source="derived here",
        statement="A sub-block of zeros stays exact although its scale is further from the largest than 2^11.",
        reported="The kernel's assertion would stop here unless it leaves such sub-blocks out.",
        boundary="Weights quantised with this project's MXFP4, which gives a zero sub-block the scale 2^-127.",
        criterion=All((Exact("zero_changed", "recipe", 0.0), Within("zero_exponent", "recipe", BOUND + 1.0, 254.0))),
        control=Control("the sub-block 2^20 smaller, not zero", Exact("faint_changed", "recipe", 0.0)),
    ),
    Claim(
        id="V4-6", variant="normal weights", tier="M", source=f"{V4}; checked there on its own weights only",
        statement="For normal weights the sub-block scales of a 128 x 128 block differ by at most 2^3, and for "
        "weights whose rows have log-normal sizes of sigma = 1 by at most 2^11, so that the cast loses nothing.",
        reported="The condition was verified empirically for the report's weights.",
        boundary="Random weights, MXFP4 by the rounded-up rule, one draw per run.",
        criterion=All((
            Within("scale_exponent", "recipe@rows0", 0.0, 3.0),
            Within("scale_exponent", "recipe@rows1", 0.0, float(BOUND)),
            Exact("changed", "recipe@rows0", 0.0), Exact("changed", "recipe@rows1", 0.0),
        )),
        control=Control("rows of sigma = 6", Exact("changed", "recipe@rows6", 0.0)),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    """What is enumerated and drawn."""

    largest_exponent: int = 24
    """Ratios of scales 2^0 to 2^this are tried; at least 16."""
    bases: tuple[int, ...] = (-90, -40, -7, 0, 40, 110)
    """Exponents of the largest sub-block scale; from -90, where the smallest numbers are still normal, to 110."""
    draws: int = 8
    """Matrices of random weights per spread."""
    spreads: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0)
    """Log-normal sigmas of the rows' sizes; 0, 1 and 6 are among them."""
    evidence: bool = True
    """Whether verdicts count as evidence; false for a quick look and for a preset changed by hand."""

    def __post_init__(self) -> None:
        if not 16 <= self.largest_exponent <= 30:
            raise ReproError(f"largest_exponent is {self.largest_exponent}; it lies between 16 and 30.")
        if not self.bases or not all(-90 <= base <= 110 for base in self.bases):
            raise ReproError(f"bases {self.bases} are exponents from -90 to 110, at least one.")
        if not {0.0, 1.0, 6.0} <= set(self.spreads) or self.draws < 1:
            raise ReproError(
                f"spreads {self.spreads} must hold 0, 1 and 6, which claims name, and draws be at least 1."
            )


def block_with(ratio_exponent: int, base: int) -> QTensor:
    """MXFP4 codes `[128, 128]`: every code in every sub-block, and scales 2^base down to 2^(base - ratio_exponent).

    Row r has the scales of its four sub-blocks at 2^(base - d) with d running through 0 .. ratio_exponent, both ends in
    every block.
    """
    codes = np.tile(np.arange(16, dtype=np.uint8), (SIDE, SIDE // 16))
    steps = np.arange(SIDE * SIDE // SUB).reshape(SIDE, SIDE // SUB) % (ratio_exponent + 1)
    scale = (base - steps + 127).astype(np.uint8)
    scale = jax.lax.bitcast_convert_type(jnp.asarray(scale), jnp.float8_e8m0fnu)
    return QTensor(jnp.asarray(codes), scale, None, RECIPES["mxfp4"], -1)


def to_e4m3(x: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """x in E4M3 under one given block scale: (x_hat float32, whether an element is subnormal)."""
    q = quantize(jnp.asarray(x), "fp8_delayed", scale=jnp.float32(scale))
    stored = np.abs(np.asarray(q.codes).astype(np.float32))
    return np.asarray(q.dequantize()), (stored > 0) & (stored < FORMATS["e4m3"].min_normal)


def bits_changed(x: np.ndarray, x_hat: np.ndarray) -> int:
    """Number of elements whose float32 bits differ."""
    return int((np.asarray(x, np.float32).view(np.int32) != np.asarray(x_hat, np.float32).view(np.int32)).sum())


def enumerated(preset: Preset) -> Iterator[Run]:
    """Every ratio at every base, with the block scale chosen in three ways."""
    changed: dict[tuple[str, int], int] = {}
    subnormal: dict[int, int] = {}
    for d in range(preset.largest_exponent + 1):
        for base in preset.bases:
            x = np.asarray(block_with(d, base).dequantize())
            top = 2.0 ** (base - 6)
            scales = {
                "largest": top,
                "smallest": top / 2.0**d,
                "amax": float(np.float32(np.abs(x).max()) / np.float32(448)),
            }
            for arm, scale in scales.items():
                x_hat, small = to_e4m3(x, scale)
                changed[arm, d] = changed.get((arm, d), 0) + bits_changed(x, x_hat)
                if arm == "largest":
                    subnormal[d] = subnormal.get(d, 0) + int(small.sum())
    count = SIDE * SIDE * len(preset.bases)
    for (arm, d), value in changed.items():
        yield Run(arm, 0, {"changed": value, "changed_share": value / count}, point=f"d{d}")
    for arm in ("largest", "smallest", "amax"):
        of_arm = [changed[arm, d] for d in range(preset.largest_exponent + 1)]
        metrics = {"changed_to_bound": sum(of_arm[: BOUND + 1]), "lossless_exponent": _last_zero(of_arm)}
        if arm == "largest":
            metrics["normal_exponent"] = _last_zero([subnormal[d] for d in range(preset.largest_exponent + 1)])
        yield Run(arm, 0, metrics)


def _last_zero(counts: list[int]) -> int:
    """The last index before the first count that is not zero; -1 if the first is not."""
    return next((i for i, count in enumerate(counts) if count), len(counts)) - 1


def reach_of_any_scale() -> dict[str, float]:
    """log2 of the largest power-of-two ratio between two factors under which all E2M1 values are E4M3 values.

    reach_exponent over all factors, reach_exponent_other over those that are not powers of two. 1 is a value of E2M1,
    so a factor is itself an E4M3 value, and trying those is trying all.
    """
    grid = {Fraction(float(v)) for v in FORMATS["e4m3"].values()}
    values = [Fraction(float(v)) for v in FORMATS["e2m1"].values()]
    good = [r for r in grid if r > 0 and all(r * v in grid for v in values)]

    def reach(powers: bool) -> int:
        # A ratio p / q in lowest terms is a power of two if both are.
        ratios = [a / b for a in good for b in good if a >= b and (powers or not _power(a))]
        return max(r.numerator.bit_length() - 1 for r in ratios if _power(r))

    return {"reach_exponent": reach(True), "reach_exponent_other": reach(False)}


def _power(r: Fraction) -> bool:
    return all(n & (n - 1) == 0 for n in (r.numerator, r.denominator))


MX = dataclasses.replace(RECIPES["mxfp4"], scale_rule="rceil")  # DeepSeek's rule: 2^ceil(log2(amax / 6))
BLOCK = dataclasses.replace(RECIPES["fp8_block"], scale_format="e8m0", scale_rule="rceil", amax_floor=0.0)


def through_recipes(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Weights `[128, 128]` in MXFP4, these in E4M3, and log2 of the ratio of the sub-block scales."""
    fp4 = quantize(jnp.asarray(w, jnp.float32), MX)
    x = fp4.dequantize()
    codes = np.asarray(jax.lax.bitcast_convert_type(fp4.scale, jnp.uint8)).astype(int)
    return np.asarray(x), np.asarray(quantize(x, BLOCK).dequantize()), int(codes.max() - codes.min())


def random_weights(preset: Preset) -> Iterator[Run]:
    """Normal weights whose rows have log-normal sizes, from float32 to MXFP4 to E4M3 by the recipes of the project."""
    for draw in range(preset.draws):
        key_rows, key_weights = jax.random.split(jax.random.key(draw))
        rows = np.asarray(jax.random.normal(key_rows, (SIDE, 1)))
        w = np.asarray(jax.random.normal(key_weights, (SIDE, SIDE)))
        for spread in preset.spreads:
            x, x_hat, exponent = through_recipes(np.exp(spread * rows) * w)
            lost = bits_changed(x, x_hat)
            metrics = {"changed": lost, "changed_share": lost / x.size, "scale_exponent": exponent}
            yield Run("recipe", draw, metrics, point=f"rows{spread:g}")
    w = np.array(w)
    w[5, :SUB] = 0.0
    x, x_hat, zero_exponent = through_recipes(w)
    zero_changed = bits_changed(x, x_hat)
    w[5, :SUB] = 2.0**-20
    x, x_hat, _ = through_recipes(w)
    yield Run("recipe", 0, {
        "zero_changed": zero_changed, "zero_exponent": zero_exponent, "faint_changed": bits_changed(x, x_hat),
    })  # fmt: skip


def checks(preset: Preset) -> list[Run]:
    """All of the above."""
    return [*enumerated(preset), Run("any_scale", 0, reach_of_any_scale()), *random_weights(preset)]


_CPU = Preset()
FIGURES = (
    Dose("ratio", "changed_share", "What MXFP4 -> E4M3 changes", "log2 of the ratio of sub-block scales",
         "share of elements that change", points=tuple((f"d{d}", d) for d in range(_CPU.largest_exponent + 1)),
         arms=("largest", "amax", "smallest"),
         lines=(Reference("kernel's bound 2^11", x=BOUND), Reference("arithmetic limit 2^14", x=LIMIT))),
    Dose("weights", "changed_share", "Random weights through both formats", "log-normal sigma of the rows' sizes",
         "share of elements that change", points=tuple((f"rows{s:g}", s) for s in _CPU.spreads), arms=("recipe",)),
    Dose("weights_ratio", "scale_exponent", "How far sub-block scales of random weights differ",
         "log-normal sigma of the rows' sizes", "log2 of the ratio of sub-block scales",
         points=tuple((f"rows{s:g}", s) for s in _CPU.spreads), arms=("recipe",),
         lines=(Reference("kernel's bound 2^11", y=BOUND), Reference("arithmetic limit 2^14", y=LIMIT))),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="lossless-fp4-fp8",
    title="MXFP4 weights in E4M3 products: lossless, and how far",
    claims=CLAIMS,
    arms=ARMS,
    presets={
        "smoke": Preset(largest_exponent=16, bases=(0,), draws=2, spreads=(0.0, 1.0, 6.0), evidence=False),
        "cpu": _CPU,
    },
    checks=checks,
    check_arms=("any_scale",),
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
