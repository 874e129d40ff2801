"""Reading the fields of a `config.json`, with a note on what became of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from repro.errors import ReproError

Fate = Literal["kept", "approximated", "dropped"]


class Note(NamedTuple):
    """What became of one field: kept; approximated by something else, which makes it another model; or dropped, since
    it says nothing about the forward pass."""

    field: str
    value: Any
    fate: Fate
    remark: str = ""


REQUIRED = object()
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    list: "a list",
    dict: "a table",
}


class Fields:
    """The fields of one `config.json`. Each is taken once; `left` are those that nobody asked for.

    All methods raise `ReproError`, naming the field.
    """

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.family, self.notes = family, []
        self._left = dict(config)

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(self._left)

    def value(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """The field, without a note; `default` where it is absent or null."""
        value = self._left.pop(name, None)
        if value is None:
            if default is REQUIRED:
                raise ReproError(f"config.json has no {name}, which a {self.family} model needs.")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ReproError(f"config.json: {name} is {value!r}; it must be {_WORDS[kind]}.")
        return value

    def keep(self, name: str, kind: type = int, default: Any = REQUIRED, *, remark: str = "") -> Any:
        """The field, which the model has too."""
        given = name in self._left
        value = self.value(name, kind, default)
        if given:
            self.notes.append(Note(name, value, "kept", remark))
        return value

    def choose(self, name: str, meanings: Mapping[str, Any], default: str | None = None) -> Any:
        """What the model has for one of the words that are known."""
        word = self.keep(name, str, REQUIRED if default is None else default)
        if word not in meanings:
            raise ReproError(
                f"config.json: {name} {word!r} is not built; for {self.family} it is {' or '.join(meanings)}."
            )
        return meanings[word]

    def fixed(self, name: str, allowed: Any, why: str) -> None:
        """A field that may only have one value, or be absent."""
        value = self._left.pop(name, None)
        if value is not None and value != allowed:
            raise ReproError(f"config.json: {name} is {value!r} and must be {allowed!r}: {why}.")
        if value is not None:
            self.notes.append(Note(name, value, "kept"))

    def approximate(self, name: str, remark: str) -> Any:
        """The field as it stands, of something that is not built; None where it is absent."""
        value = self._left.pop(name, None)
        if value is not None:
            self.notes.append(Note(name, value, "approximated", remark))
        return value

    def note(self, name: str, fate: Fate, remark: str) -> None:
        """Changes the note on a field that was taken."""
        self.notes = [n._replace(fate=fate, remark=remark) if n.field == name else n for n in self.notes]

    def drop(self, names: Iterable[str], remark: str) -> None:
        for name in names:
            if name in self._left:
                self.notes.append(Note(name, self._left.pop(name), "dropped", remark))
