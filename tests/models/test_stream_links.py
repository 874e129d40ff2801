"""Residual streams inside the model; their equations are in test_hyper_connections.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from repro.errors import ReproError
from repro.models import ModelConfig, ResidualConfig, abstract, declarations, init_and_apply
from repro.models.hyper_connections import head_weights, read_streams
from repro.models.stream_links import (
    HyperConnections,
    ManifoldHyperConnections,
    StreamEnds,
    StreamLink,
    Streams,
)
from repro.optim import check_layouts, describe, from_declarations

pytestmark = pytest.mark.usefixtures("quick_compile")

PLAIN = ModelConfig(vocab_size=11, layers=2, width=16, heads=2, ffn=24)
ONE_LAYER = dataclasses.replace(PLAIN, layers=1)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)))
KINDS = {
    "hyper": dict(kind="hyper"),
    "hyper, learned": dict(kind="hyper", readout="learned"),
    "manifold": dict(kind="manifold"),
    "released": dict(kind="manifold", form="released", readout="learned"),
    "last": dict(kind="manifold", readout="last", start="zero"),
    "symmetric": dict(kind="manifold", start="symmetric"),
    "lite": dict(kind="manifold_lite"),
}


def having(config=PLAIN, **residual):
    return dataclasses.replace(config, residual=ResidualConfig(**residual))


def run(config, change=lambda p: p, **options):
    init, apply = init_and_apply(config)
    return jax.jit(lambda key: apply(change(init(key)), TOKENS, **options))(jax.random.key(0))


def drawn(config):
    """Parameters of random numbers."""
    rng, shapes = np.random.default_rng(1), jax.eval_shape(init_and_apply(config)[0], jax.random.key(0))
    return jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) * max(x.shape[-1], 4) ** -0.5), shapes)


@pytest.mark.parametrize("streams", [1, 4])
def test_hyper_connections_start_as_the_plain_residual(fusion_emitters, streams):
    with fusion_emitters():
        plain, found = run(PLAIN, hidden=True), run(having(kind="hyper", streams=streams), hidden=True)
    # The carry is shown as the sum of the streams, and a multiplication by a power of two is exact.
    np.testing.assert_array_equal(found.hidden[1:-1] / streams, plain.hidden[1:-1])
    if streams == 1:
        np.testing.assert_array_equal(found.logits, plain.logits)
    np.testing.assert_allclose(found.logits, plain.logits, rtol=0, atol=1e-5)  # the final norm's epsilon
    assert [float(getattr(found.stats.residual, f"{way}_max")) for way in ("forward", "backward")] == [1, 1]
    np.testing.assert_array_equal(found.stats.residual.spread, 0.0)


@pytest.mark.parametrize("kind", ["manifold", "manifold_lite"])
def test_a_single_stream_without_a_dynamic_part_is_the_plain_residual(kind):
    plain = run(PLAIN)
    tiny = dataclasses.replace(PLAIN, norm_eps=1e-12)  # the reading weight is a factor in front of a norm
    found = run(having(tiny, kind=kind, streams=1, alpha=0.0))
    np.testing.assert_allclose(found.logits, plain.logits, rtol=0, atol=1e-4)


def test_streams_persist_through_the_stack(monkeypatch):
    config = having(kind="manifold", start="one_hot", alpha=1.0)
    params = jax.jit(init_and_apply(config)[0])(jax.random.key(0))
    run = lambda: jax.jit(init_and_apply(config)[1])(params, TOKENS)
    right = run()
    assert float(right.stats.residual.spread.min()) > 0.05
    call = StreamLink.__call__

    def collapsing(self, carry, norm, f, position):
        (x, product, read), record = call(self, carry, norm, f, position)
        mean = jnp.broadcast_to(x.mean(2, keepdims=True), x.shape)
        return Streams(jnp.where(position % 2 == 1, mean, x), product, read), record

    monkeypatch.setattr(StreamLink, "__call__", collapsing)
    wrong = run()  # every block expands one stream and collapses it again
    assert float(wrong.stats.residual.spread.max()) < 1e-6
    assert float(jnp.abs(wrong.logits - right.logits).max()) > 1e-2


def test_links_in_turn_against_a_loop():
    config, rng = having(kind="hyper", streams=3), np.random.default_rng(0)
    norm, y_of = lambda x: 2 * x, lambda x: (jnp.sin(x), "record")
    ends = StreamEnds(config, rngs=nnx.Rngs(0))
    carry = ends.enter(jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32))
    x, product = np.asarray(carry.x_BTND, np.float64), np.broadcast_to(np.eye(3), (2, 3, 3, 3))
    for position in range(3):
        link = HyperConnections(config, position, rngs=nnx.Rngs(0))
        for p in (link.theta_DM, link.bias, link.alpha):
            p[...] = p[...] + jnp.asarray(rng.normal(size=p.shape), jnp.float32)
        pre, post, res = (np.moveaxis(m, (-2, -1), (0, 1)) for m in link.maps(carry.x_BTND))
        carry, record = link(carry, norm, y_of, jnp.asarray(position))
        assert record == "record"
        for b, t in np.ndindex(2, 3):
            y = np.sin(2 * sum(pre[b, t, i] * x[b, t, i] for i in range(3)))
            x[b, t] = [
                sum(res[b, t, i, j] * x[b, t, j] for j in range(3)) + post[b, t, i] * y for i in range(3)
            ]  # fmt: skip
        product = res @ product
        np.testing.assert_allclose(carry.x_BTND, x, rtol=1e-3, atol=1e-3)
        x = np.asarray(carry.x_BTND, np.float64)
    stats = ends.statistics(carry, jnp.zeros(1))
    rows, columns = np.abs(product.sum(-1)), np.abs(product.sum(-2))
    expected = rows.max(-1).mean(), rows.min(-1).mean(), columns.max(-1).mean(), columns.min(-1).mean()
    found = stats.forward_max, stats.forward_min, stats.backward_max, stats.backward_min
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert not np.allclose(found[:2], found[2:], rtol=0.1)  # rows and columns are not exchanged
    deviation = np.sqrt(np.mean((x - x.mean(2, keepdims=True)) ** 2) / np.mean(x**2))
    assert float(ends.spread(carry)) == pytest.approx(deviation, rel=1e-5)


def test_readouts():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 16)), jnp.float32)
    read = jnp.asarray(rng.normal(size=(4, 2, 3)), jnp.float32)
    carry = Streams(x, jnp.zeros((4, 4, 2, 3)), read)
    ends = lambda **more: StreamEnds(having(kind="manifold", **more), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(ends().leave(carry), x.sum(2), rtol=1e-6)
    np.testing.assert_allclose(ends(readout="last").leave(carry), read_streams(x, read), rtol=1e-6)
    learned = ends(readout="learned", form="released", eps=0.5)
    own = learned.phi_NDM[...].reshape(64, 4), learned.bias[...], learned.alpha[...]
    np.testing.assert_allclose(learned.leave(carry), read_streams(x, head_weights(x, *own, eps=0.5)), rtol=1e-5)
    link = ManifoldHyperConnections(having(kind="manifold", readout="last"), 0, rngs=nnx.Rngs(0))
    after, _ = link(carry, lambda x: x, lambda x: (x, None), jnp.asarray(0))
    np.testing.assert_allclose(after.read_NBT, link.maps(x)[0], rtol=1e-6)


def test_the_starts_of_mhc():
    def coefficients(position, **more):
        link = ManifoldHyperConnections(having(alpha=0.0, **more), position, rngs=nnx.Rngs(0))
        return [np.asarray(m)[..., 0, 0] for m in link.maps(jnp.ones((1, 1, 4, 16)))]

    read, write, mix = coefficients(6, kind="manifold")
    assert read.argmax() == 2 and read.max() > 0.98 and np.sort(read)[2] < 0.02
    np.testing.assert_array_equal(write, 1.0)
    np.testing.assert_allclose(mix, np.where(np.eye(4), 0.993, 0.0025), atol=1e-3)
    even = coefficients(6, kind="manifold", start="zero")
    for found, expected in zip(even, (0.5, 1.0, 0.25), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(coefficients(0, kind="manifold", identity=0.0)[2], 0.25, rtol=1e-6)
    lite = coefficients(1, kind="manifold_lite")[2]
    assert np.diag(lite).min() > 0.95 and lite.sum(0) == pytest.approx(1.0)


@functools.cache
def gradients(name):
    """Parameters of one layer to the gradients of a language model's loss, and the spread of the streams."""
    _, apply = init_and_apply(having(ONE_LAYER, **KINDS[name]))

    def loss(p):
        out = apply(p, TOKENS)
        log_p = jax.nn.log_softmax(out.logits[:, :-1])
        return -jnp.take_along_axis(log_p, TOKENS[:, 1:, None], -1).mean(), out.stats.residual.spread.max()

    return jax.jit(jax.grad(loss, has_aux=True))


