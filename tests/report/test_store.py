"""A stored run is smaller and says the same."""

import io
import json
import shutil

import numpy as np
import polars as pl
import pytest
from PIL import Image

from repro.claims import Run, Runs
from repro.errors import ReproError
from repro.report.record import RunFolder, sha256, write_json
from repro.report.store import BITS, COLOURS, POINTS, few_colours, round_bits, store, thin


def _png():
    """A picture of many colours."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)).save(buffer, format="png")
    return buffer.getvalue()


def _curves(steps, **more):
    keys = {"arm": "a", "size": "", "point": "", "phase": "test", "rate": 0.1, "seed": 0}
    table = pl.DataFrame({"step": np.arange(steps, dtype=np.int32), "loss": np.linspace(3, 2, steps, dtype=np.float32)})
    return table.with_columns(pl.lit(value).alias(name) for name, value in (keys | more).items())


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    write_json(folder.path / "run.json", {"schema": 1, "experiment": "x"})
    (folder.path / "report.md").write_text("# x\n")
    (folder.path / "figures").mkdir()
    (folder.path / "figures" / "a.png").write_bytes(_png())
    curves = pl.concat([_curves(100), _curves(100, phase="tuning")])
    curves = curves.with_columns(pl.Series("head_logits", [[1.0]] * len(curves)))
    folder.write_results(Runs([Run("a", 0, {"loss": 0.1 + 0.2})]), curves)
    folder.seal({"verdicts": [], "experiment": "x"})
    return folder.path


def test_scalars_are_whole_and_curves_thinned(run, tmp_path):
    store(run, tmp_path / "out")
    _, verdict, _ = RunFolder(tmp_path / "out").sealed()
    for name in ("runs.parquet", "run.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run / name).read_bytes()
    (thinned,) = verdict["thinned"]
    assert "every k-th recorded step and the last" in thinned["rule"]
    assert thinned["from_sha256"] == sha256(run / "metrics.parquet")
    curves = pl.read_parquet(tmp_path / "out" / "metrics.parquet")
    assert curves["step"].to_list() == [*range(0, 99, 3), 99]
    assert set(curves["phase"]) == {"test"} and "head_logits" not in curves.columns


def test_a_folder_is_made_small_in_place_once(run):
    store(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    RunFolder(run).sealed()
    store(run)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


def test_the_rule_of_an_earlier_version_is_kept(run):
    folder = RunFolder(run)
    _, verdict, _ = folder.sealed()
    folder.seal({"verdicts": verdict["verdicts"], "curves": "every 10th step and the last"})
    store(run)
    _, verdict, _ = folder.sealed()
    assert [entry["from_sha256"] is None for entry in verdict["thinned"]] == [True, False] and "curves" not in verdict


@pytest.mark.parametrize("steps", [1, 2, POINTS - 1, POINTS, POINTS + 1, 300, 4000])
def test_every_run_keeps_its_ends_and_at_most_so_many_points(steps):
    kept = thin(pl.concat([_curves(steps), _curves(7, seed=1)]))
    first = kept.filter(pl.col("seed") == 0)["step"].to_list()
    assert first[0] == 0 and first[-1] == steps - 1 and len(first) <= POINTS
    assert kept.filter(pl.col("seed") == 1)["step"].to_list() == list(range(7))
    gaps = np.diff(first)[:-1]
    assert len(set(gaps)) <= 1


def test_values_keep_twelve_bits_and_what_diverged():
    values = np.array([1.0, -3.14159274, 1e-30, 6e4, np.nan, np.inf, -np.inf, 3.4e38, 0.0], np.float32)
    rounded = round_bits(values)
    assert np.array_equal(rounded[4:7], values[4:7], equal_nan=True) and rounded[8] == 0 and np.isfinite(rounded[7])
    finite = np.isfinite(values) & (values != 0)
    assert np.all(np.abs(rounded[finite] / values[finite] - 1) <= 2.0**-BITS)
    mantissa, _ = np.frexp(rounded[finite].astype(float))
    assert np.array_equal(mantissa * 2**BITS, np.round(mantissa * 2**BITS))


def test_nulls_stay_nulls():
    curves = _curves(3).with_columns(pl.Series("other", [None, 1.0, float("nan")], dtype=pl.Float32))
    kept = thin(curves)["other"]
    assert kept[0] is None and kept[1] == 1 and np.isnan(kept[2])


def test_figures_have_few_colours():
    small = few_colours(_png())
    assert len(small) < len(_png()) and len(Image.open(io.BytesIO(small)).getcolors()) <= COLOURS
    assert few_colours(small) == small


def test_the_colour_of_a_thin_line_is_exact():
    pixels = np.full((200, 200, 3), 255, np.uint8)
    pixels[:100] = np.indices((100, 200)).sum(0)[..., None] % 256
    pixels[150] = (213, 94, 0)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    assert Image.open(io.BytesIO(few_colours(buffer.getvalue()))).convert("RGB").getpixel((7, 150)) == (213, 94, 0)


def test_an_edited_run_is_refused(run, tmp_path):
    record = json.loads((run / "run.json").read_text()) | {"experiment": "y"}
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(ReproError, match="run.json was edited"):
        store(run, tmp_path / "out")


def test_a_folder_with_something_in_it_is_not_overwritten(run, tmp_path):
    shutil.copytree(run, tmp_path / "out")
    with pytest.raises(ReproError, match="not an empty folder"):
        store(run, tmp_path / "out")
