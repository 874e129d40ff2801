import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import ReproError
from repro.optim import NS_SCHEDULES, newton_schulz

pytestmark = pytest.mark.usefixtures("quick_compile")

# Few shapes, so that the tests share compiled programs.
WIDE, TALL, SQUARE, BATCH = (8, 12), (12, 8), (8, 8), (3, 8, 12)

newton_schulz_module = importlib.import_module("repro.optim.newton_schulz")  # the package has a function of that name
jitted = jax.jit(newton_schulz, static_argnames=("schedule", "dtype", "steps"))


def matrix_with(singular_values, rows, columns, seed=0):
    """A rows x columns matrix (float64) with the given singular values, and its orthogonal factor U V^T."""
    rng = np.random.default_rng(seed)
    n = len(singular_values)
    u = np.linalg.qr(rng.normal(size=(rows, n)))[0]
    v = np.linalg.qr(rng.normal(size=(columns, n)))[0]
    return (u * singular_values) @ v.T, u @ v.T


def relative_values(n, smallest):
    """n singular values of Frobenius norm 1, the smallest of which is `smallest`."""
    values = np.geomspace(smallest, 1, n)
    for _ in range(200):  # a fixed point: only the smallest is pinned
        values = np.geomspace(smallest, values[-1] / np.linalg.norm(values), n)
    assert abs(np.linalg.norm(values) - 1) < 1e-6
    return values


def reference(x, table):
    """Newton–Schulz in float64, straight from the definition."""
    x = np.asarray(x, np.float64)
    if x.shape[-2] > x.shape[-1]:
        return np.swapaxes(reference(np.swapaxes(x, -1, -2), table), -1, -2)
    y = x / np.linalg.norm(x, axis=(-2, -1), keepdims=True)
    for a, b, c in table:
        gram = y @ np.swapaxes(y, -1, -2)
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_the_tables():
    assert set(NS_SCHEDULES) >= {"muon5", "hybrid10", "cubic"}
    assert NS_SCHEDULES["muon5"] == ((3.4445, -4.7750, 2.0315),) * 5
    assert NS_SCHEDULES["hybrid10"] == ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
    with pytest.raises(TypeError):
        NS_SCHEDULES["muon5"] = ()


@pytest.mark.parametrize("schedule", ["muon5", "hybrid10", "cubic"])
@pytest.mark.parametrize("shape", [WIDE, TALL])
def test_equals_the_definition_in_float64(shape, schedule):
    x = gaussian(*shape)
    got = np.asarray(jitted(x, schedule))
    assert got.dtype == np.float32 and got.shape == shape
    np.testing.assert_allclose(got, reference(x, NS_SCHEDULES[schedule]), atol=3e-6)
    a, b, c = NS_SCHEDULES[schedule][0]
    for wrong in [((a, b, c * 1.01),) * 5, ((a, b, c),) * 4, ((b, a, c),) * 5, ((a, b, c),) * 6]:
        with np.errstate(all="ignore"), pytest.raises(AssertionError):
            np.testing.assert_allclose(reference(x, wrong), got, atol=3e-6)


@pytest.mark.parametrize("shape", [SQUARE, (2, 3, 5, 4), (1, 7), (7, 1), (1, 1)])
def test_any_shape(shape):
    x = gaussian(*shape)
    np.testing.assert_allclose(jitted(x), reference(x, NS_SCHEDULES["muon5"]), atol=3e-6)


def singular_values_lie_in(y, low, high):
    values = np.linalg.svd(np.asarray(y, np.float64), compute_uv=False)
    assert low <= values.min() and values.max() <= high, (values.min(), values.max())


