"""Which LayerNorm gains does an MX format clamp, what does it cost, and which scale rule avoids it?

Written before the first run. E4M3 has no 480: in its top octave 256 .. 512 the largest number is 448 = 1.75 * 256.
The floor rule of OCP MX puts the largest magnitude of a block of 32 into that octave, so a block whose amax is
between 1.75 and 2 times a power of two has all that lies above 1.75 clamped. Gains of a LayerNorm start at 1 and move
a little: those that drift just below 1 lie there. In detail, with max the largest element, 2^emax the power of two in
it, and m mantissa bits, a block is clamped exactly if the significand of its amax is

    floor: in (max / 2^emax, 2)     even: in (max / 2^emax, 2 - 2^-(m + 1))     rceil, ceil: never

For E4M3 that is (0.875, 1) under floor and (0.875, 0.96875) under even, and every gain from 27/32 = 0.84375 (the tie
below 448, which goes to the even 448) up to 1 then becomes 0.875. A cluster at 0.97 +- 0.01 has the relative error
sqrt(0.095^2 + 0.01^2) / sqrt(0.97^2 + 0.01^2) = 9.85 %. But a block with a single gain at or above 1 is not clamped,
and of 512 such gains at least one is there with probability 1 - (1 - 0.00135)^512 = 50 %.

This module asks about the format only (no training), so it has no plan; one can be added beside `checks`.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import All, Arm, Claim, Control, Exact, Experiment, Run, Within
from repro.errors import ReproError
from repro.quant import FORMATS, RECIPES, Format, Recipe, fake_quantize, quantize
from repro.report import Dose, Reference

BLOCK = 32
DEVIATION = 0.01  # of the gains of a cluster
RULES = ("floor", "even", "rceil", "ceil")
NAMED = (0.93, 0.9375, 0.97, 1.0)  # means that claims name

ARMS = (
    Arm("floor", "floor (OCP MX)"),
    Arm("even", "even"),
    Arm("rceil", "rounded up (rceil)"),
    Arm("ceil", "ceil"),
    Arm("bump", "floor, exponent + 1"),
)
PAPER = "arXiv 2506.20752 (instabilities of training in MX formats)"
_CLUSTER = "512 gains, normal around the mean with deviation 0.01, E4M3 in blocks of 32; no training."


def at(mean: float) -> str:
    """The point of a mean."""
    return f"mean{mean:g}"


CLAIMS = (
    Claim(
        id="FP-6", variant="which gains", tier="M",
        source=f"derived here from OCP MX v1.0, section 6.3; mechanism: {PAPER}",
        statement="A block is clamped exactly where the significand of its largest magnitude is above max / 2^emax "
        "and, with m mantissa bits, below 2 (floor) or 2 - 2^-(m + 1) (even); never under rceil and ceil.",
        reported="The floor rule clamps what lies in the top quarter of an octave (E4M3: 448 to 512).",
        boundary="E4M3, E5M2, E3M2, E2M3, E2M1 and INT8; all significands of 12 or more bits, at four exponents. Rceil "
        "multiplies by a rounded 1 / max and may miss by one unit in the last place of float32.",
        criterion=Exact("window_mismatches", "windows", 0.0),
        control=Control("the window of floor for every rule", Exact("window_mismatches_floor", "windows", 0.0)),
    ),
    Claim(
        id="FP-6", variant="one value", tier="M", source=PAPER,
        statement="In a clamped E4M3 block every gain from 0.84375 to 1 becomes 0.875: one distinct value, whatever "
        "the gains are.",
        reported="All values of a block clamp to one.",
        boundary="Every amax between 0.875 and 1 with 12 or more bits, with 31 gains spread from 0.84375 up to it.",
        criterion=All((Exact("most_distinct", "floor", 1.0), Exact("least_value", "floor", 0.875))),
        control=Control("rounded-up scales", Exact("most_distinct", "rceil", 1.0)),
    ),
    Claim(
        id="FP-6", variant="9.8 % in clamped blocks", tier="M", source=PAPER,
        statement="With gains around 0.97 every block without a gain of 1 or more has one distinct value, and the "
        "error of these blocks (root mean square) is 9.7 to 9.9 %.",
        reported="9.8 % and one distinct value, in a computation of our own for this mean; the paper names the "
        "mechanism.",
        boundary=_CLUSTER,
        criterion=All((
            Exact("distinct_below_one", f"floor@{at(0.97)}", 1.0),
            Within("error_below_one", f"floor@{at(0.97)}", 0.097, 0.099),
        )),
        control=Control("rounded-up scales", Within("error_below_one", f"rceil@{at(0.97)}", 0.097, 0.099)),
    ),
    Claim(
        id="FP-6", variant="9.8 % in the whole vector", tier="M", source=PAPER,
        statement="512 gains around 0.97 become one distinct value, with an error of 9.7 to 9.9 %, in every draw.",
        reported="9.8 % and one distinct value, as above, for one draw.",
        boundary=f"{_CLUSTER} By the formula above half of all draws hold a gain of 1 or more, whose block escapes.",
        criterion=All((
            Exact("distinct", f"floor@{at(0.97)}", 1.0),
            Within("error", f"floor@{at(0.97)}", 0.097, 0.099),
        )),
        control=Control("rounded-up scales", Exact("distinct", f"rceil@{at(0.97)}", 1.0)),
    ),
    Claim(
        id="FP-6", variant="remedy", tier="M", source=PAPER,
        statement="Raising the shared exponent by one cuts the error at 0.97 at least threefold, and under floor it "
        "is at least five times that at 1.0.",
        reported="Exponent + 1 is one of the interventions that stabilise training.", boundary=_CLUSTER,
        criterion=All((
            Within("error_over_bump", "floor", 3.0, np.inf),
            Within("error_over_one", "floor", 5.0, np.inf),
        )),
        control=Control("rounded-up scales in place of floor", Within("error_over_bump", "rceil", 3.0, np.inf)),
    ),
    Claim(
        id="FP-6", variant="bias in clamped blocks", tier="M", source="derived here",
        statement="Clamping is a bias: with gains around 0.97 the mean of the blocks without a gain of 1 or more "
        "falls by 9 to 10 % under floor and moves by less than 1 % with rounded-up scales.",
        reported="Not reported as a number. Added when the next claim had failed in a trial.", boundary=_CLUSTER,
        criterion=All((
            Within("bias_below_one", f"floor@{at(0.97)}", -0.10, -0.09),
            Within("bias_below_one", f"rceil@{at(0.97)}", -0.01, 0.01),
        )),
        control=Control("floor in place of rounded-up scales",
                        Within("bias_below_one", f"floor@{at(0.97)}", -0.01, 0.01)),
    ),
    Claim(
        id="FP-6", variant="bias of the whole vector", tier="M", source="derived here",
        statement="At 0.97 under floor the mean of all 512 gains falls by 9 to 10 % in every draw, with rounded-up "
        "scales it moves by less than 1 %.",
        reported="Not reported as a number.",
        boundary=f"{_CLUSTER} Blocks that escape, as above, make it smaller.",
        criterion=All((
            Within("bias", f"floor@{at(0.97)}", -0.10, -0.09), Within("bias", f"rceil@{at(0.97)}", -0.01, 0.01),
        )),
        control=Control("floor in place of rounded-up scales", Within("bias", f"floor@{at(0.97)}", -0.01, 0.01)),
    ),
    Claim(
        id="FP-6", variant="rule even", tier="M", source="derived here",
        statement="The rule even only narrows the window: it saves gains around 0.97 (error below 3 %) and clamps "
        "those around 0.93 (error above 5 %).",
        reported="Not reported.", boundary=_CLUSTER,
        criterion=All((Within("error", f"even@{at(0.97)}", 0.0, 0.03), Within("error", f"even@{at(0.93)}", 0.05, 1.0))),
        control=Control("rounded-up scales", Within("error", f"rceil@{at(0.93)}", 0.05, 1.0)),
    ),
    Claim(
        id="FP-6", variant="differences between gains", tier="M", source=f"{PAPER}, which holds clamping responsible",
        statement="Without clamping the differences between gains survive: with rounded-up scales fewer than half of "
        "the blocks have a single value, also around 0.9375.",
        reported="Clamping makes all gains of a block equal.",
        boundary=f"{_CLUSTER} E4M3 has a spacing of 1/16 below 1, six deviations of this cluster.",
        criterion=All((
            Within("single_share", f"rceil@{at(0.97)}", 0.0, 0.5),
            Within("single_share", f"rceil@{at(0.9375)}", 0.0, 0.5),
        )),
        control=Control("floor at 0.97", Within("single_share", f"floor@{at(0.97)}", 0.0, 0.5)),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    """What is scanned and drawn."""

    significant_bits: int = 14
    """Significant bits of the magnitudes scanned."""
    elements: tuple[str, ...] = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8")
    """Element formats whose windows are scanned; the clusters are in E4M3."""
    draws: int = 8
    """Gain vectors per mean; a claim has to hold on every one."""
    gains: int = 512
    means: tuple[float, ...] = (
        0.86, 0.87, 0.88, 0.89, 0.9, 0.91, 0.92, 0.93, 0.9375, 0.945, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0, 1.01, 1.02
    )  # fmt: skip
    """Means of the gains; 0.93, 0.9375, 0.97 and 1 are among them."""
    evidence: bool = True
    """Whether verdicts count as evidence; false for a quick look and for a preset changed by hand."""

    def __post_init__(self) -> None:
        if not set(NAMED) <= set(self.means):
            raise ReproError(f"means {self.means} must hold {', '.join(map(str, NAMED))}, which claims name.")
        if not 12 <= self.significant_bits <= 20 or self.draws < 1 or self.gains < BLOCK or self.gains % BLOCK:
            raise ReproError("significant_bits is 12 to 20, draws at least 1, and gains a multiple of 32.")


def recipe(rule: str, element: str = "e4m3") -> Recipe:
    """MX in blocks of 32 with a scale rule."""
    return dataclasses.replace(RECIPES["mxfp8"], element=element, scale_rule=rule)


def quantised(gains_BK: np.ndarray, arm: str) -> np.ndarray:
    """Gains `[blocks, 32]` after MX quantisation, float64. In the arm `bump` the exponent is floor's plus one."""
    x = jnp.asarray(gains_BK, jnp.float32)
    if arm != "bump":
        return np.asarray(fake_quantize(x, recipe(arm)), np.float64)
    # One more element of twice the largest magnitude raises the exponent of each block by one, and is dropped again.
    extra = 2 * jnp.max(jnp.abs(x), axis=1, keepdims=True)
    wider = dataclasses.replace(recipe("floor"), block_shape=(1, x.shape[1] + 1))
    return np.asarray(fake_quantize(jnp.concatenate([x, extra], 1), wider), np.float64)[:, :-1]


