import dataclasses
import math

import pytest

from repro.errors import ReproError
from repro.models import SIZES, ModelConfig, YarnConfig
from repro.models.config import SIZES as SHAPES
from repro.models.config import QKNorm


def test_sizes():
    assert {n: dataclasses.astuple(SIZES[n]) for n in ("xs", "s", "m", "deep")} == {
        "xs": (2, 64, 4, 172, 64, 16),
        "s": (4, 128, 4, 344, 128, 16),
        "m": (6, 256, 8, 688, 256, 16),
        "deep": (24, 32, 4, 86, 32, 8),
    }
    with pytest.raises(TypeError):
        SIZES["xs"] = SIZES["s"]


def test_the_default_is_xs():
    assert SIZES["xs"].apply(ModelConfig()) == ModelConfig()


def test_one_family_in_width_alone():
    family = [SIZES[n] for n in ("w32", "xs", "w128")]
    assert len({(s.layers, s.width // s.heads, s.length, s.batch_size) for s in family}) == 1
    assert len({s.width for s in family}) == 3


@pytest.mark.parametrize("name", SHAPES)
def test_every_size_is_a_valid_config_that_keeps_the_switches(name):
    switches = ModelConfig(qk_norm="layer", soft_cap=30.0, rope_theta=5.0, compute_dtype="bfloat16", vocab_size=7)
    size, config = SIZES[name], SIZES[name].apply(switches)
    shape = {f: getattr(size, f) for f in ("layers", "width", "heads", "ffn")}
    assert config == dataclasses.replace(switches, **shape)
    assert config.head_size * config.heads == config.width


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: value} for name in ("vocab_size", "layers", "width", "heads", "ffn") for value in (0, -1)),
        {"heads": 3},
        {"heads": 64},  # head size 1: no pairs for RoPE
        {"width": 36, "heads": 4},  # head size 9
        {"qk_norm": "batch"},
        {"soft_cap": -1.0},
        {"soft_cap": math.inf},
        {"soft_cap": math.nan},
        {"rope_theta": 0.0},
        {"rope_theta": -1.0},
        {"rope_theta": math.nan},
        {"norm_eps": 0.0},
        {"norm_eps": -1e-6},
        {"norm_eps": math.inf},
        {"compute_dtype": "float16"},
        {"attention": "gqa"},
        {"kv_heads": 3},
        {"kv_heads": -2},
        {"head_dim": 5},
        {"glu": "geglu"},
        *({name: value} for name in ("glu_limit", "situ_gate", "situ_up") for value in (0.0, -1.0, math.inf, math.nan)),
        *({"powlu_m": value} for value in (0.0, 10.0, math.nan)),
        *({name: 8} for name in ("q_rank", "kv_rank", "nope_size", "rope_size", "value_size")),
        {"position": "alibi"},
        {"yarn": YarnConfig(factor=2.0), "position": "none"},  # nothing turns, so nothing can be stretched
        {"yarn": YarnConfig(factor=2.0), "rope_theta": 1.0},  # all pairs turn alike
    ],
    ids=str,
)
def test_refused(wrong):
    with pytest.raises(ReproError, match=f"model.({'|'.join(wrong)})"):
        ModelConfig(**wrong)


MLA = dict(attention="mla", q_rank=24, kv_rank=16, nope_size=16, rope_size=8, value_size=12)


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: 0} for name in ("kv_rank", "nope_size", "rope_size", "value_size")),
        {"rope_size": 7},
        {"q_rank": 65},
        {"kv_rank": 65},
        {"kv_heads": 2},
        {"head_dim": 16},
    ],
    ids=str,
)
def test_refused_with_latent_attention(wrong):
    with pytest.raises(ReproError, match=f"model.({'|'.join(wrong)})"):
        ModelConfig(**MLA | wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"factor": 0.5},
        {"factor": math.inf},
        {"factor": math.nan},
        {"original": 0},
        {"beta_fast": 0.5},
        {"beta_slow": 0.0},
        {"mscale": -1.0},
        {"mscale_all_dim": math.inf},
    ],
    ids=str,
)
def test_yarn_refuses(wrong):
    with pytest.raises(ReproError, match="model.yarn"):
        YarnConfig(**{"factor": 40.0} | wrong)


@pytest.mark.parametrize("norm", QKNorm.__args__[1:])
def test_every_norm_of_queries_and_keys_goes_with_latent_attention(norm):
    assert ModelConfig(**MLA, qk_norm=norm).head_size == 24


def test_head_sizes():
    assert ModelConfig(**MLA).head_size == 24
    assert ModelConfig(**MLA | {"q_rank": 0, "heads": 5}).head_size == 24  # heads need not divide the width
    assert ModelConfig(heads=3, head_dim=20).head_size == 20
    assert (ModelConfig().key_heads, ModelConfig(kv_heads=2).key_heads) == (4, 2)


def test_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().layers = 3
    assert hash(ModelConfig()) == hash(ModelConfig())
