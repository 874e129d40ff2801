"""Does muP keep the change of features and the best learning rate the same over width?

Written before the first run. A base model of width 32 and wider ones of the same depth, under three rules:

- standard: one rate for everything, matrices and head drawn from N(0, 1 / fan-in).
- muP (Yang et al., arXiv 2203.03466, in the form of the package `mup`), with m = width / 32: rate of matrices 1 / m, that of
  embedding, gains and head as at the base; head drawn with the base model's spread, and its output divided by m.
- standard with the rate of the embedding times m, since a later study finds that nearly all of muP's benefit under AdamW
  is there.

All three are one model at the base width, exactly. Heads have 16 components at every width, so muP's attention factor 1 / K in
place of 1 / sqrt(K) is one constant for all widths and is left out. There is no decay; gains are trained.

*Coordinate check.* Four Adam steps at a rate of 0.01, large on purpose, on one fixed batch. The change is the root mean square,
over batch, positions and width, of what the first block adds to the residual stream after them minus before them; its slope
is that of log2 of the change over log2 of the width, per seed. The residual stream itself would hide it behind the embedding,
and what follows the final norm is bounded.

*Transfer.* Every rule at every width has its own search in factors of two on tuning seeds. Each test seed is then trained at
half the best rate, at it and at twice it, and its own best rate is the lowest point of the parabola through the three, in
log2 of the rate, at most an octave from the middle (the lowest of the three where the parabola has no lowest point). The
drift of a seed is the slope of that over log2 of the width: octaves per doubling, for two doublings. Under muP a rate is the
one that the base model would have, so that no drift means that a rate found at width 32 holds.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from repro.claims import (
    All,
    Arm,
    AtLeast,
    AtMost,
    Cell,
    Claim,
    Control,
    Exact,
    Experiment,
    NonInferior,
    Run,
    Within,
)
from repro.claims.statistics import slope
from repro.data import load_corpus
from repro.errors import ReproError
from repro.models import SIZES, ModelConfig, init_and_apply
from repro.optim import factor_tree, scale_by_width_rule, width_factors
from repro.optim.layout import matched
from repro.optim.width_rules import WidthFactors
from repro.report import Dose, Effects, Ladder
from repro.train import Program, TrainConfig
from repro.train.preset import Preset, tuned

BASE = 32
Rule = Literal["standard", "mup", "embedding"]
ARMS = (
    Arm("standard", "standard", {"rule": "standard"}),
    Arm("mup", "muP", {"rule": "mup"}),
    Arm("embedding", "standard, embedding rate times m", {"rule": "embedding"}),
)
POINTS = {"half": 0.5, "best": 1.0, "double": 2.0}
"""The rates of a test seed over the best one of the tuning seeds."""
DRIFT, MOVES, STAYS, MARGIN = 0.35, 0.5, 0.2, 0.02
"""Octaves per doubling, slopes of the coordinate check, nats of loss."""
YANG, LATER = "Tensor Programs V (arXiv 2203.03466)", "arXiv 2605.21486"


@dataclasses.dataclass(frozen=True)
class WidthConfig(TrainConfig):
    """The decoder with a rule of how it changes with its width."""

    rule: Rule = "standard"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in Rule.__args__:
            raise ReproError(f"train.rule is {self.rule!r}; known are {', '.join(Rule.__args__)}.")
        if self.weight_decay or self.weights != "fp32":
            raise ReproError("train.rule is for runs without weight decay, whose weights are float32.")
        for name in ("heads", "ffn"):
            if getattr(self.model, name) * BASE % self.model.width:
                raise ReproError(
                    f"model.{name} {getattr(self.model, name)} of width {self.model.width} has no counterpart at {BASE}."
                )

    def base_model(self) -> ModelConfig:
        """The same model at the base width: its head size and its ratio of F to D kept."""
        model, scaled = self.model, lambda n: n * BASE // self.model.width
        return dataclasses.replace(model, width=BASE, heads=scaled(model.heads), ffn=scaled(model.ffn))

    @classmethod
    def program_class(cls) -> type[Program]:
        return WidthProgram

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        words = {
            "standard": "one rate at every width", "mup": f"muP over width {BASE}, head multiplier form",
            "embedding": f"one rate, that of the embedding times width / {BASE}",
        }  # fmt: skip
        return {"N7": {"over width": words[self.rule]}}


class WidthProgram(Program):
    """The engine's program under a rule of width."""

    def __init__(self, config: WidthConfig) -> None:
        super().__init__(config)
        of = lambda model: jax.eval_shape(init_and_apply(model)[0], jax.random.key(0))
        self.multiple = config.model.width / BASE
        self.factors = width_factors(
            of(config.model), of(config.base_model()), self.layouts, rule="mup", matrices="adam"
        )
        if config.rule != "mup":
            roles = {name: layout.role for name, _, layout in matched(of(config.model), self.layouts)}
            rate = lambda role: self.multiple if (config.rule, role) == ("embedding", "embedding") else 1.0
            self.factors = {name: WidthFactors(rate(role), 1.0, 1.0) for name, role in roles.items()}

    def optimizer(self, numbers, part, seed=0):
        return optax.chain(super().optimizer(numbers, part, seed), scale_by_width_rule(self.factors))

    def init(self, seed):
        state = super().init(seed)
        if self.config.rule != "mup":
            return state
        # Factors are against the base model's spread. The model draws matrices and head from N(0, 1 / fan-in), which is
        # 1 / sqrt(m) of that already.
        drawn = {"matrix": self.multiple**-0.5, "head": self.multiple**-0.5}
        found = matched(state.params, self.layouts)
        scales = [self.factors[name].init / drawn.get(layout.role, 1.0) for name, _, layout in found]
        scaled = [w if scale == 1 else w * jnp.float32(scale) for scale, (_, w, _) in zip(scales, found, strict=True)]
        return dataclasses.replace(state, params=jax.tree.unflatten(jax.tree.structure(state.params), scaled))

    def multiplied(self, params):
        """The parameters as they enter the forward pass."""
        return jax.tree.map(lambda w, f: w if f == 1 else w * f, params, factor_tree(params, self.factors, "forward"))

    def loss(self, params, window_BT1, z_loss, key=None):
        return super().loss(self.multiplied(params), window_BT1, z_loss, key)

    def features(self, params, window_BT1):
        """What the first block adds to the residual stream [B, T, D]."""
        hidden = self.apply(self.multiplied(params), window_BT1[:, :-1].astype(jnp.int32), hidden=True).hidden
        return hidden[1] - hidden[0]


