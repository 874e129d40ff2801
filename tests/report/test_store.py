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
from repro.report.ledger_tables import fold, ledgers_by_arm
from repro.report.picture import COLOURS, PIXELS, small_picture
from repro.report.record import RunFolder, sha256, write_json
from repro.report.store import BITS, POINTS, round_bits, short_report, store, thin


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
    assert pl.read_parquet(tmp_path / "out" / "runs.parquet").equals(pl.read_parquet(run / "runs.parquet"))
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == json.loads((run / "run.json").read_text())
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


def test_only_metrics_that_a_rule_or_a_figure_over_steps_reads_are_kept():
    curves = _curves(3).with_columns(pl.lit(1.0).alias("max_logit"), pl.lit(2.0).alias("unread"))
    assert thin(curves, {"loss", "max_logit"}).columns == [*_curves(3).columns, "max_logit"]
    assert "unread" in thin(curves).columns


@pytest.mark.parametrize("own", [{"rate": "1"}, {"rate": "2", "clip": "off"}, {"clip": "on"}, {}])
def test_ledgers_of_arms_are_whole_again(own):
    usual = {
        "N6": {"title": "update", "rows": {"rate": "1", "clip": "off"}},
        "N7": {"title": "shape", "rows": {"D": 8}},
    }
    by_arm = {"a": usual, "b": {"N6": {"title": "update", "rows": own}, "N7": usual["N7"]}}
    record = {"ledgers": usual, "ledgers_by_arm": by_arm}
    folded = record | {"ledgers_by_arm": fold(record)}
    assert folded["ledgers_by_arm"]["a"] == {} and len(json.dumps(folded)) < len(json.dumps(record))
    assert ledgers_by_arm(folded) == ledgers_by_arm(record) == by_arm
    assert fold(folded) == folded["ledgers_by_arm"]


REPORT = """# Title

Preset cpu.

## Figures

![Loss](figures/loss.png)

Loss: by step.

![Effects](figures/effects.png)

Effects: diamonds.

## Claim by claim

### K2-1: supported

- **Reason**: such.

| seed 100 | seed 101 |
| --- | --- |
| 1 | 2 |

## Test runs

| arm | loss |
| --- | --- |
| a | 1 |

## What was run

| setting | value |
| --- | --- |
| steps | 3 |

## To run it again

```
repro run x
```
"""


def test_a_report_loses_only_what_the_files_beside_it_hold():
    short = short_report(REPORT, ["effects"])
    for gone in ("Effects", "effects.png", "seed 100", "Test runs", "| a | 1 |", "What was run"):
        assert gone not in short, gone
    for kept in ("Preset cpu", "loss.png", "Loss: by step.", "**Reason**", "Not in this copy", "repro run x"):
        assert kept in short, kept
    assert short_report(short, ["effects"]) == short and short_report("# x\n") == "# x\n"


def _as_png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(buffer, format="png")
    return buffer.getvalue()


def test_figures_have_few_pixels_and_colours():
    wide = _as_png(np.random.default_rng(0).integers(0, 256, (6, PIXELS + 100, 3)))
    small = Image.open(io.BytesIO(small_picture(wide)))
    assert small.width == PIXELS and len(small.getcolors()) <= COLOURS
    assert small_picture(small_picture(wide)) == small_picture(wide)
    assert len(small_picture(_png())) < len(_png())


def test_lines_and_areas_keep_their_colour_and_a_scale_of_colours_its_steps():
    pixels = np.full((200, 400, 3), 255)
    pixels[:100] = np.indices((100, 400)).sum(0)[..., None] // 2 % 256
    pixels[150] = (213, 94, 0)
    pixels[160:170] = (213, 230, 241)
    pixels[170:180] = (211, 228, 240)
    small = Image.open(io.BytesIO(small_picture(_as_png(pixels)))).convert("RGB")
    assert [small.getpixel((7, y)) for y in (150, 165, 175)] == [(213, 94, 0), (213, 230, 241), (211, 228, 240)]
    scale = np.repeat(np.linspace(0, 255, 100)[None, :, None], 50, 0) * [1, 0.5, 0.25]
    assert len(Image.open(io.BytesIO(small_picture(_as_png(scale)))).getcolors()) == 100


def test_an_edited_run_is_refused(run, tmp_path):
    record = json.loads((run / "run.json").read_text()) | {"experiment": "y"}
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(ReproError, match="run.json was edited"):
        store(run, tmp_path / "out")


def test_a_folder_with_something_in_it_is_not_overwritten(run, tmp_path):
    shutil.copytree(run, tmp_path / "out")
    with pytest.raises(ReproError, match="not an empty folder"):
        store(run, tmp_path / "out")
