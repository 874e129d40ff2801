"""What does one outlier do to the rest of a tensor in FP8, and where do E4M3 and E5M2 change places?

Written before the first run: the claims, their rules and controls below. Two kinds of data are used.

Channels (FP-5). A tensor of 8 tokens and 256 channels of normal numbers, channels 17 and 90 multiplied by a factor k.
An element is *below the line* if |x| / scale is less than the smallest normal number, that is, if it is more than 448
/ 2^-6 = 28,672 times smaller than the largest magnitude that shares its scale. With m the largest of the 16 outlying
normal numbers, a share erf(k m / 28,672 / sqrt 2) of the other elements should be there under one scale for the
tensor.

Tokens (FP-4). Normal numbers times exp(sigma z), z normal per token. 448 and 57,344 are both 1.75 times a power of
two, so the grids of E4M3 and E5M2, each scaled to the same largest magnitude, are nested: E4M3's is the finer one
down to 1 / 28,672 of it, they are equal down to 1 / 57,344, and E5M2's is the finer one below. Averaging over tokens
turns that into a sigma at which the formats change places, which is predicted by quadrature.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import All, Arm, Claim, Control, Exact, Experiment, Run, Within
from repro.errors import ReproError
from repro.quant import FORMATS, RECIPES, Format, Recipe, fake_quantize
from repro.report import Dose, Heatmap, Reference

OUTLIERS = (17, 90)  # channels
SMALL, MIDDLE, LARGE = 1e3, 1e4, 1e5  # factors that claims name
LINE = FORMATS["e4m3"].max / FORMATS["e4m3"].min_normal  # 28,672

_TENSOR = RECIPES["fp8_tensor"]
_TILE32 = dataclasses.replace(RECIPES["fp8_tile"], block_shape=(1, 32))
_GRAINS = {"tensor": _TENSOR, "block": RECIPES["fp8_block"], "tile": RECIPES["fp8_tile"], "tile32": _TILE32}
# Without the kernels' floor of 1e-4 under the largest magnitude, which the quietest tokens here would meet.
_LOW_TILE = dataclasses.replace(RECIPES["fp8_tile"], amax_floor=2.0**-80)
RECIPE_OF: dict[str, Recipe] = {
    **_GRAINS,
    **{f"{name}_pow2": dataclasses.replace(r, scale_format="e8m0", scale_rule="rceil") for name, r in _GRAINS.items()},
    "mxfp8": RECIPES["mxfp8"], "nvfp4": RECIPES["nvfp4"],
    "e4m3": _TENSOR, "e5m2": dataclasses.replace(_TENSOR, element="e5m2"),
    "e4m3_tile": _LOW_TILE, "e5m2_tile": dataclasses.replace(_LOW_TILE, element="e5m2"),
}  # fmt: skip
GRAINS = tuple(_GRAINS)
ARMS = (
    Arm("tensor", "E4M3, one scale"),
    Arm("block", "E4M3, 128 x 128"),
    Arm("tile", "E4M3, 1 x 128"),
    Arm("tile32", "E4M3, 1 x 32"),
    Arm("mxfp8", "MXFP8, 1 x 32"),
    Arm("nvfp4", "NVFP4, 1 x 16 in two levels"),
    Arm("e4m3", "E4M3, one scale"),
    Arm("e5m2", "E5M2, one scale"),
    Arm("e4m3_tile", "E4M3, 1 x 128"),
    Arm("e5m2_tile", "E5M2, 1 x 128"),
    Arm("formats", "one scale"),
    Arm("formats_tile", "a scale per 1 x 128"),
)

TEACHING = "course material on FP8 training (a constructed tensor, 8 tokens by 256 channels)"
V3 = "DeepSeek-V3 (arXiv 2412.19437), section 3.3.2"
FORMAT_PAPER = "Micikevicius et al. (arXiv 2209.05433)"
_CHANNELS = "8 x 256 normal numbers with two constant outlying channels; no activation of a real model."
_TOKENS = "Normal numbers with a log-normal factor per token; quantisation error of a tensor, not of a training run."


def at(factor: float) -> str:
    """The point of a factor k."""
    return f"k{factor:.0f}"


def sigma_point(sigma: float) -> str:
    return f"sigma{sigma:g}"


_FOUR = ("error_of_0.01", 0.00445, 0.00455)
CLAIMS_OUTLIER = (
    Claim(
        id="FP-5", variant="four numbers", tier="M", source=f"{TEACHING}; block scales: {V3}",
        statement="In [1000, 0.01, 0.02, 0.5] the relative error of 0.01 in E4M3 is 12.8 % under one scale and 0.45 % "
        "where 1000 has a scale of its own.",
        reported="12.8 % and 0.45 %.",
        boundary="1000 in one 1 x 128 tile and the other numbers in the next; rounding to nearest, scale amax / 448.",
        criterion=All((
            Within("error_of_0.01", "four_in_tensor", 0.1275, 0.1285),
            Within("error_of_0.01", "four_apart", *_FOUR[1:]),
        )),
        control=Control("all four numbers in one tile", All((
            Within("error_of_0.01", "four_in_tensor", 0.1275, 0.1285),
            Within("error_of_0.01", "four_in_tile", *_FOUR[1:]),
        ))),
    ),
    Claim(
        id="FP-5", variant="four numbers, as they stand", tier="M", source=f"{TEACHING}; block scales: {V3}",
        statement="A 1 x 128 tile brings the error of 0.01 in [1000, 0.01, 0.02, 0.5] to 0.45 % as the tensor stands, "
        "with its four numbers side by side.",
        reported="From 12.8 % to 0.45 %; read literally, of this tensor.",
        boundary="One row of four neighbouring numbers, which lie in one tile.",
        criterion=Within("error_of_0.01", "four_in_tile", *_FOUR[1:]),
        control=Control("one scale for the tensor", Within("error_of_0.01", "four_in_tensor", *_FOUR[1:])),
    ),
    Claim(
        id="FP-5", variant="range", tier="M", source=TEACHING,
        statement="Under a scale of amax / 448, E4M3 has 8 values per octave down to amax / 28,672, and nothing but "
        "zero from amax / 458,752 on.",
        reported="448 / 2^-6 = 28,672; below it fewer bits, then zero.",
        boundary="A property of the format; 458,752 = 448 / 2^-10 is derived here.",
        criterion=All((Exact("normal_range", "e4m3", 28672.0), Exact("zero_range", "e4m3", 458752.0))),
        control=Control("E5M2", All((Exact("normal_range", "e5m2", 28672.0), Exact("zero_range", "e5m2", 458752.0)))),
    ),
    Claim(
        id="FP-5", variant="small factors", tier="M", source=TEACHING,
        statement="Up to k = 1,000 the relative error (root mean square) of the ordinary channels is the same to a "
        "tenth for one scale, 128 x 128, 1 x 128 and 1 x 32.",
        reported="The errors of four granularities are almost equal.", boundary=_CHANNELS,
        criterion=Within("spread_small", "grains", 1.0, 1.1),
        control=Control("k = 100,000", Within("spread_large", "grains", 1.0, 1.1)),
    ),
    Claim(
        id="FP-5", variant="small factors, powers of two", tier="M", source="derived here",
        statement="With scales rounded up to powers of two, where all granularities round on one grid, the errors of "
        "the claim on small factors are the same to a hundredth.",
        reported="Not reported. Added when that claim had failed in a trial: a scale that is no power of two moves the "
        "grid under the largest elements.",
        boundary=_CHANNELS,
        criterion=Within("spread_small_pow2", "grains", 1.0, 1.01),
        control=Control("k = 100,000", Within("spread_large_pow2", "grains", 1.0, 1.01)),
    ),
    Claim(
        id="FP-5", variant="small factors, reason", tier="M", source=TEACHING,
        statement="At k = 1,000 no element has crossed the line of 28,672 under one scale.",
        reported="Given as the reason why the errors are almost equal.",
        boundary=f"{_CHANNELS} By the formula the share is erf(m k / 28,672 / sqrt 2), about 6 %.",
        criterion=Exact("below_line", f"tensor@{at(SMALL)}", 0.0),
        control=Control("k = 10,000", Exact("below_line", f"tensor@{at(MIDDLE)}", 0.0)),
    ),
    Claim(
        id="FP-5", variant="share below the line", tier="M", source=TEACHING,
        statement="At k = 10,000 about half of the elements are below the line under one scale (mean over draws 0.4 to "
        "0.6), at most half with 1 x 128 tiles and a quarter with 1 x 32, and the share of every draw under one scale "
        "is that of the formula to 4 standard errors.",
        reported="About half; with 1 x 128 only the half with the outliers, with 1 x 32 fewer blocks.",
        boundary=_CHANNELS,
        criterion=All((
            Within("mean_below_line", "tensor_all_draws", 0.4, 0.6),
            Within("below_line", f"tile@{at(MIDDLE)}", 0.0, 0.5),
            Within("below_line", f"tile32@{at(MIDDLE)}", 0.0, 0.25),
            Within("share_z", f"tensor@{at(MIDDLE)}", -4.0, 4.0),
        )),
        control=Control("the formula without the factor m",
                        Within("share_z_without_m", f"tensor@{at(MIDDLE)}", -4.0, 4.0)),
    ),
    Claim(
        id="FP-5", variant="confined", tier="M", source=f"{TEACHING}; {V3}",
        statement="Whatever k is, not one element of a block without an outlying channel changes, for 1 x 128, 1 x 32 "
        "and MXFP8 blocks.",
        reported="The second 128 channels are wholly unaffected.", boundary=_CHANNELS,
        criterion=All(tuple(Exact("changed_outside", arm, 0.0) for arm in ("tile", "tile32", "mxfp8"))),
        control=Control("one scale for the tensor", Exact("changed_outside", "tensor", 0.0)),
    ),
    Claim(
        id="FP-5", variant="two levels", tier="M", source="derived here for NVFP4 (arXiv 2509.25149)",
        statement="Under NVFP4 an outlier does reach other blocks: a block whose largest magnitude is 458,752 times "
        "smaller than the tensor's, or more, becomes zero, and no other block does.",
        reported="Not reported in this form: the block scale is itself E4M3 and has E4M3's range.",
        boundary="Every magnitude with 8 significant bits from 2^10 to 2^24 times below the largest, one block each.",
        criterion=Exact("zero_mismatches", "nvfp4", 0.0),
        control=Control("28,672 in place of 458,752", Exact("zero_mismatches_at_line", "nvfp4", 0.0)),
    ),
)  # fmt: skip

CLAIMS_FORMATS = (
    Claim(
        id="FP-4", variant="nested grids", tier="M",
        source=f"derived here from the formats of {FORMAT_PAPER}, section 3",
        statement="With both formats scaled to the same largest magnitude, E4M3 is never further from an element than "
        "E5M2 down to 1 / 57,344 of it, and E5M2 never further than E4M3 below.",
        reported="E4M3 has a bit more of precision, E5M2 of range; no place is given.",
        boundary="Every magnitude with 12 or more significant bits over 40 octaves; largest magnitude 448.",
        criterion=All((Exact("e4m3_worse_above", "grids", 0.0), Exact("e5m2_worse_below", "grids", 0.0))),
        control=Control("1 / 114,688 in place of 1 / 57,344", Exact("e4m3_worse_above_wrong", "grids", 0.0)),
    ),
    Claim(
        id="FP-4", variant="weights and activations", tier="M", source=f"{FORMAT_PAPER}, section 3",
        statement="On normal numbers under one scale, E5M2's error is twice E4M3's (1.9 to 2.1).",
        reported="E4M3 is recommended for weights and activations; no ratio is given.", boundary=_TOKENS,
        criterion=Within("e5m2_over_e4m3", f"formats@{sigma_point(0)}", 1.9, 2.1),
        control=Control("log-normal tokens, sigma = 6",
                        Within("e5m2_over_e4m3", f"formats@{sigma_point(6)}", 1.9, 2.1)),
    ),
    Claim(
        id="FP-4", variant="gradients", tier="M", source=f"{FORMAT_PAPER}, section 3",
        statement="On log-normal tokens of sigma = 6 under one scale, the error of a token, averaged over tokens, is "
        "smaller in E5M2 than in E4M3.",
        reported="E5M2 is recommended for gradients, whose range is wide.",
        boundary=f"{_TOKENS} Whether gradients are spread so widely is not asked here.",
        criterion=Within("e5m2_over_e4m3", f"formats@{sigma_point(6)}", 0.0, 0.999),
        control=Control("a scale per 1 x 128 tile",
                        Within("e5m2_over_e4m3", f"formats_tile@{sigma_point(6)}", 0.0, 0.999)),
    ),
    Claim(
        id="FP-4", variant="gradients, error of the whole tensor", tier="M", source=f"{FORMAT_PAPER}, section 3",
        statement="On the same data the relative error of the whole tensor (root of squared error over squared size) "
        "is smaller in E5M2 than in E4M3.",
        reported="E5M2 is recommended for gradients; the measure of error is open.",
        boundary=f"{_TOKENS} The loudest tokens decide this measure.",
        criterion=Within("whole_e5m2_over_e4m3", f"formats@{sigma_point(6)}", 0.0, 0.999),
        control=Control("normal numbers", Within("whole_e5m2_over_e4m3", f"formats@{sigma_point(0)}", 0.0, 0.999)),
    ),
    Claim(
        id="FP-4", variant="cross-over", tier="M", source=f"derived here from the formats of {FORMAT_PAPER}",
        statement="The sigma at which the two formats change places is the one that quadrature predicts, to 5 %.",
        reported="Not reported.", boundary=f"{_TOKENS} It depends on the number of tokens through the largest one.",
        criterion=Within("crossing_over_predicted", "formats", 0.95, 1.05),
        control=Control("subnormal numbers flushed in the prediction",
                        Within("crossing_over_flushed", "formats", 0.95, 1.05)),
    ),
    Claim(
        id="FP-4", variant="no cross-over with tiles", tier="M", source=f"derived here; {V3} uses E4M3 throughout",
        statement="With a scale per 1 x 128 tile along a token, E5M2's error is twice E4M3's (1.9 to 2.1) at every "
        "sigma.",
        reported="E4M3 everywhere is said to be enough with fine scales.",
        boundary=f"{_TOKENS} One token fills a tile.",
        criterion=Within("least_e5m2_over_e4m3", "formats_tile", 1.9, 2.1),
        control=Control("one scale", Within("least_e5m2_over_e4m3", "formats", 1.9, 2.1)),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is drawn and scanned."""

    draws: int = 8
    """Independent tensors; a claim has to hold on every one."""
    factors: tuple[float, ...] = (1.0, 10.0, 100.0, 1e3, 3e3, 1e4, 3e4, 1e5, 1e6, 1e7)
    """Factors k of the outlying channels; 1, 1,000, 10,000 and 100,000 are among them."""
    sigmas: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0)
    """Log-normal spreads of the tokens, from 0 to 6."""
    tokens: int = 4096
    width: int = 128
    """Channels of each token; at most 128, so that a token is one tile."""
    significant_bits: int = 14
    """Significant bits of the magnitudes that the scan of the two grids goes through."""
    evidence: bool = True
    """Whether verdicts count as evidence; false for a quick look and for a preset changed by hand."""

    def __post_init__(self) -> None:
        if not {1.0, SMALL, MIDDLE, LARGE} <= set(self.factors):
            raise ReproError(f"factors {self.factors} must hold 1, 1000, 10000 and 100000, which claims name.")
        if list(self.sigmas) != sorted(set(self.sigmas)) or self.sigmas[:1] != (0.0,) or self.sigmas[-1] != 6.0:
            raise ReproError(f"sigmas {self.sigmas} must ascend from 0 to 6, which claims name.")
        if self.draws < 1 or self.tokens < 2 or not 16 <= self.width <= 128 or not 12 <= self.significant_bits <= 20:
            raise ReproError("draws is at least 1, tokens at least 2, width 16 to 128, significant_bits 12 to 20.")


