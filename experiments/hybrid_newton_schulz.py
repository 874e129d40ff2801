"""Does hybrid Newton-Schulz (8 + 2 steps) train as well as five steps, or better?

Written before the first run. DeepSeek-V4 orthogonalises with eight lifting and two converging steps and a factor of 0.18;
five steps leave the singular values between about 0.7 and 1.1, so their factor of 0.2 gives an update of about the same
root mean square. Each arm is tuned on the same seeds. No number is published for the exchange of one by the other; one
public attempt at a billion parameters saw no gain. So the claim has two halves, and the placebo, five steps with a factor of
0.2001, shows how much any change at all moves a paired loss.
"""

import dataclasses

from repro.claims import Arm, Cell, Claim, Control, Experiment, Greater, NonInferior, swapped
from repro.report import Curve, Effects, Ladder
from repro.train import TrainConfig
from repro.train.preset import Preset, tuned

V4 = "DeepSeek-V4 report"
ARMS = (
    Arm("muon5", "five steps, 0.2", {"optim.schedule": "muon5", "optim.rms": 0.2}),
    Arm("hybrid10", "8 + 2 steps, 0.18", {"optim.schedule": "hybrid10", "optim.rms": 0.18}),
    Arm("placebo", "five steps, 0.2001", {"optim.schedule": "muon5", "optim.rms": 0.2001}),
    Arm("hybrid10_harm", "8 + 2 steps at three times the best rate", {"optim.schedule": "hybrid10", "optim.rms": 0.18}),
)


def _claims_at(preset: "HybridPreset", size: str) -> list[Claim]:
    at = lambda arm: f"{arm}@best/{size}"
    better = Greater("loss", at("muon5"), at("hybrid10"), log=False, smallest=0.005)
    as_well = lambda arm: NonInferior("loss", at(arm), at("muon5"), margin=0.02)

    def claim(variant, statement, rule, control):
        return Claim(
            id="V4-2", variant=f"{variant}, {size}", family=V4, tier="D", source=f"{V4}, section 2.4",
            statement=statement, reported="Used for both models; no comparison with five steps is given.",
            boundary=f"Size {size}, {preset.train.steps} steps on bytes, float32 products, each arm at its own best rate.",
            criterion=rule, control=control,
        )  # fmt: skip

    return [
        claim(
            "as well", "Hybrid Newton-Schulz costs less than 0.02 nats of validation loss against five steps.",
            as_well("hybrid10"), Control("the same at three times its best rate", as_well("hybrid10_harm")),
        ),
        claim(
            "better", "Hybrid Newton-Schulz gains at least 0.005 nats of validation loss against five steps.", better,
            Control("arms exchanged", swapped(better)),
        ),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HybridPreset(Preset):
    """The sweep of this experiment."""

    placebo: bool = True
    """Whether the placebo is trained; no claim reads it."""


def claims(preset: HybridPreset) -> tuple[Claim, ...]:
    return tuple(claim for size in preset.sizes for claim in _claims_at(preset, size))


def plan(preset: HybridPreset):
    runs, best = yield from tuned(preset, [(arm, size) for size in preset.sizes for arm in ("muon5", "hybrid10")])
    cells = []
    for size in preset.sizes:
        rates = {
            "muon5": best["muon5", size], "hybrid10": best["hybrid10", size],
            "placebo": best["muon5", size], "hybrid10_harm": 3 * best["hybrid10", size],
        }  # fmt: skip
        cells += [Cell(arm, size, rate, "best", "test", preset.test_seeds) for arm, rate in rates.items()
                  if preset.placebo or arm != "placebo"]  # fmt: skip
    yield cells


FIGURES = (
    Curve("loss", "loss", "Training loss, each arm at its best rate", "loss (nats per byte)",
          arms=("muon5", "hybrid10", "placebo"), point="best", smooth=20, start=60),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)", arms=("muon5", "hybrid10"),
           log=False),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_CPU = HybridPreset(train=TrainConfig(steps=400, eval_windows=256), sizes=("w32", "xs"), rates=(0.01,))
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), placebo=False, tuning_rates=(0.01, 0.02), tuning_limit=2, tuning_seeds=(1000,)
    ),
    "cpu": _CPU,
}

EXPERIMENT = Experiment(
    name="hybrid-newton-schulz",
    title="Hybrid Newton-Schulz against five steps",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
