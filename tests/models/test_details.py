"""Statistics of attention that a call asks for: against NumPy, for every kind of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.models import ModelConfig, init_and_apply
from repro.models.softmax import attend, logit_statistics

pytestmark = pytest.mark.usefixtures("quick_compile")

# Grouped queries in the first layer, a latent in the second.
MIXED = ModelConfig(
    vocab_size=16, layers=2, width=16, heads=2, ffn=8, pattern="mha.dense, mla.dense", kv_heads=1,
    kv_rank=6, nope_size=6, rope_size=2, value_size=8,
)  # fmt: skip


def logits(shape=(3, 2, 7, 7)):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32) * 3


def expected(raw_BHTS):
    """The quantile and the mean relative entropy [H] of unmasked positions, in float64."""
    B, H, T, _ = raw_BHTS.shape
    mask = np.tril(np.ones((T, T), bool))
    quantile = [np.quantile(raw_BHTS[:, h][:, mask].astype(np.float64), 0.999) for h in range(H)]
    relative = np.zeros((B, H, T - 1))
    for t in range(1, T):
        z = raw_BHTS[:, :, t, : t + 1].astype(np.float64)
        p = np.exp(z - z.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        relative[:, :, t - 1] = -(p * np.log(p)).sum(-1) / np.log(t + 1)
    return np.array(quantile), relative.mean((0, 2))


def test_details_of_given_logits():
    raw = logits()
    mask = np.tril(np.ones((7, 7), bool))
    found = logit_statistics(raw, raw, mask, details=True)
    quantile, relative = expected(raw)
    np.testing.assert_allclose(found["logit_p999"], quantile, rtol=1e-5)
    np.testing.assert_allclose(found["relative_entropy"], relative, rtol=1e-5)
    assert (found["logit_p999"] < found["max_logit"]).all()
    # Wrong: with what the mask hides, or one divisor for all rows.
    hidden = np.quantile(np.moveaxis(raw, 1, 0).reshape(2, -1), 0.999, axis=1)
    assert not np.allclose(found["logit_p999"], hidden, rtol=1e-3)
    assert not np.allclose(found["relative_entropy"], found["entropy"] / np.log(7), rtol=0.05)
    even = logit_statistics(jnp.zeros((1, 2, 7, 7)), jnp.zeros((1, 2, 7, 7)), mask, details=True)
    np.testing.assert_allclose(even["relative_entropy"], 1.0, rtol=1e-6)


def test_one_position_has_no_choice():
    value = jnp.ones((1, 1, 1, 4))
    _, found = attend(jnp.full((1, 1, 1, 1), 2.0), value, 0.0, details=True)
    assert float(found["logit_p999"][0]) == 2.0 and float(found["relative_entropy"][0]) == 1.0


def test_every_kind_of_attention_gives_them_on_request():
    init, apply = init_and_apply(MIXED)
    params = init(jax.random.key(0))
    params = jax.tree.map(lambda w: 2 * w, params)  # so that logits differ
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 16)
    plain, full = (jax.jit(lambda p, details=d: apply(p, tokens, details=details))(params) for d in (False, True))
    assert plain.stats.logit_p999 is None and plain.stats.relative_entropy is None
    assert full.stats.logit_p999.shape == full.stats.relative_entropy.shape == (2, 2)
    np.testing.assert_allclose(full.logits, plain.logits, rtol=1e-5, atol=1e-6)
    assert (full.stats.logit_p999 <= full.stats.max_logit).all()
    assert ((full.stats.relative_entropy > 0) & (full.stats.relative_entropy < 1)).all()
