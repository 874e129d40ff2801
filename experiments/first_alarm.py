"""Which signal is first when a loss is about to spike, and by how many steps?

Written before the first run on these seeds (pilots on the seeds 2000 and 2001 chose sizes, rates and amplifiers). Five
feedback loops are described in the literature, each with a signal that is said to see it first: depth (gradients of
layers), attention (the largest logit), gated hidden units (the largest unit), the optimizer's second moment (RMS_t),
and the routing of experts (their largest unit, and their load). Each loop has a structure in which it is free and the
others are held: pre-norm, QK norm, clamped units and b2 = 0.95 are the guarded structure, and a loop's own lacks one
of them.

*Amplifiers.* Models of this size do not spike by themselves, so something is made to grow from step 100 on: the rate,
by 10 % per step (slow); for the second moment the gradient, by 20 % per step (slow) or once by a factor of 1000
(fast), which changes no update of an Adam whose second moment is not late. Beside them the plain runs. Signals that an
amplifier moves by itself are taken per unit of it: updates over the rate's factor, gradients over the gradient's.

*Rules* (`repro.drills.alarm`). Spike: a loss more than 0.4 nats, five standard deviations of plain runs, above the
median of the 51 before. Score of a signal: distance of its logarithm from the mean of its logarithms over the 32 steps
before, the largest over layers where it has some. Alarm: a score above its limit, which is the largest score of that
signal in 15 plain runs on other seeds over all watched steps; so every signal has the same budget, one false alarm in
16 runs. The lead is the steps from the first alarm after step 99 to the spike, 0 without an alarm before it. Leads of
plain runs are taken against the spike of the run of the same seed under the slow amplifier.

Three questions per loop, under the slow amplifier: does its signal warn, is it ahead of the loss's own alarm, and is
it as early as what one would watch anyway, the gradient's norm and the largest number of the residual stream? The
first of all signals is not asked for: among eleven others with one false alarm in 16 runs each, some alarm is early by
chance. What warns is no proof of the cause: the rate moves everything.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import All, Arm, AtLeast, AtMost, Cell, Claim, Control, Experiment, Greater, Run, Runs, swapped
from repro.drills.alarm import WINDOW, alarm_step, limit, peak, scores, spike_step
from repro.errors import ReproError
from repro.models import ModelConfig
from repro.report import Curve, Effects
from repro.train import NUMERIC, JobResult, Program, TrainConfig
from repro.train.monitors import MonitorConfig
from repro.train.preset import Sweep

MARGIN = 0.4
"""Of a spike, nats."""
WARNS, AHEAD, BEHIND = 5.0, 3.0, 1.0
"""Steps: least lead, least lead over the loss's own alarm, and how far behind a general signal an early one may be."""
GENERAL = ("gradient", "residual")

SIGNALS = {
    "loss": "loss",
    "gradient": "grad_norm",
    "layers": "layer_gradient_norms",
    "update": "update_norm",
    "residual": "activation_max",
    "log_z": "log_z_rms",
    "logit": "max_abs_logit",
    "entropy": "entropy_min",
    "hidden": "hidden_max",
    "rms_t": "staleness",
    "load": "max_violation",
    "router": "router_logit_max",
}
"""Signal and metric; the last two exist with experts alone, and `hidden` is there the units of experts."""
_PER_RATE, _PER_GRADIENT = ("update",), ("gradient", "layers")

