"""Does whole-matrix Muon starve small heads, does Per-Head Muon help, and where?

Written before the first run. The orthogonal factor of a D x (H K) matrix has orthonormal columns whenever H K <= D: then
every head gets an update of the same size whatever its gradient, and there is nothing for Per-Head Muon to mend. Where
H K > D the heads share D directions, and a head with a large gradient can take most of them. So there are two shapes here,
square (H K = D) and wide (H K = 4 D), each with natural heads and with one head whose query, key and value gradients are
multiplied by 100. That is an amplifier, declared in its claims; the natural heads are the plain setting beside it.

Both arms orthogonalise with the ten-step schedule and a factor of 0.18: with five steps, small singular values stay small,
which starves heads in a square matrix too, and would be taken for the claim. In the wide shape the two arms give a head's
update another spectral norm at one rate, so each arm has its own best rate, searched for on natural heads.

Measured: the root mean square of the update of each head of the query projections, largest over smallest head, geometric
mean over steps and layers ("spread"); validation loss; largest attention logit. No single-component number is published.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from repro.claims import Arm, Cell, Claim, Control, Experiment, Greater, NonInferior, swapped
from repro.errors import ReproError
from repro.report import Curve, Effects, Ladder
from repro.train import JobResult, Program, TrainConfig, TrainState
from repro.train.optimizer import OptimizerConfig
from repro.train.preset import Preset, tuned

K3 = "Kimi K3 report"
BOOST = 100.0
_WIDE = {"model.head_dim": 64}
_KINDS = {"whole": {}, "heads": {"optim.per_head": True}}
_LABELS = {"whole": "whole matrix", "heads": "per head"}
ARMS = tuple(
    Arm(
        f"{kind}_{shape}{loud}",
        f"{_LABELS[kind]}, {shape}{', one loud head' if loud else ''}",
        settings | (_WIDE if shape == "wide" else {}) | ({"boost": BOOST} if loud else {}),
    )
    for shape in ("wide", "square")
    for loud in ("", "_loud")
    for kind, settings in _KINDS.items()
) + (Arm("heads_square_harm", "per head, square, at three times the best rate", _KINDS["heads"]),)


@dataclasses.dataclass(frozen=True)
class HeadsConfig(TrainConfig):
    """The decoder with a first head whose gradients are larger than they are."""

    numeric = (*TrainConfig.numeric, "boost")
    boost: float = 1.0
    """What the gradients of the query, key and value projections of head 0 are multiplied by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.boost > 0:
            raise ReproError(f"train.boost is {self.boost}; it must be positive.")

    @classmethod
    def program_class(cls) -> type[Program]:
        return HeadsProgram

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        return {"N6": {"head 0": f"gradients of its projections times {self.boost:g}"}}


class HeadsProgram(Program):
    """The engine's program with a loud first head, which also measures the update of every head."""

    def gradients(self, grads, numbers):
        attention = grads["blocks"]["attention"]

        def loud(g_LDHK):
            return g_LDHK.at[:, :, 0].multiply(numbers.boost)

        changed = {name: loud(attention[name]) for name in ("q_DHK", "k_DHK", "v_DHV")}
        return grads | {"blocks": grads["blocks"] | {"attention": attention | changed}}

    def step(self, state: TrainState, window_BT1, numbers):
        after, metrics = super().step(state, window_BT1, numbers)
        old, new = (s.params["blocks"]["attention"]["q_DHK"] for s in (state, after))
        rms_LH = jnp.sqrt(jnp.mean((new - old) ** 2, (1, 3)))
        metrics["head_spread"] = jnp.exp(jnp.mean(jnp.log(rms_LH.max(1) / jnp.maximum(rms_LH.min(1), 1e-30))))
        return after, metrics

    @staticmethod
    def scalars(result: JobResult, configs) -> list[dict[str, float]]:
        rows = Program.scalars(result, configs)
        for lane, row in enumerate(rows):
            row["head_spread"] = float(np.exp(np.log(result.curves["head_spread"][:, lane].astype(np.float64)).mean()))
        return rows


