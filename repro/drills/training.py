"""Drills of faults in training: which monitor sees a fault first, what ends it, and what happens without that.

A small model is trained with all cheap monitors. Limits of all signals come from runs without a fault, and the rate of
false alarms is counted on others (`repro.drills.alarm`). Then the fault strikes in runs on these other seeds, once
without guards and once with those that the drill declares.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

import repro
from repro.claims.canonical import number_to_json
from repro.data import load_corpus
from repro.drills.alarm import WINDOW, alarm_step, limit, peak, scores
from repro.drills.faults import FaultConfig
from repro.models import ModelConfig
from repro.train import JobResult, Lane, Program, TrainConfig, train
from repro.train.monitors import MONITORS, MonitorConfig, group_of

SCHEMA = 1
"""Of a stored drill."""
STEPS, FAULT_STEP = 120, 80
CALIBRATION, TEST = tuple(range(1000, 1015)), tuple(range(8))
"""Seeds of the runs that limits come from, and of those that a fault strikes."""
RECOVERED = 0.1
"""Nats above the run without the fault below which a run counts as recovered."""


@dataclasses.dataclass(frozen=True)
class Drill:
    """A fault in training: what it is, its settings in a `FaultConfig`, and the guards that should end it."""

    about: str
    fault: Mapping[str, float]
    guards: tuple[str, ...]


DRILLS: Mapping[str, Drill] = MappingProxyType(
    {
        "bad-batch": Drill(
            "a batch of random tokens", {"random_tokens": 1.0}, ("when loss > ema + 1 then skip",)
        ),
        "repeated-token": Drill(
            "a batch that holds one token all along", {"repeated_token": 1.0}, ("when grad_norm > 4 ema then skip",)
        ),
        "nan-gradient": Drill(
            "one number of the gradient is not a number", {"nan_gradient": 1.0},
            ("when grad_norm nonfinite then skip",),
        ),
        "flipped-bit": Drill(
            "the highest exponent bit of a stored weight flips", {"flipped_bit": 30.0},
            ("when loss > ema + 1 then rollback 1",),
        ),
        "activation-outlier": Drill(
            "one hidden unit is 1000 times larger in one forward pass", {"outlier": 1000.0},
            ("when hidden_max > 8 ema then skip",),
        ),
    }
)  # fmt: skip

RULE = (
    f"Score of a signal: |ln|x| - mean of ln|x| over the {WINDOW} steps before|, the largest over its entries; "
    "infinite where x is not finite. Alarm: a score above the largest that the signal has in "
    f"{len(CALIBRATION)} runs without a fault, over the steps from {FAULT_STEP} on. A run has recovered from the step "
    f"on after which its loss stays less than {RECOVERED:g} nats above that of its seed without the fault."
)


def versions() -> dict[str, str]:
    """What a drill was run with."""
    packages = {name: version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint")}
    return {"repro": repro.__version__, "python": platform.python_version()} | packages


def config(drill: Drill | None = None, *, steps: int = STEPS, fault_step: int = FAULT_STEP) -> FaultConfig:
    """The run of a drill: with its fault, or without any."""
    names = tuple(monitor.name for monitor in MONITORS.values() if not monitor.dear and monitor.group != "experts")
    return FaultConfig(
        model=ModelConfig(layers=2, width=32, heads=2, ffn=86), length=32, batch_size=8, steps=steps, eval_windows=4,
        optimizer="adamw", learning_rate=0.01, schedule="constant", monitors=MonitorConfig(names=names),
        **({} if drill is None else {"fault_step": float(fault_step), **drill.fault}),
    )  # fmt: skip


def signals(result: JobResult, lane: int) -> dict[str, np.ndarray]:
    """Every metric of one run [S] or [S, ...], those of guards apart."""
    return {
        name: values[:, lane].reshape(len(values), -1)
        for name, values in result.curves.items()
        if group_of(name) != "guards"
    }


def run(name: str, *, steps: int = STEPS, fault_step: int = FAULT_STEP, calibration=CALIBRATION, test=TEST) -> dict:
    """What a drill finds, as plain data that JSON can hold; see docs/drills.md."""
    drill, corpus = DRILLS[name], load_corpus("kjv")
    clean, faulty = config(steps=steps), config(drill, steps=steps, fault_step=fault_step)
    lanes = lambda settings, seeds: [Lane(settings.numbers(), seed) for seed in seeds]
    alone = train(
        clean, [*lanes(clean, calibration), *lanes(clean, test), *lanes(faulty, test)], corpus
    )  # one program for all
    first, struck = len(calibration), len(calibration) + len(test)
    guarded = train(dataclasses.replace(faulty, guards=drill.guards), lanes(faulty, test), corpus)

    limits = {
        signal: limit(peak(scores(signals(alone, lane)[signal]), fault_step) for lane in range(first))
        for signal in signals(alone, 0)
    }
    alarms = lambda result, lane: {
        signal: alarm_step(scores(values), limits[signal], fault_step)
        for signal, values in signals(result, lane).items()
    }
    false = [alarm is not None for lane in range(first, struck) for alarm in alarms(alone, lane).values()]
    after = [alarms(alone, lane) for lane in range(struck, struck + len(test))]
    loss = alone.curves["loss"].astype(np.float64)
    reference = loss[:, first:struck]
    return {
        "schema": SCHEMA, "drill": name, "about": drill.about, "kind": "training", "fault": dict(drill.fault),
        "fault_step": fault_step, "steps": steps, "guards": list(drill.guards), "rule": RULE,
        "seeds": {"calibration": list(calibration), "test": list(test)},
        "versions": versions(),
        "platform": jax.default_backend(),
        "off_equals_engine": _same_bits(clean, alone, first, test, corpus),
        "signals": len(limits), "false_alarms": float(np.mean(false)), "budget": 1 / (len(calibration) + 1),
        "seen": _seen(after, limits, fault_step),
        "unguarded": outcome(loss[:, struck:], reference, fault_step),
        "guarded": outcome(guarded.curves["loss"].astype(np.float64), reference, fault_step) | {
            "ended_by": _ended_by(guarded, len(test), fault_step)
        },
    }  # fmt: skip


def _same_bits(clean: FaultConfig, alone: JobResult, first: int, test, corpus) -> bool:
    """Whether the engine's own program, without faults, gives the bits of the first test run."""
    own = {field.name: getattr(clean, field.name) for field in dataclasses.fields(TrainConfig)}
    plain = TrainConfig(**own)
    assert plain.program_class() is Program
    result = train(plain, [Lane(plain.numbers(), test[0])], corpus)
    pick = lambda tree, lane: jax.tree.map(lambda leaf: np.asarray(leaf)[lane], tree)
    leaves = zip(jax.tree.leaves(pick(alone.params, first)), jax.tree.leaves(pick(result.params, 0)), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


def _seen(after: list[dict[str, int | None]], limits: Mapping[str, float], fault_step: int) -> list[dict[str, Any]]:
    """The signals that give an alarm in most of the runs that a fault strikes, the first ones first: how many steps
    after the fault in each run (0: in its own step; null: never), and the limit of the score."""
    rows = []
    for signal in limits:
        steps = [None if row[signal] is None else row[signal] - fault_step for row in after]
        known = sorted(step for step in steps if step is not None)
        if 2 * len(known) > len(steps):
            median = (known + [np.inf] * (len(steps) - len(known)))[len(steps) // 2]
            rows.append((median, -len(known), signal, steps))
    return [
        {"signal": signal, "group": group_of(signal), "steps": steps, "limit": number_to_json(limits[signal])}
        for _, _, signal, steps in sorted(rows, key=lambda row: row[:3])
    ]


def outcome(loss_SW: np.ndarray, reference_SW: np.ndarray, fault_step: int) -> dict[str, Any]:
    """What became of runs, by their loss against runs without the fault: `worst` excess from the fault's step on,
    `end`, the mean excess over the last tenth of the steps, and `recovered`, after how many steps the excess stays
    below `RECOVERED` (null: not by the end), each per run."""
    excess = loss_SW - reference_SW
    excess = np.where(np.isfinite(excess), excess, np.inf)[fault_step:]
    tail = max(1, len(loss_SW) // 10)
    found: dict[str, Any] = {"worst": [], "end": [], "recovered": []}
    for run in excess.T:
        above = np.flatnonzero(run > RECOVERED)
        recovered = int(above[-1]) + 1 if len(above) else 0
        found["worst"].append(number_to_json(float(run.max())))
        found["end"].append(number_to_json(float(run[-tail:].mean())))
        found["recovered"].append(recovered if recovered < len(run) else None)
    return found


def _ended_by(result: JobResult, lanes: int, fault_step: int) -> list[dict[str, Any]]:
    """Per rule that acted: in how many runs, and after how many steps of the fault at first; also before it."""
    rows = []
    for rule in dict.fromkeys(event["rule"] for event in result.events if "signal" in event):
        events = [event for event in result.events if event.get("rule") == rule and "signal" in event]
        first = {lane: [e["step"] for e in events if e["lane"] == lane] for lane in range(lanes)}
        at = [min((s - fault_step for s in steps if s >= fault_step), default=None) for steps in first.values()]
        early = sum(step < fault_step for steps in first.values() for step in steps)
        rows.append({"rule": rule, "steps": at, "before_the_fault": early})
    return rows
