"""An experiment: claims, arms, presets, and the plan that asks for runs."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro.claims.canonical import digest
from repro.claims.claim import Claim
from repro.claims.ledger import ledger_row
from repro.claims.runs import PHASES, Run, Runs, parse_place
from repro.claims.statistics import MAX_PAIRS
from repro.claims.verdict import ALPHA, RULE_VERSION
from repro.errors import ReproError

Scalar = bool | int | float | str
Plan = Callable[[Any], Generator[Sequence["Cell"], Runs, None]]


@dataclass(frozen=True)
class Arm:
    """One of the things compared: `name` in code, `label` for readers, `settings` for whoever trains it.

    ReproError if the name is empty or holds "@" or "/", or a setting is not a bool, int, float or str.
    """

    name: str
    label: str
    settings: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self):
        if parse_place(self.name).arm != self.name:
            raise ReproError(f"an arm's name has no '@' or '/', unlike {self.name!r}")
        _check_settings(self.name, self.settings)


@dataclass(frozen=True)
class Cell:
    """A request for training runs: one arm at one size, rate and point, over some seeds.

    `settings` override the arm's. ReproError for an unknown phase, no or repeated seeds, or a rate that is not finite
    and positive.
    """

    arm: str
    size: str
    rate: float
    point: str
    phase: str
    seeds: tuple[int, ...]
    settings: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if self.phase not in PHASES:
            raise ReproError(f"the phase of a cell is one of {', '.join(PHASES)}, not {self.phase!r}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ReproError(f"a cell of {self.arm} needs one or more different seeds, not {list(self.seeds)}")
        if not 0 < self.rate < math.inf:
            raise ReproError(f"a cell of {self.arm} has the rate {self.rate}; a rate is finite and positive")
        _check_settings(self.arm, self.settings)


def _check_settings(arm: str, settings: Mapping[str, Scalar]):
    for name, value in settings.items():
        if not isinstance(value, Scalar):
            raise ReproError(f"setting {name!r} of arm {arm} is a {type(value).__name__}, not a bool, number or string")


@dataclass(frozen=True)
class Experiment:
    """Everything fixed before the first run.

    Fields:
        name, title: in code and for readers.
        claims: the claims, or a function preset -> claims where a preset cannot judge them all.
        arms: what is compared.
        presets: name -> frozen dataclass. Fields with a meaning here, where present: `tuning_seeds`, `test_seeds`,
            and `evidence` (true if verdicts under this preset count as evidence).
        plan: preset -> generator. It yields lists of `Cell` and is sent back the `Runs` of everything trained so
            far, so that a rate may be chosen on tuning seeds before test cells are asked for. None if nothing trains.
        checks: preset -> runs of deterministic checks, for M claims.
        derive: runs -> runs with metrics computed from others.
        check_arms: what only `checks` or `derive` produce: names, or an `Arm` with a label where a figure shows it.
        figures: what the report draws, in the report's own terms; no verdict depends on it.
        words: metric -> what it is, with its unit, for those that no figure labels.

    ReproError at construction if an arm or a claim stands twice, a claim is not in the ledger, a criterion reads an
    unknown arm, tuning and test seeds overlap, or an evidence preset has too few seeds n for its largest family of m
    D claims: with 2^-n > alpha / m not even unanimous seeds could support one of them.
    """

    name: str
    title: str
    claims: tuple[Claim, ...] | Callable[[Any], Sequence[Claim]]
    arms: tuple[Arm, ...]
    presets: Mapping[str, Any]
    plan: Plan | None = None
    checks: Callable[[Any], Iterable[Run]] | None = None
    derive: Callable[[Runs], Iterable[Run]] | None = None
    check_arms: tuple[str | Arm, ...] = ()
    figures: tuple[Any, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        names = self.names()
        _refuse_repeats(names, f"experiment {self.name}: arm")
        if not self.presets:
            raise ReproError(f"experiment {self.name} has no preset")
        for preset_name, preset in self.presets.items():
            where = f"experiment {self.name}, preset {preset_name}"
            if not dataclasses.is_dataclass(preset) or isinstance(preset, type):
                raise ReproError(f"{where}: a preset is an instance of a dataclass, not {preset!r}")
            self.check(preset, where)

    def claims_for(self, preset: Any) -> tuple[Claim, ...]:
        """The claims that a preset judges, in order."""
        return tuple(self.claims(preset) if callable(self.claims) else self.claims)

    def labelled(self) -> tuple[Arm, ...]:
        """The arms, and the check arms that have a label: all that a figure may show, in order."""
        return (*self.arms, *(arm for arm in self.check_arms if isinstance(arm, Arm)))

    def names(self) -> list[str]:
        """The names of all arms and check arms."""
        return [arm.name for arm in self.arms] + [a.name if isinstance(a, Arm) else a for a in self.check_arms]

    def arm(self, name: str) -> Arm:
        """The arm of this name, with a label; ReproError if there is none."""
        for arm in self.labelled():
            if arm.name == name:
                return arm
        known = ", ".join(arm.name for arm in self.labelled())
        raise ReproError(f"experiment {self.name} has no arm {name!r}; there is {known}")

    def settings(self, cell: Cell) -> dict[str, Scalar]:
        """The settings to train a cell with: the arm's, overridden by the cell's."""
        return {**self.arm(cell.arm).settings, **cell.settings}

    def check(self, preset: Any, where: str = ""):
        """Raise ReproError if this experiment cannot be judged under a preset, such as one changed by hand."""
        where = where or f"experiment {self.name}"
        claims = self.claims_for(preset)
        known = set(self.names())
        _refuse_repeats([claim.name for claim in claims], f"{where}: claim")
        for claim in claims:
            ledger_row(claim.id)
            rules = [claim.criterion, claim.control.criterion] if claim.criterion else []
            for at in (at for rule in rules for at in rule.reads()):
                if parse_place(at).arm not in known:
                    raise ReproError(f"{where}: claim {claim.name} reads {at!r}, which is no arm of it")
        _check_seeds(preset, claims, where)


def _refuse_repeats(names: Sequence[str], what: str):
    for name, count in Counter(names).items():
        if count > 1:
            raise ReproError(f"{what} {name!r} is there {count} times")


def _check_seeds(preset: Any, claims: Sequence[Claim], where: str):
    tuning, test = tuple(getattr(preset, "tuning_seeds", ())), tuple(getattr(preset, "test_seeds", ()))
    for phase, seeds in (("tuning", tuning), ("test", test)):
        _refuse_repeats(seeds, f"{where}: {phase} seed")
    if set(tuning) & set(test):
        raise ReproError(f"{where}: the seeds {sorted(set(tuning) & set(test))} are used for tuning and for the test")
    families = Counter(claim.family for claim in claims if claim.tier == "D")
    if not families:
        return
    if len(test) > MAX_PAIRS:
        raise ReproError(f"{where}: the exact test takes at most {MAX_PAIRS} test seeds, not {len(test)}")
    largest = max(families.values())
    if getattr(preset, "evidence", False) and 2.0 ** -len(test) > ALPHA / largest:
        needed = math.ceil(math.log2(largest / ALPHA))
        raise ReproError(
            f"{where}: {len(test)} test seeds cannot support any of {largest} claims of one family at alpha "
            f"{ALPHA:g}; take at least {needed}"
        )


def gather(experiment: Experiment, preset: Any, train: Callable[[list[Cell]], Iterable[Run]]) -> Runs:
    """Follow an experiment's plan to its end: train what it asks for, then add its checks and derived runs.

    `train` turns cells into runs and is called once per list that the plan yields. ReproError if a cell names an
    unknown arm or a seed is asked for in both phases.
    """
    runs = Runs()
    if experiment.plan is not None:
        steps, answer = experiment.plan(preset), None
        phase_of: dict[int, str] = {}
        while True:
            try:
                cells = list(steps.send(answer))
            except StopIteration:
                break
            for cell in cells:
                if cell.arm not in {arm.name for arm in experiment.arms}:
                    raise ReproError(f"the plan of {experiment.name} asks for {cell.arm!r}, and there is no arm {cell.arm!r} that trains")
                for seed in cell.seeds:
                    if phase_of.setdefault(seed, cell.phase) != cell.phase:
                        raise ReproError(f"the plan of {experiment.name} uses seed {seed} for tuning and for the test")
            answer = runs = runs + train(cells)
    if experiment.checks is not None:
        runs += experiment.checks(preset)
    if experiment.derive is not None:
        runs += experiment.derive(runs)
    return runs


def rule_hash(experiment: Experiment, preset: Any, stored: Mapping[str, Any] | None = None) -> str:
    """SHA-256, in hex, of all that decides the verdicts: claims, arms, the preset with its seeds, and the label rule.

    `preset` is the dataclass that is run, which may differ from the stored ones. Texts that no verdict depends on
    (titles, labels, what the source reported) are left out. The hash is the same in every process and Python
    version. ReproError if the preset holds something without a fixed text, such as a function.

    `stored` is the preset as a record holds it: given, it is hashed in place of `preset`. So a result stays valid when
    a later version adds a setting that it did not know.
    """
    judged = ("id", "variant", "tier", "family", "statement", "criterion", "control")
    return digest(
        {
            "rule": RULE_VERSION,
            "alpha": ALPHA,
            "experiment": experiment.name,
            "claims": [{name: getattr(claim, name) for name in judged} for claim in experiment.claims_for(preset)],
            "arms": [{"name": arm.name, "settings": arm.settings} for arm in experiment.arms],
            "preset": preset if stored is None else stored,
        }
    )
