"""What becomes of many small updates when every sum is rounded: to nearest, or stochastically?

Written before the first run. Let h be the distance of neighbours on the grid around w and u = p h a positive update,
p < 1.

- Nearest: w + u rounds back to w for p < 1/2, and at p = 1/2 if w is even, so n updates leave w where it was; for
  1/2 < p < 1 it rounds to w + h, which keeps 1 / p times the update, up to twice.
- Stochastic: up with probability p. While w stays within one octave the sum after n updates is w + h * Binomial(n,
  p): mean w + n u, standard deviation h sqrt(n p (1 - p)). Across octaves the mean is still w + n u, and the
  distribution follows by summing over the grid, step by step.
- A coin (up with probability 1/2 whatever p is) is the wrong formula here: its mean is w + n h / 2.

In bf16 h = 2^-7 above 1 and 2^-8 below, so an update is swallowed up to 2^-9 .. 2^-8 of w. One thousand times -0.001
from 1 is the case that is followed across octaves: nearest stays at 1, since 0.001 < 2^-9; stochastic rounding ends
at 0 in the mean.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from repro.claims import All, Arm, Claim, Control, Exact, Experiment, Run, Within
from repro.errors import ReproError
from repro.quant import FORMATS, round_to
from repro.report import Dose, Reference

ARMS = (
    Arm("nearest", "nearest even"),
    Arm("stochastic", "stochastic"),
    Arm("toward_zero", "toward zero"),
    Arm("coin", "a coin: up with probability 1/2"),
)
FRACTIONS = tuple(2.0**-k for k in range(10, 0, -1)) + (0.515625, 0.75)  # p = u / h
COUNTS = (1, 4, 16, 64, 256)  # numbers of updates at p = 1/8
REPEATS, UPDATE = 1000, -1e-3  # across octaves
Z, KOLMOGOROV = 5.0, 2.3  # chance levels below 1e-6 and 1e-4

GUPTA = "Gupta et al. (arXiv 1502.02551)"
_WALK = "From 1 within the octave 1 to 2, in bf16, fp16 and E5M6; a sum, not the training of a network."


def at(fraction: float) -> str:
    """The point of an update, in steps of the grid."""
    return f"p{fraction:g}"


CLAIMS = (
    Claim(
        id="FP-3", variant="probability", tier="M", source=GUPTA,
        statement="A number between two neighbours goes up with probability (x - low) / (high - low), in every "
        "interval tried, and a number on the grid never moves.",
        reported="The definition.",
        boundary="15 places in every interval of E2M1 and in 24 of E4M3 and of bf16, both signs; deviations of at "
        "most 5 standard errors.",
        criterion=All((Within("worst_z", "stochastic", 0.0, Z), Exact("moved", "stochastic", 0.0))),
        control=Control("a coin", Within("worst_z", "coin", 0.0, Z)),
    ),
    Claim(
        id="FP-3", variant="expectation", tier="M", source=GUPTA,
        statement="The mean of many walkers after n updates of p steps is 1 + n u for every p from 2^-10 to 3/4, to 5 "
        "standard errors of the closed form.",
        reported="Updates below the precision are kept in expectation.", boundary=_WALK,
        criterion=Within("walk_z", "stochastic", 0.0, Z),
        control=Control("nearest rounding", Within("walk_z", "nearest", 0.0, Z)),
    ),
    Claim(
        id="FP-3", variant="distribution", tier="M", source="derived here",
        statement="After n updates the walkers are distributed as 1 + h Binomial(n, p) (Kolmogorov distance times "
        "sqrt(walkers) at most 2.3).",
        reported="Not reported.", boundary=_WALK,
        criterion=Within("kolmogorov", "stochastic", 0.0, KOLMOGOROV),
        control=Control("a coin", Within("kolmogorov", "coin", 0.0, KOLMOGOROV)),
    ),
    Claim(
        id="FP-3", variant="swallowed", tier="M", source=f"{GUPTA}; for bf16 derived here",
        statement="Nearest rounding swallows an update of bf16 exactly if it is less than half the distance to the "
        "neighbour on its side, or equal to it where the significand is even.",
        reported="Small updates are lost to rounding to nearest.",
        boundary="All 128 significands, updates up and down in 256ths of a step.",
        criterion=Exact("swallow_mismatches", "nearest", 0.0),
        control=Control("the bound 2^-8 of w in place of half a distance",
                        Exact("swallow_mismatches_relative", "nearest", 0.0)),
    ),
    Claim(
        id="FP-3", variant="nothing is left", tier="M", source=GUPTA,
        statement="Of any number of updates of up to half a step, nearest rounding keeps nothing.",
        reported="Training stalls where updates are smaller than the precision.", boundary=_WALK,
        criterion=Exact("kept_below_half", "nearest", 0.0),
        control=Control("stochastic rounding", Exact("kept_below_half", "stochastic", 0.0)),
    ),
    Claim(
        id="FP-3", variant="overshoot", tier="M", source="derived here",
        statement="Just above half a step nearest rounding does the opposite: it keeps nearly twice the update.",
        reported="Not reported; usually only the loss is named.", boundary=f"{_WALK} p = 0.515625.",
        criterion=Within("kept_above_half", "nearest", 1.9, 2.0),
        control=Control("stochastic rounding", Within("kept_above_half", "stochastic", 1.9, 2.0)),
    ),
    Claim(
        id="FP-3", variant="price", tier="M", source="derived here",
        statement="The price is noise: the standard deviation after n updates is h sqrt(n p (1 - p)), to a tenth.",
        reported="Not reported as a formula.", boundary=_WALK,
        criterion=Within("deviation_off", "stochastic", 0.0, 0.1),
        control=Control("a coin", Within("deviation_off", "coin", 0.0, 0.1)),
    ),
    Claim(
        id="FP-3", variant="across octaves", tier="M", source="derived here",
        statement="1000 updates of -0.001 from 1 in bf16: nearest ends at exactly 1; stochastic ends at 0 in the "
        "mean, with the deviation that the exact distribution on the grid has, to 5 %.",
        reported="A pilot of our own: mean 0.0003, deviation 0.041.",
        boundary="One start and one update; the exact distribution is computed independently, on bit patterns.",
        criterion=All((
            Exact("end", "nearest", 1.0), Within("octaves_z", "stochastic", 0.0, Z),
            Within("octaves_deviation_off", "stochastic", 0.0, 0.05),
        )),
        control=Control("rounding toward zero in place of stochastic", Within("octaves_z", "toward_zero", 0.0, Z)),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is drawn."""

    formats: tuple[str, ...] = ("bf16", "fp16", "e5m6")
    """Formats of the sums; fp16, bf16 or e5m6, whose steps are so fine that no walker leaves its octave."""
    intervals: tuple[str, ...] = ("e2m1", "e4m3", "bf16")
    """Formats in whose intervals the probability of going up is measured."""
    walkers: int = 8192
    """Sums that run side by side."""
    most_updates: int = 512
    """Most updates of one sum."""
    samples: int = 8192
    """Roundings of each number whose probability is measured."""
    draws: int = 4
    """Independent keys; a claim has to hold with every one."""
    evidence: bool = True
    """Whether verdicts count as evidence; false for a quick look and for a preset changed by hand."""

    def __post_init__(self) -> None:
        if "bf16" not in self.formats or not set(self.formats) <= {"bf16", "fp16", "e5m6"}:
            raise ReproError(f"formats {self.formats} must hold bf16 and otherwise only fp16 and e5m6.")
        if not self.intervals or not set(self.intervals) <= {"e2m1", "e4m3", "bf16"}:
            raise ReproError(f"intervals {self.intervals} are one or more of e2m1, e4m3 and bf16.")
        if min(self.walkers, self.samples) < 1000 or self.most_updates < max(COUNTS) or self.draws < 1:
            raise ReproError("walkers and samples are at least 1000, most_updates at least 256, draws at least 1.")