@dataclasses.dataclass(frozen=True)
class WidthPreset(Preset):
    """The sweep of this experiment: sizes of growing width, the base first."""

    layers: int = 2
    """Layers of every model."""
    ablation: bool = True
    """Whether the arm with the embedding's rate alone runs."""
    length: int = 32
    batch_size: int = 8
    """Tokens per window and windows per step, of the search and of the coordinate check."""
    coordinate_widths: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Widths of the coordinate check, the base first; none to leave it out."""
    coordinate_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    coordinate_rate: float = 0.01
    coordinate_steps: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = [SIZES[size].width if size in SIZES else 0 for size in self.sizes]
        for name, values in (("sizes", widths), ("coordinate_widths", list(self.coordinate_widths))):
            if name == "coordinate_widths" and not values:
                continue
            if len(values) < 2 or values[0] != BASE or values != sorted(set(values)):
                raise ReproError(f"{name} is {getattr(self, name)}; give two or more of growing width, {BASE} first.")
        if not self.coordinate_seeds or self.coordinate_steps < 1 or not 0 < self.coordinate_rate < math.inf:
            raise ReproError(
                "coordinate_seeds, coordinate_steps and coordinate_rate need at least one, one, and a positive value."
            )

    def quick_look(self):
        """At two widths of one layer, without the ablation and the coordinate check."""
        train = dataclasses.replace(self.train, steps=3, eval_windows=4)
        return dataclasses.replace(
            self, train=train, layers=1, sizes=("w32", "xs"), test_seeds=(0, 1), ablation=False, coordinate_widths=(),
            evidence=False,
        )  # fmt: skip

    def config(self, size: str) -> WidthConfig:
        config = super().config(size)
        model = dataclasses.replace(config.model, layers=self.layers)
        return dataclasses.replace(config, model=model, length=self.length, batch_size=self.batch_size)

    def coordinate_config(self, width: int, rule: Rule) -> WidthConfig:
        """The settings of the coordinate check: a constant rate from the first step."""
        shape = SIZES["w32"]
        scaled = lambda n: n * width // BASE
        model = dataclasses.replace(
            self.train.model, layers=self.layers, width=width, heads=scaled(shape.heads), ffn=scaled(shape.ffn)
        )
        return WidthConfig(
            model=model, length=self.length, batch_size=self.batch_size, steps=self.coordinate_steps, optimizer="adam",
            learning_rate=self.coordinate_rate, warmup=0.0, schedule="constant", rule=rule,
        )  # fmt: skip


def claims(preset: WidthPreset) -> tuple[Claim, ...]:
    return (*(_coordinate_claims(preset) if preset.coordinate_widths else ()), *_transfer_claims(preset))


def _coordinate_claims(preset: WidthPreset) -> list[Claim]:
    moves = lambda arm: Within("slope", f"{arm}@coordinates", MOVES, math.inf)
    stays = lambda arm: Within("slope", f"{arm}@coordinates", -STAYS, STAYS)
    same = lambda width: Exact("off_standard", f"mup@{width_point(width)}", 0.0)

    def claim(variant, statement, reported, rule, control):
        return Claim(
            id="O-6", variant=variant, tier="M", source=f"{YANG}, and its package mup", statement=statement, reported=reported,
            boundary=f"Widths {', '.join(map(str, preset.coordinate_widths))}, {preset.layers} layers, "
            f"{preset.coordinate_steps} Adam steps at {preset.coordinate_rate:g} on one batch of bytes, "
            f"{len(preset.coordinate_seeds)} seeds, heads of 16 components.",
            criterion=rule, control=control,
        )  # fmt: skip

    base, wider = preset.coordinate_widths[:2]
    return [
        claim("features move with width under standard rates", "In every seed the change of features grows with the width with "
              f"a slope above {MOVES:g}.", "Activations blow up with width; shown in a figure.", moves("standard"),
              Control("muP", moves("mup"))),
        claim("features move alike under muP", f"In every seed the slope lies within {STAYS:g} of zero.",
              "Activations change alike at every width; shown in a figure.", stays("mup"),
              Control("standard", stays("standard"))),
        claim("identity at the base width", "At the base width muP is the standard model, to the bit, after training.",
              "By definition.", same(base), Control(f"width {wider}", same(wider))),
    ]  # fmt: skip


def _transfer_claims(preset: WidthPreset) -> list[Claim]:
    widest = preset.sizes[-1]
    falls = lambda arm: AtMost("drift", f"{arm}@fit", -DRIFT)
    holds = lambda arm: All((AtMost("drift", f"{arm}@fit", DRIFT), AtLeast("drift", f"{arm}@fit", -DRIFT)))
    halves = lambda arm: AtLeast("half_of_other_minus_own", f"{arm}@fit", 0.0)
    as_good = lambda arm: NonInferior("loss", f"{arm}@best/{widest}", f"mup@best/{widest}", margin=MARGIN)

    def claim(variant, family, statement, reported, rule, control):
        return Claim(
            id="O-6", variant=variant, family=family, tier="D", source=family, statement=statement, reported=reported,
            boundary=f"Widths {', '.join(str(SIZES[size].width) for size in preset.sizes)}, {preset.layers} layers, "
            f"{preset.train.steps} Adam steps of {preset.batch_size} windows of {preset.length} bytes, no decay, gains "
            "trained, heads of 16 components. The base model is narrow, and the best rate is that of early training.",
            criterion=rule, control=control,
        )  # fmt: skip

    found = [
        claim("standard: the best rate falls", YANG, f"Under standard rates the best rate falls by more than {DRIFT:g} octaves "
              "per doubling of the width.", "The best rate shifts with width; shown in a figure.", falls("standard"),
              Control("muP", falls("mup"))),
        claim("muP: the best rate holds", YANG, f"Under muP the best rate drifts by less than {DRIFT:g} octaves per doubling, "
              "either way.", "The best rate is stable over width; shown in a figure.", holds("mup"),
              Control("standard", holds("standard"))),
        claim("muP: less than half the drift", YANG, "The drift under muP is less than half of that under standard rates, "
              "seeds paired.", "Stable against shifting.", halves("mup"), Control("rules exchanged", halves("standard"))),
    ]  # fmt: skip
    if preset.ablation:
        found += [
            claim("embedding rate alone: loss", LATER, "At the widest model, standard rates with that of the embedding times m "
                  f"cost less than {MARGIN:g} nats against muP, each at its own best rate.",
                  "Nearly all of muP's benefit under AdamW is the embedding's rate (as reported second-hand).",
                  as_good("embedding"), Control("standard rates", as_good("standard"))),
            claim("embedding rate alone: drift", LATER, f"Its best rate falls by more than {DRIFT:g} octaves per doubling all "
                  "the same, since the matrices still take the whole rate.", "Not reported; the rule of muP says so.",
                  falls("embedding"), Control("muP", falls("mup"))),
        ]  # fmt: skip
    return found


def width_point(width: int) -> str:
    return f"d{width}"


def fit_point(width: int) -> str:
    return f"fit d{width}"


def plan(preset: WidthPreset):
    """All rules are one model at the base width, which is trained once."""
    wide = [arm.name for arm in ARMS if preset.ablation or arm.name != "embedding"]
    places = [("standard", preset.sizes[0]), *((arm, size) for size in preset.sizes[1:] for arm in wide)]
    _, best = yield from tuned(preset, places, factor=2.0)
    yield [
        Cell(arm, size, factor * best[arm, size], point, "test", preset.test_seeds)
        for arm, size in places for point, factor in POINTS.items()
    ]  # fmt: skip


def lowest(rates: tuple[float, ...], losses: tuple[float, ...]) -> float:
    """log2 of the best rate by a parabola through three losses at `rates` an octave apart; see the module."""
    low, middle, high = losses
    bend = low - 2 * middle + high
    if not math.isfinite(bend) or bend <= 0:
        return math.log2(rates[int(np.argmin(np.nan_to_num(losses, nan=np.inf)))])
    return math.log2(rates[1]) + min(1.0, max(-1.0, (low - high) / (2 * bend)))


def derive(runs):
    """Per rule and seed: log2 of the best rate at every width, its drift, and half of the other's drift minus the own."""
    test = {(r.arm, r.size, r.seed, r.point): r for r in runs.select(phase="test") if r.point in POINTS}
    sizes = sorted({size for _, size, _, _ in test}, key=lambda size: SIZES[size].width)
    widths = np.log2([SIZES[size].width for size in sizes])
    drifts = {}
    for arm in dict.fromkeys(arm for arm, _, _, _ in test):
        for seed in dict.fromkeys(seed for _, _, seed, _ in test):
            found = []
            for size in sizes:
                trained = "standard" if size == sizes[0] else arm
                three = [test[trained, size, seed, point] for point in POINTS]
                found.append(lowest([r.rate for r in three], [r.metrics["loss"] for r in three]))
                yield Run(arm, seed, {"best_log2_rate": found[-1]}, point=fit_point(SIZES[size].width))
            drifts[arm, seed] = float(slope(widths, found))
    for (arm, seed), drift in drifts.items():
        other = drifts["mup" if arm == "standard" else "standard", seed]
        metrics = {"drift": drift, "half_of_other_minus_own": abs(other) / 2 - abs(drift)}
        yield Run(arm, seed, metrics, point="fit")