def start(name):
    return jax.jit(init_and_apply(having(ONE_LAYER, **KINDS[name]))[0])(jax.random.key(0))


ZERO = {
    # theta or phi is 0, so what alpha multiplies is.
    "hyper": ["attention_link/alpha", "ffn_link/alpha"],
    "symmetric": ["attention_link/alpha", "ffn_link/alpha"],
}
"""Parameters without a gradient at step 0; in the README with more that have one of the size of rounding errors."""


def without_gradient(gradients):
    zero = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        assert np.isfinite(leaf).all(), path
        if not np.any(leaf):
            zero.append(jax.tree_util.keystr(path[1:], simple=True, separator="/"))
    return zero


@pytest.mark.parametrize("name", ["hyper", "released"])
def test_every_parameter_has_a_gradient_at_step_0_or_a_reason(name):
    assert without_gradient(gradients(name)(start(name))[0]) == ZERO.get(name, [])


def test_a_symmetric_start_never_leaves():
    """One program for both starts, which differ in their parameters alone."""
    spreads = {}
    for name in ("symmetric", "manifold"):
        p, spreads[name] = start(name), []
        for step in range(12):
            g, spread = gradients("manifold")(p)
            if step == 0:
                assert without_gradient(g) == ZERO.get(name, [])
            p = jax.tree.map(lambda a, b: np.float32(a - 0.1 * np.sign(b) * (np.abs(b) > 1e-6)), p, g)
            spreads[name].append(float(spread))
    assert max(spreads["symmetric"]) < 1e-5
    assert spreads["manifold"][-1] > 0.05


