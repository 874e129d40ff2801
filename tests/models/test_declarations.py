import dataclasses
import math

import jax
import pytest
from flax import nnx

from repro.models import SIZES, Block, ModelConfig, declarations, init_and_apply
from repro.models.config import SIZES as SHAPES
from repro.models.transformer import abstract
from repro.optim import Layout, Part, Parts, check_layouts, describe, from_declarations, per_head, split_parts

CONFIGS = {
    f"{size} {norm}": dataclasses.replace(SIZES[size].apply(ModelConfig()), qk_norm=norm)
    for size, norm in zip(SHAPES, ["none", "rms", "layer"] * 3, strict=False)
}
STACKED = dataclasses.replace(SIZES["m"].apply(ModelConfig()), qk_norm="layer")


def of(config):
    shapes = jax.eval_shape(init_and_apply(config)[0], jax.random.key(0))
    return shapes, from_declarations(declarations(abstract(config)))


def matrix(inputs, outputs, **more):
    return Layout("matrix", inputs, outputs, layer=0, **more)


def test_the_layouts_of_a_stacked_model():
    gain = Layout("norm", layer=0)
    assert of(STACKED)[1] == {
        "embedding_ZD": Layout("embedding"),
        "head_DZ": Layout("head"),
        "final_norm": {"gain": Layout("norm")},
        "blocks": {
            "attention_norm": {"gain": gain},
            "ffn_norm": {"gain": gain},
            "attention": {
                "q_DHK": matrix((1,), (2, 3), head=2, qk="q"),
                "k_DHK": matrix((1,), (2, 3), head=2, qk="k"),
                "v_DHV": matrix((1,), (2, 3), head=2),
                "o_HVD": matrix((1, 2), (3,), head=1),
                "q_gain_K": Layout("norm", layer=0, qk="q"),
                "k_gain_K": Layout("norm", layer=0, qk="k"),
            },
            "ffn": {"gate_DF": matrix((1,), (2,)), "up_DF": matrix((1,), (2,)), "down_FD": matrix((1,), (2,))},
        },
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_every_config_has_a_layout_that_fits(name):
    config = CONFIGS[name]
    shapes, layouts = of(config)
    check_layouts(shapes, layouts)
    check_layouts(shapes, per_head(layouts))
    flat = jax.tree.leaves(layouts, is_leaf=lambda x: isinstance(x, Layout))
    roles = [layout.role for layout in flat]
    gains = 5 if config.qk_norm != "none" else 3
    assert {r: roles.count(r) for r in set(roles)} == {"matrix": 7, "norm": gains, "embedding": 1, "head": 1}
    assert [n.qk for n in flat if n.role == "matrix" and n.qk] == ["k", "q"]
    for shape, layout in zip(jax.tree.leaves(shapes), flat, strict=True):
        if layout.layer is not None:
            assert shape.shape[layout.layer] == config.layers
        if layout.head is not None:
            assert shape.shape[layout.head] == config.heads
        if layout.role == "matrix":
            sides = {math.prod(shape.shape[a] for a in axes) for axes in (layout.inputs, layout.outputs)}
            assert sides <= {config.width, config.ffn}
            assert len(layout.inputs + layout.outputs) + 1 == len(shape.shape)


def test_the_layouts_of_grouped_queries():
    config = ModelConfig(kv_heads=2, head_dim=20)
    shapes, layouts = of(config)
    check_layouts(shapes, layouts)
    found, shapes = layouts["blocks"]["attention"], shapes["blocks"]["attention"]
    assert found["q_DHK"] == matrix((1,), (2, 3), head=2, qk="q_shared")
    assert found["k_DHK"] == matrix((1,), (2, 3), head=2, qk="k_shared")
    assert {n: x.shape[1:] for n, x in shapes.items()} == {
        "q_DHK": (64, 4, 20), "k_DHK": (64, 2, 20), "v_DHV": (64, 2, 20), "o_HVD": (4, 20, 64),
    }  # fmt: skip


@pytest.mark.parametrize("q_rank", [24, 0])
def test_the_layouts_of_latent_attention(q_rank):
    config = ModelConfig(attention="mla", q_rank=q_rank, kv_rank=16, nope_size=12, rope_size=8, value_size=10)
    shapes, layouts = of(config)
    check_layouts(shapes, layouts)
    parts = Parts(3, (Part("nope", 12, "q"), Part("rope", 8, "q_shared")), split=False)
    queries = {"q_DHJ": matrix((1,), (2, 3), head=2, parts=parts)}
    sizes = {"q_DHJ": (64, 4, 20)}
    if q_rank:
        queries = {
            "q_down_DC": matrix((1,), (2,)),
            "q_norm": {"gain": Layout("norm", layer=0)},
            "q_up_CHJ": matrix((1,), (2, 3), head=2, parts=parts),
        }
        sizes = {"q_down_DC": (64, 24), "q_norm": (24,), "q_up_CHJ": (24, 4, 20)}
    assert layouts["blocks"]["attention"] == queries | {
        "kv_down_DC": matrix((1,), (2,)),
        "kv_norm": {"gain": Layout("norm", layer=0)},
        "k_rope_DR": matrix((1,), (2,), qk="k_shared"),
        "k_up_CHK": matrix((1,), (2, 3), head=2, qk="k"),
        "v_up_CHV": matrix((1,), (2, 3), head=2),
        "o_HVD": matrix((1, 2), (3,), head=1),
    }
    found = {n: jax.tree.leaves(x)[0].shape[1:] for n, x in shapes["blocks"]["attention"].items()}
    assert found == sizes | {
        "kv_down_DC": (64, 16), "kv_norm": (16,), "k_rope_DR": (64, 8), "k_up_CHK": (16, 4, 12),
        "v_up_CHV": (16, 4, 10), "o_HVD": (4, 10, 64),
    }  # fmt: skip
    rows = 24 if q_rank else 64
    assert f"Muon on 8 of {rows} x 20" in describe(shapes, per_head(layouts))
    assert f"Muon on 8 of {rows} x 12 and 8 of {rows} x 8" in describe(shapes, split_parts(per_head(layouts)))


def test_per_head_muon_of_a_model():
    shapes, layouts = of(STACKED)
    joint, split = (describe(shapes, tree).splitlines() for tree in (layouts, per_head(layouts)))
    changed = [(a.split(": ")[1], b) for a, b in zip(joint, split, strict=True) if a != b]
    assert [a for a, _ in changed] == ["Muon on 6 of 256 x 256"] * 3
    assert [b for _, b in changed] == [
        f"blocks/attention/{n} (6, 256, 8, 32) matrix: Muon on 48 of 256 x 32" for n in ("k_DHK", "q_DHK", "v_DHV")
    ]
    assert "blocks/attention/o_HVD (6, 8, 32, 256) matrix: Muon on 6 of 256 x 256" in split


def test_a_single_block_has_no_layer_axis():
    with nnx.set_graph_mode(False):
        block = nnx.eval_shape(lambda: Block(ModelConfig(), rngs=nnx.Rngs(0)))
    layouts = from_declarations(declarations(block))
    assert layouts["attention"]["q_DHK"] == Layout("matrix", (0,), (1, 2), head=1, qk="q")
    assert layouts["attention"]["o_HVD"] == Layout("matrix", (0, 1), (2,), head=0)
    assert layouts["ffn_norm"]["gain"] == Layout("norm")


def test_the_layouts_of_what_attention_may_have_besides():
    for more in ({}, dict(attention="mla", kv_rank=16, nope_size=8, rope_size=8, value_size=10)):
        shapes, layouts = of(ModelConfig(output_gate=True, attention_sink=True, qk_norm="l2", **more))
        check_layouts(shapes, layouts)
        found = layouts["blocks"]["attention"]
        assert found["gate_DHV"] == matrix((1,), (2, 3), head=2)
        assert found["sink_H"] == Layout("bias", head=1, layer=0)
        assert found["logit_scale"] == Layout("norm", layer=0, qk="q")
        assert shapes["blocks"]["attention"]["gate_DHV"].shape == (2, 64, 4, more.get("value_size", 16))
        assert shapes["blocks"]["attention"]["sink_H"].shape == (2, 4)
