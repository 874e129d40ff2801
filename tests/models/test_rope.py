import jax.numpy as jnp
import numpy as np
import pytest

from repro.models import YarnConfig, rope
from repro.models.rope import yarn_frequencies, yarn_length, yarn_logits, yarn_m

pytestmark = pytest.mark.usefixtures("quick_compile")

T, K, THETA = 7, 8, 100.0
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, T, 3, K)).astype(np.float32)


def turned(x, *, pairs="halves", frequency=lambda i: THETA ** (-2 * i / K), position=lambda t: t):
    """RoPE as multiplication of complex numbers by exp(i * angle), float64."""
    x = np.asarray(x, np.float64)
    a, b = (x[..., : K // 2], x[..., K // 2 :]) if pairs == "halves" else (x[..., ::2], x[..., 1::2])
    angle = position(np.arange(x.shape[1]))[:, None] * frequency(np.arange(K // 2))
    z = (a + 1j * b) * np.exp(1j * angle)[:, None, :]
    if pairs == "halves":
        return np.concatenate([z.real, z.imag], -1)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def test_equals_complex_multiplication():
    got = rope(jnp.asarray(X), THETA)
    np.testing.assert_allclose(got, turned(X), atol=1e-6)
    for wrong in [
        {"pairs": "neighbours"},
        {"frequency": lambda i: THETA ** (-i / K)},
        {"frequency": lambda i: THETA ** (2 * i / K)},
        {"position": lambda t: t + 1},
        {"position": lambda t: -t},
    ]:
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(got, turned(X, **wrong), atol=1e-6)


def test_interleaved_turns_neighbours():
    got = rope(jnp.asarray(X), THETA, interleaved=True)
    np.testing.assert_allclose(got, turned(X, pairs="neighbours"), atol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(got, turned(X), atol=1e-6)


def depends_on_the_distance_alone(f):
    """With one query and one key vector at all positions, q_t . k_s is constant along diagonals."""
    q, k = (np.broadcast_to(RNG.normal(size=(1, 1, 1, K)), (1, T, 1, K)).astype(np.float32) for _ in range(2))
    logits = np.einsum("btk,bsk->ts", np.asarray(f(q))[:, :, 0], np.asarray(f(k))[:, :, 0])
    for offset in range(-T + 1, T):
        diagonal = np.diagonal(logits, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(logits[0]) > 0.1


def test_only_relative_positions_matter():
    depends_on_the_distance_alone(lambda x: rope(jnp.asarray(x), THETA))
    for wrong in [
        lambda x: turned(x, position=lambda t: t**2),
        lambda x: x * np.cos(np.arange(T) / 3)[:, None, None],
        lambda x: x + np.arange(T)[:, None, None],
        lambda x: x,
    ]:
        with pytest.raises(AssertionError):
            depends_on_the_distance_alone(wrong)


def test_keeps_length_first_position_and_type():
    got = np.asarray(rope(jnp.asarray(X), THETA))
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(X, axis=-1), rtol=1e-6)
    np.testing.assert_array_equal(got[:, 0], X[:, 0])
    assert np.abs(got[:, 1:] - X[:, 1:]).max() > 0.1
    half = rope(jnp.asarray(X, jnp.bfloat16), THETA)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), got, atol=0.03)


def test_far_positions_are_exact():
    # Angles of some thousand radians are reduced in float64.
    x = np.zeros((1, 4097, 1, 4), np.float32)
    x[..., 0] = 1
    np.testing.assert_allclose(np.asarray(rope(jnp.asarray(x), 1.0))[0, -1, 0, 0], np.cos(4096.0), atol=1e-6)


RELEASED = YarnConfig(factor=40.0, original=4096)
"""DeepSeek-V3: 32 pairs, base 10,000."""


def stretched(size, theta, yarn):
    """The ramp from how often each pair turns in the original window, by looking for its ends among whole numbers."""
    turns = lambda i: yarn.original / (2 * np.pi) * theta ** (-2 * i / size)
    pairs = np.arange(-200, 200)
    low = max(pairs[turns(pairs) >= yarn.beta_fast].max(), 0)
    high = min(pairs[turns(pairs) <= yarn.beta_slow].min(), size - 1)
    i = np.arange(size // 2)
    kept = np.array([1.0 if p <= low else 0.0 if p >= high else (high - p) / (high - low) for p in i])
    return theta ** (-2 * i / size) * (kept + (1 - kept) / yarn.factor), low, high


@pytest.mark.parametrize(
    ("size", "theta", "yarn"),
    [
        (64, 1e4, RELEASED),
        (64, 5e4, YarnConfig(factor=32.0, original=4096, beta_fast=1.0, beta_slow=1.0)),  # Kimi K2: one step
        (8, 100.0, YarnConfig(factor=4.0, original=64)),
    ],
)
def test_yarn_slows_pairs_by_how_often_they_turn(size, theta, yarn):
    want, low, high = stretched(size, theta, yarn)
    got = yarn_frequencies(size, theta, yarn)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    plain = theta ** (-2 * np.arange(size // 2) / size)
    np.testing.assert_array_equal(got[: low + 1], plain[: low + 1])
    np.testing.assert_allclose(got[high:], plain[high:] / yarn.factor, rtol=1e-12)
    for wrong in [plain, plain / yarn.factor]:
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(got, wrong, rtol=1e-3)


def test_yarn_of_the_released_model():
    assert stretched(64, 1e4, RELEASED)[1:] == (10, 23)
    assert round(yarn_m(1.0, 40.0), 4) == 1.3689 and round(yarn_logits(RELEASED), 3) == 1.874
    assert yarn_length(RELEASED) == 1.0  # both m are equal, so only the logits grow
    other = YarnConfig(factor=40.0, mscale=1.0, mscale_all_dim=0.0)
    assert yarn_logits(other) == 1.0 and round(yarn_length(other), 4) == 1.3689


def test_yarn_turns_and_lengthens():
    yarn = YarnConfig(factor=4.0, original=64, mscale=2.0)
    got = rope(jnp.asarray(X), THETA, yarn=yarn)
    frequency, length = stretched(K, THETA, yarn)[0], (1 + 0.2 * np.log(4)) / (1 + 0.1 * np.log(4))
    np.testing.assert_allclose(got, turned(X, frequency=lambda i: frequency[i]) * length, atol=2e-6)
    np.testing.assert_array_equal(rope(jnp.asarray(X), THETA, yarn=YarnConfig()), rope(jnp.asarray(X), THETA))
