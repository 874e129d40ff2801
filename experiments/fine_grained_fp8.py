"""Does FP8 with fine-grained scales train like BF16, and does E4M3 do for gradients what E5M2 does?

Written before the first run: the claims, their rules and controls, and the arms.

All arms are the same decoder under AdamW, at one rate, with the same seeds and batches; they differ in the formats of the
linear layers inside the blocks. Embedding, head, norms, softmax and the optimizer are float32 in every arm. FP8 arms
emulate DeepSeek-V3's recipe: E4M3, 1x128 tiles for activations and gradients, 128x128 blocks for weights, float32 scales,
each operand quantised along the axis that its product sums over.

The bound is DeepSeek's: 0.25 % of the loss, either way. MXFP4 for all operands is the arm that must not pass.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import Arm, Cell, Claim, Control, Equivalent, Experiment, NonInferior, Run, Within
from repro.errors import ReproError
from repro.quant import POLICIES, fake_quantize
from repro.report import Curve, Dose, Effects
from repro.train import TrainConfig
from repro.train.preset import Sweep

V3 = "DeepSeek-V3 (arXiv 2412.19437)"


def _blocks(policy: str) -> str:
    return f"attention={policy},ffn={policy}"


ARMS = (
    Arm("bf16", "BF16", {"model.precision": _blocks("bf16")}),
    Arm("v3", "FP8, E4M3 tiles", {"model.precision": _blocks("v3_fp8")}),
    Arm("v3_e5m2", "FP8, E5M2 for gradients", {"model.precision": _blocks("v3_fp8_e5m2_grads")}),
    Arm("tensor", "FP8, E4M3, one scale per tensor", {"model.precision": _blocks("fp8_tensor")}),
    Arm("mxfp4", "MXFP4", {"model.precision": _blocks("mxfp4")}),
)
MARGIN = 0.0025
# 0.25 % of about 2 nats, the loss per byte of these models.
MARGIN_NATS = 0.005


def _at_size(size: str, steps: int) -> tuple[Claim, ...]:
    about = (
        f"A dense decoder of size {size}, {steps} steps on bytes, one rate, emulated in float32. The paper: mixtures of "
        "experts of 16B and 230B parameters, about a trillion tokens, training loss smoothed."
    )
    equal = lambda arm: Equivalent("loss", f"{arm}/{size}", f"bf16/{size}", margin=MARGIN, relative=True)
    no_worse = lambda arm: NonInferior("loss", f"{arm}/{size}", f"v3_e5m2/{size}", margin=MARGIN_NATS)
    return (
        Claim(
            id="V3-1", variant=f"FP8 against BF16, {size}", family=V3, tier="D", source=f"{V3}, appendix B.1",
            statement="The final validation loss under fine-grained FP8 is within 0.25 % of that under BF16.",
            reported="Below 0.25 % relative, at two sizes; no seeds.", boundary=about, criterion=equal("v3"),
            control=Control("MXFP4 in place of FP8", equal("mxfp4")),
        ),
        Claim(
            id="V3-6", variant=f"gradients in E4M3, {size}", family=V3, tier="D", source=f"{V3}, section 3.3.2",
            statement="With fine-grained scales, E4M3 gradients cost less than 0.005 nats against E5M2 gradients.",
            reported="E4M3 for all tensors; one public report finds the opposite.", boundary=about, criterion=no_worse("v3"),
            control=Control("MXFP4 in place of FP8", no_worse("mxfp4")),
        ),
    )  # fmt: skip


SPREADS = tuple(range(0, 25, 2))


def _mechanism_rule(arm: str):
    return Within("ratio", arm, 0.0, 0.6)


MECHANISM = Claim(
    id="V3-6", variant="mechanism", family=V3, tier="M", source=f"{V3}, section 3.3.2",
    statement="With one scale per 1x128 tile the relative error of E4M3 is at most 0.6 of that of E5M2, whatever the spread "
    "of magnitudes between tokens, up to 24 octaves.",
    reported="E4M3 for all tensors, its smaller range made up for by scales per tile.",
    boundary="Gaussian tokens of 128 channels, magnitudes spread evenly in their logarithm; error of each token relative "
    "to its own size, root mean square over tokens.",
    criterion=_mechanism_rule("worst_tile"),
    control=Control("one scale per tensor", _mechanism_rule("worst_tensor")),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PrecisionPreset(Sweep):
    """The sweep of this experiment; its mechanism needs no settings."""

    train: TrainConfig = TrainConfig(
        optimizer="adamw", learning_rate=0.01, weight_decay=0.1, steps=1000, eval_windows=256
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.model.precision != "plain":
            raise ReproError("train.model.precision is set by the arms in this experiment.")


def claims(preset: PrecisionPreset) -> tuple[Claim, ...]:
    found = [MECHANISM] if len(preset.sizes) == 1 else []
    for size in preset.sizes:
        # The size for a look trains one arm less, since all that takes long there is compiling them.
        found += _at_size(size, preset.train.steps)[: 1 if size == "tiny" else None]
    return tuple(found)


def plan(preset: PrecisionPreset):
    rate = preset.train.learning_rate
    # One scale per tensor is there to be seen beside the others; no claim reads it.
    arms = [arm for arm in ARMS if preset.evidence or arm.name != "tensor"]
    yield [
        Cell(arm.name, size, rate, "fixed", "test", preset.test_seeds)
        for size in preset.sizes for arm in arms if (arm.name, size) != ("v3_e5m2", "tiny")
    ]  # fmt: skip


def relative_error(octaves: float, element: str, kind: str) -> jax.Array:
    """Root mean square over 256 tokens of each token's relative error, their magnitudes spread over so many octaves."""
    x_TN = jax.random.normal(jax.random.key(0), (256, 128)) * jnp.exp2(jnp.linspace(0.0, -octaves, 256))[:, None]
    policy = POLICIES[f"dgrad_{element}_tile"] if kind == "tile" else POLICIES["fp8_tensor"]
    recipe = dataclasses.replace(policy.dgrad_dy, element=element)
    error_T = ((fake_quantize(x_TN, recipe) - x_TN) ** 2).sum(1) / (x_TN**2).sum(1)
    return jnp.sqrt(error_T.mean())


