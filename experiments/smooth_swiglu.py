"""What does weight decay do to the two branches of a SwiGLU unit, and what repairs delayed scaling of FP8 when a
channel of its product grows?

Written before the first run: the claims, their rules and controls below. Fishman et al. make three statements.

*Alignment.* Let f(x) = (x.w1) swish(x.w2), and let w1, w2 be stationary under a squared error r with a penalty L/2
(|w1|^2 + |w2|^2). With A = -1/(n L) sum_n r_n sigmoid(x_n.w2) x_n x_n' stationarity reads

    w1 = A w2,    w2 = A w1 + (what the slope of the sigmoid adds, which vanishes where the gate is saturated),

so A^2 w1 = w1, from which w1 = w2 or w1 = -w2 is concluded. That holds unless A has both the eigenvalue 1 (on w1 + w2)
and the eigenvalue -1 (on w1 - w2), which a fit may bring about. So the test has a teacher that is such a unit with
branches at 60 degrees, y = (x.a) relu(x.b): data do not align the branches by themselves. Its size S sets how
saturated the gate is, the penalty is a share p of S. A trial on two other draws chose S = 10^4, p = 0.01 and p = 0.3;
it showed balanced norms and no alignment at 0.01, and alignment at 0.3, where the fit has lost a third or more of the
teacher's norm. The rule on the direction is that of the statement, and stands although the trial lets one expect that
it fails.

*Delayed scaling* takes the scale of a tensor from the largest magnitudes of earlier steps. Here the product of a layer
is simulated, 128 tokens by 128 channels, and one channel doubles every 50 steps, ten times, from 30 times the others
on. An element is *saturated* if it lies above 464 of the scale's units: up to there E4M3 rounds to its largest number,
448, to nearest.

*Smooth-SwiGLU* divides each channel by a power of two near its largest magnitude, quantises, and multiplies the rows
of the down projection by the same. Without quantisation no bit changes. What the channel loses in range, its row of
weights gains, so the last claim asks what is left of the repair when those weights are quantised with one scale as
well.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from repro.claims import All, Arm, Claim, Control, Exact, Experiment, Run, Within
from repro.errors import ReproError
from repro.models.functional import smooth_swiglu, swiglu
from repro.quant import FORMATS, DelayedScale, fake_quantize
from repro.report import Dose, Reference

TEACHER, SOFT = 1e4, 1.0
"""Size of the teacher whose gate saturates, and of one whose gate does not."""
SMALL, STRONG = 0.01, 0.3
"""Penalties that claims name, as shares of the teacher's size."""
HISTORY, PERIOD = 16, 50
TOKENS, CHANNELS, WIDTH, OUTLIER = 128, 128, 64, 17
SATURATED = 464.0 / FORMATS["e4m3"].max
ARMS = (
    Arm("unit", "teacher of size 10^4"),
    Arm("soft_unit", "teacher of size 1"),
    Arm("delayed", "delayed scale"),
    Arm("just_in_time", "scale of the same step"),
    Arm("smooth", "Smooth-SwiGLU, delayed scale"),
    Arm("just_in_time_weights", "scale of the same step, weights too"),
    Arm("smooth_weights", "Smooth-SwiGLU, delayed scale, weights too"),
    Arm("unfolded", "smooth units, rows not scaled"),
)
FISHMAN = "Fishman et al. (arXiv 2409.12517)"


def penalty_point(penalty: float) -> str:
    return f"p{penalty:g}"


