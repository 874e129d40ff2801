"""Do norm gains clamp in training under MXFP8, and does it cost anything?

Written before the first run. MX takes the scale of a block of 32 from its largest number, rounded down to a power of two,
so in a block of gains that cluster between 0.875 and 1 every gain becomes 0.875 (see layernorm-clamp for the arithmetic).
Gains start at 1, which does not clamp; weight decay and gradients move them. The report saw instabilities that it traced
to this clamping, after more than ten thousand steps at width 512. At this size a null is expected, and would say little:
the claim is judged as it was reported, and the share of clamped gains is shown beside it.

Amplifier, declared: in the arms "0.97" all gains start at 0.97, where all of them clamp.
"""

import dataclasses

import jax
import numpy as np

from repro.claims import Arm, AtLeast, Cell, Claim, Control, Experiment, Greater, Run, swapped
from repro.errors import ReproError
from repro.quant import FORMATS
from repro.report import Curve, Effects
from repro.train import JobResult, Program, TrainConfig, TrainState
from repro.train.preset import Sweep

MX = "attention=mxfp8,ffn=mxfp8"
ARMS = (
    Arm("plain", "float32", {}),
    Arm("mx", "MXFP8, gains exact", {"model.precision": MX}),
    Arm("mx_gains", "MXFP8, gains too", {"model.precision": f"{MX},norm=mxfp8"}),
    Arm("mx_from", "MXFP8, gains exact, from 0.97", {"model.precision": MX, "first_gain": 0.97}),
    Arm("mx_gains_from", "MXFP8, gains too, from 0.97", {"model.precision": f"{MX},norm=mxfp8", "first_gain": 0.97}),
)
SU = "Su et al. (arXiv 2506.20752)"


@dataclasses.dataclass(frozen=True)
class GainsConfig(TrainConfig):
    """The decoder with gains that may start elsewhere than at 1."""

    first_gain: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.first_gain > 0:
            raise ReproError(f"train.first_gain is {self.first_gain}; it must be positive.")

    @classmethod
    def program_class(cls) -> type[Program]:
        return GainsProgram

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        return {"N7": {"gains": f"start at {self.first_gain:g}"}}


def gains_of(params) -> list:
    """All gains of the norms around the blocks and before the head."""
    return [
        params["blocks"]["attention_norm"]["gain"],
        params["blocks"]["ffn_norm"]["gain"],
        params["final_norm"]["gain"],
    ]


def clamped_share(gains: np.ndarray, block: int = 32) -> float:
    """The share of gains [..., D] above the largest MXFP8 value of their block, 448 times 2^(floor(log2 amax) - 8)."""
    blocks = np.abs(np.asarray(gains, np.float64)).reshape(-1, block)
    exponent = np.frexp(blocks.max(1, keepdims=True))[1] - 1
    largest = FORMATS["e4m3"].max * 2.0 ** (exponent - FORMATS["e4m3"].max_exponent)
    return float((blocks > largest).mean())


class GainsProgram(Program):
    """The engine's program with other first gains, and the share of gains that clamp at the end."""

    def init(self, seed: jax.Array) -> TrainState:
        state = super().init(seed)
        first = self.config.first_gain
        scaled = lambda path, w: w * first if path[-1].key == "gain" else w
        return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(scaled, state.params))

    @staticmethod
    def scalars(result: JobResult, configs: list[TrainConfig]) -> list[dict[str, float]]:
        rows = Program.scalars(result, configs)
        for lane, row in enumerate(rows):
            gains = np.concatenate([np.asarray(g[lane]).ravel() for g in gains_of(result.params)])
            row |= {"clamped_share": clamped_share(gains), "mean_gain": float(gains.mean())}
        return rows


def claims(preset: "GainsPreset") -> tuple[Claim, ...]:
    about = (
        f"Size {preset.sizes[0]}, AdamW with decay 0.1, {preset.train.steps} steps on bytes, one rate, gains of RMSNorm. "
        "The report: width 512 and more, over ten thousand steps, LayerNorm."
    )
    costs = lambda arm, against: Greater("loss", arm, against, log=False, smallest=0.01)
    claim = lambda variant, statement, rule, control: Claim(
        id="FP-6", variant=variant, family=SU, tier="D", source=SU, statement=statement,
        reported="Instabilities in MX training, traced to gains that clamp to one value.", boundary=about,
        criterion=rule, control=control,
    )  # fmt: skip
    rules = {"": costs("mx_gains", "mx"), "_from": costs("mx_gains_from", "mx_from")}
    found = (
        claim(
            "training: gains clamp", "After training at least a tenth of the gains lie above the largest number of their "
            "MXFP8 block.", AtLeast("clamped_share", "mx_gains", 0.1),
            Control("gains at initialisation", AtLeast("clamped_share", "start", 0.1)),
        ),
        claim(
            "training: clamping costs loss", "Gains in MXFP8 cost at least 0.01 nats against exact gains in an MXFP8 model.",
            rules[""], Control("arms exchanged", swapped(rules[""])),
        ),
        claim(
            "training: clamping costs loss, from 0.97", "The same where all gains start at 0.97 and clamp (amplified).",
            rules["_from"], Control("arms exchanged", swapped(rules["_from"])),
        ),
    )  # fmt: skip
    # A quick look leaves out the amplified arms.
    return found if preset.evidence else found[:2]


@dataclasses.dataclass(frozen=True)
class GainsPreset(Sweep):
    """The sweep of this experiment: one size, one rate."""

    train: GainsConfig = GainsConfig(
        optimizer="adamw", learning_rate=0.01, weight_decay=0.1, steps=600, eval_windows=256
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) != 1:
            raise ReproError(f"sizes is {self.sizes}; this experiment takes one size.")


def plan(preset: GainsPreset):
    rate = preset.train.learning_rate
    # float32 is there to be seen beside the others; no claim reads it.
    arms = [arm for arm in ARMS if preset.evidence or arm.name in ("mx", "mx_gains")]
    yield [Cell(arm.name, preset.sizes[0], rate, "fixed", "test", preset.test_seeds) for arm in arms]


def derive(runs):
    """The share of gains that clamp before the first step: gains of 1 do not."""
    for run in runs.select("mx_gains"):
        yield Run("start", run.seed, {"clamped_share": clamped_share(np.ones(32))})


FIGURES = (
    Curve(
        "loss", "loss", "Training loss with exact and with quantised gains", "loss (nats per byte)", smooth=20, start=60
    ),
    Effects("effects", "Effects of all claims"),
)

_CPU = GainsPreset()
PRESETS = {
    "smoke": _CPU.quick_look(),
    "cpu": _CPU,
}

EXPERIMENT = Experiment(
    name="norm-gains",
    title="Norm gains in MXFP8 during training",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    derive=derive,
    check_arms=("start",),
    figures=FIGURES,
    words={
        "clamped_share": "share of gains above the largest MXFP8 value of their block",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
