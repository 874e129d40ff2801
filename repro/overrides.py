"""Presets changed from the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any

import tyro

from repro.claims import Experiment
from repro.errors import ReproError
from repro.train import SHAPE_FIELDS
from repro.train.preset import Sweep


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """`{"train.steps": 300, ...}` for a preset."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        inner, name = getattr(value, field.name), f"{prefix}{field.name}"
        flat |= flatten(inner, f"{name}.") if dataclasses.is_dataclass(inner) else {name: inner}
    return flat


def parse(preset: Any, arguments: list[str], prog: str) -> Any:
    """`preset` with fields replaced by arguments such as `--train.steps 100`.

    Raises `ReproError`, one sentence, for an unknown field or a value of the wrong type.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return _parsed(preset, arguments, prog)
    except SystemExit:
        raise ReproError(f"{prog}: {_first_paragraph(said.getvalue())}; `{prog} --help` lists every field.") from None


def help_text(preset: Any, prog: str) -> str:
    """Every field that can be overridden, with its value."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        _parsed(preset, ["--help"], prog)
    return said.getvalue()


def _parsed(preset: Any, arguments: list[str], prog: str) -> Any:
    return tyro.cli(type(preset), default=preset, args=arguments, prog=prog, config=(tyro.conf.AvoidSubcommands,))


def _first_paragraph(box: str) -> str:
    """The message inside the frame that tyro draws, up to its first rule, as one line."""
    words = []
    for line in box.splitlines()[1:]:
        text = line.strip("│╭╮╰╯ ")
        if set(text) <= {"─"}:
            break
        words.append(text)
    return " ".join(words).rstrip(".")


def changed_preset(
    experiment: Experiment, preset: Any, arguments: list[str], seeds: int | None, prog: str
) -> tuple[Any, list[str]]:
    """The preset that a command asks for, and the names of the fields that differ from the stored one.

    A changed preset does not count as evidence, where it has a field `evidence`. Raises `ReproError` for a field that
    this experiment sets itself, and for `seeds` where it has no test seeds.
    """
    if seeds is not None and not hasattr(preset, "test_seeds"):
        raise ReproError(
            f"--seeds {seeds} has no meaning for {experiment.name}, which has no test seeds; leave it out."
        )
    if isinstance(preset, Sweep):
        asked, changed = _changed_training(experiment, preset, arguments, seeds, prog)
    else:
        asked = _with_seeds(parse(preset, arguments, prog), seeds)
        changed = _differences(preset, asked)
    if changed and "evidence" not in changed and hasattr(asked, "evidence"):
        asked = dataclasses.replace(asked, evidence=False)
    return asked, changed


def _with_seeds(preset: Any, seeds: int | None) -> Any:
    if seeds is None:
        return preset
    if seeds < 1:
        raise ReproError(f"--seeds is {seeds}; it must be at least 1.")
    return dataclasses.replace(preset, test_seeds=tuple(range(seeds)))


def _differences(before: Any, after: Any) -> list[str]:
    """The dotted names of the fields in which two presets of one class differ."""
    old, new = flatten(before), flatten(after)
    return sorted(name for name in new if new[name] != old[name])


def _changed_training(
    experiment: Experiment, preset: Sweep, arguments: list[str], seeds: int | None, prog: str
) -> tuple[Sweep, list[str]]:
    """`changed_preset` of a sweep, whose named sizes and own shape are two ways of saying one thing."""
    single = len(preset.sizes) == len(preset.all_sizes()) == 1
    shown = dataclasses.replace(preset, train=preset.config(preset.sizes[0])) if single else preset
    asked = _with_seeds(parse(shown, arguments, prog), seeds)
    changed = _differences(shown, asked)
    owned = {"train.learning_rate": "--rates" if hasattr(preset, "rates") else "the plan"} | {
        f"train.{name}": "the arms" for arm in experiment.arms for name in arm.settings
    }
    for name in changed:
        if name in owned:
            raise ReproError(
                f"{name} is set by {owned[name]} in this experiment, so it cannot be changed for all runs."
            )
    shape = [name for name in changed if name.removeprefix("train.") in SHAPE_FIELDS]
    if shape:
        if "sizes" in changed or not single:
            raise ReproError(f"{shape[0]} and a named size contradict each other; give the one or the other.")
        asked = dataclasses.replace(asked, sizes=("custom",))
    else:
        asked = dataclasses.replace(asked, train=preset.train if not changed else _shape_of(asked, preset))
    return asked, changed


def _shape_of(asked: Sweep, preset: Sweep) -> Any:
    """`asked.train` with the shape fields of the stored preset, which its sizes replace anyway."""
    train = asked.train
    own = {n: getattr(preset.train, n) for n in SHAPE_FIELDS if "." not in n}
    model = {
        n.removeprefix("model."): getattr(preset.train.model, n.removeprefix("model."))
        for n in SHAPE_FIELDS
        if "." in n
    }
    return dataclasses.replace(train, model=dataclasses.replace(train.model, **model), **own)
