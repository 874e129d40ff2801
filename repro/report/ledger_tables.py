"""The ledgers N1 to N10 of every arm: whole, or as what differs from those that the record has for the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tables = Mapping[str, Mapping[str, Any]]  # "N1" -> title and rows


def fold(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Arm -> ledger -> `{"but": rows}`: the rows that differ from the record's `ledgers`, None for one that the arm
    does not have. A ledger without any is left out."""
    common, folded = record.get("ledgers") or {}, {}
    for arm, tables in ledgers_by_arm(record).items():
        folded[arm] = {}
        for name in sorted({*common, *tables}, key=in_order):
            usual, own = _rows(common, name), _rows(tables, name)
            but = {entry: own.get(entry) for entry in [*own, *usual] if own.get(entry) != usual.get(entry)}
            if but:
                title = {} if name in common else {"title": tables[name].get("title", "")}
                folded[arm][name] = {**title, "but": but}
    return folded


def ledgers_by_arm(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Arm -> ledger -> title and all rows, whichever way the record holds them; empty where it holds none."""
    common, whole = record.get("ledgers") or {}, {}
    for arm, tables in (record.get("ledgers_by_arm") or {}).items():
        if any("rows" in table for table in tables.values()):
            whole[arm] = dict(tables)
            continue
        whole[arm] = {}
        for name in sorted({*common, *tables}, key=in_order):
            own = tables.get(name) or {}
            rows = {**_rows(common, name), **(own.get("but") or {})}
            title = (common.get(name) or own).get("title", "")
            whole[arm][name] = {"title": title, "rows": {entry: v for entry, v in rows.items() if v is not None}}
    return whole


def _rows(tables: Tables, name: str) -> dict[str, Any]:
    return dict((tables.get(name) or {}).get("rows") or {})


def in_order(name: str) -> tuple[int, str]:
    """The key that sorts names of ledgers: N2 before N10."""
    return len(name), name