def coin(x: jax.Array, fmt: str, key: jax.Array) -> jax.Array:
    """The wrong formula: either neighbour of |x| on the grid with probability 1/2; a number on the grid stays."""
    grid = FORMATS[fmt]
    low = jnp.abs(round_to(x, grid, rounding="toward_zero"))
    # The next number: one more in the last mantissa bit, or one more of the smallest where there is no hidden bit.
    pattern = jax.lax.bitcast_convert_type(low, jnp.int32) + (1 << (23 - grid.mantissa_bits))
    high = jax.lax.bitcast_convert_type(pattern, jnp.float32)
    high = jnp.where(low < grid.min_normal, low + grid.min_subnormal, high)
    up = (jnp.abs(x) > low) & jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.copysign(jnp.where(up, high, low), x)


def rounded(x: jax.Array, fmt: str, rounding: str, key: jax.Array) -> jax.Array:
    """x on the grid by the rounding of an arm."""
    if rounding == "coin":
        return coin(x, fmt, key)
    if rounding == "nearest":
        return round_to(x, fmt)
    return round_to(x, fmt, rounding=rounding, key=key if rounding == "stochastic" else None)


@functools.partial(jax.jit, static_argnames=("fmt", "rounding", "walkers"))
def walk(update: jax.Array, count: jax.Array, key: jax.Array, *, fmt: str, rounding: str, walkers: int) -> jax.Array:
    """`walkers` sums `[walkers]` that start at 1 and are rounded after each of `count` updates."""

    def step(i: jax.Array, w: jax.Array) -> jax.Array:
        return rounded(w + update, fmt, rounding, jax.random.fold_in(key, i))

    return jax.lax.fori_loop(0, count, step, jnp.ones(walkers))


