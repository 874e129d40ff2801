"""Structural guards: what a run does between chunks when a rule has tripped.

A run goes back to a state before the trip, or on from the present boundary, in a program of its own; the other runs of
its job are not touched. A run that only goes back does the same steps again to the bit, unless a batch was replaced or
something other than the numbers was at fault. What it did before stays in the events, not in the curves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from repro.train.compiled import steps_per_chunk
from repro.train.config import TrainConfig, with_settings
from repro.train.guards import FOREVER, Rule
from repro.train.job import Job
from repro.train.step import TrainState

Curves = dict[str, np.ndarray]

MOST_RETURNS = 8
"""Times that one run may go back. After them its structural rules are silent, so that every run comes to an end."""


@dataclasses.dataclass
class Course:
    """Where a run has left the course of its job: steps whose batch is replaced by that of another data step, settings
    that hold until a step, and how often it went back."""

    replaced: dict[int, int] = dataclasses.field(default_factory=dict)
    modes: list[tuple[dict[str, Any], int]] = dataclasses.field(default_factory=list)
    returns: int = 0

    def settings(self, step: int) -> dict[str, Any]:
        """The settings that hold at a step."""
        return {name: value for settings, until in self.modes if step < until for name, value in settings.items()}


class Supervisor:
    """The structural rules of a job. States are on the host, [runs, ...]; `courses` and `events` are plain data."""

    def __init__(self, job: Job) -> None:
        self.job, self.rules = job, job.config.rules
        self._length = steps_per_chunk(job.config, job.mesh)
        self._structural = np.array([rule.structural for rule in self.rules], bool)
        self._depth = 1 + math.ceil(max((rule.back for rule in self.rules), default=0) / self._length)
        self.snapshots: list[tuple[int, TrainState]] = []
        self.courses = [Course() for _ in job.lanes]
        self.events: list[dict[str, Any]] = []
        self._older: dict[int, TrainState] = {}
        """States of the runs that carry older parameters, which the job's own state has no place for."""

    @property
    def needed(self) -> bool:
        """Whether there is any structural rule."""
        return bool(self._structural.any())

    @property
    def settled(self) -> bool:
        """Whether the job's own state says everything, so that it can be saved."""
        return not self._older

    def remember(self, step: int, state: TrainState) -> None:
        """The state before the chunk that begins at `step`."""
        self.snapshots = [*self.snapshots, (step, state)][-self._depth :]

    def look(self, start: int, stop: int, state: TrainState, curves: Sequence[Curves]) -> bool:
        """After a chunk: sends runs back or into other programs, and writes into `state` and `curves` what they do
        there. Returns whether it did."""
        changed = False
        for lane, course in enumerate(self.courses):
            if course.settings(start) or any(start <= step < stop for step in course.replaced):
                begin = self._older.pop(lane, None) or _pick(self.snapshots[-1][1], lane)
                self._travel(lane, start, begin, stop, state, curves)
                changed = True
            elif (trip := self._trip({name: v[:, lane : lane + 1] for name, v in curves[-1].items()})) is not None:
                begin, own = self._respond(lane, start + trip, curves, stop, _pick(state, lane))
                self._travel(lane, begin, own, stop, state, curves)
                changed = True
        return changed

    def _trip(self, metrics: Curves) -> int | None:
        """The first step of a chunk [steps, 1, ...] at which a structural rule tripped."""
        fired_S = (metrics["guard_fired"][:, 0] & self._structural).any(-1)
        return int(fired_S.argmax()) if fired_S.any() else None

    def _travel(
        self, lane: int, position: int, own: TrainState, stop: int, state: TrainState, curves: Sequence[Curves]
    ) -> None:
        """Carries one run from the boundary `position` to `stop`, chunk by chunk, in the programs that its course asks
        for."""
        while position < stop:
            end = min(position - position % self._length + self._length, stop)
            job = self._alone(lane, position)
            own = _fitted(job, own)
            self._keep(lane, position, own)
            after, metrics = job.advance(job.seats.put(own), position, end)
            own, found = job.seats.take(after), job.take(metrics)
            _write(curves, lane, position, found)
            trip = self._trip(found)
            if trip is None:
                position = end
            else:
                position, own = self._respond(lane, position + trip, curves, end, own)
        if self.courses[lane].settings(stop).get("routing_lag"):
            self._older[lane] = own
        _store(state, lane, _fitted(self.job, own))

    def _respond(
        self, lane: int, step: int, curves: Sequence[Curves], boundary: int, own: TrainState
    ) -> tuple[int, TrainState]:
        """Where a run goes on, and with what state, after structural rules tripped at `step`; `own` is its state at
        `boundary`, the end of the chunk."""
        course = self.courses[lane]
        fired_R = _at(curves, "guard_fired", lane, step) & self._structural
        rules = {r: rule for r, rule in enumerate(self.rules) if fired_R[r]}
        back, position = max(rule.back for rule in rules.values()), boundary
        if back:
            course.returns += 1
            place = [i for i, (at, _) in enumerate(self.snapshots) if at <= step - back]
            position, snapshot = self.snapshots[place[-1] if place else 0]
            own = _pick(snapshot, lane)
        until = np.array(own.guards["until"])
        for r, rule in rules.items():
            until[0, r] = FOREVER if rule.steps == FOREVER else (step if back else boundary) + rule.steps
            if rule.settings:
                course.modes.append((rule.settings, int(until[0, r])))
            if rule.action == "quarantine":  # the batch of a data step that no run reaches
                course.replaced |= {step + i: self.job.config.steps + step + i for i in range(rule.steps)}
            value = float(_at(curves, rule.signal, lane, step))
            self.events.append(_event(lane, step, rule, value) | {"back_to": position if back else None})
        if course.returns >= MOST_RETURNS:
            until[0, self._structural] = FOREVER
            self.events.append({"lane": lane, "step": step, "action": "none", "rule": "the last return of this run"})
        return position, dataclasses.replace(own, guards=own.guards | {"until": until})

    def _alone(self, lane: int, step: int) -> Job:
        """The job of one run, as its course has it at a step."""
        course, job = self.courses[lane], self.job
        config = _with_modes(job.config, course.settings(step))
        return Job(config, [job.lanes[lane]], job.corpus, job.mesh, [course.replaced])

    def _keep(self, lane: int, step: int, own: TrainState) -> None:
        """The state of one run at a boundary, in place of what it was there before."""
        for at, snapshot in self.snapshots:
            if at == step:
                _store(snapshot, lane, _fitted(self.job, own))

    def notes(self) -> dict[str, Any]:
        """What must be known beside the states to go on from a save, as plain data."""
        return {
            "snapshots": [step for step, _ in self.snapshots],
            "courses": [dataclasses.asdict(course) for course in self.courses],
            "events": self.events,
        }

    def recall(self, notes: Mapping[str, Any], states: Sequence[TrainState]) -> None:
        """Goes on from `notes` and the states of its snapshots."""
        self.snapshots = [(step, _host(state)) for step, state in zip(notes["snapshots"], states, strict=True)]
        self.events = [*notes["events"]]
        self.courses = [
            Course(
                {int(step): data for step, data in c["replaced"].items()}, [(s, u) for s, u in c["modes"]], c["returns"]
            )
            for c in notes["courses"]
        ]


