"""A small model with the proportions of a large one: which stay, and what is said of the others."""

import dataclasses
import math

import pytest

from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig, config_from_hf, released, scale_down
from repro.models.presets import RELEASED
from repro.models.scale_down import HEAD_GAIN, settings

FULL = {name: config_from_hf(released(name)) for name in RELEASED}


def fates(rows):
    return {row.setting: row.fate for row in rows}


@pytest.mark.parametrize("name", RELEASED)
def test_its_own_width_and_depth_change_nothing_but_the_vocabulary(name):
    full = FULL[name]
    same, rows = scale_down(full, full.width, full.layers, vocab_size=full.vocab_size)
    expected = dataclasses.replace(full, head_gain=HEAD_GAIN, yarn=same.yarn)
    if full.attention == "mha":
        expected = dataclasses.replace(expected, head_dim=full.head_size)
    assert same == expected and same.yarn.factor == 1
    assert "rounded" not in fates(rows).values()


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("width", [128, 256, 1024])
def test_proportions(name, width):
    """Within the rounding to even numbers, one either way; so of heads times their size as well."""
    full, (small, rows) = FULL[name], scale_down(FULL[name], width)
    ratio = width / full.width
    for setting in ("ffn", "q_rank", "kv_rank"):
        assert abs(getattr(small, setting) - getattr(full, setting) * ratio) <= 1 or getattr(small, setting) == 2
    for setting in ("ffn", "latent"):
        assert abs(getattr(small.moe, setting) - getattr(full.moe, setting) * ratio) <= 1
    assert abs(small.heads - full.heads * ratio**0.5) <= 1
    share = small.heads * small.head_size / width / (full.heads * full.head_size / full.width)
    assert 1 / 1.2 < share < 1.2
    if full.attention == "mla":
        parts = ("nope_size", "value_size")
        assert all(getattr(small, p) * full.rope_size == getattr(full, p) * small.rope_size for p in parts), (
            "the split of a head is exact"
        )
    else:
        assert small.kv_heads == full.kv_heads
    numbers = ("experts", "active", "shared", "groups", "kept_groups", "scale", "affinity", "balance")
    assert all(getattr(small.moe, n) == getattr(full.moe, n) for n in numbers)
    assert small.moe.dense_layers == min(full.moe.dense_layers, 1) and small.layers < full.layers
    assert (small.moe.hash_layers > 0) == (full.moe.hash_layers > 0)
    switches = ("attention", "glu", "position", "output_gate", "attention_sink", "qk_norm", "rope_theta", "norm_eps")
    assert all(getattr(small, n) == getattr(full, n) for n in switches) and small.residual.kind == full.residual.kind
    noted = fates(rows)
    assert settings(full).keys() - {n for n in settings(full) if n.startswith("yarn.")} <= noted.keys()
    assert noted["vocab_size"] == "dropped" and noted["head_gain"] == "set" and small.vocab_size == 256
    assert ("yarn.factor" in noted) == (full.yarn.factor != 1)


def test_what_a_row_says():
    _, rows = scale_down(FULL["deepseek_v3"], 256)
    row = {row.setting: row for row in rows}
    assert row["kv_rank"][1:] == (512, 18, "rounded", "18.29 would be exact")
    assert row["moe.experts"][1:] == (256, 256, "kept", "")
    assert row["layers"].after == 4 and row["layers"].fate == "rounded"
    assert all((r.fate == "kept") == math.isclose(r.before * 256 / 7168, r.after) for n, r in row.items() if "ffn" in n)


@pytest.mark.parametrize(("name", "experts", "numbers"), [
    ("deepseek_v3", 64, (64, 2, 8, 4)), ("deepseek_v3", 16, (16, 2, 8, 4)), ("deepseek_v3", 12, (12, 2, 4, 2)),
    ("kimi_k3", 224, (224, 4, 1, 1)), ("moonlight", 3, (3, 2, 1, 1)),
])  # fmt: skip
def test_fewer_experts_at_the_same_ratio(name, experts, numbers):
    moe = scale_down(FULL[name], 128, experts=experts)[0].moe
    assert (moe.experts, moe.active, moe.groups, moe.kept_groups) == numbers


def test_bottom_layers_and_blocks_follow_the_depth():
    shallow, deep = (scale_down(FULL["deepseek_v3"], 128, layers)[0] for layers in (2, 40))
    assert (shallow.moe.dense_layers, deep.moe.dense_layers) == (1, 2)
    assert scale_down(FULL["kimi_k3"], 128, 31)[0].residual.block_layers == 4
    both = dataclasses.replace(FULL["deepseek_v4"], moe=dataclasses.replace(FULL["deepseek_v4"].moe, dense_layers=20))
    small = scale_down(both, 128, 3)[0].moe
    assert (small.dense_layers, small.hash_layers) == (1, 1), "room for one layer of each kind"


def test_a_plain_decoder():
    config = ModelConfig(width=256, heads=8, kv_heads=4, ffn=688, layers=6)
    small, rows = scale_down(config, 64, 2)
    assert (small.heads, small.head_dim, small.kv_heads, small.ffn) == (4, 16, 2, 172)
    assert "rounded" not in fates(rows).values() and small.moe == MoEConfig()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"width": 8192}, "width is 8192; it must be even and between 8 and the model's own 7168"),
        ({"width": 129}, "width is 129"),
        ({"width": 4}, "width is 4"),
        ({"width": 128, "layers": 1}, "layers is 1; it must be between 2"),
        ({"width": 128, "layers": 62}, "layers is 62; .* 61"),
        ({"width": 128, "experts": 1}, "experts is 1; it must be between 3 and the model's own 256"),
        ({"width": 128, "experts": 512}, "experts is 512"),
        ({"width": 128, "vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_refusals(how, message):
    with pytest.raises(ReproError, match=message):
        scale_down(FULL["deepseek_v3"], **how)


def test_a_pattern_is_refused():
    config = ModelConfig(width=64, layers=2, pattern="2*dense")
    with pytest.raises(ReproError, match="model.pattern is set"):
        scale_down(config, 32)