@pytest.mark.parametrize(
    ("schedule", "smallest", "low", "high", "too_small"),
    [
        ("muon5", 1e-2, 0.65, 1.15, 1e-3),
        ("hybrid10", 2e-3, 1 - 1e-3, 1 + 1e-3, 1e-5),
        ("polar_express", 1e-3, 1 - 1e-3, 1 + 1e-3, 1e-5),
        ("cubic", 1e-3, 1 - 1e-5, 1 + 1e-5, 1e-6),
    ],
)
@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE])
def test_singular_values_after_a_schedule(schedule, smallest, low, high, too_small, shape):
    x, _ = matrix_with(relative_values(8, smallest), *shape)
    singular_values_lie_in(jitted(x.astype(np.float32), schedule), low, high)
    # The same check fails for values below the range that the schedule lifts, and for fewer steps.
    smaller, _ = matrix_with(relative_values(8, too_small), *shape)
    with pytest.raises(AssertionError):
        singular_values_lie_in(jitted(smaller.astype(np.float32), schedule), low, high)
    with pytest.raises(AssertionError):
        singular_values_lie_in(reference(x, NS_SCHEDULES[schedule][: len(NS_SCHEDULES[schedule]) // 2]), low, high)


def test_muon5_does_not_converge_to_one_and_hybrid10_does():
    x, factor = matrix_with(relative_values(8, 1e-2), *WIDE)
    x = x.astype(np.float32)
    off = {s: np.abs(np.asarray(jitted(x, s)) - factor).max() for s in ["muon5", "hybrid10", "cubic"]}
    assert off["muon5"] > 0.02 and off["hybrid10"] < 1e-3 and off["cubic"] < 1e-5


@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE])
def test_cubic_converges_to_the_orthogonal_factor(shape):
    x = gaussian(*shape)
    u, _, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(jitted(x, "cubic"), u @ vt, atol=1e-5)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(jitted(x), u @ vt, atol=1e-5)


def with_eps_in_the_norm(x):
    """The form with a fixed epsilon, which loses scale invariance."""
    x = np.asarray(x, np.float64)
    return np.asarray(reference_from(x / (np.linalg.norm(x) + 1e-7)))


def reference_from(y):
    for a, b, c in NS_SCHEDULES["muon5"]:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


@pytest.mark.parametrize("exponent", [-100, -60, -27, -1, 1, 60, 100, 120])
def test_powers_of_two_change_no_bit(exponent):
    x = gaussian(*WIDE)
    scaled = np.ldexp(x, exponent)
    assert (np.ldexp(scaled, -exponent) == x).all()
    np.testing.assert_array_equal(jitted(scaled), jitted(x))


@given(st.floats(-30, 30), st.integers(0, 100))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_scale_invariance(exponent, seed):
    x = gaussian(*WIDE, seed=seed)
    np.testing.assert_allclose(jitted(x * np.float32(10.0**exponent)), jitted(x), atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scale_invariance_at_the_ends(scale):
    x = gaussian(*WIDE)

    def check(f):
        np.testing.assert_allclose(f(x * np.float32(scale)), f(x), atol=1e-5)

    check(jitted)
    if scale < 1:
        with pytest.raises(AssertionError):
            check(with_eps_in_the_norm)
    elif scale > 1e19:
        with pytest.raises(AssertionError), np.errstate(all="ignore"):  # squares overflow in a float32 norm
            check(lambda y: reference_from(y / np.sqrt((y * y).sum(dtype=np.float32))))


def test_each_matrix_of_a_batch_is_scaled_by_itself():
    x = gaussian(*BATCH)
    scale = np.float32([1e-20, 1.0, 1e20])[:, None, None]
    np.testing.assert_allclose(jitted(x * scale), jitted(x), atol=1e-5)
    joint = lambda y: reference_from_batch(y / np.linalg.norm(y.astype(np.float64)))
    assert not np.allclose(joint(x * scale), joint(x), atol=1e-5)


def reference_from_batch(ys):
    return np.stack([reference_from(y) for y in ys])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zero_stays_zero_also_beside_others(dtype):
    x = gaussian(*BATCH)
    x[1] = 0
    got = np.asarray(jitted(x, dtype=dtype))
    assert (got[1] == 0).all() and np.isfinite(got).all() and (np.abs(got[[0, 2]]).max((1, 2)) > 0.1).all()


def test_a_zero_row_stays_zero():
    x = gaussian(*WIDE)
    x[2] = 0
    got = np.asarray(jitted(x))
    assert (got[2] == 0).all()
    singular_values_lie_in(np.delete(got, 2, 0), 0.6, 1.21)


def test_nan_and_infinity_poison_their_own_matrix_only():
    x = gaussian(*BATCH)
    x[0, 0, 0], x[2, 1, 1] = np.nan, np.inf
    got = np.asarray(jitted(x))
    assert np.isnan(got[0]).any() and np.isnan(got[2]).any() and np.isfinite(got[1]).all()


@given(st.integers(0, 1000))
@settings(deadline=None, derandomize=True, max_examples=10)
def test_tall_is_the_transpose_of_wide(seed):
    x = gaussian(*WIDE, seed=seed)
    np.testing.assert_allclose(jitted(x.T), np.asarray(jitted(x)).T, atol=5e-6)


def test_orthogonal_changes_of_basis_commute():
    # Newton–Schulz acts on singular values alone.
    x, q = gaussian(*WIDE), np.linalg.qr(gaussian(*SQUARE, seed=1))[0].astype(np.float32)
    np.testing.assert_allclose(jitted(q @ x), q @ np.asarray(jitted(x)), atol=1e-5)


def test_batched_equals_single():
    x = gaussian(*BATCH)
    batched = np.asarray(jitted(x))
    for one, got in zip(x, batched, strict=True):
        np.testing.assert_allclose(got, jitted(one), atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(newton_schulz))(x), batched, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 33, 70), (6, 32, 86), (2, 3, 24, 24)])
