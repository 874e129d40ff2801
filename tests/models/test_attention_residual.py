"""Block AttnRes against a loop over sources, as the Kimi K3 report defines it in section 2 (eq. 8 to 10)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from repro.models import BlockAttnRes, ModelConfig, ResidualConfig, abstract, declarations, init_and_apply
from repro.models.attention_residual import BlockAttnResEnds, attend_to_sources
from repro.optim import check_layouts, from_declarations

pytestmark = pytest.mark.usefixtures("quick_compile")

EPS = 1e-6
PLAIN = ModelConfig(vocab_size=11, layers=3, width=16, heads=2, ffn=24)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)))


def having(config=PLAIN, **residual):
    return dataclasses.replace(config, residual=ResidualConfig(kind="block_attention", **residual))


def attended(sources, query, gain, scale=1.0, values_normed=False):
    """softmax over sources of query . (gain RMSNorm(v)), in float64."""
    normed = [v / np.sqrt(np.mean(v**2, -1, keepdims=True) + EPS) for v in sources]
    scores = np.stack([(n * gain) @ query * scale for n in normed])
    weights = np.exp(scores) / np.exp(scores).sum(0)
    return sum(w[..., None] * v for w, v in zip(weights, normed if values_normed else sources, strict=True))


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_attention_over_sources():
    sources, query, gain = drawn(4, 2, 3, 8), drawn(8, seed=1), 1 + drawn(8, seed=2)
    seen = jnp.asarray([True, True, False, True])
    own = tuple(np.float32(a) for a in (sources, query, gain))
    found = attend_to_sources(own[0], seen, *own[1:], EPS)
    kept = [sources[i] for i in (0, 1, 3)]
    np.testing.assert_allclose(found, attended(kept, query, gain), rtol=1e-4, atol=1e-5)
    for wrong in (dict(scale=8**-0.5), dict(values_normed=True)):
        assert np.abs(found - attended(kept, query, gain, **wrong)).max() > 0.05
    assert np.abs(found - attended(list(sources), query, gain)).max() > 0.05
    low = attend_to_sources(jnp.asarray(own[0], jnp.bfloat16), seen, *own[1:], EPS)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), found, rtol=0, atol=0.05)


@pytest.mark.parametrize("block_layers", [1, 2])
def test_sites_in_turn_against_a_loop(block_layers):
    layers, norm = 3, lambda x: 2 * x
    config = having(block_layers=block_layers, query_std=3.0)
    x = drawn(2, 3, 16)
    ends = BlockAttnResEnds(config, rngs=nnx.Rngs(99))
    carry = ends.enter(jnp.asarray(x, jnp.float32))
    assert len(carry) == 1 + -(-layers // block_layers)
    done, partial = [x], None
    for position in range(2 * layers):
        if position % (2 * block_layers) == 0 and partial is not None:
            done, partial = [*done, partial], None
        site = BlockAttnRes(config, position, rngs=nnx.Rngs(position))
        site.key_gain_D[...] = jnp.asarray(1 + 0.3 * drawn(16, seed=position), jnp.float32)
        sources = done if partial is None else [*done, partial]
        h = attended(sources, np.asarray(site.query_D[...]), np.asarray(site.key_gain_D[...]))
        y = np.sin(2 * h)
        carry, record = site(carry, norm, lambda x: (jnp.sin(x), "record"), jnp.asarray(position))
        assert record == "record"
        partial = y if partial is None else partial + y
        if position == 0:
            np.testing.assert_allclose(h, x)  # the first site reads the embedding alone
    sources = [*done, partial]
    np.testing.assert_allclose(carry, np.stack(sources), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        ends.leave(carry), attended(sources, np.asarray(ends.query_D[...]), 1.0), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(ends.view(carry), sum(sources), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def logits(quick_compile_module):
    """Of the plain model, of queries that are zero, and of random ones in blocks of one and of two layers."""
    tiny = dataclasses.replace(PLAIN, norm_eps=1e-12)
    configs = {
        "plain": tiny, "zero": having(tiny, block_layers=2), "one": having(tiny, query_std=1.0),
    }  # fmt: skip
    start = lambda name: jax.jit(init_and_apply(configs[name])[0])(jax.random.key(0))
    programs = {name: jax.jit(init_and_apply(configs[name])[1]) for name in ("plain", "zero", "one")}
    random = start("one")  # the size of a block changes no parameter, and the queries no program
    used = {"plain": ("plain", start("plain")), "zero": ("zero", start("zero")), "one": ("one", random)}
    used["two"] = "zero", random
    return {name: np.asarray(programs[of](params, TOKENS).logits) for name, (of, params) in used.items()}


def test_queries_of_zero_are_the_plain_residual(logits):
    """The mean of the sources is the residual stream over their number, which the norm takes out."""
    np.testing.assert_allclose(logits["zero"], logits["plain"], rtol=0, atol=1e-4)
    assert np.abs(logits["two"] - logits["plain"]).max() > 0.05


def test_the_size_of_a_block_counts_decoder_layers(logits):
    assert np.abs(logits["one"] - logits["two"]).max() > 0.05


def test_every_parameter_has_a_gradient_at_step_0_or_a_reason():
    init, apply = init_and_apply(having(query_std=0.0))
    params = jax.jit(init)(jax.random.key(0))
    g = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(apply(p, TOKENS).logits))))(params)
    zero = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(g)[0]:
        assert np.isfinite(leaf).all(), path
        if not np.any(leaf):
            zero.append(jax.tree_util.keystr(path, simple=True, separator="/"))
    # A gain multiplies a query of zero.
    assert zero == [f"{site}/key_gain_D" for site in ("blocks/attention_link", "blocks/ffn_link", "ends")]
    query_LD = g["blocks"]["attention_link"]["query_D"]
    assert not np.any(query_LD[0]) and np.any(query_LD[1])  # the first site has nothing to choose from


def test_layouts_and_types():
    config = dataclasses.replace(having(block_layers=2), layers=5, compute_dtype="bfloat16")
    init, apply = init_and_apply(config)
    shapes = jax.eval_shape(init, jax.random.key(0))
    layouts = from_declarations(declarations(abstract(config)))
    check_layouts(shapes, layouts)
    own = layouts["blocks"]["ffn_link"]
    assert {n: (layout.role, layout.qk) for n, layout in own.items()} == {
        "query_D": ("static", ""),
        "key_gain_D": ("norm", ""),
    }
    out = jax.eval_shape(apply, shapes, TOKENS)
    assert out.logits.dtype == jnp.float32 and out.stats.residual is None