_EXPERTS = {
    "model.moe.experts": 8, "model.moe.active": 2, "model.moe.ffn": 16, "model.moe.shared": 2,
    "model.moe.affinity": "sqrt_softplus", "model.moe.balance": "sign",
}  # fmt: skip
ARMS = (
    Arm("depth", "Post-LN, 6 layers", {"model.residual.kind": "post_norm", "model.layers": 6}),
    Arm("attention", "no QK norm", {"model.qk_norm": "none"}),
    Arm("glu", "SwiGLU without clamp", {"model.glu": "swiglu"}),
    Arm("moment", "b2 = 0.999", {"optim.b2": 0.999}),
    Arm("routing", "experts without clamp", _EXPERTS | {"model.glu": "swiglu"}),
    Arm("guarded", "guarded structure"),
)
RATES = {"depth": 0.003, "moment": 0.3}
"""Where they differ from the preset's: Post-LN trains at this one, and the second moment's late updates, about ten
times the usual ones, have to reach what the others reach by the growing rate."""
GROWTH = {"plain": {}, "slow": {"rate_growth": 1.1}}
BURST = {
    "plain": {},
    "slow": {"gradient_growth": 1.2},
    "fast": {"gradient_growth": 1000.0, "span": 1.0},
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limit of each signal's score; inf gives no alarm."""

    loss: float = math.inf
    gradient: float = math.inf
    layers: float = math.inf
    update: float = math.inf
    residual: float = math.inf
    log_z: float = math.inf
    logit: float = math.inf
    entropy: float = math.inf
    hidden: float = math.inf
    rms_t: float = math.inf
    load: float = math.inf
    router: float = math.inf


@dataclasses.dataclass(frozen=True)
class AlarmConfig(TrainConfig):
    """A run in which a rate or a gradient grows from some step on, and whose signals are watched."""

    numeric: ClassVar[tuple[str, ...]] = (*NUMERIC, "since", "span", "rate_growth", "gradient_growth")

    since: float = 100.0
    """First step of the growth, and first that is watched."""
    span: float = math.inf
    """Steps that it goes on for."""
    rate_growth: float = 1.0
    """Factor on the rate per step."""
    gradient_growth: float = 1.0
    """Factor on the gradient, as the optimizer gets it, per step."""
    limits: Limits = Limits()
    """What is read of the curves afterwards; no part of the program."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.since > WINDOW or self.since % 1:
            raise ReproError(f"train.since is {self.since:g}; it is a step after {WINDOW}, which a score looks back.")
        if self.span < 0 or not self.rate_growth > 0 or not self.gradient_growth > 0:
            raise ReproError("train.span is not negative, and train.rate_growth and gradient_growth are positive.")

    @classmethod
    def program_class(cls) -> type[Program]:
        return AlarmProgram

    def structure(self) -> TrainConfig:
        return dataclasses.replace(super().structure(), limits=Limits())

    def grown(self, steps: np.ndarray) -> np.ndarray:
        """For how many steps the growth has gone on, the present one included."""
        return np.clip(steps - self.since + 1, 0, self.span)

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        return {"N8": {"amplifier": "rate or gradient growing from a step on, in the runs slow and fast"}}


class AlarmProgram(Program):
    """The engine's program under an amplifier."""

    def gradients(self, grads: Any, numbers: Any) -> Any:
        return jax.tree.map(lambda g: g * numbers.gradient_growth, grads)

    def step(self, state: Any, window_BT1: jax.Array, numbers: Any, *rest: Any):
        grown = jnp.clip(state.step - numbers.since + 1, 0, numbers.span)
        numbers = numbers._replace(
            learning_rate=numbers.learning_rate * numbers.rate_growth**grown,
            gradient_growth=numbers.gradient_growth**grown,
        )
        return super().step(state, window_BT1, numbers, *rest)

    @staticmethod
    def scalars(result: JobResult, configs: list[TrainConfig]) -> list[dict[str, float]]:
        """Beside the engine's: `peak_NAME`, the largest score of a signal in the watched steps; `alarm_NAME`, where
        there is an alarm, and `spike`, where there is one, in steps after `since`; `until_spike`, the same or, without
        a spike, the number of watched steps."""
        rows = Program.scalars(result, configs)
        for lane, row in enumerate(rows):
            row |= watched({name: values[:, lane] for name, values in result.curves.items()}, configs[lane])
        return rows


def watched(curves: dict[str, np.ndarray], config: AlarmConfig) -> dict[str, float]:
    """The scalars that `AlarmProgram.scalars` adds, of the curves [S, ...] of one run."""
    since, found = int(config.since), {}
    grown = config.grown(np.arange(len(curves["loss"])))
    for name, metric in SIGNALS.items():
        if metric not in curves:
            continue
        values = np.asarray(curves[metric], np.float64)
        base = config.rate_growth if name in _PER_RATE else config.gradient_growth if name in _PER_GRADIENT else 1.0
        score = scores(values / (base**grown).reshape(-1, *[1] * (values.ndim - 1)))
        found[f"peak_{name}"] = peak(score, since)
        alarm = alarm_step(score, getattr(config.limits, name), since)
        if alarm is not None:
            found[f"alarm_{name}"] = alarm - since
    spike = spike_step(curves["loss"], since, MARGIN)
    found["until_spike"] = (len(curves["loss"]) if spike is None else spike) - since
    return found if spike is None else found | {"spike": spike - since}


@dataclasses.dataclass(frozen=True)
class AlarmPreset(Sweep):
    """The sweep of this experiment, at one size."""

    train: AlarmConfig = AlarmConfig()
    tuning_seeds: tuple[int, ...] = tuple(range(1000, 1015))
    """Plain runs that limits come from."""
    loops: tuple[str, ...] = ("depth", "attention", "glu", "moment", "routing")
    rate: float = 0.01
    """Before it grows; see `RATES`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) != 1 or not self.tuning_seeds:
            raise ReproError("this experiment takes one size, and at least one tuning seed.")
        if self.train.since >= self.train.steps:
            raise ReproError(f"train.since is {self.train.since:g} and train.steps {self.train.steps}; nothing grows.")
        if self.train.optimizer != "adamw" or not {"gradient", "staleness"} <= {*self.train.monitors.names}:
            raise ReproError("this experiment needs the optimizer adamw and the monitors gradient and staleness.")
        if not self.loops or not set(self.loops) <= {*OWN}:
            raise ReproError(f"loops is {self.loops}; choose among {', '.join(OWN)}.")


OWN = {
    "depth": ("layers", "gradients of layers", "hidden"),
    "attention": ("logit", "the largest attention logit", "hidden"),
    "glu": ("hidden", "the largest hidden unit", "logit"),
    "moment": ("rms_t", "RMS_t", "logit"),
    "routing": ("hidden", "the largest hidden unit of an expert", "logit"),
}
"""Of every loop: its own signal, what that is, and a signal of another loop."""
DEEPNET, PROXIES = "DeepNet (arXiv 2203.00555)", "Wortsman et al. (arXiv 2309.14322)"
V4, STABLE = "DeepSeek-V4 report", "StableAdamW (arXiv 2304.13013)"
_PAPER = {
    "depth": ("S-3", DEEPNET, "", "Training of Post-LN fails as its updates explode and gradients vanish; no lead."),
    "attention": ("S-1", PROXIES, ", section 3.1.1", "Every run with a logit above 10,000 diverged; no lead in steps."),
    "glu": ("V4-4", V4, ", section 4.2.3", "A clamp removes outliers and aids stability; no lead in steps."),
    "moment": ("O-4", STABLE, "", "The loss spikes 1 to 8 steps after RMS_t of the first layer rises."),
    "routing": (
        "V4-5",
        V4,
        ", section 4.2.3",
        "Spikes coincide with outliers in layers with experts; no lead in steps.",
    ),
}


def claims(preset: AlarmPreset) -> tuple[Claim, ...]:
    return tuple(claim for loop in preset.loops for claim in _claims_of(loop, preset))


def _claims_of(loop: str, preset: AlarmPreset) -> list[Claim]:
    id, family, section, reported = _PAPER[loop]
    train, (signal, words, other) = preset.train, OWN[loop]
    grows = "the gradient grows by a fifth per step" if loop == "moment" else "the rate grows by a tenth per step"
    about = (
        f"Width {train.model.width}, {train.steps} steps, AdamW at {RATES.get(loop, preset.rate):g}. Amplified: "
        f"{grows} from step {train.since:g} on. An alarm is no cause, and no spike came by itself."
    )

    def claim(variant, statement, rule, description, control, about=about):
        return Claim(
            id=id, variant=f"first alarm: {variant}", family=family, tier="D", source=family + section,
            statement=statement, reported=reported, boundary=about, criterion=rule,
            control=Control(description, control),
        )  # fmt: skip

    least = lambda metric, point, name, bound: AtLeast(metric, f"{loop}@{point}.{name}", bound)
    early = lambda name: All(tuple(least(f"ahead_of_{other}", "slow", name, -BEHIND) for other in GENERAL))
    warns = lambda variant, name, text: claim(
        variant, f"An alarm of {text} comes more than {WARNS:g} steps before the spike, in the mean.",
        least("lead", "slow", name, WARNS), "plain runs", least("lead", "plain", name, WARNS),
    )  # fmt: skip
    found = [
        warns("warns", signal, words),
        claim("ahead of the loss", f"An alarm of {words} comes more than {AHEAD:g} steps before that of the loss "
              "under the same rule, in the mean.", least("ahead_of_loss", "slow", signal, AHEAD), "plain runs",
              least("ahead_of_loss", "plain", signal, AHEAD)),
        claim("as early as general signals", f"An alarm of {words} comes, in the mean, less than {BEHIND:g} step after "
              "that of the gradient's norm, and of the largest number in the residual stream.", early(signal),
              f"a signal of another loop ({SIGNALS[other]})", early(other)),
    ]  # fmt: skip
    if loop == "routing":
        found.append(warns("the load warns", "load", "the experts' load"))
    if loop in ("attention", "glu"):
        sooner = Greater("until_spike", "guarded@slow", f"{loop}@slow", log=False, smallest=AHEAD)
        text = f"The structure with the free loop spikes at least {AHEAD:g} steps before the guarded one."
        found.append(claim("freed, it spikes sooner", text, sooner, "arms exchanged", swapped(sooner)))
    if loop == "moment":
        within = lambda at: All((AtLeast("lead", at, 0.5), AtMost("lead", at, 8.5)))
        found.append(claim(
            "1 to 8 steps", "After a burst the spike follows the alarm of RMS_t by 1 to 8 steps, in the mean.",
            within(f"{loop}@fast.{signal}"), "plain runs", within(f"{loop}@plain.{signal}"),
            about.replace(grows, "the gradient is 1000 times larger"),
        ))  # fmt: skip
    return found


def plan(preset: AlarmPreset):
    """Plain runs on the tuning seeds for the limits, then plain and amplified ones on the test seeds."""
    size = preset.sizes[0]
    guarded = {"guarded"} if {"attention", "glu"} & {*preset.loops} else set()
    arms = [arm.name for arm in ARMS if arm.name in {*preset.loops} | guarded]
    rate = lambda arm: RATES.get(arm, preset.rate)
    runs = yield [Cell(arm, size, rate(arm), "limits", "tuning", preset.tuning_seeds) for arm in arms]
    cells = []
    for arm in arms:
        of_arm = [run.metrics for run in runs.select(arm, phase="tuning")]
        names = [name for name in SIGNALS if f"peak_{name}" in of_arm[0]]
        limits = {f"limits.{name}": limit(row[f"peak_{name}"] for row in of_arm) for name in names}
        for point, settings in (BURST if arm == "moment" else GROWTH).items():
            cells.append(Cell(arm, size, rate(arm), point, "test", preset.test_seeds, settings | limits))
    yield cells


def derive(runs: Runs) -> list[Run]:
    """At the point `POINT.SIGNAL` of every run: lead, the steps from the signal's alarm to the spike; ahead_of_loss,
    ahead_of_gradient and ahead_of_residual, how much earlier it is than the alarms of these. An alarm after the spike
    counts as one at it. Plain runs are read against the spike of the slow run of their seed; without a spike
    there is nothing to read. At `plain.any`: false_alarms, the share of signals that give an alarm in a plain run."""
    spikes = {(run.arm, run.seed): run.metrics.get("spike", math.nan) for run in runs.select(point="slow")}
    found = []
    for run in runs.select(phase="test"):
        names = [name for name in SIGNALS if f"peak_{name}" in run.metrics]
        alarms = {name: run.metrics.get(f"alarm_{name}", math.inf) for name in names}
        spike = (
            spikes.get((run.arm, run.seed), math.nan) if run.point == "plain" else run.metrics.get("spike", math.nan)
        )
        if run.point == "plain":
            share = float(np.mean([math.isfinite(alarm) for alarm in alarms.values()]))
            found.append(Run(run.arm, run.seed, {"false_alarms": share}, "plain.any", run.size))
        at = {name: float(np.minimum(alarm, spike)) for name, alarm in alarms.items()}
        for name in names:
            row = {f"ahead_of_{other}": at[other] - at[name] for other in ("loss", *GENERAL)}
            row["lead"] = spike - at[name]
            found.append(Run(run.arm, run.seed, row, f"{run.point}.{name}", run.size))
    return found


_SHOWN = ("depth", "attention", "glu", "routing", "guarded")
FIGURES = (
    Curve("loss", "loss", "Training loss while the rate grows by a tenth per step", "loss (nats per byte)",
          point="slow", arms=_SHOWN, log=True, start=80),
    Curve("growing_gradient", "loss", "Training loss while the gradient grows by a fifth per step",
          "loss (nats per byte)", point="slow", arms=("moment",), start=80),
    Curve("loss_plain", "loss", "Training loss, plain", "loss (nats per byte)", point="plain", smooth=10, start=30),
    Curve("residual", "activation_max", "Largest number of the residual stream", "maximum", point="slow", arms=_SHOWN,
          log=True, start=80),
    Curve("logit", "max_abs_logit", "Largest attention logit", "largest |logit|", point="slow", arms=_SHOWN, log=True,
          start=80),
    Curve("hidden", "hidden_max", "Largest hidden unit", "largest |unit|", point="slow", arms=_SHOWN, log=True,
          start=80),
    Curve("burst", "loss", "Training loss after a burst of the gradient", "loss (nats per byte)", point="fast",
          arms=("moment",), start=80),
    Curve("rms_t", "staleness_max", "Largest RMS_t of a tensor after a burst", "RMS_t", point="fast", arms=("moment",),
          start=80),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_CPU = AlarmPreset(
    train=AlarmConfig(
        model=ModelConfig(layers=2, width=32, heads=2, ffn=86, glu="clamped", qk_norm="rms"),
        length=32, batch_size=16, optimizer="adamw", steps=160, schedule="constant", eval_windows=16,
        monitors=MonitorConfig(names=("gradient", "staleness")),
    ),
    sizes=("custom",),
)  # fmt: skip
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU, train=dataclasses.replace(_CPU.train, steps=48, since=36.0, eval_windows=4), sizes=("tiny",),
        tuning_seeds=(1000,), test_seeds=(0, 1), loops=("moment",), evidence=False,
    ),
    "cpu": _CPU,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="first-alarm",
    title="Which signal comes before a spike of the loss, in five feedback loops",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    derive=derive,
    figures=FIGURES,
    words={
        "lead": "first alarm ahead of the spike (steps)",
        "ahead_of_loss": "alarm ahead of the loss's own (steps)",
        "ahead_of_gradient": "alarm ahead of the gradient's (steps)",
        "ahead_of_residual": "alarm ahead of the residual stream's (steps)",
        "until_spike": "steps until the spike",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
