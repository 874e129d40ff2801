"""`repro drill` prints and writes what a drill found, and says by its exit code whether all held."""

import json
from pathlib import Path

import pytest

from repro.drill_command import STORAGE
from repro.drills import storage, training

STORED = Path(__file__).parents[1] / "results" / "drills"


def test_without_a_name_it_lists_them(command):
    code, said, _ = command("drill")
    assert code == 0 and all(name in said for name in (*training.DRILLS, *STORAGE))


@pytest.mark.parametrize("off_equals_engine", [True, False])
def test_a_drill_in_training(command, tmp_path, monkeypatch, off_equals_engine):
    found = json.loads((STORED / "flipped-bit.json").read_text()) | {"off_equals_engine": off_equals_engine}
    monkeypatch.setattr(training, "run", lambda name: found if name == "flipped-bit" else None)
    code, said, _ = command("drill", "flipped-bit", "--out", tmp_path / "new" / "found.json")
    assert code == (0 if off_equals_engine else 1)
    assert json.loads((tmp_path / "new" / "found.json").read_text()) == found
    words = " ".join(said.split())
    assert "36 of 46 signals see it in most runs; the first 12 are shown." in words
    assert "With guards: at worst 0 nats above the run without the fault, at the end 0; 8 of 8 recover" in words
    assert "when loss > ema + 1 then rollback 1: in 8 of 8 runs, 0 to 0 steps after the fault." in words


def test_a_drill_of_storage(command, tmp_path, monkeypatch):
    case = {"fault": "missing file", "detected": True, "went_on_from": 10, "equal": True, "moments": {"early": 2}}
    calls = []

    def called(name, equal=True):
        return lambda *args, **options: calls.append((name, args[0], options)) or case | {"equal": equal}

    monkeypatch.setattr(storage, "missing_file", called("missing_file"))
    monkeypatch.setattr(storage, "full_disk", called("full_disk", equal=False))
    monkeypatch.setattr(storage, "kill", called("kill"))
    code, said, _ = command("drill", "missing-file", "--out", tmp_path / "found.json")
    assert code == 0 and "went on from: 10" in said and "moments: early 2" in said and "equal: yes" in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["cases"] == [case] and found["kind"] == "storage" and found["schema"] == training.SCHEMA
    code, said, _ = command("drill", "full-disk")  # twice, by a limit and by a device
    assert code == 1 and said.count("equal: NO") == 2
    assert [call[2]["how"] for call in calls[1:]] == ["limit", "device"] and calls[1][1] != calls[2][1]
    assert command("drill", "kill")[0] == command("drill", "kill", "--n", "7")[0] == 0
    assert [call[1] for call in calls[3:]] == [3, 7]


def test_refusals(refused, tmp_path):
    assert "unknown" in refused("drill", "nope")
    assert "kills" in refused("drill", "nan-gradient", "--n", "3") and "kills" in refused("drill", "kill", "--n", "0")
    (tmp_path / "there").write_text("")
    assert "exists" in refused("drill", "nan-gradient", "--out", tmp_path / "there")
