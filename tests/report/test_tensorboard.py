"""What TensorBoard finds: tags in groups, and no rows where nothing was measured."""

import struct

import numpy as np
import polars as pl
from tensorboardX.proto.event_pb2 import Event

from repro.report.tensorboard import write_events


def events(path):
    """{(step, tag): value} of a TensorBoard file."""
    data, found = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
        data = data[12 + length + 4 :]
    return found


def curves(dear):
    """Two seeds of one cell over three steps."""
    cell = dict(phase="test", arm="a", size="xs", point="best", rate=0.1)
    return pl.DataFrame(
        [
            cell
            | {
                "seed": seed,
                "step": step,
                "loss": np.nan if step == 2 else step + 10.0 * seed,
                "dear": dear[seed][step],
            }
            for seed in range(2)
            for step in range(3)
        ]
    )


def test_tags_in_groups_and_steps_without_a_measurement(tmp_path):
    nan = float("nan")
    groups = {"loss": "loss", "dear": "weight"}
    write_events(tmp_path, curves([[1.0, nan, 5.0], [3.0, nan, nan]]), groups, sparse={"dear"})
    (path,) = tmp_path.rglob("events*")
    assert path.parent == tmp_path / "test" / "a" / "xs-best-0.1"
    found = events(path)
    assert {tag for _, tag in found} == {"loss/loss/median", "loss/loss/max", "weight/dear/median", "weight/dear/max"}
    assert found[0, "loss/loss/median"] == 5.0 and found[1, "loss/loss/max"] == 11.0
    assert np.isnan(found[2, "loss/loss/median"]), "a loss that is not a number is shown as one"
    assert found[0, "weight/dear/median"] == 2.0 and found[0, "weight/dear/max"] == 3.0
    assert not any(step == 1 and tag.startswith("weight") for step, tag in found)
    assert found[2, "weight/dear/median"] == 5.0, "a seed without a value has no say"
