"""How wrong are FP8 products whose sums keep about 14 bits, and does promotion to float32 every 128 repair them?

Written before the first run: the claims, their rules and controls below. Operands are rounded to E4M3 and multiplied
exactly; only the sums differ. The reference is the sum in float64, in which every sum here is exact.

The report says "close to 2 %, at most" for two random matrices at K = 4096 without saying how they are distributed or
how the error is defined. So both readings of each are run: entries of one sign (uniform in [0, 1)) and of mean zero
(standard normal), and errors element by element (the largest |error| / |value|) and by norm (the largest |error| over
the largest |value| of the product). A verdict on the number is a verdict on that reading of it, not on the report.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from repro.claims import All, Arm, Claim, Control, Experiment, Run, Within
from repro.errors import ReproError
from repro.quant import Accumulator, accumulate, round_to
from repro.report import Dose, Reference

CHUNK = 32
"""Products that a tensor core aligns and adds at once."""
INTERVAL = 128
SHORT, LONG = 256, 4096
"""Where the rules read the error; the report's K is the second."""

ARMS = (
    Arm("bits14", "14 bits, no promotion"),
    Arm("bits14_promoted", "14 bits, promoted every 128"),
    Arm("bits13", "13 bits, no promotion"),
    Arm("bits13_promoted", "13 bits, promoted every 128"),
    Arm("bits23", "23 bits, no promotion"),
    Arm("bits14_every", "14 bits, promoted at that interval"),
)
ACCUMULATORS = {
    "bits14": Accumulator(14, CHUNK, None),
    "bits14_promoted": Accumulator(14, CHUNK, INTERVAL),
    "bits13": Accumulator(13, CHUNK, None),
    "bits13_promoted": Accumulator(13, CHUNK, INTERVAL),
    "bits23": Accumulator(23, CHUNK, None),
}

V3 = "DeepSeek-V3 (arXiv 2412.19437)"
EMULATION = (
    "Emulation in JAX: chunks of 32 products aligned to their largest exponent, cut towards zero, without guard bits; "
    "no H800 was measured."
)
DATA = {"uniform": "entries of one sign, uniform in [0, 1)", "normal": "entries of mean zero, standard normal"}
NORM = {"elementwise": "element by element", "normwise": "relative to the largest element of the product"}


def _reported(data: str, norm: str) -> Claim:
    def rule(arm: str) -> Within:
        return Within(f"{data}_{norm}", f"{arm}@k{LONG}", 0.01, 0.04)

    return Claim(
        id="V3-3", variant=f"2 %, {data} data, {norm} error", tier="M", source=f"{V3}, section 3.3.2",
        statement=f"With 14 bits and no promotion the largest relative error at K = 4096 is within a factor of two of "
        f"2 %, for {DATA[data]}, {NORM[norm]}.",
        reported="Close to 2 % at most in a preliminary test with random matrices on an H800; neither their "
        "distribution nor the definition of the error is given.",
        boundary=f"{EMULATION} One reading of the reported number out of four."
        + (" Ruled by the outputs nearest to zero." if (data, norm) == ("normal", "elementwise") else ""),
        criterion=rule("bits14"), control=Control("23 bits", rule("bits23")),
    )  # fmt: skip


def _grows(arm: str) -> Within:
    return Within("uniform_growth", arm, 4.0, float("inf"))


def _repaired(arm: str) -> All:
    return All((
        Within("uniform_elementwise", f"{arm}@k{LONG}", 0.0, 0.002),
        Within("normal_normwise", f"{arm}@k{LONG}", 0.0, 0.002),
    ))  # fmt: skip