def _claims() -> tuple[Claim, ...]:
    toy = "One unit, 16 inputs, 512 normal samples, misaligned teacher; nothing of a language model."
    layer = (
        "A simulated product of 128 tokens by 128 channels, one channel growing in sudden doublings, history of 16 "
        "steps; E4M3 of the product, no training."
    )

    def claim(variant, statement, reported, rule, control, boundary):
        return Claim(
            id="FP-7", variant=variant, tier="M", source=FISHMAN, statement=statement, reported=reported,
            boundary=boundary, criterion=rule, control=control,
        )  # fmt: skip

    unit = lambda penalty, arm="unit": f"{arm}@{penalty_point(penalty)}"
    balanced = lambda place: Within("norm_ratio", place, 0.9, 1.1)
    aligned = lambda place: Within("abs_cosine", place, 0.95, 1.0)
    stationary = lambda place: Within("identity_error", place, 0.0, 0.05)
    theorem = (
        "w1 = w2 or w1 = -w2 at a stationary point with a penalty and a saturated gate; seen at 7B in one channel."
    )
    exact = lambda arm: Exact("changed", arm, 0.0)
    seen = lambda arm: Exact("growths_missed", arm, 0.0)
    repaired = lambda arm: All((Exact("saturated_steps", arm, 0.0), Within("worst_error", arm, 0.0, 2.0**-4)))
    kept = lambda arm: Within("flush_rise", arm, 0.0, 2.0)
    whole = lambda arm: Within("ordinary_rise", arm, 0.0, 2.0)
    return (
        claim(
            "stationarity", "With a penalty of 0.01 of the teacher's size w2 = A w1 holds to 5 % of |w2|.", theorem,
            stationary(unit(SMALL)), Control("a gate that is not saturated", stationary(unit(SMALL, "soft_unit"))), toy,
        ),
        claim(
            "norms", "A penalty of 0.01 of the teacher's size makes the norms of the two branches equal, to a tenth.",
            theorem, balanced(unit(SMALL)), Control("no penalty", balanced(unit(0.0))), toy,
        ),
        claim(
            "directions", "The same penalty aligns the branches: |cos| is at least 0.95.", theorem,
            aligned(unit(SMALL)), Control("no penalty", aligned(unit(0.0))),
            f"{toy} Data that determine both branches.",
        ),
        claim(
            "directions, strong penalty",
            "A penalty of 0.3 of the teacher's size, which costs much of the fit, aligns the branches.",
            "Not reported; derived from a trial.", aligned(unit(STRONG)), Control("no penalty", aligned(unit(0.0))),
            toy,
        ),
        claim(
            "exact", "Without quantisation Smooth-SwiGLU changes no bit of the layer's output or of its gradients.",
            "The function is unchanged.", exact("smooth"), Control("the rows of the down projection not scaled",
                                                                  exact("unfolded")),
            "float32, scales that are powers of two; the paper's own scales change rounding.",
        ),
        claim(
            "delayed scaling saturates",
            "With a delayed scale some element saturates at every doubling of the channel.",
            "FP8 training of a 7B model with delayed scaling diverged when outliers appeared, at about 200B tokens.",
            seen("delayed"), Control("the scale of the same step", seen("just_in_time")), layer,
        ),
        claim(
            "Smooth-SwiGLU repairs it",
            "With Smooth-SwiGLU nothing saturates under a delayed scale, and the product with the down projection "
            "never has a larger relative error than the largest one of rounding, 2^-4.",
            "Training at FP8 as in BF16.", repaired("smooth"), Control("SwiGLU", repaired("delayed")),
            f"{layer} Weights exact.",
        ),
        claim(
            "small units survive",
            "With Smooth-SwiGLU the share of the other channels' units that E4M3 flushes to zero does not double while "
            "the outlier grows a thousandfold.",
            "Not reported as a number.", kept("smooth"), Control("SwiGLU with the scale of the same step",
                                                                  kept("just_in_time")),
            layer,
        ),
        claim(
            "repaired with weights in FP8 too",
            "The same holds of what the other channels contribute to the product when the scaled weights are in E4M3 "
            "with one scale: its relative error does not double.",
            "Not reported; derived here: the range that the product loses, the weights gain.", whole("smooth_weights"),
            Control("SwiGLU with scales of the same step", whole("just_in_time_weights")), layer,
        ),
    )  # fmt: skip


