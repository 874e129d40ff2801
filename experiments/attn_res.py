"""Does Block AttnRes lower the loss at equal compute, and must its queries start at zero?

Written before the first run on these seeds. With queries of zero a site reads the mean of its sources, which the
sublayer's norm cannot tell from their sum, the plain residual stream: Block AttnRes then starts as a plain pre-norm
model, and an exact check says so. All that it gains it gains by learning queries.

Its attention over depth costs few operations beside the sublayers (the share is printed with the claim), so equal steps
are nearly equal compute. The published size of the gain, 1.25 times the compute, is tested as such: the plain model
trains 1.25 times as long, with its schedule stretched, at the rate that is best for the shorter run.

The third arm starts with random queries, whose scores have deviation 1 at first. Each of the three arms has its own
search for a rate. Muon, as in Kimi K3, no weight decay; queries and gains are with AdamW at the same rate.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import (
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
from repro.models import ModelConfig, init_and_apply
from repro.report import Curve, Effects, Ladder
from repro.train import TrainConfig, with_settings
from repro.train.preset import Preset, tuned

K3 = "Kimi K3 (arXiv 2607.24653)"
LONGER, MARGIN = 1.25, 0.005
"""Published factor of compute; nats within which the longer run is reached."""
_ATTENTION = {"model.residual.kind": "block_attention", "model.residual.block_layers": 2}
ARMS = (
    Arm("plain", "plain residual"),
    Arm("attention", "Block AttnRes", _ATTENTION),
    Arm("random", "Block AttnRes, random queries", _ATTENTION | {"model.residual.query_std": 1.0}),
)
_NAMES = tuple(arm.name for arm in ARMS)


@dataclasses.dataclass(frozen=True)
class AttnResPreset(Preset):
    """The sweep of this experiment."""

    arms: tuple[str, ...] = _NAMES
    """The arms that run; a claim is judged where all that it reads does."""
    longer: bool = True
    """Whether the plain model also trains 1.25 times as long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) != 1:
            raise ReproError(f"sizes is {self.sizes}; this experiment takes one size.")
        unknown = [arm for arm in self.arms if arm not in _NAMES]
        if unknown or not {"plain", "attention"} <= set(self.arms):
            raise ReproError(f"arms is {self.arms}; take plain, attention and perhaps random.")


