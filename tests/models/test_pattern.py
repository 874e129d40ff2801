"""Which block stands in which layer."""

import pytest

from repro.errors import ReproError
from repro.models import MoEConfig, ModelConfig
from repro.models.pattern import Kind, attention_groups, kinds, stack_names

MOE = MoEConfig(experts=4, ffn=8)
DENSE, SPARSE = Kind("mla", "dense"), Kind("mla", "moe")


def of(text, layers, moe=MOE):
    return kinds(text, "mla", layers, moe)


def test_without_a_pattern_the_experts_decide():
    assert of("", 3, MoEConfig()) == (((DENSE,), 3),)
    assert of("", 5, MoEConfig(experts=4, ffn=8, dense_layers=1, hash_layers=2)) == (
        ((DENSE,), 1), ((Kind("mla", "hash"),), 2), ((SPARSE,), 2),
    )  # fmt: skip
    assert of("", 2, MoEConfig(experts=4, ffn=8, dense_layers=2)) == (((DENSE,), 2),)


def test_patterns():
    assert of("dense, moe", 2) == (((DENSE,), 1), ((SPARSE,), 1))
    assert of(" 3 * moe ", 3) == (((SPARSE,), 3),)
    unit = (SPARSE, Kind("mha", "moe"))
    assert of("dense, 2*(moe, mha.moe), mha.hash", 6) == (
        ((DENSE,), 1), (unit, 2), ((Kind("mha", "hash"),), 1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "layers", "says"),
    [
        ("dense, moe", 3, "has 2 layers and model.layers is 3"),
        ("3*(moe", 3, "cannot be read at '3*(moe'"),
        ("sparse", 1, "cannot be read at 'sparse'"),
        ("kda.moe", 1, "cannot be read at 'kda.moe'"),
        ("mla.mha.moe", 1, "cannot be read at 'mla.mha.moe'"),
        ("0*moe, dense", 1, "cannot be read at '0*moe'"),
        ("moe,", 1, "cannot be read at ''"),
    ],
)
def test_what_cannot_be_read(text, layers, says):
    with pytest.raises(ReproError) as error:
        of(text, layers)
    assert says in str(error.value)


def test_experts_need_a_number():
    with pytest.raises(ReproError, match="model.moe.experts is 0"):
        ModelConfig(layers=2, pattern="dense, moe")


def test_groups_name_every_stack_of_attention_and_its_layers():
    segments = of("dense, 2*(moe, mha.moe)", 5)
    assert stack_names(segments) == ("blocks_0", "blocks_1")
    assert attention_groups(segments) == {"blocks_0": (0,), "blocks_1/block0": (1, 3), "blocks_1/block1": (2, 4)}
    assert stack_names(of("3*moe", 3)) == ("blocks",) and attention_groups(of("3*moe", 3)) == {}
    assert attention_groups(of("2*(moe, mha.moe)", 4)) == {"blocks/block0": (0, 2), "blocks/block1": (1, 3)}
