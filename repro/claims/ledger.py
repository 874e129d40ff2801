"""The list of claims this framework is about, read from `ledger.toml`."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from repro.errors import ReproError


@dataclass(frozen=True)
class LedgerRow:
    """One published claim.

    Fields:
        id: fixed name, such as "K2-3"; code, result files and pages use it.
        system: the paper, system or subject it belongs to.
        claim: the claim in one sentence.
        reported: what its source reported, and where that stops; empty where nothing is on record.
        tier: "M" (mechanism, exact), "D" (dynamics, small runs), "S" (scale, only stated), or a mix such as "M + D".
    """

    id: str
    system: str
    claim: str
    reported: str
    tier: str


@functools.cache
def ledger() -> Mapping[str, LedgerRow]:
    """All rows by id, in the order of the file; read-only. ReproError if an id stands twice."""
    text = resources.files("repro.claims").joinpath("ledger.toml").read_text(encoding="utf-8")
    rows: dict[str, LedgerRow] = {}
    for fields in tomllib.loads(text)["row"]:
        row = LedgerRow(**fields)
        if row.id in rows:
            raise ReproError(f"the ledger has two rows with the id {row.id!r}")
        rows[row.id] = row
    return MappingProxyType(rows)


LEDGER: Mapping[str, LedgerRow] = ledger()


def ledger_row(id: str) -> LedgerRow:
    """The row of one claim. ReproError if there is none, naming the ids of the same prefix."""
    if id not in LEDGER:
        prefix = id.split("-")[0]
        near = [known for known in LEDGER if known.split("-")[0] == prefix] or list(LEDGER)
        raise ReproError(f"no claim {id!r} in the ledger; there is {', '.join(near)}")
    return LEDGER[id]
