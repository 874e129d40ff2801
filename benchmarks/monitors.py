"""What monitors cost: the engine's compiled steps with what is always measured, and with all monitors, against none.

`none` is a step whose metrics are the loss alone: XLA drops what only the others need. A timed call has as many steps
as there are between two measurements of the dear monitors, so it holds one. Named monitors can be timed one by one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before SciPy is imported, as the command `repro` does

import jax  # noqa: E402
from step_variants import compare  # noqa: E402

from repro.train import Program, TrainConfig, TrainState, at_size  # noqa: E402
from repro.train.monitors import MonitorConfig  # noqa: E402

INTERVAL = 50
TARGETS = {"default": 1.05, "all": 1.15}


class Unwatched(Program):
    """The same step with no metric but the loss."""

    def step(self, *args: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        state, metrics = super().step(*args)
        return state, {"loss": metrics["loss"]}


@dataclasses.dataclass(frozen=True)
class UnwatchedConfig(TrainConfig):
    """A run of it."""

    @classmethod
    def program_class(cls) -> type[Program]:
        return Unwatched


def config_of(size: str, variant: str) -> TrainConfig:
    """The run of a variant: `none`, `default`, `all` or the name of a monitor."""
    kind = UnwatchedConfig if variant == "none" else TrainConfig
    config = at_size(kind(optimizer="adamw", learning_rate=1e-3), size)
    names = () if variant in ("none", "default") else (variant,)
    return dataclasses.replace(config, monitors=MonitorConfig(names=names, interval=INTERVAL))


def main(argv: Sequence[str] | None = None) -> int:
    return compare(argv, __doc__.splitlines()[0], config_of, "none", tuple(TARGETS), TARGETS, "variant", steps=INTERVAL)


if __name__ == "__main__":
    raise SystemExit(main())
