"""Do the hidden units of SwiGLU grow outliers, which forms stop that, and what does it cost?

Written before the first run: the claims, their rules and controls below. A unit is gate times branch, so it grows with
the square of its weights. Three published forms bound it: the clamp of DeepSeek-V4 (gate's input at most 10, branch in
[-10, 10]) and SiTU-GLU of Kimi K3 (4 tanh(g / 4) sigmoid(g) 25 tanh(u / 25)), both at 100, and PowLU, whose gate tends
to 1 so that the unit grows with its branch alone. Their definitions are checked first, each beside a form that is
wrong on purpose.

In training there is no weight decay, and after the warm-up the rate is constant. Pilots showed that at its best rate a
model of this size has no outliers: a clamp at 10 then never acts, and the run is SwiGLU's bit for bit, so that "no
loss" is trivial there. The amplifier is declared: the stress rate, ten times SwiGLU's best one and the same for every
form. What a form holds is judged there; what it costs is judged at the best rate of each form, and for the clamp also
at the stress rate, where it acts. Every form searches for its best rate on the tuning seeds over the same ladder; the
clamp takes SwiGLU's.

Pilots also showed that the relative error of E4M3 does not see these outliers, while the share of units that it
flushes to zero does. That share is measured after training on 16 validation windows, with one scale per tensor and per
1 x 128 tile, in the layer where it is larger; nothing is quantised in training. Growth is the largest unit over the
last tenth of the steps against that of the first ten steps.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from repro.claims import (
    All,
    Arm,
    AtLeast,
    Cell,
    Claim,
    Control,
    Equivalent,
    Exact,
    Experiment,
    Greater,
    NonInferior,
    Ratio,
    Run,
    Within,
    swapped,
)
from repro.errors import ReproError
from repro.models import Block
from repro.models.functional import clamped_swiglu, powlu, situ_glu, swiglu
from repro.quant import FORMATS
from repro.report import Curve, Effects, Ladder
from repro.train import JobResult, Program, TrainConfig
from repro.train.preset import Preset, tuned

ARMS = (
    Arm("swiglu", "SwiGLU", {"model.glu": "swiglu"}),
    Arm("situ", "SiTU-GLU", {"model.glu": "situ"}),
    Arm("clamped", "clamped SwiGLU", {"model.glu": "clamped"}),
    Arm("powlu", "PowLU", {"model.glu": "powlu"}),
)
_NAMES = tuple(arm.name for arm in ARMS)
STRESS = 10.0
"""The stress rate over SwiGLU's best."""
K3, V4 = "Kimi K3 technical report", "DeepSeek-V4 technical report"
POWLU, FISHMAN = "PowLU (arXiv 2605.25704)", "Fishman et al. (arXiv 2409.12517)"
WINDOWS, TILE = 16, 128
"""Validation windows on which the flushed share is measured, and units per tile."""