@pytest.mark.parametrize("name", KINDS)
def test_layouts_and_shapes_of_every_scheme(name):
    config = dataclasses.replace(having(**KINDS[name]), layers=5, compute_dtype="bfloat16")
    init, apply = init_and_apply(config)
    shapes = jax.eval_shape(init, jax.random.key(0))
    layouts = from_declarations(declarations(abstract(config)))
    check_layouts(shapes, layouts)
    for link in ("attention_link", "ffn_link"):
        own = layouts["blocks"][link]
        assert {layout.role for layout in own.values()} == {"matrix", "static"}
        assert all(layout.qk == "" and layout.layer == 0 for layout in own.values())  # nothing that QK-Clip scales
    text = describe(shapes, layouts)
    assert ("theta_DM (5, 16, 6) matrix: Muon on 5 of 16 x 6" in text) == (config.residual.kind == "hyper")
    assert ("_link/phi_NDM (5, 4, 16, 24) matrix: Muon on 5 of 64 x 24" in text) == (config.residual.kind == "manifold")
    out = jax.eval_shape(apply, shapes, TOKENS)
    assert out.logits.shape == (2, 6, 11) and out.stats.residual.spread.shape == (5,)


def test_the_position_goes_on_across_segments():
    """Five layers in one scan are two segments of two and three."""
    config = dataclasses.replace(having(kind="manifold", alpha=1.0), layers=5)
    split = dataclasses.replace(config, pattern="2*dense, 3*dense")
    params, apply = drawn(config), init_and_apply(config)[1]
    cut = lambda part: jax.tree.map(lambda x: x[part], params["blocks"])
    apart = {n: p for n, p in params.items() if n != "blocks"} | {
        "blocks_0": cut(slice(2)),
        "blocks_1": cut(slice(2, None)),
    }
    one, two = jax.jit(apply)(params, TOKENS), jax.jit(init_and_apply(split)[1])(apart, TOKENS)
    np.testing.assert_allclose(one.logits, two.logits, rtol=0, atol=1e-4)
    for a, b in zip(jax.tree.leaves(one.stats.residual), jax.tree.leaves(two.stats.residual), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def starts(config):
        init = init_and_apply(config)[0]
        links = lambda key: [p["ffn_link"]["bias"] for n, p in init(key).items() if n.startswith("blocks")]
        return np.concatenate(jax.jit(links)(jax.random.key(0)))  # compiled, so that no random number is drawn

    np.testing.assert_array_equal(starts(split), starts(config))
    assert np.ptp(starts(config)[:, :4], 0).max() == 8  # the stream that a sublayer reads depends on the position


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(kind="hyper", start="zero"), "model.residual.start belongs to manifold, manifold_lite"),
        (dict(kind="hyper", iterations=3), "model.residual.iterations belongs to manifold"),
        (dict(streams=2), "model.residual.streams belongs to hyper"),
        (dict(kind="manifold_lite", form="released"), "model.residual.form belongs to manifold"),
        (dict(kind="manifold", block_layers=2), "model.residual.block_layers belongs to block_attention"),
        (dict(kind="manifold", eps=1e-3), "model.residual.eps belongs to model.residual.form released"),
        (dict(kind="manifold", start="zero", identity=3.0), "model.residual.identity belongs to start one_hot"),
        (dict(kind="manifold", alpha=-1.0), "model.residual.alpha is -1.0"),
        (dict(kind="manifold_lite", streams=5), "at most 4"),
        (dict(kind="hyper", readout="last"), "readout last belongs to mHC"),
        (dict(kind="manifold", readout="mean"), "model.residual.readout is 'mean'"),
        (dict(kind="manifold", streams=0), "model.residual.streams is 0"),
        (dict(kind="gain", query_std=1.0), "model.residual.query_std belongs to block_attention"),
    ],
    ids=str,
)
def test_refused(wrong, said):
    with pytest.raises(ReproError, match=said.replace("[", r"\[")):
        ResidualConfig(**wrong)
