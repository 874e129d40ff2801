"""Do 128x128 blocks for Dgrad fail in a model with latent attention and routed experts, where nothing is amplified?

Written before the first run. The sibling `block-dgrad` finds that blocks fail once gradients inside a group of 128 tokens
differ by more than the format's range, and puts that difference there by hand. Here it may come by itself, on three
routes that a large model has and a plain decoder lacks:

- experts: DeepSeek-V3's kinds of layers, multi-head latent attention and 8 routed experts beside a shared one. What
  reaches an expert is sorted by expert, so a group is of tokens that chose alike, each scaled by its gate.
- small gates: the same with gates that are softmax probabilities of 4 of 8 experts, not normalised, so that the last
  choices of a sharp router have gates, and gradients into the expert, far below those of the first.
- masked: the loss is on the last quarter of each window alone, as in training on answers; the tokens of the prompt get
  their gradients through attention.

Only dY in dX = Q(dY) W^T is quantised, in attention's projections, feed-forward blocks and experts; so arms differ in
nothing but the scale that a token's gradient shares. One fixed rate, the same seeds and batches: the estimand is the
effect of Q alone. E2M1 stands for E4M3 at a larger model's imbalance, a scaled analogue.
"""

import dataclasses

from repro.claims import Arm, Cell, Claim, Control, Experiment, Greater, swapped
from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig
from repro.report import Curve, Effects
from repro.train import Program, TrainConfig
from repro.train.preset import Sweep
from repro.train.step import cross_entropy

V3 = "DeepSeek-V3 (arXiv 2412.19437)"
ROUTES = {
    "experts": {},
    "small_gates": {"model.moe.affinity": "softmax", "model.moe.normalise": False, "model.moe.active": 4},
    "masked": {"masked": 0.75},
}
_WORDS = {"experts": "latent attention and experts", "small_gates": "small gates", "masked": "masked prompts"}
SMALLEST = 0.01  # nats


def _policy(name: str) -> str:
    return ",".join(f"{role}={name}" for role in ("attention", "ffn", "experts"))


ARMS = (
    Arm("exact", "exact", {"model.precision": _policy("fp32")}),
    *(
        Arm(f"{element}_{kind}", f"{element.upper()} {kind}", {"model.precision": _policy(f"dgrad_{element}_{kind}")})
        for element in ("e4m3", "e2m1") for kind in ("tile", "block")
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RoutesConfig(TrainConfig):
    """A run whose loss may leave out the beginning of each window."""

    masked: float = 0.0
    """Share of a window, from its beginning, that the loss leaves out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.masked < 1:
            raise ReproError(f"train.masked is {self.masked}; it must be at least 0 and below 1.")

    @classmethod
    def program_class(cls) -> type[Program]:
        return RoutesProgram

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        return {"N6": {"loss": f"on the last {1 - self.masked:.0%} of each window" if self.masked else "on all tokens"}}


class RoutesProgram(Program):
    """The loss over the part of each window that is not masked."""

    def loss(self, params, window_BT1, z_loss, key=None, **options):
        output = self.apply(params, window_BT1[:, :-1], key=key, **options)
        first = int(self.config.masked * (window_BT1.shape[1] - 1))
        ce, log_z_squared = cross_entropy(output.logits[:, first:], window_BT1[:, 1 + first :])
        return ce + z_loss * log_z_squared + output.aux_loss, (ce, log_z_squared, output)


def claims(preset: "RoutesPreset") -> tuple[Claim, ...]:
    model, train = preset.train.model, preset.train
    about = (
        f"{model.layers} layers of width {model.width}, {train.batch_size * train.length} tokens of text per step, "
        f"{train.steps} steps, one rate. The paper: about 16B parameters, around 300B tokens."
    )
    found = []
    for route in preset.routes:
        for element in preset.elements:
            rule = Greater("loss", f"{element}_block@{route}", f"{element}_tile@{route}", log=False, smallest=SMALLEST)
            analogue = " A scaled analogue of E4M3 at a larger model's imbalance." if element == "e2m1" else ""
            found.append(
                Claim(
                    id="V3-2", variant=f"{_WORDS[route]}, {element.upper()}", family=V3, tier="D",
                    source=f"{V3}, appendix B.2",
                    statement=f"With {_WORDS[route]} and nothing amplified, {element.upper()} blocks cost at least "
                    f"{SMALLEST:g} nats more than tiles.",
                    reported="Diverges with 128x128 blocks for all tensors of Dgrad, where 1x128 tiles train.",
                    boundary=about + analogue, criterion=rule, control=Control("arms exchanged", swapped(rule)),
                )
            )  # fmt: skip
    return tuple(found)


_MODEL = ModelConfig(
    vocab_size=256, layers=3, width=64, heads=4, ffn=128, attention="mla", q_rank=32, kv_rank=16, nope_size=16, rope_size=8,
    value_size=16, moe=MoEConfig(experts=8, active=2, ffn=32, shared=1, dense_layers=1, balance="sign", balance_rate=0.01),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RoutesPreset(Sweep):
    """The sweep of this experiment."""

    train: RoutesConfig = RoutesConfig(
        model=_MODEL, optimizer="adamw", learning_rate=3e-3, weight_decay=0.1, steps=500, length=64, batch_size=4,
        eval_windows=256,
    )  # fmt: skip
    sizes: tuple[str, ...] = ("custom",)
    routes: tuple[str, ...] = tuple(ROUTES)
    """Which of the routes."""
    elements: tuple[str, ...] = ("e4m3", "e2m1")
    """Formats of dY. With one alone nothing is trained exactly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.routes or set(self.routes) - set(ROUTES):
            raise ReproError(f"routes is {self.routes}; known are {', '.join(ROUTES)}.")
        if not self.elements or set(self.elements) - {"e4m3", "e2m1"}:
            raise ReproError(f"elements is {self.elements}; known are e4m3, e2m1.")
        if self.sizes != ("custom",):
            raise ReproError(f"sizes is {self.sizes}; this experiment takes the shape that `train` gives: custom.")


def plan(preset: RoutesPreset):
    yield [
        Cell(arm.name, "custom", preset.train.learning_rate, route, "test", preset.test_seeds, ROUTES[route])
        for route in preset.routes
        for arm in ARMS
        if (arm.name == "exact" and len(preset.elements) > 1) or arm.name.startswith(preset.elements)
    ]


FIGURES = (
    *(
        Curve(route, "loss", f"Training loss with {words}", "loss (nats per byte)", point=route, smooth=20, start=50)
        for route, words in _WORDS.items()
    ),
    Effects("effects", "Effects of all claims"),
)
PRESETS = {
    "smoke": RoutesPreset(
        train=RoutesConfig(
            model=dataclasses.replace(
                _MODEL, layers=1, width=16, heads=2, ffn=16, q_rank=0, kv_rank=8, nope_size=4, rope_size=4, value_size=4,
                moe=MoEConfig(experts=4, active=2, ffn=8),
            ),
            steps=3, length=16, batch_size=8, eval_windows=4, optimizer="adamw", learning_rate=3e-3, masked=0.75,
        ),
        routes=("masked",), elements=("e4m3",), test_seeds=(0, 1), evidence=False,
    ),
    "cpu": RoutesPreset(),
}  # fmt: skip

EXPERIMENT = Experiment(
    name="dgrad-routes",
    title="Block-wise Dgrad with latent attention, experts, small gates and masked prompts",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