def window(fmt: Format, rule: str) -> tuple[float, float]:
    """The open interval of significands of amax whose blocks are clamped; empty for rules that round up."""
    top = fmt.max / 2.0**fmt.max_exponent
    upper = {"floor": 2.0, "even": 2.0 - 2.0 ** -(fmt.mantissa_bits + 1)}.get(rule, top)
    return top, upper


def significands(bits: int) -> np.ndarray:
    """All significands in [1, 2) of so many bits."""
    return 1 + np.arange(2 ** (bits - 1)) / 2 ** (bits - 1)


def window_run(bits: int, elements: tuple[str, ...]) -> Run:
    """Blocks of one element: clamped (beyond the largest element times the scale) against the window."""
    s = significands(bits)
    x = np.ldexp(s, np.array([-20, -1, 0, 13])[:, None]).ravel()[:, None]
    mismatches = {"window_mismatches": 0, "window_mismatches_floor": 0}
    for element in elements:
        for rule in RULES:
            q = quantize(jnp.asarray(x, jnp.float32), recipe(rule, element))
            fmt = FORMATS[element]
            clamped = x > fmt.max * np.asarray(q.scale).astype(np.float64)
            for name, of_rule in (("window_mismatches", rule), ("window_mismatches_floor", "floor")):
                low, high = window(fmt, of_rule)
                expected = np.tile((s > low) & (s < high), 4)[:, None]
                mismatches[name] += int((clamped != expected).sum())
    return Run("windows", 0, mismatches)