def spacing(fmt: str) -> float:
    """The distance of neighbours between 1 and 2."""
    return 2.0 ** -FORMATS[fmt].mantissa_bits


def updates_at(fraction: float, fmt: str, most: int) -> int:
    """How many updates of `fraction` steps end near 1.4, far from the end of the octave."""
    return max(1, min(most, int(0.4 / (fraction * spacing(fmt)))))


def walk_metrics(w: np.ndarray, count: int, fraction: float, fmt: str) -> dict[str, float]:
    """z of the mean, distance from the binomial law, relative deviation from its standard deviation, and the share of
    the updates that is kept."""
    h = spacing(fmt)
    deviation = h * math.sqrt(count * fraction * (1 - fraction))
    steps = (w.astype(np.float64) - 1) / h
    grid = np.arange(count + 1)
    empirical = np.searchsorted(np.sort(steps), grid, side="right") / len(steps)
    distance = np.abs(empirical - stats.binom.cdf(grid, count, fraction)).max()
    return {
        "walk_z": abs(w.mean(dtype=np.float64) - 1 - count * fraction * h) / (deviation / math.sqrt(len(w))),
        "kolmogorov": float(distance * math.sqrt(len(w))),
        "deviation_off": abs(w.std(dtype=np.float64) / deviation - 1),
        "kept": float(steps.mean() / (count * fraction)),
    }  # fmt: skip


def walk_runs(preset: Preset) -> Iterator[Run]:
    """Sums within one octave: the worst case of each metric per arm and draw, and single cases in bf16 for figures."""
    for draw in range(preset.draws):
        for arm in (arm.name for arm in ARMS):
            cases = {}
            for number, (fmt, fraction) in enumerate((f, p) for f in preset.formats for p in FRACTIONS):
                count = updates_at(fraction, fmt, preset.most_updates)
                key = jax.random.fold_in(jax.random.key(draw), number)
                cases[fmt, fraction] = walk_metrics(_walk(fraction, count, key, fmt, arm, preset), count, fraction, fmt)
            worst = {
                name: max(case[name] for case in cases.values()) for name in ("walk_z", "kolmogorov", "deviation_off")
            }
            below = max(abs(case["kept"]) for (_, p), case in cases.items() if p <= 0.5)
            above = [case["kept"] for (_, p), case in cases.items() if p == 0.515625]
            # Of several formats the one furthest from the update itself.
            worst |= {"kept_below_half": below, "kept_above_half": max(above, key=lambda kept: abs(kept - 1))}
            yield Run(arm, draw, worst)
            for fraction in FRACTIONS:
                yield Run(arm, draw, {"kept": cases["bf16", fraction]["kept"]}, point=at(fraction))
            for count in COUNTS:
                w = _walk(0.125, count, jax.random.key(draw), "bf16", arm, preset)
                yield Run(arm, draw, {"mean": w.mean(dtype=np.float64) - 1, "deviation": w.std()}, point=f"n{count}")


