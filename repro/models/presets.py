"""Named models: released ones scaled down to what a laptop trains.

All are 128 wide, four layers deep and on bytes, with as many experts as make four active at the published ratio; the
first logits are small (`repro.models.scale_down`). What is not built of DeepSeek-V4 and Kimi K3 is said in README.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from repro.errors import ReproError
from repro.models.config import SIZES as SHAPES
from repro.models.config import ModelConfig, Size
from repro.models.hugging_face import config_from_hf
from repro.models.scale_down import scale_down, settings

RELEASED = ("deepseek_v3", "deepseek_v4", "kimi_k2", "kimi_k3", "moonlight")
_WIDTH, _LAYERS, _ACTIVE = 128, 4, 4


def released(name: str) -> dict[str, Any]:
    """The architecture of a released model, as its `config.json` gives it. Raises `ReproError` for an unknown name."""
    if name not in RELEASED:
        raise ReproError(f"model {name!r} is unknown; known are {', '.join(RELEASED)}.")
    path = resources.files("repro.models.hugging_face") / "released" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


_TRAINING: Mapping[str, dict[str, Any]] = {
    # What a config.json does not say. Sequence-wise loss: arXiv 2412.19437, section 4.2, and 2606.19348, section 4.2.2.
    "deepseek_v3": {"sequence_loss": 1e-4},
    "deepseek_v4": {"sequence_loss": 1e-4},
    # arXiv 2502.16982 takes the mean of the steps away from them.
    "moonlight": {"balance_centred": True},
}


def _named(name: str) -> ModelConfig:
    full = config_from_hf(released(name))
    unit = 2 * full.moe.groups  # an even number per group, which meshes can share out
    experts = unit * round(full.moe.experts / full.moe.active * _ACTIVE / unit)
    small, _ = scale_down(full, _WIDTH, _LAYERS, experts=experts)
    return dataclasses.replace(small, moe=dataclasses.replace(small.moe, **_TRAINING.get(name, {})))


MODELS: Mapping[str, ModelConfig] = MappingProxyType({name: _named(name) for name in RELEASED})
"""Scaled-down released models, by name."""


@dataclasses.dataclass(frozen=True)
class NamedModel(Size):
    """A size that brings its architecture along."""

    model: ModelConfig = ModelConfig()

    def apply(self, config: ModelConfig) -> ModelConfig:
        """This model, with what `config` has changed from the defaults (its shape apart)."""
        shape = ("layers", "width", "heads", "ffn")
        changed = {name.split(".")[0] for name in settings(config)}
        return dataclasses.replace(self.model, **{n: getattr(config, n) for n in changed if n not in shape})


def _sized(model: ModelConfig) -> NamedModel:
    return NamedModel(model.layers, model.width, model.heads, model.ffn, length=128, batch_size=16, model=model)


SIZES: Mapping[str, Size] = MappingProxyType({**SHAPES, **{name: _sized(model) for name, model in MODELS.items()}})
"""Everything that a run can be sized by: shapes of the plain decoder, and the named models."""
