"""A stored run is smaller and says the same."""

import json

import numpy as np
import polars as pl
import pytest

from repro.claims import Run, Runs
from repro.errors import ReproError
from repro.report.record import RunFolder, write_json
from repro.report.store import store


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    write_json(folder.path / "run.json", {"schema": 1, "experiment": "x"})
    (folder.path / "report.md").write_text("# x\n")
    (folder.path / "figures").mkdir()
    (folder.path / "figures" / "a.png").write_bytes(b"png")
    curves = pl.DataFrame(
        {"seed": [0] * 25, "step": np.arange(25), "loss": np.linspace(3, 2, 25), "head_logits": [[1.0]] * 25}
    )
    folder.write_results(Runs([Run("a", 0, {"loss": 0.1 + 0.2})]), curves)
    folder.seal({"verdicts": [], "experiment": "x"})
    return folder.path


def test_scalars_are_whole_and_curves_thinned(run, tmp_path):
    store(run, tmp_path / "out")
    _, verdict, runs = RunFolder(tmp_path / "out").sealed()
    assert [r.metrics["loss"] for r in runs] == [0.1 + 0.2]
    assert verdict["curves"] == "every 10th step and the last"
    curves = pl.read_parquet(tmp_path / "out" / "metrics.parquet")
    assert curves["step"].to_list() == [0, 10, 20, 24] and "head_logits" not in curves.columns


def test_an_edited_run_is_refused(run, tmp_path):
    record = json.loads((run / "run.json").read_text()) | {"experiment": "y"}
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(ReproError, match="run.json was edited"):
        store(run, tmp_path / "out")