@dataclasses.dataclass(frozen=True)
class GluConfig(TrainConfig):
    """The decoder, whose hidden units are looked at after training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        model = self.model
        if model.residual.kind != "pre_norm" or model.moe.experts or model.pattern or model.sigma_reparam:
            raise ReproError(
                "this experiment looks into dense pre-norm blocks of one kind; leave residual, moe, pattern and "
                "sigma_reparam of train.model as they are."
            )

    @classmethod
    def program_class(cls) -> type[Program]:
        return GluProgram


def flushed(h_RF: jax.Array, tile: int) -> jax.Array:
    """The share of units that are not zero and become zero in E4M3 with the scale amax / 448 of each 1 x tile."""
    padded = jnp.pad(h_RF, ((0, 0), (0, -h_RF.shape[1] % tile)))
    tiles = jnp.abs(padded).reshape(-1, tile)
    least = tiles.max(1, keepdims=True) / FORMATS["e4m3"].max * FORMATS["e4m3"].min_subnormal / 2
    return jnp.sum((tiles <= least) & (tiles > 0)) / h_RF.size


class GluProgram(Program):
    """The engine's program, which also quantises the hidden units of the validation windows."""

    def hidden_units(self, params, tokens_BT: jax.Array) -> jax.Array:
        """What the down projection of every layer sees, [L, B, T, F]."""
        with nnx.set_graph_mode(False):
            graphdef, state = nnx.split(nnx.eval_shape(lambda: Block(self.config.model, rngs=nnx.Rngs(0))))

            def layer(weights, x_BTD):
                own = jax.tree.map(lambda leaf: leaf, state)
                nnx.replace_by_pure_dict(own, weights)
                block = nnx.merge(graphdef, own)
                x_BTD = x_BTD + block.attention(block.attention_norm(x_BTD))[0]
                return block.ffn.hidden(block.ffn_norm(x_BTD))

            entered = self.apply(params, tokens_BT, hidden=True).hidden[:-1]  # what each layer reads
            return jax.vmap(layer)(params["blocks"], entered)

    def evaluate(self, params, windows_NT1, **options):
        """Beside the loss the flushed shares: units that E4M3 turns into zero, of those that are none, in the layer
        where that is larger; one scale per tensor of a layer, and per tile."""
        found = super().evaluate(params, windows_NT1, **options)
        h_LBTF = self.hidden_units(params, windows_NT1[:WINDOWS, :-1].astype(jnp.int32))
        tensors, rows = (h_LBTF.reshape(len(h_LBTF), -1, size) for size in (h_LBTF[0].size, h_LBTF.shape[-1]))
        return found | {
            "flushed_tensor": jax.vmap(lambda h: flushed(h, h.size))(tensors).max(),
            "flushed_tile": jax.vmap(lambda h: flushed(h, TILE))(rows).max(),
        }

    @staticmethod
    def scalars(result: JobResult, configs) -> list[dict[str, float]]:
        """Beside the engine's: growth; flushed_tensor and flushed_tile, at least 1e-6, for a logarithm."""
        rows = Program.scalars(result, configs)
        for lane, row in enumerate(rows):
            row["growth"] = row["hidden_max"] / row["early_hidden_max"]
            for name in ("flushed_tensor", "flushed_tile"):
                share = float(result.final[name][lane])
                row[name] = max(share, 1e-6) if math.isfinite(row["loss"]) else math.nan
        return rows