def single_value_runs(bits: int) -> Iterator[Run]:
    """Every amax in (0.875, 1), in a block with 31 other gains spread from 0.84375 up to it."""
    amax = significands(bits) / 2
    amax = amax[amax > 0.875][:, None]
    gains = 27 / 32 + (amax - 27 / 32) * np.linspace(0, 1, BLOCK)
    for arm in ("floor", "rceil"):
        x_hat = quantised(gains, arm)
        yield Run(arm, 0, {"most_distinct": max(len(set(row)) for row in x_hat), "least_value": x_hat.min()})


def cluster(draw: int, mean: float, count: int) -> np.ndarray:
    """Gains `[count / 32, 32]`, normal around the mean; the same noise at every mean."""
    noise = jax.random.normal(jax.random.key(draw), (count // BLOCK, BLOCK))
    return np.asarray(mean + DEVIATION * noise, np.float32)


def cluster_metrics(gains: np.ndarray, x_hat: np.ndarray) -> dict[str, float]:
    """error: |x_hat - x| / |x|; bias: of the mean, relative; distinct: number of values in the whole vector;
    single_share: share of blocks with one value. All but the last also over the blocks without a gain of 1 or more.
    """
    x = gains.astype(np.float64)
    below = x.max(1) < 1
    metrics = {
        "error": _error(x, x_hat), "bias": x_hat.mean() / x.mean() - 1, "distinct": len(np.unique(x_hat)),
        "single_share": float(np.mean([len(set(row)) == 1 for row in x_hat])),
    }  # fmt: skip
    if below.any():
        metrics["distinct_below_one"] = len(np.unique(x_hat[below]))
        metrics["error_below_one"] = _error(x[below], x_hat[below])
        metrics["bias_below_one"] = x_hat[below].mean() / x[below].mean() - 1
    return metrics


def _error(x: np.ndarray, x_hat: np.ndarray) -> float:
    return float(np.sqrt(((x_hat - x) ** 2).sum() / (x**2).sum()))


def cluster_runs(preset: Preset) -> Iterator[Run]:
    """Clusters at every mean under every rule, and ratios of errors per draw."""
    for draw in range(preset.draws):
        errors = {}
        for mean in preset.means:
            gains = cluster(draw, mean, preset.gains)
            for arm in ARMS:
                metrics = cluster_metrics(gains, quantised(gains, arm.name))
                errors[arm.name, mean] = metrics["error"]
                yield Run(arm.name, draw, metrics, point=at(mean))
        for arm in ("floor", "rceil"):
            yield Run(arm, draw, {
                "error_over_bump": errors[arm, 0.97] / errors["bump", 0.97],
                "error_over_one": errors[arm, 0.97] / errors[arm, 1.0],
            }, point="ratios")  # fmt: skip


def checks(preset: Preset) -> list[Run]:
    """All of the above."""
    bits = preset.significant_bits
    return [window_run(bits, preset.elements), *single_value_runs(bits), *cluster_runs(preset)]


_CPU = Preset()
_MEANS = tuple((at(mean), mean) for mean in _CPU.means)
_EDGES = (
    Reference("0.875: clamped from here on", x=0.875),
    Reference("0.96875: up to here (even)", x=0.96875),
    Reference("1: up to here (floor)", x=1.0),
)
FIGURES = (
    Dose("error", "error", "Error of clustered LayerNorm gains in E4M3", "mean of the gains", "relative error (rms)",
         points=_MEANS, lines=_EDGES),
    Dose("bias", "bias", "Bias of clustered LayerNorm gains in E4M3", "mean of the gains", "change of the mean gain",
         points=_MEANS, lines=_EDGES),
    Dose("single", "single_share", "Blocks in which all gains become one value", "mean of the gains",
         "share of blocks", points=_MEANS, lines=_EDGES),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="layernorm-clamp",
    title="LayerNorm gains just below a power of two",
    claims=CLAIMS,
    arms=ARMS,
    presets={
        "smoke": Preset(significant_bits=12, elements=("e4m3", "e2m1"), draws=2, means=NAMED, evidence=False),
        "cpu": _CPU,
    },
    checks=checks,
    check_arms=("windows",),
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
