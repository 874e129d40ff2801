import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from repro.errors import ReproError
from repro.optim import Layout, check_layouts, declare, describe, from_declarations, muon, per_head
from repro.optim.layout import ROLES, from_matrices, to_matrices

pytestmark = pytest.mark.usefixtures("quick_compile")


@st.composite
def shapes_and_layouts(draw):
    """A shape of 2 to 5 axes, each of them batch, input or output, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=5)))
    order = draw(st.permutations(range(len(shape))))
    cut, end = sorted(draw(st.lists(st.integers(1, len(shape)), min_size=2, max_size=2, unique=True)))
    return shape, Layout("matrix", tuple(order[:cut]), tuple(order[cut:end]))


def rows_and_columns_are_named_axes(flatten, shape, layout):
    """Every element of x sits in the batch, row and column that its index says."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    matrices = np.asarray(flatten(x, layout))
    batch = [a for a in range(len(shape)) if a not in layout.inputs + layout.outputs]
    flat = lambda index, axes: np.ravel_multi_index([index[a] for a in axes], [shape[a] for a in axes])
    for index in np.ndindex(shape):
        place = (*(index[a] for a in batch), flat(index, layout.inputs), flat(index, layout.outputs))
        assert matrices[place] == x[index]


@given(shapes_and_layouts())
@example(((2, 3, 4), Layout("matrix", (0,), (2, 1))))
@settings(deadline=None, derandomize=True, max_examples=12)
def test_to_matrices_and_back(case):
    shape, layout = case
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    matrices = to_matrices(x, layout)
    assert matrices.ndim == 2 + len(shape) - len(layout.inputs) - len(layout.outputs)
    rows_and_columns_are_named_axes(to_matrices, shape, layout)
    np.testing.assert_array_equal(from_matrices(matrices, layout, shape), x)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, n: to_matrices(x, dataclasses.replace(n, outputs=n.outputs[::-1])),
        lambda x, n: to_matrices(x, dataclasses.replace(n, inputs=n.outputs, outputs=n.inputs)),
        lambda x, n: x.reshape(to_matrices(x, n).shape),  # a reshape that guesses
    ],
)
def test_the_check_on_axes_can_fail(wrong):
    with pytest.raises((AssertionError, IndexError)):
        rows_and_columns_are_named_axes(wrong, (2, 3, 4), Layout("matrix", (1,), (0, 2)))


def test_other_axes_are_batch():
    x = np.zeros((5, 6, 2, 3))
    joint = Layout("matrix", (1,), (2, 3), head=2, layer=0)
    assert to_matrices(x, joint).shape == (5, 6, 6)
    assert to_matrices(x, per_head({"x": joint})["x"]).shape == (5, 2, 6, 3)
    assert to_matrices(x, Layout("matrix", (2, 3), (1,), head=2, layer=0)).shape == (5, 6, 6)