def test_one_matrix_in_a_stack_and_under_vmap_has_the_same_bits(shape):
    x = gaussian(*shape)
    stacked = np.asarray(jitted(x))
    flat = x.reshape(-1, *shape[-2:])
    np.testing.assert_array_equal(jax.jit(jax.vmap(newton_schulz))(flat), stacked.reshape(flat.shape))
    for one, got in zip(flat[:2], stacked.reshape(flat.shape)[:2], strict=True):
        np.testing.assert_array_equal(jitted(one), got)
        np.testing.assert_array_equal(jitted(one[None])[0], got)


@pytest.mark.parametrize("shape", [WIDE, (8, 32)])
def test_jit_equals_eager(shape):
    x = gaussian(*shape)
    np.testing.assert_allclose(jitted(x), newton_schulz(x), atol=5e-6)


@pytest.mark.parametrize("schedule", ["muon5", "hybrid10"])
def test_bfloat16_products_are_near_and_not_equal(schedule):
    x = gaussian(*WIDE)
    exact, rounded = np.asarray(jitted(x, schedule)), np.asarray(jitted(x, schedule, dtype=jnp.bfloat16))
    assert rounded.dtype == np.float32
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.05, error
    singular_values_lie_in(rounded, 0.65, 1.21)


def test_the_coefficients_are_not_rounded_with_the_operands():
    # The matrix (1) passes one step as a + b; bfloat16 would hold a as 3.4375.
    assert float(newton_schulz(np.ones((1, 1), np.float32), ((3.4445, -4.7750, 0.0),), dtype=jnp.bfloat16)[0, 0]) == (
        pytest.approx(3.4445 - 4.78125, abs=1e-6)  # the second one is part of an operand
    )


def test_float32_products_are_not_left_to_the_device():
    # Elsewhere than on a CPU the default precision of a float32 product is TF32 or bfloat16.
    text = jitted.lower(gaussian(*WIDE)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 15 and all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_returns_the_type_of_its_argument(dtype):
    x = jnp.asarray(gaussian(*WIDE), dtype)
    y = jitted(x)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float32), jitted(x.astype(jnp.float32)), atol=4e-3)