def changes(config: WidthConfig, seeds: tuple[int, ...], windows_SBT1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The features [seeds, B, T, D] before and after `config.steps` steps on each seed's own fixed batch."""
    program, numbers = WidthProgram(config), config.numbers()

    def one(seed, window_BT1):
        start = program.init(seed)
        step = lambda state, _: (program.step(state, window_BT1, numbers)[0], None)
        end, _ = jax.lax.scan(step, start, None, length=config.steps)
        return program.features(start.params, window_BT1), program.features(end.params, window_BT1)

    before, after = jax.jit(lambda *of: jax.lax.map(lambda a: one(*a), of))(np.array(seeds, np.uint32), windows_SBT1)
    return np.asarray(before, np.float64), np.asarray(after, np.float64)


def checks(preset: WidthPreset) -> Iterator[Run]:
    """The coordinate check: the change of features at every width, its slope, and muP against the standard model."""
    if not preset.coordinate_widths:
        return
    corpus, seeds = load_corpus("kjv"), preset.coordinate_seeds
    windows = np.stack([corpus.batch(seed, 0, batch_size=preset.batch_size, length=preset.length) for seed in seeds])
    change, off = {}, {}
    for width in preset.coordinate_widths:
        ends = {}
        for rule in ("standard", "mup"):
            before, ends[rule] = changes(preset.coordinate_config(width, rule), seeds, windows)
            change[rule, width] = np.sqrt(np.mean((ends[rule] - before) ** 2, (1, 2, 3)))
        off[width] = np.abs(ends["mup"] - ends["standard"]).max((1, 2, 3))
    doublings = np.log2(preset.coordinate_widths)
    for rule in ("standard", "mup"):
        for i, seed in enumerate(seeds):
            for width in preset.coordinate_widths:
                metrics = {"feature_change": change[rule, width][i]}
                metrics |= {"off_standard": off[width][i]} if rule == "mup" else {}
                yield Run(rule, seed, metrics, point=width_point(width))
            of_width = np.log2([change[rule, width][i] for width in preset.coordinate_widths])
            yield Run(rule, seed, {"slope": float(slope(doublings, of_width))}, point="coordinates")


_WIDTHS = tuple((width_point(width), float(width)) for width in (32, 64, 128, 256, 512))
_FITS = tuple((fit_point(width), float(width)) for width in (32, 64, 128))
FIGURES = (
    Dose("coordinates", "feature_change", "Coordinate check", "width", "RMS change of the first block's output", points=_WIDTHS,
         arms=("standard", "mup"), log_x=2, log_y=True),
    Dose("best_rate", "best_log2_rate", "Best rate against width", "width", "log2 of the best rate", points=_FITS, log_x=2),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)", log=False),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_CPU = WidthPreset(
    train=WidthConfig(optimizer="adam", steps=300, eval_windows=256), sizes=("w32", "xs", "w128"), rates=(0.01,),
    tuning_rates=(0.005, 0.01, 0.02),
)  # fmt: skip
PRESETS = {
    "smoke": dataclasses.replace(_CPU.quick_look(), tuning_rates=(0.005, 0.01), tuning_limit=2, tuning_seeds=(1000,)),
    "cpu": _CPU,
}

EXPERIMENT = Experiment(
    name="mup",
    title="Width, feature change and the best rate under standard rates and muP",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    derive=derive,
    figures=FIGURES,
    words={
        "drift": "drift of the best rate (octaves per doubling of width)",
        "half_of_other_minus_own": "half of the drift under standard rates, minus the own (octaves per doubling)",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