def added_operations(config: ModelConfig, length: int) -> float:
    """Multiplications per token that Block AttnRes adds, over those of the plain model with attention over half of
    `length` positions on average: per site and source that it sees, D for the score, D for the norm of the key and D
    for the sum."""
    D, L, per_block = config.width, config.layers, 2 * config.residual.block_layers
    seen = sum(1 + p // per_block + (p % per_block > 0) for p in range(2 * L)) + 1 + -(-2 * L // per_block)
    plain = L * (4 * D * D + 3 * D * config.ffn + 2 * D * length / 2) + D * config.vocab_size
    return 3 * D * seen / plain


def claims(preset: AttnResPreset) -> tuple[Claim, ...]:
    size = preset.sizes[0]
    at = lambda arm, point="best": f"{arm}@{point}/{size}"
    config = preset.config(size)
    model = with_settings(config, _ATTENTION).model
    shape = (
        f"{model.layers} layers of width {model.width} in blocks of two, {config.steps} steps on bytes, Muon, no "
        f"decay, each arm at its own best rate. Block AttnRes adds {added_operations(model, config.length):.1%} of the "
        "plain model's multiplications. The paper: 48 billion parameters, blocks of three layers."
    )
    lower = Greater("loss", at("plain"), at("attention"), log=False)
    start = Greater("loss", at("random"), at("attention"), log=False)
    reaches = lambda place: NonInferior("loss", place, at("plain", "longer"), margin=MARGIN)
    zero = lambda arm: Within("from_plain", arm, 0.0, 1e-4)

    def claim(variant, tier, source, statement, reported, boundary, rule, control):
        return Claim(
            id="K3-7", variant=variant, family=K3, tier=tier, source=f"{K3}, {source}", statement=statement,
            reported=reported, boundary=boundary, criterion=rule, control=control,
        )  # fmt: skip

    judged = [
        claim(
            "starts as the plain residual", "M", "eq. 8 to 10",
            "With queries of zero, Block AttnRes has the logits of the plain model of the same weights, to 1e-4.",
            "Not in the report; it follows from a norm that takes the scale out.",
            "Six layers in blocks of two, float32, a norm with an epsilon of 1e-12. Says nothing of training.",
            zero("zero"), Control("random queries", zero("drawn")),
        ),
        claim(
            "loss", "D", "section on Block AttnRes",
            "Block AttnRes has a lower validation loss than a plain residual after equal steps.",
            "A lower loss at equal compute.", shape, lower, Control("arms exchanged", swapped(lower)),
        ),
        claim(
            "1.25 times the compute", "D", "section on Block AttnRes",
            f"Its loss is less than {MARGIN:g} nats above that of a plain residual trained {LONGER:g} times as long.",
            "The loss of a baseline with 1.25 times the compute.", shape, reaches(at("attention")),
            Control("the plain residual, not trained longer", reaches(at("plain"))),
        ),
        claim(
            "queries from zero", "D", "section on Block AttnRes",
            "Queries that start at zero end at a lower loss than random ones with scores of deviation 1.",
            "Queries of zero are called crucial against volatile training.", shape, start,
            Control("arms exchanged", swapped(start)),
        ),
    ]  # fmt: skip
    points = {"zero", "drawn", *map(at, preset.arms)} | ({at("plain", "longer")} if preset.longer else set())
    enough = lambda claim: {p for rule in (claim.criterion, claim.control.criterion) for p in rule.reads()} <= points
    return tuple(claim for claim in judged if enough(claim))


def plan(preset: AttnResPreset):
    """The best rate of every arm, then the test runs, and the plain model for longer."""
    size = preset.sizes[0]
    _, best = yield from tuned(preset, [(arm, size) for arm in preset.arms], factor=2.0)
    cells = [Cell(arm, size, best[arm, size], "best", "test", preset.test_seeds) for arm in preset.arms]
    if preset.longer:
        steps = {"steps": round(LONGER * preset.config(size).steps)}
        cells.append(Cell("plain", size, best["plain", size], "longer", "test", preset.test_seeds, steps))
    yield cells


def checks(preset: AttnResPreset) -> list[Run]:
    """How far logits at initialisation lie from the plain model's of the same weights."""
    return [Run(name, 0, {"from_plain": value}, point="") for name, value in distances().items()]


def distances() -> dict[str, float]:
    """Largest difference of logits to the plain model, for queries of zero and for random ones."""
    base = TrainConfig(model=ModelConfig(vocab_size=64, layers=6, width=32, heads=2, ffn=64, norm_eps=1e-12))
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)))

    def logits(settings):
        init, apply = init_and_apply(with_settings(base, settings).model)
        return jax.jit(lambda key: apply(init(key), tokens_BT).logits)(jax.random.key(0))

    # Queries are drawn after all weights, so the three models have the same.
    plain = logits({})
    zero, drawn = (jnp.abs(logits(dict(arm.settings)) - plain).max() for arm in ARMS[1:])
    return {"zero": float(zero), "drawn": float(drawn)}


FIGURES = (
    Curve("loss", "loss", "Training loss, each arm at its best rate", "loss (nats per byte)", point="best", smooth=20,
          start=50),
    Curve("grad_norm", "grad_norm", "Norm of the gradient at the best rate", "gradient norm", point="best", log=True,
          smooth=10),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)", log=False),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_CPU = AttnResPreset(
    train=TrainConfig(
        model=ModelConfig(layers=8, width=64, heads=4, ffn=172), length=64, batch_size=8, steps=240, eval_windows=256,
    ),
    sizes=("custom",), rates=(0.02,), tuning_rates=(0.01, 0.02, 0.04), tuning_limit=4,
)  # fmt: skip
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), arms=("plain", "attention"), longer=False, tuning_rates=(0.01, 0.02), tuning_limit=2,
        tuning_seeds=(1000,),
    ),
    "cpu": _CPU,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="attn-res",
    title="Block attention residuals: loss at equal compute, and the start of the queries",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    check_arms=("zero", "drawn"),
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
