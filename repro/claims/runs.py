"""The scalars of trained networks, and the one way a criterion may read them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from repro.errors import ReproError

PHASES = ("tuning", "test")


class Place(NamedTuple):
    """Where a value is read: an arm, and optionally a point of its ladder and a model size."""

    arm: str
    point: str | None
    size: str | None


def parse_place(at: str) -> Place:
    """Read "arm", "arm@point", "arm/size" or "arm@point/size". ReproError for anything else."""
    head, slash, size = at.partition("/")
    arm, sign, point = head.partition("@")
    empty = not arm or (sign and not point) or (slash and not size)
    if empty or "@" in point or "/" in size or "@" in size:
        raise ReproError(f"{at!r} is not a place to read from; write arm, arm@point, arm/size or arm@point/size")
    return Place(arm, point or None, size or None)


@dataclass(frozen=True)
class Run:
    """The scalars of one trained network (or of one deterministic check).

    Fields:
        arm: name of the arm it belongs to.
        seed: seed of initialisation and data order; runs of two arms with the same seed form a pair.
        metrics: name -> value, kept as floats. A diverged run keeps its NaN or infinity.
        point: where on the arm's ladder it stands, such as "best" or "stress"; empty if there is only one.
        size: name of the model size; empty if there is only one.
        rate: learning rate, NaN where none applies.
        phase: "tuning" (a rate is chosen on it) or "test" (a claim is judged on it).

    ReproError if the phase is unknown or a name holds "@" or "/".
    """

    arm: str
    seed: int
    metrics: Mapping[str, float]
    point: str = ""
    size: str = ""
    rate: float = math.nan
    phase: str = "test"

    def __post_init__(self):
        if self.phase not in PHASES:
            raise ReproError(f"the phase of a run is one of {', '.join(PHASES)}, not {self.phase!r}")
        if not self.arm or any(sign in name for name in (self.arm, self.point, self.size) for sign in "@/"):
            raise ReproError(f"arm {self.arm!r}, point {self.point!r}, size {self.size!r}: '@' and '/' are separators")
        object.__setattr__(self, "metrics", {name: float(value) for name, value in self.metrics.items()})

    @property
    def place(self) -> str:
        """The full address of this run, as `parse_place` reads it."""
        return self.arm + (f"@{self.point}" if self.point else "") + (f"/{self.size}" if self.size else "")


class Runs:
    """An immutable collection of `Run`.

    ReproError if two runs agree in arm, point, size, rate, phase and seed: one of them would be picked by hand.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Iterable[Run] = ()):
        self._rows = tuple(rows)
        seen = set()
        for row in self._rows:
            # repr, because NaN (no rate) is not equal to itself.
            key = (row.place, repr(float(row.rate)), row.phase, row.seed)
            if key in seen:
                raise ReproError(f"two {row.phase} runs of {row.place} at rate {row.rate:g} have the seed {row.seed}")
            seen.add(key)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __add__(self, more: Iterable[Run]) -> "Runs":
        return Runs((*self._rows, *more))

    def __repr__(self) -> str:
        return f"Runs({len(self._rows)} runs of {', '.join(sorted({row.place for row in self._rows})) or 'nothing'})"

    def select(
        self, arm: str | None = None, point: str | None = None, size: str | None = None, phase: str | None = "test"
    ) -> "Runs":
        """The runs that agree with every value given; None leaves that field free. May be empty."""
        wanted = {"arm": arm, "point": point, "size": size, "phase": phase}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return Runs(row for row in self._rows if all(getattr(row, name) == value for name, value in wanted.items()))

    def values(self, metric: str, at: str, size: str | None = None) -> dict[int, float]:
        """Seed -> value of `metric` over the test runs at one place, seeds ascending.

        Args:
            metric: name of a scalar. Runs that do not report it are passed over.
            at: "arm", "arm@point", "arm/size" or "arm@point/size".
            size: the same as "/size" in `at`, for criteria that go through several sizes.

        ReproError if nothing there reports the metric, if `at` fits several places (say which one is meant),
        if two runs share a seed, or if `at` and `size` name different sizes.
        """
        arm, point, own_size = parse_place(at)
        if size is not None and own_size not in (None, size):
            raise ReproError(f"{at!r} is read at size {size!r}; name the size once")
        here = self.select(arm, point, own_size if size is None else size)
        where = at if size is None or own_size else f"{at}/{size}"
        found = [row for row in here if metric in row.metrics]
        if not found:
            raise ReproError(f"no test run at {where!r} reports {metric!r}; {self._what_is_there(here)}")
        places = sorted({row.place for row in found})
        if len(places) > 1:
            raise ReproError(f"{where!r} fits {', '.join(places)}; name one of them")
        by_seed: dict[int, float] = {}
        for row in sorted(found, key=lambda row: row.seed):
            if row.seed in by_seed:
                raise ReproError(f"two test runs at {where!r} report {metric!r} for the seed {row.seed}")
            by_seed[row.seed] = row.metrics[metric]
        return by_seed

    def _what_is_there(self, here: "Runs") -> str:
        if len(here):
            return f"there is {', '.join(sorted({name for row in here for name in row.metrics}))}"
        places = sorted({row.place for row in self.select()})
        return f"test runs exist at {', '.join(places)}" if places else "there are no test runs"
