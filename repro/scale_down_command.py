"""`repro scale-down`: a small model with the proportions of a released one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from repro.errors import ReproError


def scale_down(args: argparse.Namespace, console: Console) -> int:
    """Prints what became of a `config.json`, and writes the small model where the arguments ask for it."""
    from repro.models import ModelConfig
    from repro.models.hugging_face import read
    from repro.models.scale_down import BYTES
    from repro.models.scale_down import scale_down as smaller

    if args.out is not None and args.out.exists():
        raise ReproError(f"{args.out} exists; name a new file.")
    reading = read(_config(args.config))
    vocab_size = BYTES if args.vocab_size is None else args.vocab_size
    model, rows = smaller(reading.model, args.width, args.layers, experts=args.experts, vocab_size=vocab_size)
    length, batch_size = _windows(model)
    console.print(f"{reading.family.title}, {_count(reading.model)} parameters; scaled down {_count(model)}.")
    table = _table("setting", "there", "here", "", "")
    for fate in ("kept", "rounded", "set", "dropped"):
        for row in rows:
            if row.fate == fate:
                table.add_row(row.setting, _shown(row.before), _shown(row.after), fate, row.remark)
        table.add_section()
    console.print(table)
    other = _table("fields of config.json", "", "")
    for fate in ("approximated", "dropped"):
        alike: dict[str, list[str]] = {}
        for note in reading.fate(fate):
            alike.setdefault(note.remark, []).append(f"{note.field} {_shown(note.value)}")
        for remark, fields in alike.items():
            other.add_row(", ".join(fields), fate, remark)
    if other.row_count:
        console.print(other)
    words = overrides(model, ModelConfig()) + [f"--train.length {length}", f"--train.batch-size {batch_size}"]
    console.print("As overrides of an experiment:\n  repro run NAME " + " ".join(words), soft_wrap=True)
    if args.out is not None:
        found = {"model": dataclasses.asdict(model), "length": length, "batch_size": batch_size}
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        console.print(f"As JSON, for repro.train.TrainConfig: {args.out}")
    return 0


def _config(name: str) -> dict[str, Any]:
    """A `config.json`, that of a folder, or that of a released model by its name."""
    from repro.models.hugging_face import read_json
    from repro.models.presets import RELEASED, released

    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if name in RELEASED and not path.exists():
        return released(name)
    if not path.exists():
        raise ReproError(f"{path} does not exist; give a config.json, its folder, or one of {', '.join(RELEASED)}.")
    return read_json(path)


_SHAPE = {("--train.model", name) for name in ("layers", "width", "heads", "ffn")}


def overrides(model: Any, default: Any, prefix: str = "--train.model") -> list[str]:
    """The words by which `repro run` makes `model` of `default`, such as `--train.model.width 256`. The shape is always
    among them, since an experiment may have another one."""
    words = []
    for field in dataclasses.fields(model):
        value, before, name = getattr(model, field.name), getattr(default, field.name), field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            words += overrides(value, before, f"{prefix}.{name}")
        elif value != before or (prefix, field.name) in _SHAPE:
            words.append(
                f"{prefix}.{name} {value}"
                if not isinstance(value, bool)
                else f"{prefix}.{'' if value else 'no-'}{name}"
            )
    return words


def _windows(model: Any) -> tuple[int, int]:
    """Tokens per window and windows per step of the plain decoder nearest in width."""
    from repro.models.config import SIZES

    nearest = min(SIZES.values(), key=lambda size: (abs(size.width - model.width), -size.length))
    return nearest.length, nearest.batch_size


def _count(model: Any) -> str:
    """The number of parameters, such as 671.0B."""
    import jax

    from repro.models import abstract

    total = sum(leaf.size for leaf in jax.tree.leaves(abstract(model)))
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if total >= size:
            return f"{total / size:.4g}{unit}"
    return str(total)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | dict):
        text = json.dumps(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("there", "here") else "left", overflow="fold")
    return table
