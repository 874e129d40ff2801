"""Curves as TensorBoard event files, one folder per arm, size and rate."""

from __future__ import annotations

import time
from pathlib import Path

import polars as pl
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar

CELL = ["phase", "arm", "size", "point", "rate"]


def write_events(folder: Path, curves: pl.DataFrame, metrics: list[str]) -> None:
    """Writes the median over seeds of each metric as `metric/median`, and its largest value as `metric/max`, into
    `folder/<phase>/<arm>/<size>-<point>-<rate>/`. The file's name is fixed, so writing twice replaces: `curves` holds
    every seed of the cells that it names."""
    grouped = curves.group_by([*CELL, "step"], maintain_order=True).agg(
        *(pl.col(m).median().alias(f"{m}/median") for m in metrics), *(pl.col(m).max().alias(f"{m}/max") for m in metrics)
    )
    now = time.time()
    for (phase, arm, size, point, rate), rows in grouped.group_by(CELL, maintain_order=True):
        path = Path(folder) / phase / arm / f"{size}-{point}-{rate:g}" / "events.out.tfevents.0.repro"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        writer = RecordWriter(str(path))
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        tags = [c for c in rows.columns if "/" in c]
        for row in rows.sort("step").iter_rows(named=True):
            for tag in tags:
                event = Event(wall_time=now, step=row["step"], summary=scalar(tag, row[tag]))
                writer.write(event.SerializeToString())
        writer.close()
