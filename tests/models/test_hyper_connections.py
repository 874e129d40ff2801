"""The equations of several residual streams against DeepSeek-V4's released code, and against loops."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from repro.errors import ReproError
from repro.models import hyper_connections as equations
from repro.models.functional import mhc_maps as eager_mhc_maps

pytestmark = pytest.mark.usefixtures("quick_compile")

GOLDEN = dict(np.load(Path(__file__).parent / "data" / "deepseek_v4_streams.npz"))
N, D = 4, 16
mhc_maps = jax.jit(eager_mhc_maps, static_argnames="form")
sinkhorn = jax.jit(equations.sinkhorn, static_argnums=1)
head_weights, hyper_maps, lite_maps, read_streams, write_streams = map(
    jax.jit,
    (
        equations.head_weights, equations.hyper_maps, equations.lite_maps, equations.read_streams,
        equations.write_streams,
    ),
)  # fmt: skip
X, Y = GOLDEN["hc_streams"], GOLDEN["hc_sublayer_out"]
OWN = GOLDEN["hc_fn"].T, GOLDEN["hc_base"], GOLDEN["hc_scale"]


def written(res, post, x=X, y=Y):
    return np.einsum("btij,btjd->btid", res, x) + np.asarray(post)[..., None] * y[:, :, None]


@pytest.fixture(scope="module")
def maps():
    return {form: [np.asarray(m) for m in mhc_maps(X, *OWN, form=form)] for form in ("paper", "released")}


def test_the_released_form_equals_the_released_code(maps):
    pre, post, res = maps["released"]
    np.testing.assert_allclose(post, GOLDEN["hc_post"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(res.swapaxes(2, 3), GOLDEN["hc_comb"], rtol=0, atol=1e-5)
    np.testing.assert_allclose((pre[..., None] * X).sum(2), GOLDEN["hc_collapsed"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(written(res, post), GOLDEN["hc_new_streams"], rtol=0, atol=1e-5)


def test_the_streams_as_the_model_reads_and_writes_them(maps):
    pre, post, res = (jnp.moveaxis(m, range(2, m.ndim), range(m.ndim - 2)) for m in maps["released"])
    np.testing.assert_allclose(read_streams(X, pre), GOLDEN["hc_collapsed"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(write_streams(X, Y, post, res), GOLDEN["hc_new_streams"], rtol=0, atol=1e-5)


def test_a_mixing_matrix_that_is_not_transposed_is_wrong(maps):
    _, post, res = maps["released"]
    assert np.abs(written(res.swapaxes(2, 3), post) - GOLDEN["hc_new_streams"]).max() > 0.1


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2)], ids=["reading, mixing, writing", "writing, reading, mixing"])
def test_another_order_of_the_slices_is_wrong(order):
    cut = lambda m: np.split(m, (N, 2 * N), -1)
    phi, bias = (np.concatenate([cut(m)[i] for i in order], -1) for m in OWN[:2])
    _, post, res = mhc_maps(X, phi, bias, OWN[2][list(order)], form="released")
    assert np.abs(written(res, post) - GOLDEN["hc_new_streams"]).max() > 0.1


def test_the_released_readout():
    head = GOLDEN["head_fn"].T, GOLDEN["head_base"], GOLDEN["head_scale"][0]
    np.testing.assert_allclose(read_streams(X, head_weights(X, *head)), GOLDEN["head_out"], rtol=0, atol=1e-5)
    assert np.abs(X.sum(2) - GOLDEN["head_out"]).max() > 0.1  # the readout of Hyper-Connections


def test_the_forms_agree_after_transposing_the_logits(maps):
    transposed = np.arange(N * N).reshape(N, N).T.reshape(-1)
    order = np.concatenate([np.arange(2 * N), 2 * N + transposed])
    paper = mhc_maps(X, OWN[0][:, order], OWN[1][order], OWN[2], form="paper")
    for a, b in zip(paper, maps["released"], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)  # the epsilons
    assert np.abs(maps["paper"][2] - maps["released"][2]).max() > 0.05


def balanced(logits, iterations):
    """float64, matrix by matrix: columns, then rows."""
    m = np.exp(np.asarray(logits, np.float64))
    for _ in range(iterations):
        m = m / m.sum(-2, keepdims=True)
        m = m / m.sum(-1, keepdims=True)
    return m


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_is_columns_then_rows(iterations):
    logits = 3 * np.random.default_rng(iterations).normal(size=(5, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(sinkhorn(logits, iterations), balanced(logits, iterations), rtol=1e-5, atol=1e-7)
    rows_first = balanced(logits.swapaxes(1, 2), iterations).swapaxes(1, 2)
    assert np.abs(rows_first - balanced(logits, iterations)).max() > 1e-4


def test_the_gradient_passes_through_all_iterations():
    logits = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    weights = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    found = jax.jit(jax.grad(lambda z: jnp.sum(weights * sinkhorn(z, 7))))(logits)
    step, expected = 1e-5, np.zeros((3, 3))
    for i, j in np.ndindex(3, 3):
        moved = np.zeros((3, 3))
        moved[i, j] = step
        ends = [np.sum(weights * balanced(logits + sign * moved, 7)) for sign in (1, -1)]
        expected[i, j] = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(arrays(np.float32, (2, 4, 4), elements=st.floats(-4, 4, width=32)))
def test_sinkhorn_is_doubly_stochastic(logits):
    m = np.asarray(sinkhorn(logits, 20))
    np.testing.assert_allclose(m.sum(-1), 1.0, rtol=0, atol=1e-5)
    assert (m >= 0).all() and np.abs(m.sum(-2) - 1).max() < 0.2  # the error of the finite iteration
    np.testing.assert_allclose(sinkhorn(logits + 7.0, 20), m, rtol=0, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(arrays(np.float32, (1, 4, 4), elements=st.floats(-1000, 1000, width=32)))
def test_sinkhorn_of_large_logits_is_finite(logits):
    m = np.asarray(sinkhorn(logits, 20))
    assert np.isfinite(m).all()
    np.testing.assert_allclose(m.sum(-1), 1.0, rtol=0, atol=1e-5)


def test_mhc_lite_is_exactly_doubly_stochastic_and_reaches_every_permutation():
    rng, count = np.random.default_rng(0), 6
    x = rng.normal(size=(1, 2, 3, 5)).astype(np.float32)
    phi, bias = np.zeros((15, 6 + count), np.float32), np.zeros(6 + count, np.float32)
    seen = set()
    for p in range(count):
        own = bias.copy()
        own[6 + p] = 100.0
        res = np.asarray(lite_maps(x, phi, own, np.ones(3, np.float32))[2])[:, :, 0, 0]
        np.testing.assert_allclose(np.sort(res, -1), [[0, 0, 1]] * 3, atol=1e-6)
        seen.add(tuple(res.argmax(-1)))
    assert len(seen) == count
    phi = 9 * rng.normal(size=phi.shape).astype(np.float32)
    res = lite_maps(x, phi, bias, np.ones(3, np.float32))[2]
    for axis in (0, 1):
        np.testing.assert_allclose(res.sum(axis), 1.0, rtol=0, atol=1e-6)
    assert float(res.max()) > 0.9  # close to one permutation, where the iteration has a large error


def test_hyper_connections_against_a_loop():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, N, D)).astype(np.float32)
    theta, bias, alpha = rng.normal(size=(D, 2 + N)) / 4, rng.normal(size=2 * N + N * N), np.array([0.3, 0.7, 0.5])
    pre, post, res = hyper_maps(x, *(np.float32(a) for a in (theta, bias, alpha)))
    for b, t in np.ndindex(2, 3):
        for j in range(N):
            stream = x[b, t, j].astype(np.float64)
            stream /= np.sqrt(np.mean(stream**2) + 1e-6)
            z = np.tanh([sum(stream[d] * theta[d, m] for d in range(D)) for m in range(2 + N)])
            assert float(pre[j, b, t]) == pytest.approx(alpha[0] * z[0] + bias[j], abs=1e-5)
            assert float(post[j, b, t]) == pytest.approx(alpha[1] * z[1] + bias[N + j], abs=1e-5)
            for i in range(N):  # what stream i gets of stream j
                expected = alpha[2] * z[2 + i] + bias[2 * N + i * N + j]
                assert float(res[i, j, b, t]) == pytest.approx(expected, abs=1e-5)


def test_the_derivatives_of_reading_and_writing():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x, y, pre, post, res = draw(2, 3, N, D), draw(2, 3, D), draw(N, 2, 3), draw(N, 2, 3), draw(N, N, 2, 3)
    a, b = draw(2, 3, D), draw(2, 3, N, D)
    plain = lambda x, y, pre, post, res: (
        jnp.sum(a * jnp.einsum("nbt,btnd->btd", pre, x))
        + jnp.sum(b * (jnp.einsum("ijbt,btjd->btid", res, x) + jnp.einsum("nbt,btd->btnd", post, y)))
    )
    ours = lambda x, y, pre, post, res: jnp.sum(a * read_streams(x, pre)) + jnp.sum(b * write_streams(x, y, post, res))
    for found, expected in zip(
        *(jax.jit(jax.grad(f, range(5)))(x, y, pre, post, res) for f in (ours, plain)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_coefficients_stay_float32_beside_bfloat16_streams():
    x, y = jnp.asarray(X, jnp.bfloat16), jnp.asarray(Y, jnp.bfloat16)

    def loss(x, phi):
        pre, post, res = mhc_maps(x, phi, *OWN[1:])
        last = lambda m: jnp.moveaxis(m, range(2, m.ndim), range(m.ndim - 2))
        assert {m.dtype for m in (pre, post, res)} == {jnp.dtype("float32")}
        read, new = read_streams(x, last(pre)), write_streams(x, y, last(post), last(res))
        assert read.dtype == new.dtype == jnp.bfloat16
        return new.astype(jnp.float32).sum() + read.astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1)))(x, OWN[0])
    assert [g.dtype.name for g in gradients] == ["bfloat16", "float32"]


def test_refused():
    with pytest.raises(ReproError, match="square matrices on the last two axes, not shape"):
        equations.sinkhorn(np.zeros((2, 3)))
    with pytest.raises(ReproError, match="at least one iteration, not 0"):
        equations.sinkhorn(np.zeros((3, 3)), 0)
    with pytest.raises(ReproError, match="form 'comb' is unknown; known are paper, released"):
        eager_mhc_maps(X, *OWN, form="comb")