CLAIMS = _claims()


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is drawn."""

    draws: int = 8
    """Independent data; a claim has to hold with every one."""
    penalties: tuple[float, ...] = (0.0, 0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)
    """Penalties of the unit as shares of the teacher's size, among them 0, 0.01 and 0.3."""
    starts: int = 4
    """Random starts of a fit, of which the best counts."""
    growths: int = 10
    """How often the channel doubles."""
    evidence: bool = True
    """Whether verdicts count as evidence; false for a quick look and for a preset changed by hand."""

    def __post_init__(self) -> None:
        if not {0.0, SMALL, STRONG} <= set(self.penalties) or min(self.penalties) < 0:
            raise ReproError(f"penalties {self.penalties} must hold 0, {SMALL:g} and {STRONG:g}, and none below 0.")
        for name in ("draws", "starts", "growths"):
            if getattr(self, name) < 1:
                raise ReproError(f"{name} is {getattr(self, name)}; it must be at least 1.")


# Without a penalty the fit creeps towards a gate of infinite norm and would never end.
_ENOUGH = {"maxiter": 300, "maxfun": 600, "ftol": 1e-15, "gtol": 1e-12}


def fit(draw: int, size: float, penalty: float, starts: int, inputs: int = 16, samples: int = 512) -> dict[str, float]:
    """The unit of the module's docstring fitted to its teacher: `norm_ratio` |w1| / |w2|, `abs_cosine`, and
    `identity_error` |w2 - A w1| / |w2| (with a penalty). Loss and penalty are in units of the teacher's size."""
    rng = np.random.default_rng(draw)
    x, (a, other) = rng.normal(size=(samples, inputs)), rng.normal(size=(2, inputs))
    a /= np.linalg.norm(a)
    other -= (other @ a) * a
    b = 0.5 * a + np.sqrt(0.75) * other / np.linalg.norm(other)  # 60 degrees
    y = (x @ a) * np.maximum(x @ b, 0)

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        q, z = x @ w[:inputs], x @ w[inputs:]
        gate = expit(z)
        r = q * z * gate / size - y
        slopes = [r * z * gate, r * q * (gate + z * gate * (1 - gate))]
        slope = np.concatenate([x.T @ s for s in slopes]) / (samples * size)
        return 0.5 * np.mean(r * r) + 0.5 * penalty * (w @ w) / size, slope + penalty * w / size

    begins = [size**0.5 * (rng.normal(size=(2, inputs)) * [[1 / 3], [3]] / inputs**0.5) for _ in range(starts)]
    found = [minimize(loss, w.ravel(), jac=True, method="L-BFGS-B", options=_ENOUGH) for w in begins]
    w1, w2 = np.split(min(found, key=lambda result: result.fun).x, 2)
    n1, n2 = np.linalg.norm(w1), np.linalg.norm(w2)
    metrics = {"norm_ratio": n1 / n2, "abs_cosine": abs(w1 @ w2) / (n1 * n2)}
    if penalty:
        gate = expit(x @ w2)
        r = (x @ w1) * (x @ w2) * gate / size - y
        Aw1 = -x.T @ (r * gate * (x @ w1)) / (samples * penalty)
        metrics["identity_error"] = np.linalg.norm(w2 - Aw1) / n2
    return metrics


