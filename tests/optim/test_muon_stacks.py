"""Matrices of one shape as one batch over the whole tree, parts of an axis, and factors by block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.optim import (
    Layout, Part, Parts, describe, equal_parts, newton_schulz, orthogonalise, per_head, split_parts, update_factor,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("quick_compile")

D, H, K = 12, 3, 4


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def done(tree, layouts, rms=0.2):
    f = lambda t: orthogonalise(t, layouts, schedule="muon5", rms=rms, dtype=jnp.float32)
    return jax.jit(f)(tree)


SQUARE, TALL = Layout("matrix", (0,), (1,)), Layout("matrix", (1,), (0,))
STACK = Layout("matrix", (1,), (2,), layer=0)


def test_a_tree_gives_each_matrix_what_it_gets_alone():
    tree = {"a": normal(12, 8), "b": normal(8, 12, seed=1), "c": normal(3, 8, 12, seed=2), "d": normal(8, 8, seed=3)}
    layouts = {"a": SQUARE, "b": SQUARE, "c": STACK, "d": SQUARE}
    together = done(tree, layouts)
    for name in tree:
        alone = done({name: tree[name]}, {name: layouts[name]})[name]
        np.testing.assert_array_equal(together[name], alone)
    factor = 0.2 * 12**0.5
    np.testing.assert_allclose(together["c"][1], factor * newton_schulz(tree["c"][1]), atol=1e-5)


def test_the_program_grows_with_shapes_and_not_with_parameters():
    tree = {str(i): normal(12, 8, seed=i) for i in range(4)} | {str(i): normal(8, 12, seed=i) for i in range(4, 8)}
    layouts = dict.fromkeys(tree, SQUARE)
    f = lambda t: orthogonalise(t, layouts, schedule="muon5", rms=0.2, dtype=jnp.float32)
    assert jax.jit(f).lower(tree).as_text().count("stablehlo.dot_general") == 15


@pytest.mark.parametrize(
    ("rms", "shape", "factor"),
    [
        (0.2, (4, 9), 0.6), (0.18, (9, 4), 0.54), ("jordan", (4, 9), 1.5), ("jordan", (9, 4), 1.0),
        ("spectral", (4, 9), 1.5), ("spectral", (9, 4), 2 / 3),
    ],
)  # fmt: skip
def test_factors(rms, shape, factor):
    assert update_factor(rms, *shape) == pytest.approx(factor)
    x = normal(*shape)
    np.testing.assert_allclose(done({"x": x}, {"x": SQUARE}, rms)["x"], factor * newton_schulz(x), atol=1e-5)


def test_the_spectral_factor_gives_the_spectral_norm_of_the_condition():
    # |dW|_2 = sqrt(outputs / inputs), up to the singular values of muon5, whichever way the kernel is stored.
    x = normal(4, 32)
    for layout, kernel in ((SQUARE, x), (TALL, x.T)):
        norm = np.linalg.norm(done({"x": kernel}, {"x": layout}, "spectral")["x"], 2)
        assert 0.65 < norm / (32 / 4) ** 0.5 < 1.21
    assert update_factor("spectral", 32, 4) != update_factor("spectral", 4, 32)


def test_an_unknown_factor_is_refused():
    with pytest.raises(ReproError, match="rms 'adam' is unknown; give a number, or one of jordan, spectral"):
        update_factor("adam", 2, 2)


# One kernel [D, 3, H, K] with queries, keys and values; their own kernels; and one that folds heads into an axis.
FUSED = Layout("matrix", (0,), (1, 2, 3), head=2, parts=Parts(1, (Part("q", 1), Part("k", 1), Part("v", 1))))
APART = Layout("matrix", (0,), (1, 2), head=1)


@pytest.mark.parametrize("by_head", [False, True])
def test_a_fused_projection_is_its_parts(by_head):
    fused = normal(D, 3, H, K)
    tree, layouts = {"qkv": fused}, {"qkv": FUSED}
    own, own_layouts = {n: fused[:, i] for i, n in enumerate("qkv")}, dict.fromkeys("qkv", APART)
    if by_head:
        layouts, own_layouts = per_head(layouts), per_head(own_layouts)
    got, want = done(tree, layouts)["qkv"], done(own, own_layouts)
    np.testing.assert_allclose(got, jnp.stack([want[n] for n in "qkv"], 1), atol=1e-6)
    whole = done(tree, split_parts(layouts, split=False))["qkv"]
    assert np.abs(whole - got).max() > 0.1


def test_segments_of_unequal_size():
    # The query up-projection of latent attention: per head, and on request its two parts apart.
    x = normal(8, H, 6)
    layout = Layout("matrix", (0,), (1, 2), head=1, parts=Parts(2, (Part("nope", 4), Part("rope", 2)), split=False))
    together, apart = per_head({"q": layout}), per_head(split_parts({"q": layout}, ("rope",)))
    assert describe({"q": x}, together) == "q (8, 3, 6) matrix: Muon on 3 of 8 x 6"
    assert describe({"q": x}, apart) == "q (8, 3, 6) matrix: Muon on 3 of 8 x 4 and 3 of 8 x 2"
    assert split_parts({"q": layout}, ("k", "v"))["q"] == layout
    for head in range(H):
        np.testing.assert_allclose(
            done({"q": x}, together)["q"][:, head], 0.2 * 8**0.5 * newton_schulz(x[:, head]), atol=1e-5
        )
        for columns in (slice(0, 4), slice(4, 6)):
            np.testing.assert_allclose(
                done({"q": x}, apart)["q"][:, head, columns],
                0.2 * 8**0.5 * newton_schulz(x[:, head, columns]),
                atol=1e-5,
            )


def test_heads_folded_into_an_axis():
    x = normal(D, H, K)
    folded = Layout("matrix", (0,), (1,), parts=equal_parts(1, H * K, H))
    want = done({"x": x}, per_head({"x": APART}))["x"]
    np.testing.assert_allclose(done({"x": x.reshape(D, H * K)}, {"x": folded})["x"], want.reshape(D, -1), atol=1e-6)
    with pytest.raises(ReproError, match="axis 1 of size 12 does not divide into 5 equal parts"):
        equal_parts(1, 12, 5)
    with pytest.raises(ReproError, match="has 10 entries on axis 1, and the parts of its layout 12"):
        describe({"x": normal(D, 10)}, {"x": folded})


def test_per_head_does_not_depend_on_the_order_of_heads():
    x, order = normal(D, H, K), [2, 0, 1]
    layouts = per_head({"x": APART})
    np.testing.assert_allclose(
        done({"x": x[:, order]}, layouts)["x"], done({"x": x}, layouts)["x"][:, order], atol=1e-6
    )


def test_experts_are_matrices_of_their_own():
    x = normal(2, 3, 8, 12)  # layers, experts, in, out
    layout = Layout("matrix", (2,), (3,), expert=1, layer=0)
    got = done({"x": x}, {"x": layout})["x"]
    np.testing.assert_allclose(got[1, 2], 0.2 * 12**0.5 * newton_schulz(x[1, 2]), atol=1e-5)
    loud = x.at[0, 0].multiply(1000.0)
    np.testing.assert_allclose(done({"x": loud}, {"x": layout})["x"], got, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Parts(0, ()), "must be at least one segment"),
        (lambda: Parts(0, (Part("a", 0),)), "each of size 1 or more"),
        (lambda: Layout("norm", parts=Parts(0, (Part("a", 1, "x"),))), "qk 'x' is unknown"),
        (lambda: Layout("norm", qk="query"), "qk 'query' is unknown"),
    ],
)
def test_parts_that_are_refused(make, message):
    with pytest.raises(ReproError, match=message):
        make()
