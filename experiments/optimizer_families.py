"""Do Adam, Lion and Signum tie when each is tuned, does SGD fall behind, and where is adaptivity needed?

Written before the first run. The task is the King James Bible in words, since class imbalance is what is said to make SGD
fail: of 2,048 ids the most frequent is every thirteenth word and half of them are rarer than one in 14,000. Nothing
decays, so that the update rules alone differ.

Every arm has its own ladder of rates, starting where its rule is usually run (signs move every weight by the whole rate, so
Lion and Signum start five times below Adam; SGD far above), in factors of two until the best is inside, at most nine rates,
on the same three tuning seeds. The hybrids have two rates: the Adam part has Adam's own best one, and SGD's is searched for with
the same budget. Betas are 0.9 and 0.95 for Adam, 0.9 and 0.99 for Lion, 0.9 for Signum and for the momentum of SGD; none has
a b2 below b1^2, where Adam fails for another reason.

Recovered is (loss of SGD - loss of the arm) / (loss of SGD - loss of Adam), seed by seed. It says something only where there
is a gap, so the claims that read it ask for the gap as well. Their control puts adaptivity everywhere but on the head and the
norms: if that recovers as much, the place did not matter.
"""

import dataclasses
import math

import jax
import optax

from repro.claims import All, Arm, AtLeast, Cell, Claim, Control, Equivalent, Experiment, Greater, Run, swapped
from repro.errors import ReproError
from repro.models import ModelConfig
from repro.optim.layout import ROLES, matched
from repro.report import Curve, Effects, Ladder
from repro.train import Program, TrainConfig
from repro.train.optimizer import build
from repro.train.preset import Preset, tuned

ZHAO = "Zhao et al. (arXiv 2407.07972)"
TIE, BEHIND, RECOVERED = 0.05, 0.15, 0.7
"""Nats within which tuned optimizers tie, nats by which SGD falls behind, part of that gap that counts as recovered."""
_SGD = {"optimizer": "sgd", "optim.momentum": 0.9, "optim.nesterov": False}
ARMS = (
    Arm("adam", "Adam", {"optimizer": "adam"}),
    Arm("lion", "Lion", {"optimizer": "lion", "optim.b2": 0.99}),
    Arm("signum", "Signum", {"optimizer": "signum"}),
    Arm("sgd", "SGD with momentum", _SGD),
    Arm("adalayer", "Adalayer, per coordinate on head and norms", {"optimizer": "adalayer", "optim.coordinates": "head,norm"}),
    Arm("adam_on_ends", "SGD, Adam on head and norms", _SGD | {"adam_roles": "head,norm"}),
    Arm("adam_on_rest", "SGD, Adam on all but head and norms", _SGD | {"adam_roles": "embedding,matrix"}),
)  # fmt: skip
_NAMES = tuple(arm.name for arm in ARMS)
_HYBRIDS = tuple(arm.name for arm in ARMS if "adam_roles" in arm.settings)


@dataclasses.dataclass(frozen=True)
class FamiliesConfig(TrainConfig):
    """The decoder, where some roles may have Adam beside the optimizer of the others."""

    adam_roles: str = ""
    """Roles that Adam updates, such as `head,norm`; empty for none."""
    adam_rate: float = 0.01
    """Adam's peak rate there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in self.split_roles():
            if role not in ROLES:
                raise ReproError(f"train.adam_roles names {role!r}; roles are {', '.join(ROLES)}.")
        if not 0 < self.adam_rate < math.inf:
            raise ReproError(f"train.adam_rate is {self.adam_rate}; it must be positive and finite.")
        if self.adam_roles and (self.weight_decay or math.isfinite(self.optim.gradient_clip)):
            raise ReproError("train.adam_roles is for runs without weight decay and without gradient clipping.")

    def split_roles(self) -> tuple[str, ...]:
        return tuple(filter(None, self.adam_roles.split(",")))

    @classmethod
    def program_class(cls) -> type[Program]:
        return FamiliesProgram

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        return {"N6": {self.adam_roles: "Adam at a rate of its own"}} if self.adam_roles else {}


class FamiliesProgram(Program):
    """The engine's program with Adam on some roles."""

    def optimizer(self, numbers, part, seed=0):
        others, config = super().optimizer(numbers, part, seed), self.config
        roles = config.split_roles()
        if not roles:
            return others
        adam = build("adam", config.optim, self.layouts, config.adam_rate * part, 0.0, "none", seed)

        def labels(params):
            chosen = ["adam" if layout.role in roles else "others" for _, _, layout in matched(params, self.layouts)]
            return jax.tree.unflatten(jax.tree.structure(params), chosen)

        return optax.partition({"adam": adam, "others": others}, labels)


