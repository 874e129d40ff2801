"""Does Muon reach AdamW's loss in fewer steps?

Written before the first run. Both have the same budget: rates are searched for by validation loss on the same tuning seeds,
in the same steps of sqrt(2), from the same three starting rates, until the best is inside the ladder. Decay is 0.1 for both,
as Moonlight has it. An arm of fewer steps is a run of its own with its whole schedule, tuned by itself, and is compared at
its end: a longer run read in its middle has not had its rate lowered yet.

The published figure is 52 % of the FLOPs at compute-optimal budgets of 0.4 to 1.5 billion parameters, a ratio that shrinks
with scale in the paper's own fits. Steps, not time: Muon's step costs more, and benchmarks/ says how much.
"""

import dataclasses

from repro.claims import Arm, Cell, Claim, Control, Experiment, Greater, swapped
from repro.report import Curve, Effects, Ladder
from repro.train import TrainConfig
from repro.train.preset import Preset, tuned

SHARES = {"75": 0.75, "52": 0.52}
"""Parts of the steps of the full run that shorter arms have."""
MOONLIGHT = "Moonlight (arXiv 2502.16982)"
ARMS = (
    Arm("adamw", "AdamW", {"optimizer": "adamw"}),
    Arm("muon", "Muon", {"optimizer": "muon"}),
    Arm("adamw_75", "AdamW, 75 % of the steps", {"optimizer": "adamw"}),
    Arm("muon_75", "Muon, 75 % of the steps", {"optimizer": "muon"}),
    Arm("muon_52", "Muon, 52 % of the steps", {"optimizer": "muon"}),
)


def _claims_at(preset: "StepsPreset", size: str) -> list[Claim]:
    at = lambda arm: f"{arm}@best/{size}"
    less = lambda long, short, smallest=None: Greater("loss", at(long), at(short), log=False, smallest=smallest)

    def claim(variant, statement, rule, control):
        return Claim(
            id="ML-3", variant=f"{variant}, {size}", family=MOONLIGHT, tier="D", source=f"{MOONLIGHT}, section 3.2",
            statement=statement, reported="AdamW's loss at about 52 % of its training FLOPs.",
            boundary=f"Size {size}, {preset.train.steps} steps on bytes, decay 0.1, each arm at its own best rate. The paper: "
            "0.4 to 1.5 billion parameters, compute-optimal budgets, AdamW tuned and Muon at AdamW's settings.",
            criterion=rule, control=control,
        )  # fmt: skip

    own = Control("AdamW itself in 75 % of the steps", less("adamw", "adamw_75"))
    found = [
        claim(
            "equal steps", "In the same number of steps Muon's validation loss is at least 0.02 nats below AdamW's.",
            less("adamw", "muon", 0.02), Control("arms exchanged", swapped(less("adamw", "muon", 0.02))),
        ),
        claim("75 % of the steps", "Muon gets below AdamW's loss in 75 % of the steps.", less("adamw", "muon_75"), own),
        claim("52 % of the steps", "Muon gets below AdamW's loss in 52 % of the steps.", less("adamw", "muon_52"), own),
    ]  # fmt: skip
    return found if preset.shorter else found[:1]


@dataclasses.dataclass(frozen=True)
class StepsPreset(Preset):
    """The sweep of this experiment."""

    shorter: bool = True
    """Whether there are arms of fewer steps."""


def claims(preset: StepsPreset) -> tuple[Claim, ...]:
    return tuple(claim for size in preset.sizes for claim in _claims_at(preset, size))


def plan(preset: StepsPreset):
    """Tune and test: first the full runs, then those of fewer steps, since their lengths are structures of their own."""

    def of(arm: str) -> dict:
        share = SHARES.get(arm.partition("_")[2])
        return {"steps": max(1, round(share * preset.train.steps))} if share else {}

    arms = [arm.name for arm in (ARMS if preset.shorter else ARMS[:2])]
    runs, best = yield from tuned(
        preset, [(arm, size) for size in preset.sizes for arm in arms], settings={arm: of(arm) for arm in arms}
    )
    yield [
        Cell(arm, size, best[arm, size], "best", "test", preset.test_seeds, of(arm))
        for size in preset.sizes for arm in arms
    ]  # fmt: skip


FIGURES = (
    Curve("loss", "loss", "Training loss, each arm at its best rate", "loss (nats per byte)", point="best", smooth=20,
          start=60),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)",
           arms=("adamw", "muon", "muon_75", "muon_52"), log=False),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_CPU = StepsPreset(train=TrainConfig(steps=400, weight_decay=0.1, eval_windows=256), sizes=("w32", "xs"), rates=(0.01,))
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), shorter=False, tuning_rates=(0.01, 0.02), tuning_limit=2, tuning_seeds=(1000,)
    ),
    "cpu": _CPU,
    "cpu-sizes": dataclasses.replace(_CPU, sizes=("w128",)),
}

EXPERIMENT = Experiment(
    name="muon-vs-adamw",
    title="Steps that Muon and AdamW need to one loss",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
