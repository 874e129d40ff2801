"""Does quantising the input of Dgrad in 128x128 blocks fail where 1x128 tiles do not (DeepSeek-V3, appendix B.2)?

Written before the first run: the claims, their rules and controls, the arms and the doses.

What is quantised. Only dY in dX = Q(dY) W^T, of all linear layers inside the blocks of the decoder; forward pass, Wgrad,
embedding, head, norms and attention are exact. So an arm differs from another in nothing but the scale that a token's
gradient shares: with its own 128 channels (tile), or with 128 tokens (block).

The amplifier, declared. Token imbalance inside a group of 128 tokens is put there by hand: rows of text alternate with
rows of a second domain (a deterministic sequence on 16 ids of its own) whose loss has the weight w. Each domain has an
expert and a softmax of its own, so what a domain learns in the layers reaches it only through Dgrad. At w = 1 nothing is
amplified, and the same question is put there, in plain text, in deep models and on a memorised text.

Rates. One fixed rate for every arm (3e-3), the same seeds and batches: the estimand is the effect of Q alone.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import (
    All,
    Arm,
    AtLeast,
    Cell,
    Claim,
    Control,
    Experiment,
    Greater,
    NonInferior,
    Run,
    Within,
    swapped,
)  # fmt: skip
from repro.errors import ReproError
from repro.models import ModelConfig
from repro.quant import FORMATS, POLICIES, fake_quantize
from repro.report import Curve, Dose, Effects
from repro.train.domains import FORMATS_TRIED, GROUP, QUIET, TEXT, DgradConfig
from repro.train.preset import Sweep

V3 = "DeepSeek-V3 (arXiv 2412.19437)"
REPORTED = (
    "Diverges with 128x128 blocks for all tensors of Dgrad, where 1x128 tiles train; cause offered as a hypothesis."
)
PAPER = "The paper: a mixture of experts of about 16B parameters, around 300B tokens."
SMALL = "A decoder of 39k parameters, 256 tokens per step, 1200 steps, one rate."
DECLARED = 2.0**-18
# Between half and one octave above the weight at which a format flushes the quiet domain to zero.
DECLARED_OTHERS = {"e3m2": 2.0**-9, "e2m3": 2.0**-6, "e2m1": 2.0**-4}
REORDERED = ("block_prescaled", "block_by_domain", "block_by_magnitude")

ARMS = (
    Arm("none", "exact", {"element": "none"}),
    *(
        Arm(f"{element}_{kind}", f"{element.upper()} {kind}", {"element": element, "granularity": kind})
        for element in ("e4m3", "e3m2", "e2m3", "e2m1") for kind in ("tile", "block")
    ),
    *(
        Arm(f"block_{order}", f"E4M3 block, {words}", {"element": "e4m3", "granularity": "block", "order": order})
        for order, words in (
            ("prescaled", "each token scaled"), ("by_domain", "tokens by domain"),
            ("by_magnitude", "tokens by magnitude"), ("after_dispatch", "down after dispatch"),
        )
    ),
)  # fmt: skip


def weight_name(weight: float) -> str:
    """The point of a weight, which is a power of two: "2^-18"."""
    return f"2^{round(math.log2(weight))}"


def _at(arm: str, weight: float) -> str:
    return f"{arm}@{weight_name(weight)}"


def _claim(variant: str, statement: str, criterion, control: Control, tier: str = "D", boundary: str = SMALL) -> Claim:
    return Claim(
        id="V3-2", variant=variant, family=V3, tier=tier, source=f"{V3}, appendix B.2", statement=statement,
        reported=REPORTED, boundary=f"{boundary} {PAPER}", criterion=criterion, control=control,
    )  # fmt: skip


def _mechanism_rule(arm: str):
    return All((
        Within("tile_worst", arm, 0.0, 0.04), Within("at_2^12", arm, 0.0, 0.04),
        Within("at_2^16", arm, 0.15, math.inf), Within("at_2^18", arm, 0.5, math.inf),
    ))  # fmt: skip


_ONE_GROUP = "One group of 128 Gaussian tokens of 128 channels, one of them R times louder. Says nothing of training."
MECHANISM = (
    _claim(
        "mechanism, E4M3",
        "The relative error of quiet tokens stays below 4 % with tiles at every scale ratio R up to 2^24; with blocks it "
        "does so at 2^12, exceeds 15 % at 2^16 and 50 % at 2^18.",
        _mechanism_rule("mechanism"), Control("tiles in place of blocks", _mechanism_rule("mechanism_of_tiles")),
        tier="M", boundary=_ONE_GROUP,
    ),
    _claim(
        "knee, five formats",
        "The ratio R at which a block's error is twice that of a tile is the range of the format's normal numbers times "
        "1.18 over the crest factor of the loud token, to an octave, for E4M3, E5M2, E3M2, E2M3 and E2M1.",
        All(tuple(Within(element, "knee", -1.0, 1.0) for element in FORMATS_TRIED)),
        Control(
            "the range taken as the largest number alone",
            All(tuple(Within(element, "knee_of_max", -1.0, 1.0) for element in FORMATS_TRIED)),
        ),
        tier="M", boundary=_ONE_GROUP,
    ),
)  # fmt: skip


def _declared() -> tuple[Claim, ...]:
    block, tile, exact = (_at(arm, DECLARED) for arm in ("e4m3_block", "e4m3_tile", "none"))
    amplified = f"{SMALL} Amplified: loss weight 2^-18 on one of two domains."
    harm = lambda arm: Greater("quiet_loss", arm, tile, log=False, smallest=1.0)
    safe = lambda arm: NonInferior("quiet_loss", arm, exact, margin=0.05)
    return (
        _claim(
            "declared imbalance, E4M3", "Under declared imbalance blocks leave the quiet domain at least 1 nat behind tiles.",
            harm(block), Control("blocks with each token scaled by a power of two", harm(_at("block_prescaled", DECLARED))),
            boundary=amplified,
        ),
        _claim(
            "tiles under declared imbalance", "Under the same imbalance tiles cost the quiet domain less than 0.05 nats.",
            safe(tile), Control("blocks", safe(block)), boundary=amplified,
        ),
        _claim(
            "cause", "Blocks cost the quiet domain less than 0.05 nats once a group holds tokens of one magnitude: by a "
            "scale per token, by sorting tokens by domain, and by sorting them by magnitude.",
            All(tuple(safe(_at(arm, DECLARED)) for arm in REORDERED)), Control("blocks in token order", safe(block)),
            boundary=amplified,
        ),
        _claim(
            "dispatch alone", "Sorting tokens by domain in the experts alone is not enough: attention's Dgrad still costs "
            "the quiet domain at least 0.05 nats.",
            Greater("quiet_loss", _at("block_after_dispatch", DECLARED), exact, log=False, smallest=0.05),
            Control("sorted by domain everywhere",
                    Greater("quiet_loss", _at("block_by_domain", DECLARED), exact, log=False, smallest=0.05)),
            boundary=amplified,
        ),
    )  # fmt: skip


def _others() -> Claim:
    rule = lambda weights: All(tuple(
        Greater("quiet_loss", _at(f"{e}_block", w), _at(f"{e}_tile", w), log=False, smallest=1.0)
        for e, w in weights.items()
    ))  # fmt: skip
    return _claim(
        "declared imbalance, narrower formats",
        "Blocks leave the quiet domain at least 1 nat behind tiles in E3M2, E2M3 and E2M1 too, at a weight half to one "
        "octave above the one that each format flushes to zero.",
        rule(DECLARED_OTHERS),
        Control("weight 1", rule(dict.fromkeys(DECLARED_OTHERS, 1.0))),
        boundary=f"{SMALL} Amplified: loss weight 2^-9, 2^-6 or 2^-4 on one of two domains.",
    )


def _natural(where: str, boundary: str, metric: str, smallest: float) -> Claim:
    rule = Greater(metric, _at("e4m3_block", 1.0), _at("e4m3_tile", 1.0), log=False, smallest=smallest)
    return _claim(
        f"{where}, E4M3", f"{where.capitalize()}, without any weight, E4M3 blocks cost at least {smallest:g} nats of text "
        "loss more than tiles.", rule, Control("arms exchanged", swapped(rule)), boundary=boundary,
    )  # fmt: skip


def _analogue(where: str, boundary: str, smallest: float) -> Claim:
    rule = Greater("loss", _at("e2m1_block", 1.0), _at("e2m1_tile", 1.0), log=False, smallest=smallest)
    return _claim(
        f"{where}, E2M1", f"{where.capitalize()}, without any weight, E2M1 blocks cost at least {smallest:g} nats of text "
        "loss more than tiles (E2M1 stands for E4M3 at a larger model's imbalance: a scaled analogue).",
        rule, Control("arms exchanged", swapped(rule)), boundary=boundary,
    )  # fmt: skip


def _reaches(where: str, boundary: str) -> Claim:
    return _claim(
        f"imbalance {where}", "Inside groups of 128 tokens the gradients of an exactly trained model spread over at least "
        "14 octaves by the end of training, where E4M3 blocks begin to fail.",
        _spread("none"), Control("the first ten steps", _spread("start")), boundary=boundary,
    )  # fmt: skip


def _spread(arm: str):
    return AtLeast("token_range", _at(arm, 1.0) if arm == "none" else arm, 14.0)


def _growth() -> Claim:
    more = Greater("growth", "growth_block", "growth_tile")
    return _claim(
        "error over depth", "The relative error of gradients grows from the last to the first of 16 layers under E2M1 "
        "blocks, and by a larger factor than under tiles.",
        All((AtLeast("growth", "growth_block", 1.0, log=True), more)), Control("arms exchanged", swapped(more)),
        boundary="The exactly trained 16-layer decoder; gate matrices, held-out text.",
    )  # fmt: skip


def claims(preset: "DgradPreset") -> tuple[Claim, ...]:
    if preset.question == "declared":
        where = "two domains at equal weight"
        if preset.breadth == "core":
            return (*MECHANISM, _natural(where, SMALL, "loss", 0.01))
        return (
            *MECHANISM,
            *_declared(),
            _others(),
            _natural(where, SMALL, "loss", 0.01),
            _analogue(where, SMALL, 0.05),
        )
    layers, steps = preset.train.model.layers, preset.train.steps
    about = f"Plain text, {layers} layers, 256 tokens per step, {steps} steps, one rate."
    if preset.question == "deep":
        where = f"plain text, {layers} layers"
        return (
            _natural(where, about, "loss", 0.01),
            _analogue(where, about, 0.005),
            _reaches("in depth", about),
            _growth(),
        )
    about = f"The first bytes of the corpus ({preset.data}) learned by heart, {layers} layers, {steps} steps, one rate."
    return (_natural("memorised text", about, "train_loss", 0.01), _reaches("on memorised text", about))


# --- What is run -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DgradPreset(Sweep):
    """The sweep of this experiment."""

    train: DgradConfig = DgradConfig()
    sizes: tuple[str, ...] = ("custom",)
    question: Literal["declared", "deep", "memorised"] = "declared"
    """Which claims: two domains with declared imbalance; a deep decoder on plain text; a text learned by heart."""
    weights: tuple[float, ...] = tuple(2.0**-k for k in (0, 10, 12, 14, 16, 17, 18, 20))
    """Loss weights of the quiet domain (powers of two) for exact, tile and block; 1 and 2^-18 must be among them."""
    breadth: Literal["all", "core"] = "all"
    """With core: only blocks against tiles of E4M3, and no claim about a weight."""
    octaves: int = 32
    """The mechanism is measured at scale ratios up to 2 to this power, in half octaves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.question == "declared" and not {1.0, DECLARED} <= set(self.weights):
            raise ReproError("weights must hold 1 and 2^-18, which claims are judged at.")
        if any(not 0 < w <= 1 or math.frexp(w)[0] != 0.5 for w in self.weights):
            raise ReproError(f"weights is {self.weights}; they must be powers of two up to 1.")
        if self.octaves < 32:
            raise ReproError(f"octaves is {self.octaves}; the knee of E5M2 needs at least 32.")
        if (self.question == "declared") != (self.train.domains == 2):
            raise ReproError("train.domains must be 2 for the question of declared imbalance, and 1 for the others.")


