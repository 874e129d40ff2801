"""Does mHC hold the gain of the residual streams where Hyper-Connections lose it, and what of its loss needs streams?

Written before the first run on these seeds; pilots with another code base had suggested the thresholds.

The gain of a token is the largest absolute row sum (forward) or column sum (backward) of the product of the mixing
matrices of all sublayers, averaged over tokens. Rows of mHC's matrices sum to 1 by construction, so only its backward
gain can say anything, and a maximum hides attenuation, so the smallest sums are judged too. Gains of Hyper-Connections
and mHC are compared at one rate and at several depths, and at one depth over a ladder of rates.

Losses are compared with each arm at its own best rate at the middle depth. mHC gives every sublayer a learned write
gain besides its streams. Two controls have that gain and no streams: `gain`, a plain residual with one learned factor
2 sigmoid(b) per sublayer, and `symmetric`, mHC whose streams start equal in everything, so that they are exchangeable
and stay equal for ever. If these lose nothing against mHC, its loss is no evidence for streams. Nothing is expected of
the losses of Hyper-Connections against mHC at this size, so equality within a margin is asked.

Float32, AdamW, no weight decay and no gradient clip. mHC starts with streams that hardly mix and sublayer k reading
stream k mod N, a choice of this package, since its paper states none. Two exact checks multiply random matrices.
"""

import dataclasses

import jax
import numpy as np

from repro.claims import (
    All,
    Arm,
    AtLeast,
    AtMost,
    Cell,
    Claim,
    Control,
    Equivalent,
    Experiment,
    Greater,
    NonInferior,
    Ratio,
    Run,
    Within,
    swapped,
)
from repro.claims.statistics import slope
from repro.errors import ReproError
from repro.models import ModelConfig
from repro.models.functional import sinkhorn
from repro.report import Curve, Dose, Effects, Ladder
from repro.train import TrainConfig
from repro.train.preset import Preset, tuned

MHC = "mHC (arXiv 2512.24880)"
BOUND, APART, GROWS, HEATS = 1.6, 10.0, 2.0, 10.0
"""The published gain of mHC; factors by which gains are apart, grow over the depths, and over the rates."""
MARGIN = 0.01
"""Nats of validation loss within which an arm loses nothing."""
ARMS = (
    Arm("plain", "plain residual", {"model.residual.kind": "pre_norm"}),
    Arm("gain", "plain residual with a learned write gain", {"model.residual.kind": "gain"}),
    Arm("hyper", "Hyper-Connections", {"model.residual.kind": "hyper"}),
    Arm("manifold", "mHC", {"model.residual.kind": "manifold"}),
    Arm("symmetric", "mHC, equal streams", {"model.residual.kind": "manifold", "model.residual.start": "symmetric"}),
)
_NAMES = tuple(arm.name for arm in ARMS)
STREAMS = ("hyper", "manifold")


def depth_point(layers: int) -> str:
    return f"L{layers}"