def test_a_given_table():
    x = gaussian(*WIDE)
    table = [[2.0, -1.5, 0.5], (1.5, -0.5, 0.0)]
    np.testing.assert_allclose(newton_schulz(x, table), reference(x, table), atol=1e-6)
    np.testing.assert_array_equal(jitted(x, NS_SCHEDULES["muon5"]), jitted(x))
    np.testing.assert_allclose(newton_schulz(x, ()), x / np.linalg.norm(x), atol=1e-6)


def test_steps_only_check_the_table():
    x = gaussian(*WIDE)
    np.testing.assert_array_equal(jitted(x, steps=5), jitted(x))
    with pytest.raises(ReproError, match="has 10 rows, one per step, and 5 steps were asked for"):
        newton_schulz(x, "hybrid10", steps=5)
    for table in [((1.0, 2.0),), ((1.0, np.nan, 0.0),)]:
        with pytest.raises(ReproError, match="rows of three finite numbers"):
            newton_schulz(x, table)


def half_rank(rows, columns):
    """A matrix with half of its singular values zero, up to rounding to float32."""
    return matrix_with(np.ones(rows // 2), rows, columns)[0].astype(np.float32)


GRAM = [
    (gaussian(8, 32), 3e-6), (gaussian(16, 32), 3e-6), (gaussian(32, 8), 3e-6),
    (matrix_with(relative_values(8, 2e-3), 8, 32)[0].astype(np.float32), 2e-5), (half_rank(8, 32), 5e-3),
]  # fmt: skip


@pytest.mark.parametrize("schedule", ["muon5", "hybrid10", "polar_express"])
@pytest.mark.parametrize(("x", "tolerance"), GRAM)
def test_the_gram_side_is_numerically_equal(x, tolerance, schedule):
    np.testing.assert_allclose(jitted(x, schedule), reference(x, NS_SCHEDULES[schedule]), atol=tolerance)


def test_the_gram_side_needs_its_restarts(monkeypatch):
    monkeypatch.setattr(newton_schulz_module, "_RESTART", 10)
    x = half_rank(8, 32)
    got = np.asarray(jax.jit(lambda x: newton_schulz(x, "hybrid10"))(x))
    assert not np.abs(got - reference(x, NS_SCHEDULES["hybrid10"])).max() < 1


def long_products(x):
    """How many products have the long side of x among their axes."""
    text = jitted.lower(x).as_text()
    return sum("dot_general" in line and f"x{max(x.shape)}xf32" in line for line in text.splitlines())


def test_a_long_side_is_touched_every_third_step():
    assert long_products(gaussian(8, 12)) == 10  # twice a step
    assert long_products(gaussian(8, 16)) == 4  # twice before the first and before the fourth


def test_polar_express_rows_are_each_best_for_what_the_row_before_leaves():
    # The best odd quintic on [l, u] is off by the same amount at l, at both inner extrema and at u. The first three rows are
    # fitted to a narrower interval to bound their slope, so one extremum stays below the others.
    low, high = 1e-3, 1.0
    for row, (a, b, c) in enumerate(newton_schulz_module._POLAR_EXPRESS):
        p = lambda s, a=a, b=b, c=c: a * s + b * s**3 + c * s**5
        q1, q2 = sorted(np.sqrt(np.roots([5 * c, 3 * b, a]).real))
        errors = np.array([1 - p(low), p(q1) - 1, 1 - p(q2), p(high) - 1])
        np.testing.assert_allclose(errors[[0, 1, 3]], errors.max(), rtol=1e-3)
        assert errors[2] == pytest.approx(errors.max(), rel=1e-3) if row > 2 else 0.75 < errors[2] < errors.max()
        low, high = 1 - errors.max(), 1 + errors.max()
    assert errors.max() < 1e-8


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ReproError, match="'muon6' is unknown; known are muon5, hybrid10, "):
        newton_schulz(gaussian(2, 2), "muon6")