def plan(preset: DgradPreset):
    cells: list[Cell] = []

    def test(arm: str, weight: float = 1.0) -> None:
        settings = {"quiet_weight": weight}
        cells.append(
            Cell(
                arm,
                preset.sizes[0],
                preset.train.learning_rate,
                weight_name(weight),
                "test",
                preset.test_seeds,
                settings,
            )
        )

    if preset.question == "declared":
        core = preset.breadth == "core"
        for weight in preset.weights:
            for arm in ("e4m3_tile", "e4m3_block") if core else ("none", "e4m3_tile", "e4m3_block"):
                test(arm, weight)
        for arm in () if core else (*REORDERED, "block_after_dispatch"):
            test(arm, DECLARED)
        for element, weight in () if core else DECLARED_OTHERS.items():
            for kind in ("tile", "block"):
                test(f"{element}_{kind}", weight)
                test(f"{element}_{kind}")
    else:
        elements = ("e4m3", "e2m1") if preset.question == "deep" else ("e4m3",)
        for arm in ("none", *(f"{e}_{kind}" for e in elements for kind in ("tile", "block"))):
            test(arm)
    yield cells


def quiet_error(ratio: jax.Array, element: str, granularity: str) -> jax.Array:
    """Relative L2 error of the 127 quiet tokens of a group beside one that is `ratio` times louder."""
    x_TN = one_group()
    x_TN = x_TN.at[0].multiply(ratio)
    recipe = POLICIES[f"dgrad_{element}_{granularity}"].dgrad_dy
    quiet = x_TN[1:]
    return jnp.sqrt(((fake_quantize(x_TN, recipe)[1:] - quiet) ** 2).sum() / (quiet**2).sum())


