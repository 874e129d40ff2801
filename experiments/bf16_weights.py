"""Do weights stored in bfloat16 lose small updates in training, and does stochastic rounding keep them?

Written before the first run. AdamW moves a weight by about the learning rate. Around |w| = width^-1/2 = 1/8 the grid of
bfloat16 has steps of 2^-10 to 2^-11, so an update below about 2.4e-4 (2^-9 |w|) rounds back to nothing. At the low rate,
3e-4 at its peak and a tenth of that at the end of the schedule, most updates should be swallowed when rounded to nearest,
and kept in the mean when rounded stochastically; at the usual rate, 1e-2, nearest should do as well. All three arms have
float32 optimizer states and the same seeds, batches and rates; only what is stored between steps differs.
"""

import dataclasses

from repro.claims import Arm, AtMost, Cell, Claim, Control, Experiment, Greater, NonInferior
from repro.errors import ReproError
from repro.report import Curve, Dose, Effects
from repro.train import TrainConfig
from repro.train.preset import Sweep

ARMS = (
    Arm("fp32", "float32", {"weights": "fp32"}),
    Arm("nearest", "bfloat16, nearest", {"weights": "bf16"}),
    Arm("stochastic", "bfloat16, stochastic", {"weights": "bf16_stochastic"}),
)
KALAMKAR, GUPTA = "Kalamkar et al. (arXiv 1905.12322)", "Gupta et al. (arXiv 1502.02551)"


def claims(preset: "WeightsPreset") -> tuple[Claim, ...]:
    size = preset.sizes[0]
    about = f"Size {size}, AdamW, {preset.train.steps} steps on bytes, float32 arithmetic; weights alone in bfloat16."
    costs = lambda rate: Greater("loss", f"nearest@{rate}", f"fp32@{rate}", log=False, smallest=0.05)
    keeps = lambda arm, rate: NonInferior("loss", f"{arm}@{rate}", f"fp32@{rate}", margin=0.02)
    retained = lambda rate: AtMost("retained", f"nearest@{rate}", 0.5)
    found = (
        Claim(
            id="FP-2", variant="small updates are swallowed", family=KALAMKAR, tier="D", source=KALAMKAR,
            statement="At the low rate less than half of the norm of the updates arrives in weights rounded to nearest.",
            reported="Keeps a float32 master copy of the weights.", boundary=about,
            criterion=retained("low"), control=Control("the usual rate", retained("high")),
        ),
        Claim(
            id="FP-2", variant="swallowed updates cost loss", family=KALAMKAR, tier="D", source=KALAMKAR,
            statement="At the low rate weights rounded to nearest cost at least 0.05 nats against float32.",
            reported="Keeps a float32 master copy of the weights.", boundary=about,
            criterion=costs("low"), control=Control("the usual rate", costs("high")),
        ),
        Claim(
            id="FP-3", variant="training at a low rate", family=GUPTA, tier="D", source=GUPTA,
            statement="At the low rate weights rounded stochastically cost less than 0.02 nats against float32.",
            reported="16-bit fixed point trains like float32 with stochastic rounding, and fails with nearest.",
            boundary=about, criterion=keeps("stochastic", "low"), control=Control("nearest", keeps("nearest", "low")),
        ),
        Claim(
            id="FP-3", variant="training at the usual rate", family=GUPTA, tier="D", source=GUPTA,
            statement="At the usual rate weights rounded stochastically cost less than 0.02 nats against float32.",
            reported="16-bit fixed point trains like float32 with stochastic rounding, and fails with nearest.",
            boundary=about, criterion=keeps("stochastic", "high"),
            control=Control("nearest at the low rate", keeps("nearest", "low")),
        ),
    )  # fmt: skip
    # The size for a look trains one arm less, since all that takes long there is compiling them.
    return tuple(claim for claim in found if claim.id == "FP-2" or size != "tiny")


@dataclasses.dataclass(frozen=True)
class WeightsPreset(Sweep):
    """The sweep of this experiment."""

    train: TrainConfig = TrainConfig(optimizer="adamw", steps=600, weight_decay=0.1, eval_windows=256)
    rates: tuple[float, float, float] = (3e-4, 2e-3, 1e-2)
    """Peak rates called low, middle and high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.rates) != sorted(set(self.rates)) or self.rates[0] <= 0:
            raise ReproError(f"rates is {self.rates}; give three positive rates, ascending.")
        if len(self.sizes) != 1:
            raise ReproError(f"sizes is {self.sizes}; this experiment takes one size.")


def plan(preset: WeightsPreset):
    yield [
        Cell(arm.name, preset.sizes[0], rate, point, "test", preset.test_seeds)
        for arm in ARMS if (arm.name, preset.sizes[0]) != ("stochastic", "tiny")
        for point, rate in zip(("low", "middle", "high"), preset.rates, strict=True)
    ]  # fmt: skip


_POINTS = (("low", 3e-4), ("middle", 2e-3), ("high", 1e-2))
FIGURES = (
    Curve("loss", "loss", "Training loss at the low rate", "loss (nats per byte)", point="low", smooth=20, start=30),
    Curve("retained", "retained", "Share of the update that arrives, low rate", "norm of the change over the update",
          arms=("nearest", "stochastic"), point="low", smooth=10),
    Dose("rates", "loss", "Validation loss against the rate", "peak learning rate", "loss (nats per byte)",
         arms=("fp32", "nearest", "stochastic"), points=_POINTS, log_x=10, log_y=False),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_CPU = WeightsPreset()
PRESETS = {
    "smoke": _CPU.quick_look(),
    "cpu": _CPU,
}

EXPERIMENT = Experiment(
    name="bf16-weights",
    title="Weights stored in bfloat16, to nearest and stochastically",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