@dataclasses.dataclass(frozen=True)
class FamiliesPreset(Preset):
    """The sweep of this experiment: `tuning_rates` are where Adam and Adalayer start."""

    arms: tuple[str, ...] = _NAMES
    """The arms that run; a claim is judged where all that it reads does."""
    sign_rates: tuple[float, ...] = (0.001, 0.002, 0.004)
    """Where Lion and Signum start."""
    sgd_rates: tuple[float, ...] = (0.25, 0.5, 1.0)
    """Where SGD and the SGD of the hybrids start."""
    length: int = 32
    """Words per window at a named size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sign_rates", "sgd_rates"):
            rates = getattr(self, name)
            if len(rates) < 2 or list(rates) != sorted(set(rates)) or rates[0] <= 0:
                raise ReproError(f"{name} is {rates}; give at least two positive rates, ascending.")
            if len(rates) > self.tuning_limit:
                raise ReproError(f"tuning_limit {self.tuning_limit} is below the {len(rates)} rates of {name}.")
        unknown = [arm for arm in self.arms if arm not in _NAMES]
        if unknown or not {"adam", "sgd"} <= set(self.arms):
            raise ReproError(f"arms is {self.arms}; take adam, sgd and any of {', '.join(_NAMES)}.")

    def config(self, size: str) -> TrainConfig:
        config = super().config(size)
        return config if size == "custom" else dataclasses.replace(config, length=self.length)

    def starts(self) -> dict[str, tuple[float, ...]]:
        """Where the search begins for the arms that do not begin like Adam."""
        return dict.fromkeys(("lion", "signum"), self.sign_rates) | dict.fromkeys(("sgd", *_HYBRIDS), self.sgd_rates)


def _claims_at(preset: FamiliesPreset, size: str) -> list[Claim]:
    at = lambda arm: f"{arm}@best/{size}"
    tie = lambda arm: Equivalent("loss", at(arm), at("adam"), margin=TIE)
    behind = Greater("loss", at("sgd"), at("adam"), log=False, smallest=BEHIND)
    recovers = lambda arm: All((behind, AtLeast("recovered", at(arm), RECOVERED)))

    def claim(variant, statement, reported, rule, control):
        return Claim(
            id="O-7", variant=f"{variant}, {size}", family=ZHAO, tier="D", source=ZHAO, statement=statement,
            reported=reported,
            boundary=f"Size {size}, {preset.train.steps} steps of 16 windows of {preset.length} words, 2,048 ids, no decay, "
            "float32, each arm at its own best rate in factors of two. The paper: 150 million to 1.2 billion parameters on C4.",
            criterion=rule, control=control,
        )  # fmt: skip

    same = "Similar best losses, and similar robustness to the rate, of Adam, Adafactor, Lion and Signum."
    own = Control("SGD in its place", tie("sgd"))
    elsewhere = Control("SGD, with Adam on all but head and norms", recovers("adam_on_rest"))
    return [
        claim(f"{arm.capitalize()} ties", f"The validation loss of {arm.capitalize()} lies within {TIE:g} nats of Adam's.",
              same, tie(arm), own) for arm in ("lion", "signum")
    ] + [
        claim(
            "SGD falls behind", f"The validation loss of SGD with momentum is at least {BEHIND:g} nats above Adam's.",
            "SGD is worse in loss and in robustness.", behind, Control("arms exchanged", swapped(behind)),
        ),
        claim(
            "Adalayer recovers", f"SGD is at least {BEHIND:g} nats behind, and Adalayer with one second moment per coordinate "
            f"on head and norms alone recovers more than {RECOVERED:.0%} of that.",
            "A second moment per coordinate is needed on the last layer and the norms only.", recovers("adalayer"), elsewhere,
        ),
        claim(
            "Adam on head and norms recovers", f"SGD is at least {BEHIND:g} nats behind, and SGD with Adam on head and norms "
            f"alone recovers more than {RECOVERED:.0%} of that.",
            "Adaptivity is needed on the last layer and the norms only.", recovers("adam_on_ends"), elsewhere,
        ),
    ]  # fmt: skip


def claims(preset: FamiliesPreset) -> tuple[Claim, ...]:
    runs = set(preset.arms)
    reads = lambda claim: {
        at.partition("@")[0] for rule in (claim.criterion, claim.control.criterion) for at in rule.reads()
    }
    return tuple(claim for size in preset.sizes for claim in _claims_at(preset, size) if reads(claim) <= runs)


def plan(preset: FamiliesPreset):
    """Tune what has one rate, then the SGD of the hybrids beside Adam's best rate, and test."""
    alone = [arm for arm in preset.arms if arm not in _HYBRIDS]
    hybrids = [arm for arm in preset.arms if arm in _HYBRIDS]
    how = {"starts": preset.starts(), "factor": 2.0}
    _, best = yield from tuned(preset, [(arm, size) for size in preset.sizes for arm in alone], **how)
    beside = {}
    for size in preset.sizes if hybrids else ():
        beside |= {(arm, size): {"adam_rate": best["adam", size]} for arm in hybrids}
        own = {arm: beside[arm, size] for arm in hybrids}
        _, found = yield from tuned(preset, [(arm, size) for arm in hybrids], own, **how)
        best |= found
    yield [
        Cell(arm, size, best[arm, size], "best", "test", preset.test_seeds, beside.get((arm, size), {}))
        for size in preset.sizes for arm in preset.arms
    ]  # fmt: skip


