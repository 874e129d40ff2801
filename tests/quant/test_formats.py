import gfloat
import gfloat.formats
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from repro.errors import ReproError
from repro.quant import FORMATS, decode, encode

pytestmark = pytest.mark.usefixtures("quick_compile")

LISTED = [fmt for fmt in FORMATS.values() if fmt.bits <= 16]
ORACLES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


def all_codes(fmt):
    """Every code, once, in the type in which the format stores codes."""
    raw = np.arange(2**fmt.bits)
    if fmt.fixed_point:
        return np.where(raw < raw.size // 2, raw, raw - raw.size).astype(np.int8)
    return raw.astype(np.uint8 if fmt.bits <= 8 else np.uint16).view(fmt.dtype)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}")


# max, smallest normal, smallest positive: OCP OFP8 v1.0 table 1, OCP MX v1.0 tables 1 to 7, IEEE 754.
FACTS = {
    "fp32": (3.4028234663852886e38, 2**-126, 2**-149),
    "bf16": (3.3895313892515355e38, 2**-126, 2**-133),
    "fp16": (65504, 2**-14, 2**-24),
    "e4m3": (448, 2**-6, 2**-9),
    "e5m2": (57344, 2**-14, 2**-16),
    "e5m6": (65024, 2**-14, 2**-20),
    "e3m2": (28, 0.25, 0.0625),
    "e2m3": (7.5, 1, 0.125),
    "e2m1": (6, 1, 0.5),
    "e8m0": (2**127, 2**-127, 2**-127),
    "int8": (127 / 64, 1, 1 / 64),
    "int4": (7 / 4, 1, 1 / 4),
    "nf4": (1, 0.07958029955625534, 0.07958029955625534),
}
SIZES = {
    "fp32": (32, 8, 23, 127), "bf16": (16, 8, 7, 127), "fp16": (16, 5, 10, 15), "e4m3": (8, 4, 3, 7),
    "e5m2": (8, 5, 2, 15), "e5m6": (12, 5, 6, 15), "e3m2": (6, 3, 2, 3), "e2m3": (6, 2, 3, 1), "e2m1": (4, 2, 1, 1),
    "e8m0": (8, 8, 0, 127),
}  # fmt: skip


def test_the_numbers_of_the_standards():
    assert set(FACTS) == set(FORMATS)
    for name, fmt in FORMATS.items():
        assert fmt.name == name
        assert (fmt.max, fmt.min_normal, fmt.min_subnormal) == FACTS[name]
    for name, (size, exponent, mantissa, bias) in SIZES.items():
        fmt = FORMATS[name]
        assert (fmt.bits, fmt.exponent_bits, fmt.mantissa_bits, fmt.bias) == (size, exponent, mantissa, bias)


@pytest.mark.parametrize("fmt", LISTED, ids=lambda fmt: fmt.name)
def test_every_code_is_decoded_and_encoded_to_itself(fmt):
    codes = all_codes(fmt)
    values = np.asarray(decode(codes, fmt))
    nan = np.isnan(values)
    expected = {"ieee": 2 * (2**fmt.mantissa_bits - 1), "nan": 2 if fmt.signed else 1, "none": 0}[fmt.specials]
    assert nan.sum() == expected
    back = encode(values[~nan], fmt)
    assert back.dtype == fmt.dtype
    np.testing.assert_array_equal(bits(back), bits(codes[~nan]))
    if nan.any():
        assert np.isnan(np.asarray(decode(encode(values[nan], fmt), fmt))).all()

    finite = values[np.isfinite(values)]
    listed = fmt.values()
    assert listed.dtype == np.float32 and (np.diff(listed) > 0).all()
    np.testing.assert_array_equal(bits(listed), bits(np.unique(finite) + np.float32(0)))
    assert (listed[0], listed[-1]) == (fmt.lowest, fmt.max)
    assert listed[listed > 0][0] == fmt.min_subnormal


@pytest.mark.parametrize("name", ORACLES)
def test_codes_mean_what_ml_dtypes_says(name):
    fmt = FORMATS[name]
    codes = np.arange(2**fmt.bits).astype(np.uint8 if fmt.bits <= 8 else np.uint16)
    theirs = codes.view(ORACLES[name]).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(decode(codes, fmt)), theirs)
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(bits(decode(codes, fmt))[~nan], bits(theirs)[~nan])


def test_int8_is_the_element_of_mxint8():
    info = gfloat.formats.format_info_ocp_int8
    theirs = [gfloat.decode_float(info, code).fval for code in range(256)]
    np.testing.assert_array_equal(np.asarray(decode(all_codes(FORMATS["int8"]), "int8")), theirs)


def test_encode_rounds_and_overflows_as_the_standard_says():
    assert bits(encode(jnp.float32(1e9), "e4m3")) == 0x7F
    assert bits(encode(jnp.float32(1e9), "e5m2")) == 0x7C
    assert bits(encode(jnp.float32(1e9), "e2m1")) == 0x7
    assert bits(encode(jnp.float32(-2.5), "e2m1")) == 0xC


def test_what_is_refused():
    with pytest.raises(ReproError, match="known are fp32"):
        encode(jnp.ones(3), "e4m4")
    with pytest.raises(ReproError, match="at most 16 bits"):
        FORMATS["fp32"].values()
    with pytest.raises(ReproError, match="e2m1 has no NaN"):
        encode(jnp.array([1.0, jnp.nan]), "e2m1")