def checks(preset: PrecisionPreset):
    if len(preset.sizes) > 1:
        return
    errors = jax.jit(jax.vmap(relative_error, (0, None, None)), static_argnums=(1, 2))
    spreads = jnp.asarray(SPREADS, jnp.float32)
    for kind in ("tile", "tensor"):
        found = {e: np.asarray(errors(spreads, e, kind), np.float64) for e in ("e4m3", "e5m2")}
        for element, values in found.items():
            for octaves, value in zip(SPREADS, values, strict=True):
                yield Run(f"{element}_{kind}", 0, {"error": value}, point=f"{octaves} octaves")
        yield Run(f"worst_{kind}", 0, {"ratio": float((found["e4m3"] / found["e5m2"]).max())})


_ERRORS = tuple(f"{e}_{kind}" for e in ("e4m3", "e5m2") for kind in ("tile", "tensor"))
FIGURES = (
    Curve("loss", "loss", "Training loss by format", "loss (nats per byte)", smooth=20, start=100),
    Dose("spread", "error", "E4M3 and E5M2 against the spread of tokens", "octaves between loudest and quietest token",
         "relative error of a token", arms=_ERRORS, points=tuple((f"{k} octaves", float(k)) for k in SPREADS),
         log_x=False, log_y=True),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_CPU = PrecisionPreset()
PRESETS = {
    "smoke": _CPU.quick_look(),
    "cpu": _CPU,
    "cpu-sizes": dataclasses.replace(_CPU, sizes=("w32", "w128")),
}

EXPERIMENT = Experiment(
    name="fine-grained-fp8",
    title="Fine-grained FP8 against BF16, and the format of gradients",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    check_arms=(
        "worst_tile", "worst_tensor",
        *(Arm(f"{e}_{kind}", f"{e.upper()}, one scale per {kind}") for e in ("e4m3", "e5m2") for kind in ("tile", "tensor")),
    ),
    figures=FIGURES,
)  # fmt: skip

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
