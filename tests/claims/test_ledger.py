"""The ledger is data: complete, unique and well formed."""

from collections import Counter

import pytest

from repro.claims import LEDGER, ledger, ledger_row
from repro.errors import ReproError


def test_every_system_has_its_rows():
    assert Counter(row.system for row in ledger().values()) == {
        "DeepSeek-V3": 8,
        "DeepSeek-V4 and mHC": 10,
        "Kimi K2": 5,
        "Kimi K3": 7,
        "Moonlight": 4,
        "Number formats and low-precision training": 12,
        "Quantisation after and around training": 8,
        "Optimizers and scaling": 7,
        "Stability": 9,
    }


def test_rows_are_well_formed():
    for id, row in LEDGER.items():
        assert row.id == id and row.claim and "\n" not in row.claim and "  " not in row.claim
        assert set(row.tier.split(" (")[0].split(" + ")) <= {"M", "D", "S"}


def test_one_row():
    row = ledger_row("V3-1")
    assert row.tier == "D (equivalence)" and "0.25 %" in row.claim and row.reported
    with pytest.raises(ReproError, match=r"'K2-9'.*K2-1, K2-2"):
        ledger_row("K2-9")
    with pytest.raises(ReproError, match="V3-1"):
        ledger_row("nonsense")
    with pytest.raises(TypeError):
        LEDGER["X"] = row
