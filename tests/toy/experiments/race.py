"""The smallest experiment that tunes, tests and judges: AdamW at two decays."""

from repro.claims import Arm, Cell, Claim, Control, Exact, Experiment, Greater, Run, best_rate, swapped
from repro.models import ModelConfig
from repro.report import Curve, Effects
from repro.train import TrainConfig
from repro.train.preset import Preset

RULE = Greater("loss", "decayed@best/custom", "plain@best/custom", log=False)
CLAIMS = (
    Claim("K2-1", "made up", "Decay costs loss.", "", "", "D", RULE, Control("arms exchanged", swapped(RULE))),
    Claim("K2-2", "made up", "Nothing is wrong.", "", "", "M", Exact("error", "check", 0.0),
          Control("a wrong one", Exact("error", "wrong", 0.0))),
)  # fmt: skip


def plan(preset):
    runs = yield [
        Cell("plain", "custom", rate, "tuning", "tuning", preset.tuning_seeds) for rate in preset.tuning_rates
    ]
    rate = best_rate(runs, "plain", "custom")
    yield [Cell(arm, "custom", rate, "best", "test", preset.test_seeds) for arm in ("plain", "decayed")]


SMOKE = Preset(
    train=TrainConfig(
        model=ModelConfig(layers=1, width=16, heads=2, ffn=16), length=8, batch_size=2, steps=30, eval_windows=8
    ),
    sizes=("custom",), tuning_rates=(0.01, 0.02), tuning_seeds=(100,), test_seeds=(0, 1, 2), lanes_per_device=2,
    evidence=False,
)  # fmt: skip

EXPERIMENT = Experiment(
    name="race",
    title="A race",
    claims=CLAIMS,
    arms=(
        Arm("plain", "AdamW", {"optimizer": "adamw"}),
        Arm("decayed", "AdamW + decay 9", {"optimizer": "adamw", "weight_decay": 9.0}),
    ),
    presets={"smoke": SMOKE},
    plan=plan,
    checks=lambda preset: [Run("check", 0, {"error": 0.0}), Run("wrong", 0, {"error": 1.0})],
    check_arms=("check", "wrong"),
    figures=(Curve("loss", "loss", "Training loss", "loss", point="best"), Effects("effects", "Effects")),
)
