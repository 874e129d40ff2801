"""Bytes of a training state, against hand counts and real arrays."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from repro.errors import ReproError
from repro.quant import RECIPES, STATE_POLICIES, StatePolicy, quantize, state_ledger, storage_bits
from repro.quant.formats import FORMATS
from repro.quant.ledger import ROLES, storable

BYTES = {"fp32_adam": 16, "fp16_mixed": 16, "bf16_mixed": 16, "bf16_only": 8, "v3": 12}
BITS = {
    "mxfp4": 4.25, "mxfp8": 8.25, "mxfp6_e3m2": 6.25, "nvfp4": 4.5, "nvfp4_2d": 4 + 8 / 256, "nf4": 4 + 0.125 + 1 / 512,
    "fp8_tile": 8.25, "fp8_tile_pow2": 8.0625, "fp8_block": 8 + 32 / 16384, "fp8_tensor": 8, "int4_group": 4.25,
    "fp32": 32, "bf16": 16, "e5m6": 12, "e2m1": 4,
}  # fmt: skip


@pytest.mark.parametrize(("name", "each"), BYTES.items())
def test_bytes_per_parameter(name, each):
    found = state_ledger(1000, name)
    assert found.bytes_per_parameter == each and found.bytes == 1000 * each
    assert [row.role for row in found.rows] == [role for role in ROLES if role in found.policy.formats()]
    assert BYTES.keys() == STATE_POLICIES.keys()


def test_the_published_total():
    found = state_ledger(27_781_427_952, "fp32_adam")
    assert found.bytes == 444_502_847_232 and f"{found.bytes / 1e9:.1f}" == "444.5"
    assert f"{found.bytes / 2**30:.1f}" != "444.5", "binary units are another number"
    assert state_ledger(27_781_427_952, "v3").bytes * 4 == found.bytes * 3


@pytest.mark.parametrize(("name", "bits"), BITS.items())
def test_bits_per_value(name, bits):
    assert storage_bits(name) == Fraction(bits)
    with pytest.raises(AssertionError):
        assert storage_bits(name) == FORMATS[RECIPES[name].element if name in RECIPES else name].bits - 1


@pytest.mark.parametrize("name", [n for n in storable() if n in RECIPES and n not in ("fp8_delayed", "nf4")])
def test_bits_are_those_of_the_arrays_of_a_quantised_tensor(name):
    q = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32), name)
    scales = 0 if RECIPES[name].block_shape is None else q.scale.size * FORMATS[RECIPES[name].scale_format].bits
    assert q.codes.size * FORMATS[RECIPES[name].element].bits + scales == 256 * 256 * storage_bits(name)


def test_nf4_counts_both_levels_of_scales():
    q = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32), "nf4")
    _, groups = q.tensor_scale
    assert q.codes.size * 4 + q.scale.size * 8 + groups.size * 32 == 256 * 256 * storage_bits("nf4")
    assert round(float(storage_bits("nf4")), 3) == 4.127


def test_other_formats_for_some_roles():
    policy = STATE_POLICIES["v3"].with_roles({"ema": "fp32", "second_moment": None, "compute_copy": "mxfp8"})
    assert policy.formats() == {
        "master": "fp32", "gradient": "fp32", "first_moment": "bf16", "compute_copy": "mxfp8", "ema": "fp32",
    }  # fmt: skip
    assert state_ledger(8, policy).bytes_per_parameter == 14 + Fraction(33, 32)
    assert STATE_POLICIES["v3"].with_roles({}) is STATE_POLICIES["v3"]


def test_bytes_are_rounded_up():
    rows = state_ledger(3, StatePolicy("p", "mxfp4")).rows
    assert rows[0].bytes == math.ceil(3 * 4.25 / 8) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: state_ledger(0, "v3"), "at least 1, not 0"),
        (lambda: state_ledger(1.5, "v3"), "at least 1, not 1.5"),
        (lambda: state_ledger(True, "v3"), "not True"),
        (lambda: state_ledger(1, "v9"), "'v9' is unknown; known are fp32_adam"),
        (lambda: StatePolicy("p", gradient="fp32"), "holds no weights"),
        (lambda: StatePolicy("p", "fp7"), "'fp7' is no format"),
        (lambda: storage_bits("int8_channel"), "depend on the length of an axis"),
        (lambda: STATE_POLICIES["v3"].with_roles({"momentum": "fp32"}), "no role 'momentum'; there is parameters"),
        (lambda: STATE_POLICIES["v3"].with_roles({"master": None}), "holds no weights"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ReproError, match=message):
        call()
