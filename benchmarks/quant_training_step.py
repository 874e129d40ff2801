"""What emulated formats cost in training: the engine's compiled steps of one model, per precision, against float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from step_variants import compare

from repro.train import TrainConfig, at_size

TARGETS = {"v3": 1.6, "attention=mxfp4,ffn=mxfp4": 2.0}


def config_of(size: str, precision: str) -> TrainConfig:
    config = at_size(TrainConfig(optimizer="adamw", learning_rate=1e-3), size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, precision=precision))


def main(argv: Sequence[str] | None = None) -> int:
    return compare(argv, __doc__.splitlines()[0], config_of, "plain", (*TARGETS,), TARGETS, "precision")


if __name__ == "__main__":
    raise SystemExit(main())