def one_group() -> jax.Array:
    """128 Gaussian tokens of 128 channels."""
    return jax.random.normal(jax.random.key(0), (GROUP, GROUP), jnp.float32)


def predicted_knee(element: str, *, of_max: bool = False) -> float:
    """log2 of the ratio at which a block's error is twice a tile's.

    Rounding has the relative error e = 2^-m / sqrt(12 * 2.164) while values are normal (the mean of 4^floor(log2 x) over
    that of x^2 is 1 / 2.164 for a mantissa that is uniform in its logarithm), and the absolute error u / sqrt(12), u the
    smallest subnormal, below. Their squares add to (2 e)^2 where the quiet tokens' RMS, in units of the scale, is
    u / (6 e). It is max / (R c), with c the loud token's amax over its RMS. So R = 6 e max / (u c), and as
    u = 2^-m min_normal, R = 1.18 (max / min_normal) / c. `of_max` leaves out min_normal: a wrong formula, for the control.
    """
    fmt = FORMATS[element]
    crest = float(jnp.abs(one_group()[0]).max() / jnp.sqrt((one_group() ** 2).mean()))
    return math.log2(6 / math.sqrt(12 * 2.164) * fmt.max / (1.0 if of_max else fmt.min_normal) / crest)


def measured_knee(ratios: np.ndarray, errors: np.ndarray, tile: float) -> float:
    """log2 of the first ratio at which `errors` reach twice `tile`, interpolated between neighbours."""
    above = int(np.argmax(errors >= 2 * tile))
    low, high = errors[above - 1] / tile, errors[above] / tile
    return float(ratios[above - 1] + (ratios[above] - ratios[above - 1]) * (2 - low) / (high - low))


