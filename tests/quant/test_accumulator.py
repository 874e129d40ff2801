import math

import jax
import numpy as np
import pytest

from repro.errors import ReproError
from repro.quant import Accumulator, accumulate, round_to

pytestmark = pytest.mark.usefixtures("quick_compile")


def truncated(x, significant):
    """x cut towards zero to so many significant bits."""
    if x == 0:
        return 0.0
    step = 2.0 ** (math.frexp(x)[1] - significant)
    return math.trunc(x / step) * step


def by_hand(a, b, accumulator):
    """One row times one column, from the definition, in Python's integers and exact floats."""
    k = len(a)
    interval = accumulator.promote_every or k
    total = np.float32(0)
    for start in range(0, k, interval):
        part = 0.0
        for at in range(start, min(start + interval, k), accumulator.chunk):
            end = min(at + accumulator.chunk, start + interval, k)
            terms = [part, *(float(x) * float(y) for x, y in zip(a[at:end], b[at:end], strict=True))]
            largest = max((math.frexp(t)[1] for t in terms if t), default=0)
            step = 2.0 ** (largest - 1 - accumulator.mantissa_bits)
            part = truncated(sum(math.trunc(t / step) for t in terms) * step, accumulator.mantissa_bits + 1)
        total = np.float32(total + np.float32(part))
    return total


def operands(k, positive=False, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(size=(2, k)) if positive else rng.normal(size=(2, k)) * 4
    return np.asarray(round_to(a, "e4m3")), np.asarray(round_to(b, "e4m3"))


@pytest.mark.parametrize("sizes", [(14, 32, 128), (13, 16, None), (23, 1, None), (10, 8, 16)])
def test_it_is_its_definition(sizes):
    accumulator = Accumulator(*sizes)
    a = np.stack([operands(200, seed=s)[0] for s in range(4)])
    b = np.stack([operands(200, seed=s)[1] for s in range(3)], axis=1)
    theirs = [[by_hand(a[i], b[:, j], accumulator) for j in range(3)] for i in range(4)]
    np.testing.assert_array_equal(accumulate(a, b, accumulator), theirs)
    np.testing.assert_array_equal(jax.jit(lambda a, b: accumulate(a, b, accumulator))(a, b), theirs)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(accumulate(a, b, Accumulator(8, *sizes[1:])), theirs)
    np.testing.assert_array_equal(-accumulate(-a, b, accumulator), theirs)  # as no cut towards minus infinity is


def one(a, b, *sizes):
    return float(accumulate(a[None], b[:, None], Accumulator(*sizes))[0, 0])


def test_one_product_at_a_time_with_23_bits_is_float32_cut_towards_zero():
    a, b = operands(300, positive=True)
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total = truncated(total + float(x) * float(y), 24)
    assert one(a, b, 23, 1, None) == total


def test_few_bits_lose_and_promotion_restores():
    """DeepSeek-V3, section 3.5.2: a sum of 4096 products that all have one sign."""
    a, b = operands(4096, positive=True)
    exact = float(np.dot(a.astype(np.float64), b.astype(np.float64)))
    errors = [1 - one(a, b, bits, 32, None) / exact for bits in (12, 13, 14, 16, 23)]
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[1] > 0.04 > errors[2] > 0.01
    assert 0 <= 1 - one(a, b, 14, 32, 128) / exact < 1e-3


def test_the_order_inside_a_chunk_does_not_matter():
    a, b = operands(128)
    order = np.concatenate([np.random.default_rng(s).permutation(32) + 32 * s for s in range(4)])
    assert one(a, b, 13, 32, None) == one(a[order], b[order], 13, 32, None)
    swamped = np.ones(65, np.float32) * np.float32(2.0**-15)
    swamped[0] = 1
    assert one(swamped, np.ones(65, np.float32), 14, 1, None) == 1.0
    assert one(swamped[::-1].copy(), np.ones(65, np.float32), 14, 1, None) > 1.0
    assert one(-swamped, np.ones(65, np.float32), 14, 1, None) == -1.0


def test_what_is_refused():
    for sizes, message in (((0, 32, None), "1 to 23"), ((23, 256, None), "31 bits"), ((14, 32, 100), "do not divide")):
        with pytest.raises(ReproError, match=message):
            Accumulator(*sizes)