def structural_events(supervisor: Supervisor, curves: Curves) -> list[dict[str, Any]]:
    """What a supervisor did; `after` is the signal at that step in the run as it went on."""
    known = [event for event in supervisor.events if "signal" in event]
    after = [{"after": float(curves[event["signal"]][event["step"], event["lane"]])} for event in known]
    return [event | more for event, more in zip(known, after, strict=True)] + [
        event for event in supervisor.events if "signal" not in event
    ]


def numeric_events(rules: Sequence[Rule], curves: Curves) -> list[dict[str, Any]]:
    """Where rules tripped that act inside the step: one event for each stretch of steps in a row."""
    events = []
    for r, rule in enumerate(rules):
        if rule.structural:
            continue
        for lane in range(curves["loss"].shape[1]):
            steps = np.flatnonzero(curves["guard_fired"][:, lane, r])
            for stretch in np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1):
                if len(stretch):
                    first = int(stretch[0])
                    found = _event(lane, first, rule, float(curves[rule.signal][first, lane]))
                    events.append(found | {"times": len(stretch)})
    return events


def _event(lane: int, step: int, rule: Rule, value: float) -> dict[str, Any]:
    return {"lane": lane, "step": step, "rule": rule.text, "signal": rule.signal, "value": value, "action": rule.action}


def _with_modes(config: TrainConfig, settings: dict[str, Any]) -> TrainConfig:
    return with_settings(config, settings) if settings else config


def _host(state: Any) -> Any:
    """Arrays on the host that can be written to."""
    return jax.tree.map(np.array, state)


def _fitted(job: Job, own: TrainState) -> TrainState:
    """One run's state [1, ...] as the program of a job carries it."""
    one = jax.tree.map(lambda x: x[0], own)
    return jax.tree.map(lambda x: np.array(x)[None], job.programs.program.fitted(one))


def _pick(state: TrainState, lane: int) -> TrainState:
    """One run of a state, [1, ...]."""
    return jax.tree.map(lambda x: np.array(x[lane : lane + 1]), state)


def _store(state: TrainState, lane: int, own: TrainState) -> None:
    """Writes one run [1, ...] into a state."""
    for whole, part in zip(jax.tree.leaves(state), jax.tree.leaves(own), strict=True):
        whole[lane] = part[0]


def _place(curves: Sequence[Curves], step: int) -> tuple[Curves, int]:
    """The part of the curves that holds a step, and the step's row in it."""
    for part in curves:
        if step < len(part["loss"]):
            return part, step
        step -= len(part["loss"])
    raise IndexError(step)


def _at(curves: Sequence[Curves], name: str, lane: int, step: int) -> np.ndarray:
    part, row = _place(curves, step)
    return part[name][row, lane]


def _write(curves: Sequence[Curves], lane: int, start: int, found: Curves) -> None:
    for i in range(len(found["loss"])):
        part, row = _place(curves, start + i)
        for name, values in found.items():
            part[name][row, lane] = values[i, 0]