@dataclasses.dataclass(frozen=True)
class GluPreset(Preset):
    """The sweep of this experiment."""

    train: GluConfig = GluConfig(optimizer="adamw", steps=250, schedule="constant", warmup=1 / 6, eval_windows=256)
    sizes: tuple[str, ...] = ("w32", "xs")
    rates: tuple[float, ...] = (0.003,)
    tuning_rates: tuple[float, ...] = (0.003, 0.00424, 0.006)
    tuning_limit: int = 6
    arms: tuple[str, ...] = _NAMES
    """The arms that run; a claim is judged where all that it reads does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "swiglu" not in self.arms or not set(self.arms) <= set(_NAMES):
            raise ReproError(f"arms is {self.arms}; take swiglu and any of {', '.join(_NAMES)}.")


def _definitions() -> list[Claim]:
    about = "A grid of gates and branches up to 10^4 in magnitude, float32. Says nothing of training."

    def claim(id, variant, source, statement, reported, rule, control):
        return Claim(
            id=id, variant=variant, tier="M", source=source, statement=statement, reported=reported, boundary=about,
            criterion=rule, control=control,
        )  # fmt: skip

    value = lambda arm: Exact("at_3_5", arm, 11.94, 0.005)
    bound = lambda arm: Within("largest", arm, 99.0, 100.0)
    order = lambda arm: All((Within("order", arm, 1.95, 2.05), Within("one_percent_at", arm, 0.17, 0.178)))
    alive = lambda arm: Within("slope_at_20", arm, 1.7e-4, 1.9e-4)
    clamp = lambda arm: All((Within("largest", arm, 99.0, 100.0), Exact("wrong_slopes", arm, 0.0)))
    linear = lambda arm: All((Within("power", arm, 0.95, 1.05), Within("largest_gate", arm, 1.0, 10.0)))
    finite = lambda arm: Exact("nan_slopes", arm, 0.0)
    eq12, clamped = f"{K3}, eq. 12", f"{V4}, section 4.2.3"
    return [
        claim(
            "K3-2", "definition", eq12, "SiTU-GLU of gate 3 and branch 5 is 11.94.", "The formula.",
            value("situ_form"), Control("the sigmoid of the capped gate", value("capped_sigmoid")),
        ),
        claim(
            "K3-2", "bound", eq12, "No unit exceeds 100, and some come within 1 % of it.", "beta_1 beta_2 = 100.",
            bound("situ_form"), Control("a cap on the gate alone", bound("gate_alone")),
        ),
        claim(
            "K3-2", "first order", eq12,
            "Each branch agrees with SwiGLU's to first order: it deviates with the square of |z| / beta, 1 % at 0.174.",
            "Agrees near zero; 0.174 is derived here.", order("situ_form"),
            Control("z / (1 + |z| / beta) as the cap", order("soft_sign")),
        ),
        claim(
            "K3-2", "gradient", f"{K3}, appendix B",
            "At a gate of 20, five betas, the slope of the gate is still 1.8e-4.",
            "A smooth cap keeps a gradient, unlike a clamp; no number.", alive("situ_form"),
            Control("the clamp at 10", alive("clamp_form")),
        ),
        claim(
            "V4-4", "definition", clamped,
            "No unit exceeds 100, some come within 1 % of it, the gradient is exactly 0 where a branch is clamped and "
            "SwiGLU's where none is, and the gate is not clamped from below.",
            "min(gate, 10) and branch in [-10, 10].", clamp("clamp_form"),
            Control("the gate clamped from below too", clamp("clamped_below")),
        ),
        claim(
            "S-8", "growth", POWLU,
            "The unit grows with its inputs to the power of 1, and its gate never exceeds 10.",
            "f tends to 1 at large inputs.", linear("powlu_form"), Control("SwiGLU", linear("swiglu_form")),
        ),
        claim(
            "S-8", "gradient", "implementations of PowLU",
            "No slope of the gate is NaN, at any sign of its input.", "The power needs a safe input.",
            finite("powlu_form"), Control("the power of the input itself", finite("unsafe_power")),
        ),
    ]  # fmt: skip


def _claims_at(preset: GluPreset, size: str) -> list[Claim]:
    at = lambda arm, point="best": f"{arm}@{point}/{size}"
    shape = f"Size {size}, AdamW without decay, {preset.train.steps} steps on bytes, constant rate"
    stressed = f"{shape}; at ten times the best rate of SwiGLU, the amplifier."
    best = f"{shape}; at the best rate of each form, where hardly any unit is large."
    share = f"{stressed} Units of the trained model quantised on 16 windows; nothing is quantised in training."
    held = lambda arm, times, point="stress": Ratio("hidden_max", at("swiglu", point), at(arm, point), at_least=times)
    flushed = lambda arm, least: Greater(
        "flushed_tensor", at("swiglu", "stress"), at(arm, "stress"), smallest=least
    )  # fmt: skip
    grows = lambda point: AtLeast("growth", at("swiglu", point), 10.0, log=True)
    harmless = lambda arm, point: NonInferior("loss", at(arm, point), at("swiglu"), margin=0.02)
    acting = lambda point: NonInferior("loss", at("clamped", "stress"), at("swiglu", point), margin=0.05)
    same = lambda point: Equivalent("loss", at("powlu", point), at("swiglu"), margin=0.02)
    lost = Ratio("flushed_tensor", at("swiglu", "stress"), at("swiglu"), at_least=10.0)
    more = Greater("flushed_tensor", at("powlu"), at("swiglu"), smallest=2.0)

    def claim(id, variant, family, statement, reported, boundary, rule, control):
        return Claim(
            id=id, variant=f"{variant}, {size}", family=family, tier="D", source=family, statement=statement,
            reported=reported, boundary=boundary, criterion=rule, control=control,
        )  # fmt: skip

    exchanged = lambda rule: Control("arms exchanged", swapped(rule))
    at_best = lambda arm, times: Control("the best rates", held(arm, times, "best"))
    return [
        claim(
            "K3-2", "SwiGLU grows", K3, "The largest unit of SwiGLU grows at least tenfold in training.",
            "The reason for a bound; no number.", stressed, grows("stress"), Control("the best rate", grows("best")),
        ),
        claim(
            "K3-2", "stops growth", K3, "The largest unit of SiTU-GLU ends at less than a third of SwiGLU's.",
            "Stops the growth of outliers; no ablation.", stressed, held("situ", 3.0), at_best("situ", 3.0),
        ),
        claim(
            "K3-2", "no harm", K3, "SiTU-GLU costs less than 0.02 nats of validation loss.",
            "Trains like SwiGLU; no number.", best, harmless("situ", "best"),
            Control("SiTU-GLU at the stress rate", harmless("situ", "stress")),
        ),
        claim(
            "K3-2", "flushed", K3,
            "SwiGLU has at least 1.25 times the flushed share of SiTU-GLU, with one scale per tensor.",
            "Not reported; derived from pilots.", share, flushed("situ", 1.25), exchanged(flushed("situ", 1.25)),
        ),
        claim(
            "V4-4", "removes outliers", V4, "The largest unit of the clamp ends at less than a third of SwiGLU's.",
            "Removes outliers in both models.", stressed, held("clamped", 3.0), at_best("clamped", 3.0),
        ),
        claim(
            "V4-4", "no loss", V4, "The clamp costs less than 0.02 nats of validation loss at SwiGLU's best rate.",
            "At no loss of quality.", f"{best} The clamp then hardly acts, so little follows.",
            harmless("clamped", "best"), Control("the clamp at the stress rate", harmless("clamped", "stress")),
        ),
        claim(
            "V4-4", "no loss where it acts", V4,
            "At the stress rate it costs less than 0.05 nats against SwiGLU there.",
            "At no loss of quality.", stressed, acting("stress"), Control("against SwiGLU at its best rate",
                                                                            acting("best")),
        ),
        claim(
            "V4-4", "flushed", V4,
            "SwiGLU has at least 1.5 times the flushed share of the clamp, with one scale per tensor.",
            "Not reported; derived from pilots.", share, flushed("clamped", 1.5), exchanged(flushed("clamped", 1.5)),
        ),
        claim(
            "S-8", "slows growth", POWLU, "The largest unit of PowLU ends at less than half of SwiGLU's.",
            "No spike at 7.9B in FP8 where SwiGLU had one (those runs changed the form midway).", stressed,
            held("powlu", 2.0), at_best("powlu", 2.0),
        ),
        claim(
            "S-8", "trains like SwiGLU", POWLU, "Its validation loss lies within 0.02 nats of SwiGLU's.",
            "1.912 against 1.910 after 29.8B tokens.", best, same("best"), Control("PowLU at the stress rate",
                                                                                   same("stress")),
        ),
        claim(
            "S-8", "flushes more at the best rate", POWLU,
            "At its best rate PowLU has at least twice the flushed share of SwiGLU: its gate is near x^3 / 2 at 0.",
            "Not reported; derived from pilots.", f"{best} Units quantised after training.", more, exchanged(more),
        ),
        claim(
            "FP-7", "outliers cost small units", FISHMAN,
            "At the stress rate the flushed share of SwiGLU is at least ten times that at its best rate.",
            "Outliers break FP8 training of a 7B model.", share, lost, exchanged(lost),
        ),
    ]  # fmt: skip


LANGUAGE_MODEL = Claim(
    id="FP-7", variant="alignment in a language model", tier="S", source=FISHMAN,
    statement="Under weight decay the two branches of a channel align in a language model, and FP8 training with "
    "delayed scaling diverges.",
    reported="Llama 2 7B; the correlation in the outlying channel jumps between 125B and 210B tokens.",
    boundary="Stated only. The mechanism is in smooth-swiglu.", criterion=None, control=None,
    reason_untestable="Above 100B tokens at 7B parameters.",
)  # fmt: skip


def claims(preset: GluPreset) -> tuple[Claim, ...]:
    trained = [claim for size in preset.sizes for claim in _claims_at(preset, size)]
    known = lambda claim: all(at.split("@")[0] in preset.arms for at in claim.criterion.reads())
    return (*_definitions(), *filter(known, trained), LANGUAGE_MODEL)


def plan(preset: GluPreset):
    """The best rate of every form but the clamp, then all forms there and at the stress rate."""
    searched = [arm for arm in preset.arms if arm != "clamped"]
    runs, best = yield from tuned(preset, [(arm, size) for size in preset.sizes for arm in searched])
    cells = []
    for size in preset.sizes:
        own = {arm: best["swiglu" if arm == "clamped" else arm, size] for arm in preset.arms}
        stress = STRESS * best["swiglu", size]
        for point, rates in (("best", own), ("stress", dict.fromkeys(preset.arms, stress))):
            cells += [Cell(arm, size, rate, point, "test", preset.test_seeds) for arm, rate in rates.items()]
    yield cells


def checks(preset: GluPreset) -> list[Run]:
    """The forms against what they are said to be, and wrong forms beside them."""
    found = {arm: {name: float(v) for name, v in row.items()} for arm, row in measured().items()}
    z = np.asarray(_DISTANCES)
    for arm, away in jax.tree.map(lambda d: np.asarray(d, np.float64), departures()).items():
        orders = [np.polyfit(np.log(z[:20]), np.log(of_branch[:20]), 1)[0] for of_branch in away]
        found.setdefault(arm, {}).update(
            order=max(orders, key=lambda order: abs(order - 2)), one_percent_at=float(np.interp(0.01, away[0], z))
        )
    return [Run(arm, 0, metrics) for arm, metrics in found.items()]


def _capped_sigmoid(g: jax.Array, u: jax.Array) -> jax.Array:
    gate = 4 * jnp.tanh(g / 4)
    return gate * jax.nn.sigmoid(gate) * 25 * jnp.tanh(u / 25)


def _clamped_below(g: jax.Array, u: jax.Array) -> jax.Array:
    return clamped_swiglu(jnp.where(g < -10, -10.0, g), u, 10.0)


def _unsafe_power(g: jax.Array, u: jax.Array) -> jax.Array:
    return u * jax.nn.sigmoid(g) * jnp.where(g > 0, g ** (3 / (jnp.sqrt(g) + 1)), g)


FORMS = {
    "situ_form": (situ_glu, ("at_3_5", "largest", "slope_at_20")),
    "capped_sigmoid": (_capped_sigmoid, ("at_3_5",)),
    "gate_alone": (lambda g, u: situ_glu(g, u, 4.0, math.inf), ("largest",)),
    "clamp_form": (lambda g, u: clamped_swiglu(g, u, 10.0), ("largest", "wrong_slopes", "slope_at_20")),
    "clamped_below": (_clamped_below, ("largest", "wrong_slopes")),
    "powlu_form": (lambda g, u: powlu(u, g), ("power", "largest_gate", "nan_slopes")),
    "swiglu_form": (swiglu, ("power", "largest_gate")),
    "unsafe_power": (_unsafe_power, ("nan_slopes",)),
}
"""Forms by name, right and wrong, as functions of gate and branch, and what is measured of each."""


@jax.jit
def measured() -> dict[str, dict[str, jax.Array]]:
    """What `FORMS` asks for.

    at_3_5: the unit at gate 3 and branch 5. largest: of |unit|. slope_at_20: of the gate, at branch 1. wrong_slopes:
    slopes that are not 0 where a branch is clamped, or not SwiGLU's elsewhere. power: of the growth of the unit with
    both inputs from 1e6 to 1e9. largest_gate: of the gate up to 1e9. nan_slopes: slopes of the gate that are NaN.
    """
    line = np.concatenate([-np.geomspace(1e4, 1e-3, 60), [0.0], np.geomspace(1e-3, 1e4, 60)]).astype(np.float32)
    g, u = (jnp.asarray(m.ravel()) for m in np.meshgrid(line, line))
    far, gates = jnp.asarray([1e6, 1e9], jnp.float32), jnp.asarray(np.geomspace(1e-3, 1e9, 2000), jnp.float32)
    slopes = lambda f, g, u: jax.grad(lambda g, u: f(g, u).sum(), (0, 1))(g, u)
    right_g = jnp.where(g > 10, 0.0, slopes(swiglu, g, jnp.clip(u, -10, 10))[0])
    right_u = jnp.where(jnp.abs(u) > 10, 0.0, slopes(swiglu, jnp.minimum(g, 10), u)[1])

    def wrong(f):
        by_g, by_u = slopes(f, g, u)
        return (by_g != right_g).sum() + (by_u != right_u).sum()

    def power(f):
        ends = jnp.log(f(far, far))
        return (ends[1] - ends[0]) / math.log(1e3)

    measures = {
        "at_3_5": lambda f: f(jnp.float32(3.0), jnp.float32(5.0)),
        "largest": lambda f: jnp.abs(f(g, u)).max(),
        "slope_at_20": lambda f: jax.grad(f)(jnp.float32(20.0), jnp.float32(1.0)),
        "wrong_slopes": wrong,
        "power": power,
        "largest_gate": lambda f: f(gates, jnp.ones_like(gates)).max(),
        "nan_slopes": lambda f: jnp.isnan(slopes(f, line, jnp.ones_like(line))[0]).sum(),
    }
    return {arm: {name: measures[name](f) for name in names} for arm, (f, names) in FORMS.items()}


_DISTANCES = tuple(np.geomspace(0.02, 0.2, 40))
"""|z| / beta at which branches are compared."""


@jax.jit
def departures() -> dict[str, jax.Array]:
    """1 - ratio of a branch to SwiGLU's, at those distances, of the gate and of the other branch [2, 40]."""
    z = jnp.asarray(_DISTANCES, jnp.float32)
    soft_sign = 1 - 1 / (1 + z)
    one = jnp.ones_like(z)
    gate = situ_glu(4 * z, one, 4.0, math.inf) / swiglu(4 * z, one)
    up = situ_glu(one, 25 * z, math.inf, 25.0) / swiglu(one, 25 * z)
    return {"situ_form": jnp.stack([1 - gate, 1 - up]), "soft_sign": jnp.stack([soft_sign, soft_sign])}


FIGURES = (
    Curve("hidden", "hidden_max", "Largest hidden unit at ten times the best rate", "largest |unit|", point="stress",
          log=True, line=100.0, line_label="bound of SiTU-GLU and of the clamp"),
    Curve("loss", "loss", "Training loss at the best rate", "loss (nats per byte)", point="best", smooth=10, start=30),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)", log=False),
    Ladder("flushed", "flushed_tensor", "Share of units that E4M3 flushes to zero",
           "share of units flushed, one scale per tensor"),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_CPU = GluPreset()
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), arms=("swiglu", "situ"), tuning_rates=(0.003, 0.00424), tuning_limit=2, tuning_seeds=(1000,)
    ),
    "cpu": _CPU,
}

EXPERIMENT = Experiment(
    name="glu-outliers",
    title="Outliers of gated units, and forms that bound them",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    check_arms=(*FORMS, "soft_sign"),
    figures=FIGURES,
    words={
        "growth": "largest hidden unit, end over beginning",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
