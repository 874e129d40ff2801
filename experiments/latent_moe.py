"""Does RMSNorm on the summed latent keep LatentMoE stable and free of scale, and what of the tensors inside the branch?

Written before the first run on these seeds (pilots with another code base had suggested the arms and the size of
effects). Routed experts work in a latent space: z = W_down x, u = sum of gate * expert(z), y = W_up norm(u). Kimi K3
puts the norm there since "routed activations" exploded at its size.

*Exactly.* With the norm the branch does not depend on the size of the gates (or of the experts' outputs), as long as
the latent is large against the norm's epsilon.

*In training.* Everything before such a norm is free of scale, so nothing holds it back: the norm may bound what enters
the residual stream and let grow what is inside. So three tensors are asked, the branch's output y, the sum u and the
largest hidden unit of an expert, each by its growth: the geometric mean over the last tenth of the steps (worst layer)
over that of the first ten steps. The hidden units are what K3 multiplies in MXFP8. Claims are in the direction of the
report, that the norm stabilises; a contradicted one says that it does the opposite.

AdamW at a shared rate above the best one, without decay and with 0.1; the experts are SwiGLU, so that no bounded unit
hides the effect of the norm, and balanced by quantiles. The loss is compared at best rates, without decay.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from repro.claims import (
    All,
    Arm,
    Cell,
    Claim,
    Control,
    Experiment,
    Greater,
    NonInferior,
    Run,
    Within,
    swapped,
)
from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig
from repro.models.moe import LatentMoE
from repro.report import Curve, Effects, Ladder
from repro.train import TrainConfig
from repro.train.preset import Preset, tuned

K3 = "Kimi K3 report"
GROWS, MARGIN = 1.5, 0.02
"""Ratio of growths that counts; nats of loss."""
_PLAIN, _DECAY = {"model.moe.latent_norm": False}, {"weight_decay": 0.1}
ARMS = (
    Arm("plain", "no norm", _PLAIN),
    Arm("norm", "norm"),
    Arm("plain_decay", "no norm, decay 0.1", _PLAIN | _DECAY),
    Arm("norm_decay", "norm, decay 0.1", _DECAY),
)
TENSORS = {
    "routed": ("routed_rms", "branch output"),
    "sum": ("sum_rms", "summed latent"),
    "hidden": ("expert_hidden_max", "expert hidden units"),
}
"""Name of a growth -> the scalar it is of, and the tensor in words."""


@dataclasses.dataclass(frozen=True)
class LatentPreset(Preset):
    """The sweep of this experiment, at one size."""

    shared_rate: float = 0.01
    """Where growth is compared."""
    high_rate: float = 0.03
    """Shown beside it; no claim reads it."""
    complete: bool = True
    """Whether rates are searched for and decay is run, or only growth without decay is compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) != 1:
            raise ReproError(f"sizes is {self.sizes}; this experiment takes one size.")
        if not 0 < self.shared_rate < self.high_rate:
            raise ReproError("shared_rate must be positive and below high_rate.")


def _exact() -> Claim:
    free = lambda arm: All((Within("changed", arm, 0.0, 1e-4), Within("latent_rms", arm, 1.0, np.inf)))
    return Claim(
        id="K3-3", variant="free of scale", tier="M", source=f"{K3}, eq. 11",
        statement="Gates ten times larger change the routed output by at most 1e-4 of its size, at a latent of RMS 1 "
        "or more.",
        reported="The norm makes the routed branch free of scale (follows from the equation).",
        boundary="One layer in float32 with random weights, eight experts. Says nothing of training.",
        criterion=free("with_norm"), control=Control("no norm", free("without_norm")),
    )  # fmt: skip


def _growth(preset: LatentPreset, decay: str) -> list[Claim]:
    train = preset.train
    words = "decay 0.1" if decay else "no decay"
    found = []
    for name, (_, tensor) in TENSORS.items():
        rule = Greater(f"{name}_growth", f"plain{decay}@shared", f"norm{decay}@shared", smallest=GROWS)
        found.append(
            Claim(
                id="K3-3",
                variant=f"{tensor}, {words}",
                family=K3,
                tier="D",
                source=f"{K3}, eq. 11",
                statement=f"Without the norm the {tensor} grow{'' if name == 'hidden' else 's'} more, by a factor of "
                f"at least {GROWS:g} over training.",
                reported="The norm stabilises the branch."
                if name == "routed"
                else "Routed activations exploded without it.",
                boundary=f"{train.model.layers} layers of width {train.model.width}, latent {train.model.moe.latent}, "
                f"AdamW at {preset.shared_rate:g}, {train.steps} steps, {words}, SwiGLU. The report: 2.8 trillion "
                "parameters, Muon, SiTU units, which are bounded.",
                criterion=rule,
                control=Control("arms exchanged", swapped(rule)),
            )  # fmt: skip
        )
    return found


