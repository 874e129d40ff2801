"""Steps of a job executed again, and whether they give the bits that were recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from repro.errors import ReproError
from repro.train.checkpoint import Checkpoints, Curves, Restored, digests
from repro.train.job import Job
from repro.train.loop import Reached, advance, restored, whole_state


@dataclasses.dataclass(frozen=True)
class Difference:
    """A metric of one run that was not what is recorded; for an array, its first entry that was not."""

    step: int
    run: int
    metric: str
    recorded: float
    replayed: float


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a replay found. Steps `start` to `step` were compared, in all `metrics`."""

    start: int
    step: int
    end: int
    """The chunk boundary until which was computed."""
    metrics: tuple[str, ...]
    differences: tuple[Difference, ...]
    """Those of the first step that differs."""
    state_equal: bool | None
    """Whether the state at `end` has the digest of the checkpoint there; None if there is none."""
    repeatable: bool | None
    """Whether a second replay gave the bits of the first; None where it was not needed."""
    accepted: tuple[str, ...] = ()
    """Differences to what wrote the checkpoint."""

    @property
    def equal(self) -> bool:
        return not self.differences and self.state_equal is not False

    @property
    def cause(self) -> str:
        """What a difference means."""
        if self.equal:
            return ""
        if not self.repeatable:
            return "a second replay differs from the first: a nondeterministic kernel, or hardware at fault"
        if self.accepted:
            return f"a second replay gives the bits of the first; what was recorded had {', '.join(self.accepted)}"
        return "a second replay gives the bits of the first: what was recorded came from other hardware or a fault then"


def replay(
    job: Job,
    step: int,
    recorded: Curves,
    saves: Checkpoints | None = None,
    *,
    accept_differences: bool = False,
    on_start: Callable[[Restored | None], None] = lambda start: None,
) -> Replay:
    """Executes `job` again up to `step`, from the last intact checkpoint in `saves` at or before it or from step 0, and
    compares every step on the way with `recorded` [step, run, ...] bit by bit. The programs are those of training, whole
    chunks. Where something differs all is done once more, to tell a cause that is there now from one that was.

    Raises `ReproError` if `recorded` does not reach to `step`, and as `Checkpoints.restore`.
    """
    stored = len(recorded["loss"]) if recorded else 0
    if not 0 <= step < stored:
        raise ReproError(
            f"step {step} is not stored; {f'steps 0 to {stored - 1} are' if stored else 'no step is, as yet'}."
        )
    start = None
    if saves is not None:
        start = restored(saves, job, at_most=step, keep_later=True, accept_differences=accept_differences)
    on_start(start)
    first = 0 if start is None else start.step
    reached = advance(job, step + 1, start)
    rows = slice(first, step + 1)
    shared = tuple(name for name in recorded if name in reached.curves)
    found = _first_difference(recorded, reached.curves, shared, rows)
    kept = None if saves is None else saves.digests_of(reached.step)
    own = None if kept is None else _digests(job, reached)
    state_equal = None if kept is None else own == kept
    repeatable = None
    if found or state_equal is False:
        again = advance(job, step + 1, start)
        same = not _first_difference(reached.curves, again.curves, shared, slice(first, reached.step))
        repeatable = same and _digests(job, again) == _digests(job, reached)
    accepted = () if start is None else start.differences
    return Replay(first, step, reached.step, shared, found, state_equal, repeatable, accepted)


def _digests(job: Job, reached: Reached) -> tuple[str, ...]:
    return digests(whole_state(job, reached.state, reached.supervisor))


def _first_difference(a: Curves, b: Curves, names: tuple[str, ...], rows: slice) -> tuple[Difference, ...]:
    """All metrics that differ at the first step at which one does."""
    flat = {}
    for name in names:
        # A table holds all arrays as float32; what was measured is turned into that, too.
        pair = [np.ascontiguousarray(c[name][rows].astype(a[name].dtype)) for c in (a, b)]
        flat[name] = [x.reshape(*x.shape[:2], -1) for x in pair]
    other = {name: _bits(x) != _bits(y) for name, (x, y) in flat.items()}
    steps = {name: np.flatnonzero(mask.any((1, 2))) for name, mask in other.items()}
    first = min((found[0] for found in steps.values() if len(found)), default=None)
    if first is None:
        return ()
    found = []
    for name, mask in other.items():
        for run in np.flatnonzero(mask[first].any(-1)):
            entry = np.flatnonzero(mask[first, run])[0]
            was, now = (float(x[first, run, entry]) for x in flat[name])
            found.append(Difference(rows.start + int(first), int(run), name, was, now))
    return tuple(found)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")