def _walk(fraction: float, count: int, key: jax.Array, fmt: str, arm: str, preset: Preset) -> np.ndarray:
    update = jnp.float32(fraction * spacing(fmt))
    # Without randomness all walkers are one.
    walkers = preset.walkers if arm in ("stochastic", "coin") else 1
    w = walk(update, jnp.int32(count), key, fmt=fmt, rounding=arm, walkers=walkers)
    return np.broadcast_to(np.asarray(w), (preset.walkers,))


def intervals(fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of intervals of the non-negative half of the grid: all of them, or 24 spread over a larger format."""
    grid = FORMATS[fmt].values().astype(np.float64)
    grid = grid[grid >= 0]
    if fmt == "bf16":  # where float32 is normal by a wide margin, so that 16ths of a step are too
        grid = grid[(grid > 1e-30) & (grid < 1e30)]
    index = np.unique(np.linspace(0, len(grid) - 2, 24).astype(int))
    return grid[index], grid[index + 1]


def probability_runs(preset: Preset) -> Iterator[Run]:
    """The share that goes up at 15 places of every interval against the definition; `moved` counts grid points."""
    places = np.arange(1, 16) / 16
    for draw in range(preset.draws):
        for arm in ("stochastic", "coin"):
            worst, moved = 0.0, 0
            for number, fmt in enumerate(preset.intervals):
                low, high = intervals(fmt)
                x = (low[:, None] + (high - low)[:, None] * places).ravel()
                key = jax.random.fold_in(jax.random.key(100 + draw), number)
                x = jnp.asarray(np.stack([x, -x]), jnp.float32)
                up = np.asarray(share_up(x, key, fmt=fmt, rounding=arm, rounds=preset.samples // 64))
                share = np.tile(places, len(low))
                z = (up - share) / np.sqrt(share * (1 - share) / (64 * (preset.samples // 64)))
                worst = max(worst, float(np.abs(z).max()))
                grid = jnp.asarray(np.concatenate([low, -high]), jnp.float32)
                still = np.asarray(rounded(jnp.tile(grid, (64, 1)), fmt, arm, key))
                moved += int((still != np.asarray(grid)).sum())
            yield Run(arm, draw, {"worst_z": worst, "moved": moved}, point="intervals")


@functools.partial(jax.jit, static_argnames=("fmt", "rounding", "rounds"))
def share_up(x: jax.Array, key: jax.Array, *, fmt: str, rounding: str, rounds: int) -> jax.Array:
    """The share of 64 `rounds` samples in which the magnitude of x `[2, places]` grows, by sign and place."""

    def grown(i: jax.Array, count: jax.Array) -> jax.Array:
        y = rounded(jnp.broadcast_to(x, (64, *x.shape)), fmt, rounding, jax.random.fold_in(key, i))
        return count + (jnp.abs(y) > jnp.abs(x)).sum(0)

    return jax.lax.fori_loop(0, rounds, grown, jnp.zeros(x.shape, jnp.int32)) / (64 * rounds)


def swallow_run() -> Run:
    """Which updates nearest rounding swallows in bf16, against half the distance to the neighbour."""
    h = spacing("bf16")
    index = np.arange(128)[:, None, None]
    w, sign = 1 + index * h, np.array([1.0, -1.0])[:, None]
    # Below a power of two neighbours are half as far apart.
    distance = np.where((index == 0) & (sign < 0), h / 2, h)
    update = np.arange(1, 257) / 256 * h
    kept = np.asarray(round_to(jnp.asarray(w + sign * update, jnp.float32), "bf16")) != w
    swallowed = (update < distance / 2) | ((update == distance / 2) & (index % 2 == 0))
    metrics = {
        "swallow_mismatches": int((kept == swallowed).sum()),
        "swallow_mismatches_relative": int((kept == (update <= w * 2.0**-8)).sum()),
    }
    return Run("nearest", 0, metrics, point="all significands")


def exact_distribution(update: float, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """(values, probabilities) of a bf16 sum from 1 after `repeats` stochastically rounded updates.

    Works on bit patterns in NumPy: the lower 16 bits of a float32 magnitude, over 2^16, are the probability of
    rounding it up. Probabilities below 1e-16 are dropped.
    """
    values, probabilities = np.ones(1, np.float32), np.ones(1)
    for _ in range(repeats):
        bits = (values + np.float32(update)).astype(np.float32).view(np.uint32)
        low, up = bits & np.uint32(0xFFFF0000), (bits & np.uint32(0xFFFF)) / 2**16
        patterns = np.concatenate([low, low + np.uint32(0x10000)])
        weights = np.concatenate([probabilities * (1 - up), probabilities * up])
        kept = weights > 1e-16
        unique, inverse = np.unique(patterns[kept], return_inverse=True)
        values, probabilities = unique.view(np.float32), np.bincount(inverse, weights[kept])
    return values.astype(np.float64), probabilities


def octave_runs(preset: Preset) -> Iterator[Run]:
    """1000 updates of -0.001 from 1 in bf16."""
    values, probabilities = exact_distribution(UPDATE, REPEATS)
    mean = float((values * probabilities).sum())
    deviation = float(np.sqrt((values**2 * probabilities).sum() - mean**2))
    for draw in range(preset.draws):
        for arm in ("nearest", "stochastic", "toward_zero"):
            key = jax.random.key(200 + draw)
            w = walk(jnp.float32(UPDATE), jnp.int32(REPEATS), key, fmt="bf16", rounding=arm, walkers=preset.walkers)
            w = np.asarray(w, np.float64)
            end = 1 + REPEATS * float(np.float32(UPDATE))
            yield Run(arm, draw, {
                "end": w.mean(), "end_deviation": w.std(), "exact_mean": mean, "exact_deviation": deviation,
                "octaves_z": abs(w.mean() - end) / (deviation / math.sqrt(len(w))),
                "octaves_deviation_off": abs(w.std() / deviation - 1),
            }, point="octaves")  # fmt: skip


def checks(preset: Preset) -> list[Run]:
    """All of the above."""
    return [*probability_runs(preset), *walk_runs(preset), swallow_run(), *octave_runs(preset)]


_COUNTS = tuple((f"n{count}", count) for count in COUNTS)
FIGURES = (
    Dose("kept", "kept", "Share of small updates that a bf16 sum keeps", "update, in steps of the grid",
         "sum of changes over sum of updates", points=tuple((at(p), p) for p in FRACTIONS), log_x=2,
         arms=("nearest", "stochastic", "toward_zero"),
         lines=(Reference("all of it", y=1.0), Reference("half a step", x=0.5))),
    Dose("mean", "mean", "A bf16 sum from 1, updates of an eighth of a step", "number of updates", "mean change",
         points=_COUNTS, log_x=2, log_y=True),
    Dose("deviation", "deviation", "The noise of that sum", "number of updates", "standard deviation",
         points=_COUNTS, log_x=2, log_y=True,
         arms=("nearest", "stochastic", "coin")),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="stochastic-rounding",
    title="Small updates under rounding to nearest and stochastic rounding",
    claims=CLAIMS,
    arms=ARMS,
    presets={
        "smoke": Preset(
            formats=("bf16",),
            intervals=("e2m1",),
            walkers=1024,
            most_updates=256,
            samples=1024,
            draws=1,
            evidence=False,
        ),
        "cpu": Preset(),
    },
    checks=checks,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