def _claims_at(preset: "HeadsPreset", size: str) -> list[Claim]:
    at = lambda arm: f"{arm}@best/{size}"
    spread = lambda case, smallest: Greater("head_spread", at(f"whole_{case}"), at(f"heads_{case}"), smallest=smallest)
    costs = lambda case, smallest: Greater(
        "loss", at(f"whole_{case}"), at(f"heads_{case}"), log=False, smallest=smallest
    )
    loud = f"the gradients of one head times {BOOST:g} (the amplifier)"

    def claim(variant, statement, rule, control=None, about="natural heads"):
        return Claim(
            id="K3-1", variant=f"{variant}, {size}", family=K3, tier="D", source=f"{K3}, section 2.5",
            statement=statement, reported="Balanced heads and better stability at scale; no single-component number.",
            boundary=f"Size {size}, {preset.train.steps} steps on bytes, {about}, ten-step schedule, each arm at its own best "
            "rate for natural heads.",
            criterion=rule, control=control or Control("arms exchanged", swapped(rule)),
        )  # fmt: skip

    harmless = NonInferior("loss", at("heads_square"), at("whole_square"), margin=0.02)
    found = [
        claim(
            "wide, natural: spread", "Where H K = 4 D, the updates of natural heads differ at least 1.1 times more in size "
            "under whole-matrix Muon than under Per-Head Muon.", spread("wide", 1.1),
        ),
        claim(
            "wide, natural: loss", "There Per-Head Muon gains at least 0.01 nats of validation loss.", costs("wide", 0.01),
        ),
        claim(
            "wide, one loud head: spread", "Where H K = 4 D and one head is loud, the updates differ at least 3 times more "
            "in size under whole-matrix Muon.", spread("wide_loud", 3.0), about=loud,
        ),
        claim(
            "wide, one loud head: loss", "There Per-Head Muon gains at least 0.02 nats of validation loss.",
            costs("wide_loud", 0.02), about=loud,
        ),
        claim(
            "square, one loud head: spread", "Where H K = D and one head is loud, the updates differ at least 1.1 times more "
            "in size under whole-matrix Muon.", spread("square_loud", 1.1), about=loud,
        ),
        claim(
            "square, natural: no harm", "Where H K = D, Per-Head Muon costs less than 0.02 nats of validation loss.",
            harmless, Control("Per-Head Muon at three times its best rate",
                              NonInferior("loss", at("heads_square_harm"), at("whole_square"), margin=0.02)),
        ),
    ]  # fmt: skip
    return found if preset.square else found[:4]


@dataclasses.dataclass(frozen=True)
class HeadsPreset(Preset):
    """The sweep of this experiment."""

    square: bool = True
    """Whether there are arms with H K = D beside those with H K = 4 D."""


def claims(preset: HeadsPreset) -> tuple[Claim, ...]:
    return tuple(claim for size in preset.sizes for claim in _claims_at(preset, size))


def plan(preset: HeadsPreset):
    arms = [arm.name for arm in ARMS if preset.square or "wide" in arm.name]
    natural = [arm for arm in arms if not arm.endswith(("_loud", "_harm"))]
    runs, best = yield from tuned(preset, [(arm, size) for size in preset.sizes for arm in natural])
    rate = lambda arm, size: (3 if arm.endswith("_harm") else 1) * best["_".join(arm.split("_")[:2]), size]
    yield [
        Cell(arm, size, rate(arm, size), "best", "test", preset.test_seeds) for size in preset.sizes for arm in arms
    ]  # fmt: skip


_WIDE_ARMS = ("whole_wide", "heads_wide", "whole_wide_loud", "heads_wide_loud")
FIGURES = (
    Curve("spread", "head_spread", "Largest over smallest update of a head, H K = 4 D",
          "largest over smallest RMS of a head", arms=_WIDE_ARMS, point="best", log=True, smooth=10),
    Curve("spread_square", "head_spread", "Largest over smallest update of a head, H K = D",
          "largest over smallest RMS of a head",
          arms=("whole_square", "heads_square", "whole_square_loud", "heads_square_loud"), point="best", log=True,
          smooth=10),
    Curve("loss", "loss", "Training loss, H K = 4 D", "loss (nats per byte)", arms=_WIDE_ARMS, point="best", smooth=20,
          start=60),
    Curve("max_logit", "max_logit", "Largest attention logit, H K = 4 D", "max logit", arms=_WIDE_ARMS, point="best",
          log=True),
    Ladder("rates", "loss", "Validation loss against the rate, natural heads", "loss (nats per byte)",
           arms=("whole_wide", "heads_wide", "whole_square", "heads_square"), log=False),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_TRAIN = HeadsConfig(steps=300, eval_windows=256, optim=OptimizerConfig(schedule="hybrid10", rms=0.18))
_CPU = HeadsPreset(train=_TRAIN, sizes=("w32", "xs"), rates=(0.01,))
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), square=False, tuning_rates=(0.01, 0.02), tuning_limit=2, tuning_seeds=(1000,)
    ),
    "cpu": _CPU,
}

EXPERIMENT = Experiment(
    name="per-head-muon",
    title="Whole-matrix and Per-Head Muon, with natural and with loud heads",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