@functools.partial(jax.jit, static_argnames=("draws", "growths"))
def grown(draws: int, growths: int) -> dict[str, dict[str, jax.Array]]:
    """Per arm and metric, `[draws, steps]`, what happens to the product while its outlying channel grows.

    saturated: share of elements above the range. error: of the product with the down projection, relative, in the
    Frobenius norm. ordinary: the same of what the other channels contribute. flushed: share of the other channels'
    elements that become zero.
    """
    other = np.arange(CHANNELS) != OUTLIER

    def lane(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
        down_FD = jax.random.normal(jax.random.fold_in(key, 0), (CHANNELS, WIDTH)) * CHANNELS**-0.5

        def step(scales: dict[str, DelayedScale], t: jax.Array):
            normal = jax.random.normal(jax.random.fold_in(key, t + 1), (2, TOKENS, CHANNELS))
            # A unit whose gate is open for every token and whose other branch grows.
            size = jnp.ldexp(8.0, t // PERIOD)
            outlying = jnp.stack([jnp.full(TOKENS, 4.0), size * (1 + 0.1 * normal[1, :, OUTLIER])])
            g, u = normal.at[:, :, OUTLIER].set(outlying)
            h, (smooth, row_F) = swiglu(g, u), smooth_swiglu(g, u)
            low = lambda x, scale: fake_quantize(x, "fp8_delayed", scale=scale)
            tensor = lambda x: fake_quantize(x, "fp8_tensor")
            own = {name: scale.scale() for name, scale in scales.items()}
            top = lambda x: jnp.max(jnp.abs(x)) / FORMATS["e4m3"].max
            rows, smooth_units = row_F[:, None], low(smooth, own["smooth"]) * row_F
            arms = {  # units as the product sees them, weights likewise, what is quantised and its scale
                "delayed": (low(h, own["delayed"]), down_FD, h, own["delayed"]),
                "just_in_time": (tensor(h), down_FD, h, top(h)),
                "smooth": (smooth_units, down_FD, smooth, own["smooth"]),
                "just_in_time_weights": (tensor(h), tensor(down_FD), h, top(h)),
                "smooth_weights": (smooth_units, tensor(rows * down_FD) / rows, smooth, own["smooth"]),
            }
            found = {}
            for name, (units, weights, quantised, scale) in arms.items():
                off = lambda keep, units=units, weights=weights: _relative(
                    (units * keep) @ weights, (h * keep) @ down_FD
                )
                flushed = (units == 0) & (h != 0) & other
                found[name] = {
                    "saturated": jnp.mean(jnp.abs(quantised) > SATURATED * FORMATS["e4m3"].max * scale),
                    "error": off(1.0),
                    "ordinary": off(other),
                    "flushed": flushed.sum() / (TOKENS * (CHANNELS - 1)),
                }
            return {"delayed": scales["delayed"].update(h), "smooth": scales["smooth"].update(smooth)}, found

        start = {name: DelayedScale.create(HISTORY) for name in ("delayed", "smooth")}
        return jax.lax.scan(step, start, jnp.arange(PERIOD * (growths + 1)))[1]

    return jax.vmap(lane)(jax.vmap(jax.random.key)(jnp.arange(draws)))


def _relative(a: jax.Array, exact: jax.Array) -> jax.Array:
    return jnp.linalg.norm(a - exact) / jnp.linalg.norm(exact)


def summary(row: dict[str, np.ndarray]) -> dict[str, float]:
    """What claims read of one draw, from the curves of `grown` after a history of steps has passed.

    growths_missed: doublings at which nothing saturated. saturated_steps: steps at which something did. worst_error:
    largest error. flush_rise, ordinary_rise: mean over the last 50 steps over that of the first 50.
    """
    grows = np.arange(PERIOD, len(row["error"]), PERIOD)
    rise = lambda name: row[name][-PERIOD:].mean() / row[name][:PERIOD][HISTORY:].mean()
    return {
        "growths_missed": float((row["saturated"][grows] == 0).sum()),
        "saturated_steps": float((row["saturated"][HISTORY:] > 0).sum()),
        "worst_error": float(row["error"][HISTORY:].max()),
        "flush_rise": float(rise("flushed")),
        "ordinary_rise": float(rise("ordinary")),
    }


def changed(draw: int) -> dict[str, float]:
    """Numbers that differ from SwiGLU's in the output of a layer and its gradients, with rows scaled and without."""
    rng = np.random.default_rng(draw)
    g, u = rng.normal(size=(2, TOKENS, CHANNELS)).astype(np.float32)
    u[:, OUTLIER] *= 1000
    inputs = g, u, (rng.normal(size=(CHANNELS, WIDTH)) * CHANNELS**-0.5).astype(np.float32)

    def plain(g, u, w):
        return swiglu(g, u) @ w

    def smooth(g, u, w, folded=True):
        h, scale_F = smooth_swiglu(g, u)
        return h @ (scale_F[:, None] * w if folded else w)

    def outcome(f):
        y, pull = jax.vjp(f, *map(jnp.asarray, inputs))
        return y, *pull(jnp.sin(y))

    exact = outcome(plain)
    count = lambda f: float(sum((a != b).sum() for a, b in zip(outcome(f), exact, strict=True)))
    return {"smooth": count(smooth), "unfolded": count(functools.partial(smooth, folded=False))}


def checks(preset: Preset) -> Iterator[Run]:
    """Fits of the unit, the growing channel, and the bits of a layer."""
    for draw in range(preset.draws):
        for penalty in preset.penalties:
            yield Run("unit", draw, fit(draw, TEACHER, penalty, preset.starts), point=penalty_point(penalty))
        yield Run("soft_unit", draw, fit(draw, SOFT, SMALL, preset.starts), point=penalty_point(SMALL))
    curves = jax.tree.map(np.asarray, grown(preset.draws, preset.growths))
    for draw in range(preset.draws):
        counts = changed(draw)
        for arm, values in curves.items():
            own = summary({name: of_draws[draw] for name, of_draws in values.items()})
            yield Run(arm, draw, own | ({"changed": counts[arm]} if arm in counts else {}))
            for growth in range(preset.growths + 1):
                steps = slice(growth * PERIOD + (HISTORY if growth == 0 else 0), (growth + 1) * PERIOD)
                of_step = {name: values[name][draw][steps] for name in ("error", "flushed", "ordinary")}
                metrics = {"error": of_step["error"].max(), **{n: of_step[n].mean() for n in ("flushed", "ordinary")}}
                yield Run(arm, draw, metrics, point=f"x{2**growth}")
        yield Run("unfolded", draw, {"changed": counts["unfolded"]})


_CPU = Preset()
_PENALTIES = tuple((penalty_point(p), p) for p in _CPU.penalties if p)
_GROWN = tuple((f"x{2**growth}", float(2**growth)) for growth in range(_CPU.growths + 1))
_HELD = ("delayed", "just_in_time", "smooth")
FIGURES = (
    Dose("cosine", "abs_cosine", "Alignment of the branches against the penalty", "penalty / size of the teacher",
         "|cos(w1, w2)|", _PENALTIES, ("unit",), log_x=10, lines=(Reference("the teacher's", y=0.5),)),
    Dose("norms", "norm_ratio", "Balance of the branches against the penalty", "penalty / size of the teacher",
         "|w1| / |w2|", _PENALTIES, ("unit",), log_x=10, lines=(Reference("equal", y=1.0),)),
    Dose("error", "error", "Largest relative error of the product while one channel grows", "growth of the channel",
         "relative error", _GROWN, _HELD, log_x=2, log_y=True),
    Dose("flushed", "flushed", "Share of the other channels' units that become zero", "growth of the channel", "share",
         _GROWN, _HELD, log_x=2, log_y=True),
    Dose("ordinary", "ordinary", "Error of what the other channels contribute", "growth of the channel",
         "relative error", _GROWN, ("just_in_time", "smooth", "just_in_time_weights", "smooth_weights"), log_x=2,
         log_y=True),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="smooth-swiglu",
    title="Alignment of SwiGLU branches, delayed scaling, and Smooth-SwiGLU",
    claims=CLAIMS,
    arms=ARMS,
    presets={
        "smoke": Preset(draws=1, penalties=(0.0, SMALL, STRONG), starts=1, growths=2, evidence=False),
        "cpu": _CPU,
    },
    checks=checks,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