@dataclasses.dataclass(frozen=True)
class GainPreset(Preset):
    """The sweep of this experiment. `rates` are those at which gains are compared: the middle one at every depth, the
    others at the middle depth."""

    arms: tuple[str, ...] = _NAMES
    """The arms that run; a claim is judged where all that it reads does."""
    depths: tuple[int, ...] = (6, 12, 24)
    """Layers, ascending; the losses are those of the middle one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) != 1:
            raise ReproError(f"sizes is {self.sizes}; this experiment takes one size.")
        if len(self.depths) not in (1, 3) or list(self.depths) != sorted(set(self.depths)) or self.depths[0] < 1:
            raise ReproError(f"depths is {self.depths}; give one or three numbers of layers, ascending.")
        if len(self.rates) not in (1, 3):
            raise ReproError(f"rates is {self.rates}; give one or three rates.")
        unknown = [arm for arm in self.arms if arm not in _NAMES]
        if unknown or not set(STREAMS) <= set(self.arms):
            raise ReproError(f"arms is {self.arms}; take hyper, manifold and any of {', '.join(_NAMES)}.")

    @property
    def depth(self) -> int:
        return self.depths[len(self.depths) // 2]

    def grid(self) -> dict[str, tuple[int, float]]:
        """The points where gains are compared, as (layers, rate)."""
        middle = self.rates[len(self.rates) // 2]
        points = {depth_point(layers): (layers, middle) for layers in self.depths}
        if len(self.rates) == 3:
            points |= {"low": (self.depth, self.rates[0]), "high": (self.depth, self.rates[-1])}
        return points


def _mechanism() -> list[Claim]:
    about = "64 random 4 x 4 matrices in a row, 64 draws, float32. Says nothing of training."
    shared = dict(id="V4-9", family=MHC, tier="M", source=f"{MHC}, eq. 9", boundary=about)
    flat = lambda arm: Within("log_gain_slope", arm, -0.005, 0.005)
    even = lambda arm: Within("contrast", arm, 0.0, 1e-3)
    return [
        Claim(
            variant="products", **shared,
            statement="The gain of a product of matrices after 20 Sinkhorn iterations does not grow with their number: "
            "its logarithm changes by less than 0.005 per matrix.",
            reported="Doubly stochastic matrices are closed under multiplication.",
            criterion=flat("sinkhorn"), control=Control("the identity plus noise in its place", flat("unconstrained")),
        ),
        Claim(
            variant="averaging", **shared,
            statement="The price: a product of 64 such matrices from random logits is the even average to 0.001, so "
            "streams that were different at its start are one.",
            reported="Not in the paper; it follows for strictly positive doubly stochastic matrices.",
            criterion=even("sinkhorn"), control=Control("logits with 6 added to the diagonal", even("near_identity")),
        ),
    ]  # fmt: skip


def claims(preset: GainPreset) -> tuple[Claim, ...]:
    size, depths = preset.sizes[0], preset.depths
    at = lambda arm, point="best": f"{arm}@{point}/{size}"
    middle, ends = depth_point(preset.depth), (depth_point(depths[0]), depth_point(depths[-1]))
    config = preset.config(size)
    shape = (
        f"{preset.depth} layers of width {config.model.width} ({2 * preset.depth} sublayers), four streams, "
        f"{config.steps} steps on bytes, AdamW, no clip. The paper: 60 sublayers, 27 billion parameters."
    )
    bounded = lambda arm: All((
        AtMost("peak_gain_backward_max", at(arm, middle), BOUND, log=True),
        AtLeast("least_gain_backward_min", at(arm, middle), 1 / BOUND, log=True),
    ))  # fmt: skip
    apart = Ratio("peak_gain_backward_max", at("hyper", middle), at("manifold", middle), at_least=APART)
    fades = lambda arm: AtMost("least_gain_backward_min", at(arm, middle), 0.5, log=True)
    grows = lambda arm, few, many, least: Greater("peak_gain_backward_max", at(arm, many), at(arm, few), smallest=least)
    lower = Greater("loss", at("plain"), at("manifold"), log=False)
    same = lambda left: Equivalent("loss", left, at("manifold"), margin=2 * MARGIN)
    explains = lambda arm: All((lower, NonInferior("loss", at(arm), at("manifold"), margin=MARGIN)))
    one = lambda arm: AtMost("stream_spread", at(arm), 1e-3)

    def claim(variant, section, statement, reported, rule, control):
        return Claim(
            id="V4-9", variant=variant, family=MHC, tier="D", source=f"{MHC}, {section}", statement=statement,
            reported=reported, boundary=shape, criterion=rule, control=control,
        )  # fmt: skip

    judged = [
        claim(
            "mHC is bounded", "experiments at 27B",
            f"The backward gain of mHC stays between {1 / BOUND:g} and {BOUND:g} through the whole run.",
            "A gain of at most about 1.6.", bounded("manifold"), Control("Hyper-Connections", bounded("hyper")),
        ),
        claim(
            "apart", "experiments at 27B",
            f"The largest backward gain of Hyper-Connections is more than {APART:g} times that of mHC, same rate.",
            "About 3000 against 1.6.", apart, Control("arms exchanged", swapped(apart)),
        ),
        claim(
            "attenuation", "section 3.1",
            "Hyper-Connections also attenuate: the smallest column sum falls below 0.5 at some step.",
            "The paper reports maxima, which hide it.", fades("hyper"), Control("mHC", fades("manifold")),
        ),
        claim(
            "over depth", "section 3.1",
            f"From {2 * depths[0]} to {2 * depths[-1]} sublayers the largest backward gain of Hyper-Connections grows "
            f"by a factor of at least {GROWS:g}.",
            "The product diverges with depth.", grows("hyper", *ends, GROWS),
            Control("mHC", grows("manifold", *ends, GROWS)),
        ) if len(depths) == 3 else None,
        claim(
            "over rates", "section 3.1",
            f"From the lowest to the highest rate of the ladder it grows by a factor of at least {HEATS:g}.",
            "Not in the paper; seen in pilots.", grows("hyper", "low", "high", HEATS),
            Control("mHC", grows("manifold", "low", "high", HEATS)),
        ),
        claim(
            "loss", "experiments at 27B",
            "mHC has a lower validation loss than a plain residual, each at its own best rate.",
            "0.021 nats lower at 27 billion parameters.", lower, Control("arms exchanged", swapped(lower)),
        ),
        claim(
            "loss of Hyper-Connections", "experiments at 27B",
            f"Hyper-Connections and mHC end within {2 * MARGIN:g} nats of each other, each at its own best rate.",
            "A surge of the loss of Hyper-Connections at step 12,000 of 50,000; no surge is expected in short runs.",
            same(at("hyper")), Control("mHC at the highest rate of the ladder", same(at("manifold", "high"))),
        ),
        claim(
            "explained by a write gain", "experiments at 27B",
            "mHC is better than a plain residual, and a plain residual with a learned write gain per sublayer loses "
            f"less than {MARGIN:g} nats against mHC: its loss needs no streams.",
            "The paper has no such control.", explains("gain"), Control("the plain residual", explains("plain")),
        ),
        claim(
            "explained without different streams", "experiments at 27B",
            f"mHC is better than a plain residual, and mHC whose streams are all equal loses less than {MARGIN:g} nats "
            "against it.",
            "The paper has no such control.", explains("symmetric"), Control("the plain residual", explains("plain")),
        ),
        claim(
            "equal streams", "eq. 9", "Streams that start equal in everything stay equal.",
            "Not in the paper; it follows from exchangeability.", one("symmetric"),
            Control("mHC with one stream read per sublayer", one("manifold")),
        ),
    ]  # fmt: skip
    points = {at(arm, point) for arm in STREAMS for point in preset.grid()} | {at(arm) for arm in preset.arms}
    enough = lambda claim: {p for rule in (claim.criterion, claim.control.criterion) for p in rule.reads()} <= points
    return (*_mechanism(), *(claim for claim in judged if claim is not None and enough(claim)))


def plan(preset: GainPreset):
    """The best rate of every arm at the middle depth, then all test runs."""
    size, at_depth = preset.sizes[0], lambda layers: {"model.layers": layers}
    main = at_depth(preset.depth)
    arms, settings = [(arm, size) for arm in preset.arms], dict.fromkeys(preset.arms, main)
    _, best = yield from tuned(preset, arms, settings, factor=2.0)
    cells = [Cell(arm, size, best[arm, size], "best", "test", preset.test_seeds, main) for arm in preset.arms]
    for point, (layers, rate) in preset.grid().items():
        cells += [Cell(arm, size, rate, point, "test", preset.test_seeds, at_depth(layers)) for arm in STREAMS]
    yield cells


def checks(preset: GainPreset) -> list[Run]:
    """Products of random matrices."""
    return [Run(name, 0, metrics, point="") for name, metrics in mechanism_metrics().items()]


def mechanism_metrics(matrices: int = 64, draws: int = 64) -> dict[str, dict[str, float]]:
    """By kind of matrix, log_gain_slope: least-squares slope of the logarithm of the median over draws of the larger of
    the forward and backward gain of the product, per matrix, over 8 to `matrices` of them; contrast: mean over draws of
    the largest |entry - 1/4| of the whole product."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(matrices, draws, 4, 4)).astype(np.float32)
    balanced = jax.jit(sinkhorn)
    kinds = {
        "sinkhorn": balanced(noise),
        "near_identity": balanced(0.1 * noise + 6 * np.eye(4, dtype=np.float32)),
        "unconstrained": np.eye(4) + 0.3 * noise,
    }
    found = {}
    for name, kind in kinds.items():
        product, gains = np.broadcast_to(np.eye(4), (draws, 4, 4)), []
        for m in np.asarray(kind, np.float64):
            product = m @ product
            gains.append(np.median(np.maximum(*(np.abs(product.sum(axis)).max(-1) for axis in (-1, -2)))))
        counts = np.arange(8, matrices + 1)
        found[name] = {
            "log_gain_slope": float(slope(counts, np.log(gains[7:])[None])[0]),
            "contrast": float(np.abs(product - 0.25).max((-2, -1)).mean()),
        }
    return found


