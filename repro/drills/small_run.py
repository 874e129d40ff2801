"""A run small enough to be killed many times: AdamW with and without decay, a checkpoint at every chunk boundary.

`python -m repro.drills.small_run DIR` begins it, or continues it if the folder exists.
"""

from __future__ import annotations

import sys
from pathlib import Path

from repro.claims import Arm, Cell, Claim, Control, Experiment, Greater, swapped
from repro.models import ModelConfig
from repro.train import TrainConfig
from repro.train.preset import Preset

RULE = Greater("loss", "decayed@fixed/custom", "plain@fixed/custom", log=False)
# Only that a run has a verdict: nothing is judged here, and nobody's results hold it.
CLAIMS = (
    Claim(
        "K2-1", "no source", "A decay of 9 costs loss.", "", "", "D", RULE, Control("arms exchanged", swapped(RULE)),
        variant="drill",
    ),
)  # fmt: skip
PRESET = Preset(
    train=TrainConfig(
        model=ModelConfig(layers=1, width=16, heads=2, ffn=16), length=8, batch_size=2, steps=100, optimizer="adamw",
        learning_rate=0.02, eval_windows=4,
    ),
    sizes=("custom",), test_seeds=(0, 1), lanes_per_device=1, evidence=False,
)  # fmt: skip


def _plan(preset: Preset):
    rate = preset.train.learning_rate
    for arm in ("plain", "decayed"):
        yield [Cell(arm, "custom", rate, "fixed", "test", preset.test_seeds)]


EXPERIMENT = Experiment(
    name="small-run", title="A small run", claims=CLAIMS, presets={"drill": PRESET}, plan=_plan, figures=(),
    arms=(Arm("plain", "AdamW", {}), Arm("decayed", "AdamW + decay 9", {"weight_decay": 9.0})),
)  # fmt: skip


def main(path: Path) -> None:
    from repro.report.record import RunFolder
    from repro.runner import execute

    folder = RunFolder.existing(path) if (path / "run.json").is_file() else RunFolder.create(path)
    with folder.locked():
        execute(EXPERIMENT, "drill", PRESET, folder, checkpoint_seconds=0.0, keep_checkpoints=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
