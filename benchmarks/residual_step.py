"""What residual schemes cost: the engine's compiled steps of one model, per scheme, against pre-norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from step_variants import compare

from repro.models import ResidualConfig
from repro.train import TrainConfig, at_size

TARGETS = {"manifold": 2.0}
KINDS = ("hyper", "manifold", "manifold_lite", "block_attention")


def config_of(size: str, kind: str) -> TrainConfig:
    config = at_size(TrainConfig(optimizer="adamw", learning_rate=1e-3), size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, residual=ResidualConfig(kind=kind)))


def main(argv: Sequence[str] | None = None) -> int:
    return compare(argv, __doc__.splitlines()[0], config_of, "pre_norm", KINDS, TARGETS, "kind")


if __name__ == "__main__":
    raise SystemExit(main())