def dequantised(x: np.ndarray, arm: str) -> np.ndarray:
    """x after quantisation by an arm's recipe, float64."""
    return np.asarray(fake_quantize(jnp.asarray(x, jnp.float32), RECIPE_OF[arm]), np.float64)


def channels(draw: int, factor: float) -> np.ndarray:
    """float32 `[8, 256]`: normal numbers, the outlying channels times a factor. The numbers do not depend on it."""
    x_TD = np.array(jax.random.normal(jax.random.key(draw), (8, 256)))
    x_TD[:, OUTLIERS] *= np.float32(factor)
    return x_TD


def ordinary() -> np.ndarray:
    """Mask `[256]` of the channels that are not outlying."""
    return ~np.isin(np.arange(256), OUTLIERS)


def outside(recipe: Recipe) -> np.ndarray:
    """Mask `[256]` of the channels whose blocks hold no outlying channel; of all ordinary ones under one scale."""
    if recipe.block_shape is None:
        return ordinary()
    along = recipe.block_shape[1]
    return ~np.isin(np.arange(256) // along, [channel // along for channel in OUTLIERS])


def below_line(x_TD: np.ndarray, arm: str) -> np.ndarray:
    """Mask of the elements that are more than 28,672 times smaller than the largest magnitude of their block."""
    shape = RECIPE_OF[arm].block_shape or x_TD.shape
    rows, columns = (min(size, n) for size, n in zip(shape, x_TD.shape, strict=True))
    blocks = np.abs(x_TD.astype(np.float64)).reshape(x_TD.shape[0] // rows, rows, -1, columns)
    return (blocks < blocks.max((1, 3), keepdims=True) / LINE).reshape(x_TD.shape)


def root_mean_square_error(x: np.ndarray, x_hat: np.ndarray, axis=None) -> np.ndarray:
    """|x_hat - x| / |x| along an axis, or of the whole."""
    x = np.asarray(x, np.float64)
    return np.sqrt(((x_hat - x) ** 2).sum(axis) / (x**2).sum(axis))


def four_numbers() -> Iterator[Run]:
    """The relative error of 0.01 beside, and apart from, 1000."""
    side_by_side = np.array([[1000, 0.01, 0.02, 0.5]], np.float32)
    apart = np.zeros((1, 256), np.float32)
    apart[0, [0, 128, 129, 130]] = side_by_side
    for name, x, place, arm in (
        ("four_in_tensor", side_by_side, 1, "tensor"),
        ("four_in_tile", side_by_side, 1, "tile"),
        ("four_apart", apart, 128, "tile"),
    ):
        yield Run(name, 0, {"error_of_0.01": abs(dequantised(x, arm)[0, place] - 0.01) / 0.01})


def ranges(arm: str) -> dict[str, float]:
    """How far a scale reaches, by scanning octaves below the largest magnitude of the format.

    normal_range: the largest magnitude over the lower end of the last octave that has as many values as the first full
    one. zero_range: the largest magnitude over the largest power of two, or three quarters of one, that becomes zero.
    """
    fmt = FORMATS[RECIPE_OF[arm].element]
    per_octave = 2**fmt.mantissa_bits
    exponents = np.arange(fmt.max_exponent - 1, fmt.min_exponent - fmt.mantissa_bits - 4, -1)
    significands = 1 + np.arange(8 * per_octave) / (8 * per_octave)
    x = np.ldexp(significands, exponents[:, None])
    x_hat = dequantised(np.append(x.ravel(), fmt.max)[None], arm)[0, :-1].reshape(x.shape)
    counts = [len({v for v in row if 2.0**e <= v < 2.0 ** (e + 1)}) for row, e in zip(x_hat, exponents, strict=True)]
    full = [e for e, count in zip(exponents, counts, strict=True) if count == per_octave]
    return {"normal_range": fmt.max / 2.0 ** min(full), "zero_range": fmt.max / x[x_hat == 0].max()}


def outlier_runs(preset: Preset) -> Iterator[Run]:
    """FP-5 on the 8 x 256 tensor: one run per arm, factor and draw, and summaries per draw."""
    arms = (*GRAINS, "mxfp8", "nvfp4")
    shares = []
    for draw in range(preset.draws):
        plain_TD = channels(draw, 1.0)
        plain = {arm: dequantised(plain_TD, arm) for arm in arms}
        changed, errors = dict.fromkeys(arms, 0), {}
        for factor in preset.factors:
            x_TD, kept = channels(draw, factor), ordinary()
            for arm in arms:
                x_hat = dequantised(x_TD, arm)
                away = outside(RECIPE_OF[arm])
                changed[arm] += int((x_hat != plain[arm])[:, away].sum())
                errors[arm, factor] = float(root_mean_square_error(x_TD[:, kept], x_hat[:, kept]))
                metrics = {"error": errors[arm, factor]}
                if arm in GRAINS:
                    below = below_line(x_TD, arm)[:, kept]
                    metrics["below_line"] = float(below.mean())
                    if arm == "tensor":
                        metrics |= _against_formula(x_TD, factor, below)
                        shares += [metrics["below_line"]] * (factor == MIDDLE)
                yield Run(arm, draw, metrics, point=at(factor))
            for arm in GRAINS:
                x_hat = dequantised(x_TD, f"{arm}_pow2")
                errors[f"{arm}_pow2", factor] = float(root_mean_square_error(x_TD[:, kept], x_hat[:, kept]))
        for arm in arms:
            yield Run(arm, draw, {"changed_outside": changed[arm]})
        spreads = {}
        for suffix in ("", "_pow2"):
            of_factor = {k: _spread([errors[arm + suffix, k] for arm in GRAINS]) for k in preset.factors}
            spreads[f"spread_small{suffix}"] = max(v for k, v in of_factor.items() if k <= SMALL)
            spreads[f"spread_large{suffix}"] = of_factor[LARGE]
        yield Run("grains", draw, spreads)
    yield Run("tensor_all_draws", 0, {"mean_below_line": float(np.mean(shares))})


def _spread(errors: list[float]) -> float:
    return max(errors) / min(errors)


def _against_formula(x_TD: np.ndarray, factor: float, below: np.ndarray) -> dict[str, float]:
    """The share below the line less the formula's, in standard errors; and with m = 1 in the formula."""
    largest = float(np.abs(x_TD).max())

    def z(threshold: float) -> float:
        share = math.erf(threshold / math.sqrt(2))
        return (below.mean() - share) / math.sqrt(max(share * (1 - share), 1e-12) / below.size)

    return {"share_z": z(largest / LINE), "share_z_without_m": z(factor / LINE)}


def two_level_runs() -> Iterator[Run]:
    """Which NVFP4 blocks become zero, against the ratio of the tensor's largest magnitude to the block's."""
    magnitudes = np.ldexp(1 + np.arange(128) / 128, np.arange(-16, -2)[:, None]).ravel()
    x = np.zeros((1 + len(magnitudes), 16), np.float32)
    x[0, 0] = 448.0  # the two scales are then powers of two and the magnitudes below exact
    x[1:, 3] = magnitudes
    lost = (dequantised(x, "nvfp4") == 0).all(1)[1:]
    metrics = {
        "zero_mismatches": int((lost != (magnitudes * 16 * LINE <= 448)).sum()),
        "zero_mismatches_at_line": int((lost != (magnitudes * LINE <= 448)).sum()),
    }
    yield Run("nvfp4", 0, metrics, point="ratios")


def grid_runs(bits: int) -> Iterator[Run]:
    """Which of the two formats is nearer, element by element, for all magnitudes with so many significant bits."""
    significands = 1 + np.arange(2 ** (bits - 1)) / 2 ** (bits - 1)
    x = np.ldexp(significands, np.arange(8, -33, -1)[:, None]).ravel()
    x = np.append(x[x <= 448.0], 448.0)[None]  # so that the scales are 1 and 2^-7, exactly
    e4m3, e5m2 = (np.abs(dequantised(x, arm) - x) for arm in ("e4m3", "e5m2"))

    def worse(reach: float) -> float:
        return int((e4m3 > e5m2)[x >= 448.0 / reach].sum())

    yield Run("grids", 0, {
        "e4m3_worse_above": worse(2 * LINE), "e4m3_worse_above_wrong": worse(4 * LINE),
        "e5m2_worse_below": int((e5m2 > e4m3)[x < 448.0 / (2 * LINE)].sum()),
    })  # fmt: skip


def predicted_token_error(sigma: float, largest: float, fmt: Format, *, flush: bool = False) -> float:
    """The error of a token (root mean square), averaged over log-normal tokens, under one scale, by quadrature.

    `largest` is the largest magnitude of the tensor. With `flush` numbers below the smallest normal become zero.
    Rounding is written out in float64 here and shares no code with `repro.quant`.
    """
    z = np.linspace(-5, 5, 201)
    weight = np.exp(-(z**2) / 2)
    n = (np.arange(2000) + 0.5) / 2000 * 6  # half of a normal distribution, midpoints
    density = np.exp(-(n**2) / 2)
    u = np.minimum(np.exp(sigma * z)[:, None] * n / largest * fmt.max, fmt.max)
    exponent = np.maximum(np.frexp(u)[1] - 1, fmt.min_exponent)
    step = np.ldexp(1.0, exponent - fmt.mantissa_bits)
    rounded = np.rint(u / step) * step
    if flush:
        rounded = np.where(u < fmt.min_normal, 0.0, rounded)
    error = np.sqrt((density * (rounded - u) ** 2).sum(1) / (density * u**2).sum(1))
    return float((weight * error).sum() / weight.sum())


def crossing(sigmas: tuple[float, ...], ratios: list[float]) -> float:
    """The first sigma at which a ratio falls below 1, by interpolation of its logarithm; infinity if it never does."""
    logs = np.log(ratios)
    for i in range(1, len(logs)):
        if logs[i - 1] >= 0 > logs[i]:
            return sigmas[i - 1] + (sigmas[i] - sigmas[i - 1]) * logs[i - 1] / (logs[i - 1] - logs[i])
    return math.inf


def token_runs(preset: Preset) -> Iterator[Run]:
    """FP-4 on log-normal tokens: one run per pair of formats, sigma and draw, and the cross-over per draw."""
    for draw in range(preset.draws):
        key_tokens, key_values = jax.random.split(jax.random.key(1000 + draw))
        z_T = np.asarray(jax.random.normal(key_tokens, (preset.tokens,)), np.float64)
        n_TD = np.asarray(jax.random.normal(key_values, (preset.tokens, preset.width)), np.float64)
        found = {"formats": [], "formats_tile": []}
        predicted, flushed = [], []
        for sigma in preset.sigmas:
            # The loudest token has factor 1; what is quantised does not depend on the unit.
            x_TD = (np.exp(sigma * (z_T - z_T.max()))[:, None] * n_TD).astype(np.float32)
            for pair, arms in (("formats", ("e4m3", "e5m2")), ("formats_tile", ("e4m3_tile", "e5m2_tile"))):
                token, whole = [], []
                for arm in arms:
                    x_hat = dequantised(x_TD, arm)
                    token.append(float(root_mean_square_error(x_TD, x_hat, axis=1).mean()))
                    whole.append(float(root_mean_square_error(x_TD, x_hat)))
                    yield Run(arm, draw, {"token_error": token[-1], "whole_error": whole[-1]}, point=sigma_point(sigma))
                found[pair].append(token[1] / token[0])
                metrics = {"e5m2_over_e4m3": token[1] / token[0], "whole_e5m2_over_e4m3": whole[1] / whole[0]}
                yield Run(pair, draw, metrics, point=sigma_point(sigma))
            largest = float(np.abs(x_TD).max()) * math.exp(sigma * z_T.max())
            for ratios, flush in ((predicted, False), (flushed, True)):
                errors = [predicted_token_error(sigma, largest, FORMATS[f], flush=flush) for f in ("e5m2", "e4m3")]
                ratios.append(errors[0] / errors[1])
        measured = crossing(preset.sigmas, found["formats"])
        yield Run("formats", draw, {
            "crossing_sigma": measured, "least_e5m2_over_e4m3": min(found["formats"]),
            "crossing_over_predicted": measured / crossing(preset.sigmas, predicted),
            "crossing_over_flushed": measured / crossing(preset.sigmas, flushed),
        })  # fmt: skip
        yield Run("formats_tile", draw, {"least_e5m2_over_e4m3": min(found["formats_tile"])})


def checks(preset: Preset) -> list[Run]:
    """All of the above."""
    runs = [*four_numbers(), *outlier_runs(preset), *two_level_runs(), *token_runs(preset)]
    runs += [Run(arm, 0, ranges(arm)) for arm in ("e4m3", "e5m2")]
    return runs + [*grid_runs(preset.significant_bits)]


def heat() -> dict[str, np.ndarray]:
    """Relative error of every element at k = 100,000, at least 0.01: one matrix `[8, 256]` per granularity."""
    x_TD = channels(0, LARGE)
    labels = {arm.name: arm.label for arm in ARMS}
    error = {arm: np.abs(dequantised(x_TD, arm) - x_TD) / np.abs(x_TD) for arm in ("tensor", "tile", "tile32")}
    return {labels[arm]: np.maximum(values, 0.01) for arm, values in error.items()}


_CPU = Preset()
_K = tuple((at(k), k) for k in _CPU.factors)
_SIGMA = tuple((sigma_point(s), s) for s in _CPU.sigmas)
FIGURES = (
    Heatmap("heat", "Where two outlying channels (17 and 90, k = 100,000) do harm", heat,
            "relative error, 0.01 and more", xlabel="channel", ylabel="token", log=True),
    Dose("error", "error", "Error of the ordinary channels", "factor k of the outlying channels",
         "relative error (rms)", points=_K, arms=(*GRAINS, "mxfp8", "nvfp4"), log_x=10, log_y=True),
    Dose("below_line", "below_line", "Share of elements below the line of 28,672", "factor k of the outlying channels",
         "share of elements", points=_K, arms=GRAINS, log_x=10),
    Dose("ratio", "e5m2_over_e4m3", "E5M2 against E4M3", "log-normal spread sigma of the tokens",
         "error of E5M2 over that of E4M3", points=_SIGMA, arms=("formats", "formats_tile"), log_y=True,
         lines=(Reference("no difference", y=1.0),)),
    Dose("formats", "token_error", "Error of a token, averaged over tokens", "log-normal spread sigma of the tokens",
         "relative error (rms)", points=_SIGMA, arms=("e4m3", "e5m2", "e4m3_tile", "e5m2_tile"), log_y=True),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="outlier-scaling",
    title="One outlier, one scale: what FP8 keeps of the rest",
    claims=CLAIMS_OUTLIER + CLAIMS_FORMATS,
    arms=ARMS,
    presets={
        "smoke": Preset(
            draws=2, factors=(1.0, SMALL, MIDDLE, LARGE), sigmas=(0.0, 2.0, 3.0, 4.0, 6.0), tokens=512,
            significant_bits=12, evidence=False,
        ),
        "cpu": _CPU,
    },
    checks=checks,
    check_arms=("four_in_tensor", "four_in_tile", "four_apart", "tensor_all_draws", "grains", "grids"),
    figures=FIGURES,
)  # fmt: skip

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