CLAIMS = (
    *(_reported(data, norm) for data in DATA for norm in NORM),
    Claim(
        id="V3-3", variant="grows with K", tier="M", source=f"{V3}, section 3.3.2",
        statement="Without promotion the largest relative error at K = 4096 is at least four times that at K = 256.",
        reported="The problem is said to become more pronounced at large K; no figure over K.",
        boundary=f"{EMULATION} Entries of one sign, element by element; every set of operands for itself.",
        criterion=_grows("bits14"), control=Control("promotion every 128", _grows("bits14_promoted")),
    ),
    Claim(
        id="V3-3", variant="promotion repairs it", tier="M", source=f"{V3}, section 3.3.2",
        statement="Promotion to float32 every 128 products keeps the error at K = 4096 at or below 0.2 %, a tenth of "
        "the reported error, on both kinds of data.",
        reported="128 is called the smallest interval that clearly improves precision; no number.",
        boundary=f"{EMULATION} Element by element for entries of one sign, by norm for entries of mean zero.",
        criterion=_repaired("bits14_promoted"), control=Control("no promotion", _repaired("bits14")),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """Sizes of the products."""

    ks: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    """Lengths of the sums, among them 256 and 4096, where the rules read them."""
    intervals: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    """Intervals of promotion that are compared at K = 4096, with 14 bits; may be empty."""
    outputs: int = 16
    """Rows, and columns, of a product: the largest error is over outputs x outputs sums."""
    trials: int = 8
    """Sets of operands; a rule must hold in each."""
    evidence: bool = True
    """Whether verdicts count as evidence."""

    def __post_init__(self) -> None:
        if not {SHORT, LONG} <= set(self.ks) or min(self.ks) < 1:
            raise ReproError(f"ks is {self.ks}; it must hold {SHORT} and {LONG}, and lengths of at least 1.")
        if any(n < 1 or n % CHUNK for n in self.intervals):
            raise ReproError(f"intervals is {self.intervals}; they must be multiples of {CHUNK}.")
        if min(self.outputs, self.trials) < 1:
            raise ReproError("outputs and trials must be at least 1.")


def operands(data: str, seed: int, outputs: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 matrices [outputs, k] and [k, outputs], as float32."""
    rng = np.random.default_rng([seed, list(DATA).index(data)])
    draw = (lambda *shape: rng.uniform(size=shape)) if data == "uniform" else (lambda *shape: rng.normal(size=shape))
    return tuple(np.asarray(round_to(draw(*shape), "e4m3")) for shape in ((outputs, k), (k, outputs)))


def errors(product: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """The largest relative error by both definitions; `exact` is float64."""
    away = np.abs(product.astype(np.float64) - exact)
    return {"elementwise": float(np.max(away / np.abs(exact))), "normwise": float(np.max(away) / np.max(np.abs(exact)))}


def padded(a: np.ndarray, b: np.ndarray, k: int, length: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    """The first k terms, and zeros up to `length`, which add nothing: so sums of all lengths share one program."""
    zeros = length - k
    return jnp.asarray(np.pad(a[:, :k], ((0, 0), (0, zeros)))), jnp.asarray(np.pad(b[:k], ((0, zeros), (0, 0))))


def checks(preset: Preset) -> list[Run]:
    """Errors by accumulator and K, and by interval of promotion."""
    runs = []
    longest = -(-max(preset.ks) // INTERVAL) * INTERVAL
    for seed in range(preset.trials):
        sets = {data: operands(data, seed, preset.outputs, longest) for data in DATA}
        for arm, accumulator in ACCUMULATORS.items():
            uniform = {}
            for k in preset.ks:
                metrics = _metrics({d: padded(a, b, k, longest) for d, (a, b) in sets.items()}, accumulator)
                uniform[k] = metrics["uniform_elementwise"]
                runs.append(Run(arm, seed, metrics, point=f"k{k}"))
            with np.errstate(divide="ignore", invalid="ignore"):  # a short sum may be exact
                growth = np.float64(uniform[LONG]) / np.float64(uniform[SHORT])
            runs.append(Run(arm, seed, {"uniform_growth": growth}))
        for interval in preset.intervals:
            cut = {d: padded(a, b, LONG, -(-LONG // interval) * interval) for d, (a, b) in sets.items()}
            metrics = _metrics(cut, Accumulator(14, CHUNK, interval))
            runs.append(Run("bits14_every", seed, metrics, point=f"n{interval}"))
    return runs


def _metrics(sets: dict, accumulator: Accumulator) -> dict[str, float]:
    found = {}
    for data, (a, b) in sets.items():
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        of_norm = errors(np.asarray(accumulate(a, b, accumulator)), exact)
        found |= {f"{data}_{norm}": value for norm, value in of_norm.items()}
    return found


_TITLES = {
    (data, norm): f"Error of the sum, {kind} entries, {size}"
    for data, kind in (("uniform", "uniform"), ("normal", "zero-mean"))
    for norm, size in (("elementwise", "element by element"), ("normwise", "relative to the largest"))
}
_KS = tuple((f"k{2**i}", 2**i) for i in range(5, 15))
_INTERVALS = tuple((f"n{2**i}", 2**i) for i in range(5, 13))


def _over_k(data: str, norm: str) -> Dose:
    return Dose(
        f"{data}_{norm}", f"{data}_{norm}", _TITLES[data, norm], "length of the sum K",
        "largest relative error", _KS, log_x=2, log_y=True, lines=(Reference("2 %, as reported for K = 4096", y=0.02),),
    )  # fmt: skip


FIGURES = (
    *(_over_k(data, norm) for data in DATA for norm in NORM),
    Dose(
        "interval", "uniform_elementwise", "Error at K = 4096 against the interval of promotion, uniform data",
        "products between promotions", "largest relative error", _INTERVALS, ("bits14_every",), log_x=2, log_y=True,
        lines=(Reference("every 128", x=128.0),),
    ),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="accumulation",
    title="Sums of about 14 bits, and promotion every 128",
    claims=CLAIMS,
    arms=ARMS,
    presets={
        "smoke": Preset(ks=(SHORT, LONG), intervals=(), outputs=8, trials=2, evidence=False),
        "cpu": Preset(),
    },
    checks=checks,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