def checks(preset: DgradPreset):
    if preset.question != "declared":
        return
    halves = np.arange(2 * preset.octaves + 1) / 2
    errors_at = jax.jit(jax.vmap(quiet_error, (0, None, None)), static_argnums=(1, 2))
    ratios = jnp.asarray(2.0**halves, jnp.float32)
    curves = {
        (element, kind): np.asarray(errors_at(ratios, element, kind), np.float64)
        for element in FORMATS_TRIED for kind in ("tile", "block")
    }  # fmt: skip
    for (element, kind), errors in curves.items():
        for octave, value in zip(halves, errors, strict=True):
            if octave == round(octave):
                yield Run(f"group_{element}_{kind}", 0, {"error": value}, point=f"2^{int(octave)}")
    at = lambda errors, octave: float(errors[2 * octave])
    tile, block = curves["e4m3", "tile"], curves["e4m3", "block"]
    for arm, errors in (("mechanism", block), ("mechanism_of_tiles", tile)):
        yield Run(arm, 0, {"tile_worst": tile[:49].max()} | {f"at_2^{k}": at(errors, k) for k in (12, 16, 18)})
    found = {e: measured_knee(halves, curves[e, "block"], curves[e, "tile"][0]) for e in FORMATS_TRIED}
    yield Run("knee", 0, {e: found[e] - predicted_knee(e) for e in FORMATS_TRIED})
    yield Run("knee_of_max", 0, {e: found[e] - predicted_knee(e, of_max=True) for e in FORMATS_TRIED})


