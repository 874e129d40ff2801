"""Does the z-loss stop the drift of output logits, and does it cost anything?

Written before the first run: the claims, their rules and controls below. The softmax does not change when all logits
of a token move together, so the cross entropy exerts no force on log Z = log sum exp(logits), and it drifts. The
z-loss adds a coefficient times (log Z)^2. In the report logits drift to large negative values late in training at a
high rate; nothing in the mechanism fixes the sign, so what is measured is the root mean square of log Z over tokens,
which is about 6 at the start (256 ids, logits of unit variance).

There is no weight decay, and the rate is constant after the warm-up, so that nothing else holds the logits. The best
rate is searched for without a z-loss; the stress rate is ten times that. The coefficient of the report is 1e-4, over
100,000 steps. These runs have 400: at 1e-4 the product of coefficient and steps is 250 times smaller, and a pilot
(width 32, one seed of neither set) indeed showed hardly an effect, a drift from 6 to 8 at the best rate, and none at
the end of the stress rate. So each rule is asked twice: of 1e-4, as reported, and of 1e-2, the amplifier, which brings
the product to within a factor of three. The rule for 1e-4 stands although the pilot lets one expect that it fails.
"""

import dataclasses

from repro.claims import Arm, AtLeast, Cell, Claim, Control, Experiment, NonInferior, Ratio, Run, Runs, swapped
from repro.report import Curve, Effects, Ladder
from repro.train import TrainConfig
from repro.train.preset import Preset, tuned

WORTSMAN = "Wortsman et al. (arXiv 2309.14322)"
COEFFICIENTS = {"none": 0.0, "z1e-4": 1e-4, "z1e-3": 1e-3, "z1e-2": 1e-2}
ARMS = tuple(Arm(name, f"z-loss {z:g}" if z else "no z-loss", {"z_loss": z}) for name, z in COEFFICIENTS.items())
STRESS = 10.0
"""The stress rate over the best one."""
BETWEEN = "z1e-3"
"""Runs at the stress rate alone, on half of the seeds, for a figure."""


def _claims_at(preset: Preset, size: str) -> list[Claim]:
    at = lambda arm, point="best": f"{arm}@{point}/{size}"
    shape = f"Size {size}, AdamW without decay, {preset.train.steps} steps on bytes, constant rate, untied head"
    best, stressed = f"{shape}; at the best rate.", f"{shape}; at ten times the best rate."
    reported = (
        "Over 100,000 steps at a high rate logits drift to large negative values, and a coefficient of 1e-4 stops that "
        "(from digests of the paper)."
    )
    drifts = lambda arm: AtLeast("drift", at(arm, "drift"), 1.2, log=True)
    held = lambda arm, point: Ratio("log_z_rms", at("none", point), at(arm, point), at_least=3.0)
    harmless = lambda arm, point="best": NonInferior("loss", at(arm, point), at("none"), margin=0.02)

    def claim(variant, statement, boundary, rule, control):
        return Claim(
            id="S-2", variant=f"{variant}, {size}", family=WORTSMAN, tier="D", source=f"{WORTSMAN}, section 3.1.2",
            statement=statement, reported=reported, boundary=boundary, criterion=rule, control=control,
        )  # fmt: skip

    exchanged = lambda rule: Control("arms exchanged", swapped(rule))
    dear = lambda arm: Control("the same at the stress rate", harmless(arm, "stress"))
    return [
        claim(
            "logits drift", "Without a z-loss the root mean square of log Z ends at least 1.2 times as large as it "
            "starts.", best, drifts("none"), Control("a z-loss of 1e-2", drifts("z1e-2")),
        ),
        claim(
            "stops drift, 1e-4", "With a z-loss of 1e-4 it ends at less than a third of what it is without.", stressed,
            held("z1e-4", "stress"), exchanged(held("z1e-4", "stress")),
        ),
        claim(
            "stops drift, amplified", "With a z-loss of 1e-2 it ends at less than a third of what it is without.",
            stressed, held("z1e-2", "stress"), exchanged(held("z1e-2", "stress")),
        ),
        claim(
            "stops drift at the best rate, amplified",
            "With a z-loss of 1e-2 it ends at less than a third of what it is without.", best, held("z1e-2", "best"),
            exchanged(held("z1e-2", "best")),
        ),
        claim(
            "no harm, 1e-4", "A z-loss of 1e-4 costs less than 0.02 nats of validation loss.", best, harmless("z1e-4"),
            dear("z1e-4"),
        ),
        claim(
            "no harm, amplified", "A z-loss of 1e-2 costs less than 0.02 nats of validation loss.", best,
            harmless("z1e-2"), dear("z1e-2"),
        ),
    ]  # fmt: skip


def claims(preset: Preset) -> tuple[Claim, ...]:
    return tuple(claim for size in preset.sizes for claim in _claims_at(preset, size))


def plan(preset: Preset):
    """The best rate without a z-loss, then all coefficients there and at the stress rate."""
    _, best = yield from tuned(preset, [("none", size) for size in preset.sizes])
    seeds, cells = preset.test_seeds, []
    for size in preset.sizes:
        for point, factor in (("best", 1.0), ("stress", STRESS)):
            rate = factor * best["none", size]
            cells += [Cell(arm, size, rate, point, "test", seeds) for arm in COEFFICIENTS if arm != BETWEEN]
        half = seeds[: max(1, len(seeds) // 2)]
        cells.append(Cell(BETWEEN, size, STRESS * best["none", size], "stress", "test", half))
    yield cells


def derive(runs: Runs) -> list[Run]:
    """drift: the root mean square of log Z over the last tenth of the steps against that over the first ten."""
    return [
        Run(run.arm, run.seed, {"drift": run.metrics["log_z_rms"] / run.metrics["early_log_z_rms"]}, "drift", run.size)
        for run in runs.select(point="best")
        if run.arm in ("none", "z1e-2")
    ]


_SHOWN = ("none", "z1e-4", "z1e-2")
FIGURES = (
    Curve("log_z", "log_z_rms", "log Z at the best rate", "root mean square of log Z", arms=_SHOWN, point="best"),
    Curve("log_z_stress", "log_z_rms", "log Z at ten times the best rate", "root mean square of log Z", point="stress"),
    Curve("loss", "loss", "Training loss at the best rate", "loss (nats per byte)", arms=_SHOWN, point="best",
          smooth=10, start=40),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)", log=False),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_CPU = Preset(
    train=TrainConfig(optimizer="adamw", steps=400, schedule="constant", eval_windows=256),
    sizes=("w32", "xs"),
    rates=(0.003,),
    tuning_rates=(0.003, 0.00424, 0.006),
    tuning_limit=6,
)
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), tuning_rates=(0.003, 0.00424), tuning_limit=2, tuning_seeds=(1000,)
    ),
    "cpu": _CPU,
}

EXPERIMENT = Experiment(
    name="z-loss",
    title="Drift of output logits, with and without a z-loss",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    derive=derive,
    figures=FIGURES,
    words={
        "drift": "RMS of log Z, last tenth over first ten steps",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
