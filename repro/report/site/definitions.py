"""What each claim rests on: its equation, where it is computed, and the tests that pin it."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from repro.claims.ledger import ledger_row


@dataclass(frozen=True)
class Definition:
    """The definition behind one claim.

    Fields:
        id: of the ledger.
        equation: lines of plain text.
        code: where it is computed, as "repro.package.name".
        tests: what pins it, as "tests/file.py::test_name".
    """

    id: str
    equation: tuple[str, ...]
    code: tuple[str, ...]
    tests: tuple[str, ...]


@functools.cache
def definitions() -> Mapping[str, Definition]:
    """All definitions by claim id. ReproError if one is of a claim that the ledger does not have."""
    text = resources.files("repro.report.site").joinpath("definitions.toml").read_text(encoding="utf-8")
    found = {}
    for id, fields in tomllib.loads(text).items():
        ledger_row(id)
        found[id] = Definition(id, tuple(fields["equation"]), tuple(fields["code"]), tuple(fields["tests"]))
    return MappingProxyType(found)
