"""Which block stands in which layer."""

from __future__ import annotations

import re
from typing import NamedTuple

from repro.errors import ReproError
from repro.models.moe_config import MoEConfig

ATTENTION = ("mha", "mla")
FFN = ("dense", "moe", "hash")


class Kind(NamedTuple):
    """One kind of block: its attention, and what follows it (a dense feed-forward block, experts that a router chooses,
    or experts that a table of token ids chooses)."""

    attention: str
    ffn: str


Segment = tuple[tuple[Kind, ...], int]
"""A unit of blocks and how often it repeats; one scan."""


def kinds(pattern: str, attention: str, layers: int, moe: MoEConfig) -> tuple[Segment, ...]:
    """The segments of `pattern`, or those that `moe` asks for where it is empty.

    Raises `ReproError` for a pattern that cannot be read, has another number of layers, or asks for experts of a model
    without any.
    """
    if not pattern:
        if not moe.experts:
            return (((Kind(attention, "dense"),), layers),)
        counts = {"dense": moe.dense_layers, "hash": moe.hash_layers}
        counts["moe"] = layers - sum(counts.values())
        return tuple(((Kind(attention, ffn),), count) for ffn, count in counts.items() if count)
    segments = tuple(_segment(text, pattern, attention) for text in _top_level(pattern))
    total = sum(len(unit) * repeats for unit, repeats in segments)
    if total != layers:
        raise ReproError(f"model.pattern {pattern!r} has {total} layers and model.layers is {layers}.")
    if not moe.experts and any(kind.ffn != "dense" for unit, _ in segments for kind in unit):
        raise ReproError(f"model.pattern {pattern!r} has experts and model.moe.experts is 0; give their number.")
    return segments


def stack_names(segments: tuple[Segment, ...]) -> tuple[str, ...]:
    """What the parameters of each segment are called in a `Transformer`."""
    return ("blocks",) if len(segments) == 1 else tuple(f"blocks_{i}" for i in range(len(segments)))


def attention_groups(segments: tuple[Segment, ...]) -> dict[str, tuple[int, ...]]:
    """The layers of every stack of attention parameters, by the path above them; empty where there is one stack."""
    found, first = {}, 0
    for name, (unit, repeats) in zip(stack_names(segments), segments, strict=True):
        for i in range(len(unit)):
            path = name if len(unit) == 1 else f"{name}/block{i}"
            found[path] = tuple(range(first + i, first + len(unit) * repeats, len(unit)))
        first += len(unit) * repeats
    return found if len(found) > 1 else {}


def _top_level(pattern: str) -> list[str]:
    """The parts between commas outside brackets."""
    parts, depth = [""], 0
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _segment(text: str, pattern: str, attention: str) -> Segment:
    found = re.fullmatch(r"(?:(\d+)\s*\*\s*)?(?:\(([^()]+)\)|([^()*]+))", text)
    names = [] if found is None else [name.strip() for name in (found[2] or found[3]).split(",")]
    unit = tuple(
        Kind(*name.split(".")) if "." in name else Kind(attention, name) for name in names if name.count(".") < 2
    )
    repeats = int(found[1] or 1) if found else 0
    if not unit or len(unit) < len(names) or not repeats or any(a not in ATTENTION or f not in FFN for a, f in unit):
        raise ReproError(
            f"model.pattern {pattern!r} cannot be read at {text!r}; write blocks such as dense, 3*(moe, mha.moe), with "
            f"{', '.join(FFN)} after an optional {' or '.join(ATTENTION)}."
        )
    return unit, repeats
