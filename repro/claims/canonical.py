"""JSON that is strict and the same everywhere: NaN and infinities as strings, one spelling for every value."""

import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from repro.errors import ReproError

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def number_to_json(x: float | None) -> float | str | None:
    """A float as strict JSON has it: itself, or "nan", "inf", "-inf"."""
    return x if x is None or math.isfinite(x) else repr(float(x))


def number_from_json(x: float | str | None) -> float | None:
    """The inverse of `number_to_json`; ReproError for any other string."""
    if isinstance(x, str):
        if x not in _NON_FINITE:
            raise ReproError(f"{x!r} is not a number; a stored one may be nan, inf or -inf")
        return _NON_FINITE[x]
    return x


def plain(value: Any, path: str = "value") -> Any:
    """Dicts, lists, strings, numbers, booleans and None that say the same as `value`.

    Dataclasses become dicts of their fields, enums their values, NumPy scalars Python numbers; a whole float becomes
    an integer, since 2 and 2.0 are one setting. ReproError, naming `path`, for anything whose text could differ
    between two processes, such as a function or a set.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), f"{path}.{f.name}") for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ReproError(f"{path} has the key {key!r}, and only strings can be hashed as keys")
        return {str(key): plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, enum.Enum):
        return plain(value.value, path)
    if value is None or isinstance(value, bool | str):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return plain(value.item(), path)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        whole = math.isfinite(value) and value == int(value) and abs(value) < 2**53
        return int(value) if whole else number_to_json(float(value))
    raise ReproError(f"{path} is a {type(value).__name__}, which has no fixed text to hash")


def digest(value: Any) -> str:
    """SHA-256, in hex, of `plain(value)` as compact JSON with sorted keys."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