def _losses(preset: LatentPreset) -> list[Claim]:
    harmless = lambda at: NonInferior("loss", at, "plain@best", margin=MARGIN)
    lower = Greater("loss", "plain@best", "norm@best", log=False, smallest=0.01)
    boundary = (
        f"{preset.train.model.layers} layers of width {preset.train.model.width}, {preset.train.steps} steps, no "
        "decay, each at its own best rate in factors of two."
    )
    shared = dict(id="K3-3", family=K3, tier="D", source=f"{K3}, section on LatentMoE", boundary=boundary)
    return [
        Claim(
            variant="no harm", **shared, statement=f"The norm costs less than {MARGIN:g} nats of validation loss.",
            reported="Validation loss improves consistently; no number.", criterion=harmless("norm@best"),
            control=Control("the norm at eight times its best rate", harmless("norm@harm")),
        ),
        Claim(
            variant="lower loss", **shared, statement="The norm lowers the validation loss by at least 0.01 nats.",
            reported="Validation loss improves consistently; no number.", criterion=lower,
            control=Control("arms exchanged", swapped(lower)),
        ),
    ]  # fmt: skip


def claims(preset: LatentPreset) -> tuple[Claim, ...]:
    if not preset.complete:
        return (_exact(), *_growth(preset, ""))
    return (_exact(), *_growth(preset, ""), *_growth(preset, "_decay"), *_losses(preset))


def plan(preset: LatentPreset):
    size = preset.sizes[0]
    cell = lambda arm, rate, point: Cell(arm, size, rate, point, "test", preset.test_seeds)
    if not preset.complete:
        yield [cell(arm, preset.shared_rate, "shared") for arm in ("plain", "norm")]
        return
    _, best = yield from tuned(preset, [(arm, size) for arm in ("plain", "norm")], factor=2.0)
    cells = [cell(arm.name, preset.shared_rate, "shared") for arm in ARMS]
    cells += [cell(arm.name, preset.high_rate, "high") for arm in ARMS]
    cells += [cell(arm, best[arm, size], "best") for arm in ("plain", "norm")]
    yield [*cells, cell("norm", 8 * best["norm", size], "harm")]


def derive(runs):
    """How many times the three tensors grow, by run."""
    for run in runs.select():
        if "early_routed_rms" in run.metrics:
            grown = {
                f"{name}_growth": run.metrics[of] / run.metrics[f"early_{of}"] for name, (of, _) in TENSORS.items()
            }
            yield Run(run.arm, run.seed, grown, point=run.point, size=run.size)


def routed_output(norm: bool, gate_scale: float, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The routed branch of one layer with random weights, the same for all arguments, and the RMS of its latent."""
    moe = MoEConfig(experts=8, active=2, ffn=64, latent=32, latent_norm=norm, scale=gate_scale)
    config = ModelConfig(width=x_BTD.shape[-1], moe=moe)
    with nnx.set_graph_mode(False):
        y_BTD, record = LatentMoE(config, rngs=nnx.Rngs(params=jax.random.key(0)))(x_BTD)
    return y_BTD, record.moe.sum_rms


def checks(preset: LatentPreset) -> list[Run]:
    """Gates ten times larger, with and without the norm. The input is larger than a normed one, so that the latent "
    "is."""

    @jax.jit
    def measured(x_BTD):
        found = {}
        for arm, norm in (("with_norm", True), ("without_norm", False)):
            (y_BTD, rms), (scaled_BTD, _) = (routed_output(norm, scale, x_BTD) for scale in (1.0, 10.0))
            changed = jnp.abs(scaled_BTD - y_BTD).max() / jnp.sqrt(jnp.mean(y_BTD**2))
            found[arm] = {"changed": changed, "latent_rms": rms}
        return found

    x_BTD = 6 * jax.random.normal(jax.random.key(1), (2, 32, 64))
    return [Run(arm, 0, {name: float(v) for name, v in row.items()}) for arm, row in measured(x_BTD).items()]


FIGURES = (
    *(
        Curve(name, of, f"{tensor[0].upper()}{tensor[1:]} at the shared rate", "RMS" if "rms" in of else "maximum",
              point="shared", log=True, smooth=5)
        for name, (of, tensor) in TENSORS.items()
    ),
    Curve("high", "expert_hidden_max", "Expert hidden units at the high rate", "maximum", point="high", log=True,
          smooth=5),
    Curve("loss", "loss", "Training loss at the shared rate", "loss (nats per byte)", point="shared", smooth=10,
          start=30),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)", arms=("plain", "norm"),
           log=False),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_MOE = MoEConfig(experts=8, active=2, ffn=64, shared=1, latent=32, balance="quantile")
_CPU = LatentPreset(
    train=TrainConfig(
        model=ModelConfig(moe=_MOE), length=64, batch_size=8, optimizer="adamw", steps=250, warmup=0.2,
        schedule="constant", eval_windows=128,
    ),
    sizes=("custom",), rates=(0.01,), tuning_rates=(0.0015, 0.003, 0.006), tuning_limit=5,
)  # fmt: skip
PRESETS = {"smoke": dataclasses.replace(_CPU.quick_look(), complete=False), "cpu": _CPU}

EXPERIMENT = Experiment(
    name="latent-moe",
    title="The norm of LatentMoE: what leaves the branch and what is inside",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    derive=derive,
    check_arms=("with_norm", "without_norm"),
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