def test_per_head_splits_q_k_and_v_and_nothing_else():
    q = Layout("matrix", (0,), (1, 2), head=1, qk="q")
    v = Layout("matrix", (0,), (1, 2), head=1)
    o = Layout("matrix", (0, 1), (2,), head=0)
    others = {"o": o, "ffn": Layout("matrix", (0,), (1,)), "norm": Layout("norm"), "bias": Layout("bias", head=0)}
    split = per_head({"q": q, "v": v, "deep": {"k": dataclasses.replace(q, qk="k")}} | others)
    assert split["q"] == dataclasses.replace(q, outputs=(2,))
    assert split["v"] == dataclasses.replace(v, outputs=(2,))
    assert split["deep"]["k"] == dataclasses.replace(q, qk="k", outputs=(2,))
    assert {name: split[name] for name in others} == others
    assert per_head(split) == split


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("matrx", (0,), (1,)), "role 'matrx' is unknown"),
        (("matrix",), "must name its input axes and its output axes"),
        (("matrix", (0,)), "must name its input axes and its output axes"),
        (("matrix", (0, 1), (1,)), r"axes \[1\] are both input and output"),
        (("matrix", (0, 0), (1,)), "named twice"),
        (("matrix", (0,), (1,), None, None, 0), "named twice"),
        (("matrix", (0,), (1,), None, 1), "named twice"),
        (("matrix", (0,), (1,), None, 2, 2), "named twice"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(arguments, message):
    with pytest.raises(ReproError, match=message):
        Layout(*arguments)


def test_every_role_can_be_declared():
    for role in ROLES:
        assert Layout(role, (0,), (1,)).role == role


PARAMS = {"a": np.zeros((2, 3)), "blocks": {"w": np.zeros((4, 2, 3))}}
LAYOUTS = {"a": Layout("embedding"), "blocks": {"w": Layout("matrix", (1,), (2,), layer=0)}}


def test_layouts_that_fit_are_accepted():
    assert check_layouts(PARAMS, LAYOUTS) is None
    check_layouts(jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PARAMS)), LAYOUTS)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"a": Layout("norm")}, "parameter blocks/w has no layout"),
        ({"a": Layout("norm"), "blocks": {}}, "parameter blocks/w has no layout"),
        ({"a": Layout("norm"), "blocks": {"w": None}}, "parameter blocks/w has no layout"),
        ({"a": Layout("norm"), "blocks": {"w": "matrix"}}, "parameter blocks/w has no layout"),
        (LAYOUTS | {"blocks": LAYOUTS["blocks"] | {"v": Layout("norm")}}, "layout blocks/v belongs to no parameter"),
        (LAYOUTS | {"a": Layout("matrix", (0,), (2,))}, r"parameter a of shape \(2, 3\) has no axis 2 "),
        (LAYOUTS | {"a": Layout("matrix", (-1,), (0,))}, r"parameter a of shape \(2, 3\) has no axis -1 "),
        (LAYOUTS | {"a": Layout("norm", head=2)}, "parameter a .* has no axis 2 "),
        (LAYOUTS | {"a": Layout("norm", layer=3)}, "parameter a .* has no axis 3 "),
        (LAYOUTS | {"a": Layout("norm", expert=4)}, "parameter a .* has no axis 4 "),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_path(layouts, message):
    with pytest.raises(ReproError, match=message):
        check_layouts(PARAMS, layouts)


def test_describe():
    params = PARAMS | {"q": np.zeros((5, 6, 2, 3)), "gain": np.zeros(6)}
    layouts = LAYOUTS | {"q": Layout("matrix", (1,), (2, 3), head=2, layer=0), "gain": Layout("norm")}
    assert describe(params, layouts).splitlines() == [
        "a (2, 3) embedding: AdamW",
        "blocks/w (4, 2, 3) matrix: Muon on 4 of 2 x 3",
        "gain (6,) norm: AdamW",
        "q (5, 6, 2, 3) matrix: Muon on 5 of 6 x 6",
    ]
    assert "q (5, 6, 2, 3) matrix: Muon on 10 of 6 x 3" in describe(params, per_head(layouts))
    with pytest.raises(ReproError, match="parameter blocks/w has no layout"):
        describe(PARAMS, {"a": Layout("norm")})


def test_from_declarations():
    tree = {
        "x": {"role": "norm"},
        "blocks": {"w": {"role": "matrix", "inputs": (1,), "outputs": (2,), "layer": 0, "head": None, "qk": ""}},
    }
    assert from_declarations(tree) == {
        "x": Layout("norm"),
        "blocks": {"w": Layout("matrix", (1,), (2,), layer=0)},
    }
    with pytest.raises(TypeError):
        from_declarations({"x": {"role": "norm", "colour": "red"}})


RULES = {
    "embed|logits": Layout("embedding"), "kernel$": Layout("matrix", (0,), (1,)), "bias|scale": Layout("norm"),
}  # fmt: skip


def tree_from_elsewhere():
    shapes = {
        "embed": (8, 4),
        "layer_0": {"kernel": (4, 6), "bias": (6,)},
        "norm": {"scale": (4,)},
        "logits": {"kernel": (4, 8)},
    }
    return jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))


def test_rules_by_path():
    params = tree_from_elsewhere()
    layouts = declare(params, RULES)
    roles = {name: layout.role for name, layout in layouts.items()}
    assert roles == {
        "embed": "embedding", "layer_0/bias": "norm", "layer_0/kernel": "matrix", "logits/kernel": "embedding",
        "norm/scale": "norm",
    }  # fmt: skip
    assert "layer_0/kernel (4, 6) matrix: Muon on 1 of 4 x 6" in describe(params, layouts)
    tx = muon(0.02, layouts=declare(params, RULES))
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"kernel": RULES["kernel$"]}, "no rule matches parameter embed; the rules are kernel"),
        (RULES | {"query": Layout("norm")}, "rule 'query' decides no parameter"),
        ({"": Layout("norm", layer=3)}, "parameter embed of shape .* has no axis 3"),
    ],
)
def test_rules_that_are_refused(rules, message):
    with pytest.raises(ReproError, match=message):
        declare(tree_from_elsewhere(), rules)
