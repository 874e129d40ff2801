"""A small model with the proportions of a large one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from repro.errors import ReproError
from repro.models.config import ModelConfig, YarnConfig
from repro.models.moe_config import MoEConfig

Fate = Literal["kept", "rounded", "dropped", "set"]
BYTES = 256
"""Vocabulary of the corpora that come with the package."""
LEAST_LAYERS = 4
"""Depth below which the default does not go, so that every kind of layer fits in more than once."""
HEAD_GAIN = 0.5
"""Standard deviation of the first logits. DeepSeek-V3 starts with 0.006 at a width of 7168, which is 0.51 (arXiv
2412.19437, section 4.2); the first loss is then ln Z + 1/8."""


class Row(NamedTuple):
    """What became of one setting: kept (the number, or its exact proportion), rounded, dropped, or set by us."""

    setting: str
    before: Any
    after: Any
    fate: Fate
    remark: str = ""


def scale_down(
    config: ModelConfig, width: int, layers: int | None = None, *, experts: int | None = None, vocab_size: int = BYTES
) -> tuple[ModelConfig, tuple[Row, ...]]:
    """`config` at a smaller width, and what became of each of its settings.

    With r the ratio of widths: ranks, feed-forward widths and the latent of LatentMoE become r times as large; heads
    and their size sqrt(r) times each, so that all heads together keep their share of the width, and a head its split
    into parts with and without position. The numbers of experts (routed, active, shared, in groups) stay, or become
    those of `experts` routed ones at the same ratio with at least two active. Depth follows the width down to four
    layers; dense and hash layers at the bottom and the layers of an AttnRes block follow the depth. Sizes are even.
    Vocabulary and YaRN are dropped, and the head starts at `HEAD_GAIN`.

    Raises `ReproError` for a width, depth or number of experts that is no smaller model.
    """
    if not 8 <= width <= config.width or width % 2:
        raise ReproError(f"width is {width}; it must be even and between 8 and the model's own {config.width}.")
    return _Scaling(config, width, experts, vocab_size).result(layers)


class _Scaling:
    def __init__(self, config: ModelConfig, width: int, experts: int | None, vocab_size: int) -> None:
        self.config, self.width, self.experts, self.vocab_size = config, width, experts, vocab_size
        self.ratio = width / config.width
        self.rows: list[Row] = []

    def result(self, layers: int | None) -> tuple[ModelConfig, tuple[Row, ...]]:
        config = self.config
        depth = self._depth(layers)
        changes = {"width": self._row("width", config.width, self.width, self.width), "layers": depth}
        changes |= self._attention()
        changes["ffn"] = self._scaled("ffn", config.ffn)
        if config.moe.experts:
            changes["moe"] = self._moe(depth)
        if config.residual.kind == "block_attention":
            changes["residual"] = self._residual(depth)
        self._switches()
        changes["vocab_size"] = self.vocab_size
        self.rows.append(Row("vocab_size", config.vocab_size, self.vocab_size, "dropped", "the size of the data's own"))
        if config.yarn.factor != 1:
            changes["yarn"] = YarnConfig()
            self.rows.append(
                Row("yarn.factor", config.yarn.factor, 1.0, "dropped", "stretches windows after pretraining")
            )
        changes["head_gain"] = HEAD_GAIN
        remark = "first logits of DeepSeek-V3's size, so that the first loss is near ln(vocabulary)"
        self.rows.append(Row("head_gain", config.head_gain, HEAD_GAIN, "set", remark))
        return dataclasses.replace(config, **changes), tuple(self.rows)

    def _row(self, setting: str, before: Any, after: Any, exact: float, remark: str = "") -> Any:
        if math.isclose(after, exact):
            self.rows.append(Row(setting, before, after, "kept", remark))
        else:
            said = f"{exact:.4g} would be exact"
            self.rows.append(Row(setting, before, after, "rounded", f"{said}; {remark}" if remark else said))
        return after

    def _scaled(self, setting: str, size: int) -> int:
        return self._row(setting, size, _even(size * self.ratio), size * self.ratio) if size else 0

    def _depth(self, layers: int | None) -> int:
        config = self.config
        kinds = len({kind for unit, _ in config.segments for kind in unit})
        if config.pattern:
            raise ReproError("model.pattern is set; a model is scaled down from its numbers of layers of each kind.")
        if layers is None:
            exact = config.layers * self.ratio
            found = min(max(LEAST_LAYERS, kinds, round(exact)), config.layers)
            return self._row("layers", config.layers, found, exact)
        if not kinds <= layers <= config.layers:
            raise ReproError(
                f"layers is {layers}; it must be between {kinds}, one of each kind, and the model's {config.layers}."
            )
        self.rows.append(Row("layers", config.layers, layers, "set", "as asked for"))
        return layers

    def _attention(self) -> dict[str, int]:
        """Heads, their size and ranks. All heads together take the same share of the width as before."""
        config = self.config
        exact = config.heads * self.ratio**0.5
        heads = self._row("heads", config.heads, min(_even(exact), config.heads), exact)
        share = config.heads * self.ratio / heads
        if config.attention == "mha":
            size = _even(config.head_size * share)
            self._row("head_dim", config.head_size, size, config.head_size * share)
            kv_heads = 0
            if config.kv_heads:
                wanted = config.kv_heads * heads / config.heads
                kv_heads = min((d for d in range(1, heads + 1) if heads % d == 0), key=lambda d: abs(d - wanted))
                self._row("kv_heads", config.kv_heads, kv_heads, wanted if config.kv_heads > 1 else 1)
            return {"heads": heads, "head_dim": size, "kv_heads": kv_heads}
        # The rotary part first: it has to be even, and the split should stay.
        rope = _even(config.rope_size * share)
        found = {"heads": heads, "rope_size": self._row("rope_size", config.rope_size, rope, config.rope_size * share)}
        for name in ("nope_size", "value_size"):
            size = max(1, round(getattr(config, name) * rope / config.rope_size))
            before, now = getattr(config, name) / config.rope_size, size / rope
            remark = "" if before == now else f"{before:.3g} times rope_size before and {now:.3g} now"
            found[name] = self._row(name, getattr(config, name), size, getattr(config, name) * share, remark)
        return found | {name: self._scaled(name, getattr(config, name)) for name in ("q_rank", "kv_rank")}

    def _moe(self, depth: int) -> MoEConfig:
        moe, config = self.config.moe, self.config
        found: dict[str, Any] = {
            "ffn": self._scaled("moe.ffn", moe.ffn),
            "latent": self._scaled("moe.latent", moe.latent),
        }
        found |= self._expert_numbers()
        self._row("moe.shared", moe.shared, moe.shared, moe.shared)
        bottom = {name: getattr(moe, name) for name in ("dense_layers", "hash_layers") if getattr(moe, name)}
        room = depth - (1 if sum(bottom.values()) < config.layers else 0)
        for i, (name, before) in enumerate(bottom.items()):
            exact = before * depth / config.layers
            most = room - (len(bottom) - 1 - i)  # one layer of each kind further up
            found[name] = self._row(f"moe.{name}", before, min(max(1, round(exact)), most), exact)
            room -= found[name]
        return dataclasses.replace(moe, **found)

    def _expert_numbers(self) -> dict[str, int]:
        moe = self.config.moe
        numbers = ("experts", "active", "groups", "kept_groups")
        if self.experts is None or self.experts == moe.experts:
            for name in numbers:
                self._row(f"moe.{name}", getattr(moe, name), getattr(moe, name), getattr(moe, name))
            return {name: getattr(moe, name) for name in numbers}
        # The normalised gate of one active expert is 1 and teaches the router nothing; so two, and one not chosen.
        if not 3 <= self.experts < moe.experts:
            raise ReproError(f"experts is {self.experts}; it must be between 3 and the model's own {moe.experts}.")
        E = self.experts
        active = min(max(2, round(moe.active * E / moe.experts)), moe.active)
        # A group is judged by its two best experts, so it needs two.
        groups = max(
            g for g in range(1, moe.groups + 1) if moe.groups % g == 0 and E % g == 0 and (g == 1 or E // g >= 2)
        )
        kept = max(1, round(moe.kept_groups * groups / moe.groups), math.ceil(active * groups / E))
        self.rows.append(Row("moe.experts", moe.experts, E, "set", "as asked for"))
        self._row("moe.active", moe.active, active, moe.active * E / moe.experts)
        self._row("moe.groups", moe.groups, groups, moe.groups)
        self._row("moe.kept_groups", moe.kept_groups, kept, moe.kept_groups * groups / moe.groups)
        return {"experts": E, "active": active, "groups": groups, "kept_groups": kept}

    def _residual(self, depth: int) -> Any:
        before = self.config.residual.block_layers
        exact = before * depth / self.config.layers
        after = self._row("residual.block_layers", before, max(1, round(exact)), exact)
        return dataclasses.replace(self.config.residual, block_layers=after)

    def _switches(self) -> None:
        """Notes those that are not at their defaults; they stay."""
        done = {row.setting for row in self.rows} | {"vocab_size", "head_gain"}
        for name, value in settings(self.config).items():
            if name not in done and not name.startswith("yarn."):
                self.rows.append(Row(name, value, value, "kept"))


def _even(size: float) -> int:
    """The nearest even number, at least 2."""
    return max(2, 2 * math.floor(size / 2 + 0.5))


def settings(config: ModelConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, with dotted names."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not dataclasses.is_dataclass(value):
            if value != field.default:
                found[field.name] = value
            continue
        for inner in dataclasses.fields(value):
            if getattr(value, inner.name) != inner.default:
                found[f"{field.name}.{inner.name}"] = getattr(value, inner.name)
    return found