def derive(runs):
    """Where the imbalance starts, and by how much the error of gradients grows from the last layer to the first."""
    for run in runs.select("none", point=weight_name(1.0)):
        yield Run("start", run.seed, {"token_range": run.metrics["token_range_start"]})
        if "error_e2m1_tile_first" in run.metrics:
            for kind in ("tile", "block"):
                first, last = (run.metrics[f"error_e2m1_{kind}_{where}"] for where in ("first", "last"))
                yield Run(f"growth_{kind}", run.seed, {"growth": first / last})


_WEIGHTS = tuple((weight_name(2.0**-k), 2.0**-k) for k in (0, 10, 12, 14, 16, 17, 18, 20))
_RATIOS = tuple((f"2^{k}", 2.0**k) for k in range(0, 33))
FIGURES = (
    Dose("dose", "quiet_loss", "Quiet domain against its loss weight", "loss weight of the quiet domain",
         "loss (nats per token)", arms=("none", "e4m3_tile", "e4m3_block"), points=_WEIGHTS, log_x=2, log_y=False),
    Dose("mechanism", "error", "Quiet tokens beside a loud one", "scale ratio R inside a group of 128 tokens",
         "relative error", arms=("group_e4m3_tile", "group_e4m3_block", "group_e5m2_block", "group_e3m2_block",
                                 "group_e2m3_block", "group_e2m1_block"),
         points=_RATIOS, log_x=2, log_y=True),
    Curve("quiet_loss", "quiet_loss", "Quiet domain at weight 2^-18", "loss (nats per token)",
          arms=("none", "e4m3_tile", "e4m3_block", *REORDERED, "block_after_dispatch"), point=weight_name(DECLARED)),
    Curve("loss", "loss", "Text without a weight", "loss (nats per byte)", point=weight_name(1.0), smooth=20, start=50),
    Curve("token_spread", "token_spread", "How far the median token is below the loudest of its group of 128", "octaves",
          point=weight_name(1.0), smooth=20, line=14.0, line_label="E4M3 blocks begin to fail"),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_PLAIN = DgradConfig(
    domains=1, steps=600, model=dataclasses.replace(DgradConfig().model, layers=16), gradient_errors=True
)
PRESETS = {
    "smoke": DgradPreset(
        train=DgradConfig(
            steps=3, eval_windows=4, model=ModelConfig(vocab_size=TEXT + QUIET, layers=1, width=16, heads=1, ffn=16)
        ),
        weights=(1.0, DECLARED), breadth="core", test_seeds=(0, 1), evidence=False,
    ),
    "cpu": DgradPreset(),
    "cpu-deep": DgradPreset(question="deep", train=_PLAIN),
    "cpu-memorised": DgradPreset(
        question="memorised", data="kjv:2048",
        train=DgradConfig(domains=1, steps=4000, model=dataclasses.replace(DgradConfig().model, width=64, ffn=128)),
    ),
}  # fmt: skip

EXPERIMENT = Experiment(
    name="block-dgrad",
    title="Block-wise against tile-wise quantisation of the Dgrad input",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    derive=derive,
    check_arms=(
        "mechanism", "mechanism_of_tiles", "knee", "knee_of_max", "start", "growth_tile", "growth_block",
        *(Arm(f"group_{e}_{kind}", f"{e.upper()} {kind}") for kind in ("block", "tile") for e in FORMATS_TRIED),
    ),
    figures=FIGURES,
    words={
        "growth": "error of the first layer over that of the last",
        "token_range": "largest over smallest gradient of the tokens of a group (octaves)",
        "train_loss": "training loss on text, last tenth (nats per token)",
    },
)  # fmt: skip

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
