"""Curves as TensorBoard event files, one folder per arm, size and rate."""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import polars as pl
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from repro.report.record import write_atomically

CELL = ["phase", "arm", "size", "point", "rate"]


def write_events(
    folder: Path, curves: pl.DataFrame, groups: Mapping[str, str], *, sparse: Collection[str] = frozenset()
) -> None:
    """Writes the median over seeds of each metric of `groups` as `group/metric/median`, and its largest value as
    `group/metric/max`, into `folder/<phase>/<arm>/<size>-<point>-<rate>/`. TensorBoard shows a group as one section.

    Metrics of `sparse` are measured in some steps only and NaN in all others, which are left out. The file's name is
    fixed, so writing twice replaces: `curves` holds every seed of the cells that it names.
    """
    value = lambda name: pl.col(name).fill_nan(None) if name in sparse else pl.col(name)
    grouped = curves.group_by([*CELL, "step"], maintain_order=True).agg(
        *(value(name).median().alias(f"{group}/{name}/median") for name, group in groups.items()),
        *(value(name).max().alias(f"{group}/{name}/max") for name, group in groups.items()),
    )
    now = time.time()
    for (phase, arm, size, point, rate), rows in grouped.group_by(CELL, maintain_order=True):
        path = Path(folder) / phase / arm / f"{size}-{point}-{rate:g}" / "events.out.tfevents.0.repro"
        tags = [c for c in rows.columns if "/" in c]
        events = [Event(wall_time=now, file_version="brain.Event:2")]
        for row in rows.sort("step").iter_rows(named=True):
            events += [
                Event(wall_time=now, step=row["step"], summary=scalar(tag, row[tag]))
                for tag in tags
                if row[tag] is not None
            ]
        write_atomically(path, b"".join(_framed(event.SerializeToString()) for event in events))


def _framed(data: bytes) -> bytes:
    """One TFRecord: length, its checksum, the data, their checksum."""
    length = struct.pack("<Q", len(data))
    checksum = lambda part: struct.pack("<I", masked_crc32c(part))
    return length + checksum(length) + data + checksum(data)