FIGURES = (
    Curve("gain", "gain_backward_max", "Backward gain at the middle depth and rate", "largest column sum",
          arms=STREAMS, point="L12", log=True, line=1.6, line_label="published for mHC"),
    Curve("attenuation", "gain_backward_min", "Smallest column sum there", "smallest column sum", arms=STREAMS,
          point="L12", log=True, line=1.0, line_label="no change"),
    Dose("depth", "peak_gain_backward_max", "Largest backward gain against depth", "sublayers", "largest column sum",
         points=(("L6", 12), ("L12", 24), ("L24", 48)), arms=STREAMS, log_x=2, log_y=True),
    Dose("heat", "peak_gain_backward_max", "Largest backward gain against the rate", "learning rate",
         "largest column sum", points=(("low", 0.003), ("L12", 0.01), ("high", 0.03)), arms=STREAMS, log_x=10,
         log_y=True),
    Curve("spread", "stream_spread", "How different the streams are at the best rate", "deviation over size",
          arms=("hyper", "manifold", "symmetric"), point="best"),
    Curve("loss", "loss", "Training loss, each arm at its best rate", "loss (nats per byte)", point="best", smooth=20,
          start=50),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)", log=False),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_CPU = GainPreset(
    train=TrainConfig(
        model=ModelConfig(layers=12, width=32, heads=2, ffn=64), length=32, batch_size=4, steps=240, optimizer="adamw",
        eval_windows=256,
    ),
    sizes=("custom",), rates=(0.003, 0.01, 0.03), tuning_rates=(0.005, 0.01, 0.02), tuning_limit=4,
)  # fmt: skip
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), arms=STREAMS, depths=(1,), rates=(0.01,), tuning_rates=(0.005, 0.01), tuning_limit=2,
        tuning_seeds=(1000,),
    ),
    "cpu": _CPU,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="residual-gain",
    title="The gain of residual streams: Hyper-Connections, mHC, and a write gain without streams",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    check_arms=("sinkhorn", "near_identity", "unconstrained"),
    figures=FIGURES,
    words={
        "least_gain_backward_min": "smallest backward gain of all steps",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