def derive(runs):
    """The part of the gap between SGD and Adam that an arm recovers, per seed; NaN where there is none."""
    losses = {(r.arm, r.size, r.seed): r.metrics["loss"] for r in runs.select(point="best")}
    for (arm, size, seed), loss in losses.items():
        if arm not in ("adam", "sgd"):
            behind = losses["sgd", size, seed]
            gap = behind - losses["adam", size, seed]
            recovered = (behind - loss) / gap if gap > 0 else math.nan
            yield Run(arm, seed, {"recovered": recovered}, point="best", size=size)


FIGURES = (
    Curve("loss", "loss", "Training loss, each arm at its best rate", "loss (nats per word)", point="best", smooth=20,
          start=30),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per word)", log=False),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_TRAIN = FamiliesConfig(model=ModelConfig(vocab_size=2048), steps=240, eval_windows=128)
_CPU = FamiliesPreset(
    train=_TRAIN, data="kjv-words:2048", sizes=("w32",), rates=(0.01,), tuning_rates=(0.005, 0.01, 0.02),
)  # fmt: skip
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), arms=("adam", "sgd"), tuning_rates=(0.005, 0.01), sgd_rates=(0.25, 0.5), sign_rates=(0.001, 0.002),
        tuning_limit=2, tuning_seeds=(1000,),
    ),
    "cpu": _CPU,
    "cpu-sizes": dataclasses.replace(_CPU, sizes=("xs",)),
}  # fmt: skip

EXPERIMENT = Experiment(
    name="optimizer-families",
    title="Adam, Lion, Signum and SGD on words of very unequal frequency",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    derive=derive,
    figures=FIGURES,
    words={
        "recovered": "part of SGD's gap that is recovered",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
