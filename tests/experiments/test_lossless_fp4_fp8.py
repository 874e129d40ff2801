"""The bound, the limit and the counterexamples of lossless-fp4-fp8, against exact rational arithmetic."""

import dataclasses
import sys
from fractions import Fraction

import numpy as np
import pytest

from repro import catalogue
from repro.claims import decide_all, gather
from repro.errors import ReproError

pytestmark = pytest.mark.usefixtures("quick_compile_module")

EXPERIMENT = catalogue.load("lossless-fp4-fp8")
M = sys.modules["repro.experiments.lossless_fp4_fp8"]
SMOKE = EXPERIMENT.presets["smoke"]
E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def in_e4m3(value):
    """Whether a positive rational is an E4M3 number, from the definition of the format."""
    if value == 0:
        return True
    exponent = max(_floor_log2(value), -6)
    steps = value / Fraction(2) ** (exponent - 3)
    return steps.denominator == 1 and value <= 448


def _floor_log2(value):
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


@pytest.fixture(scope="module")
def runs():
    return gather(EXPERIMENT, SMOKE, None)


def test_the_limits_follow_from_the_definition_of_the_formats():
    exact = [d for d in range(30) if all(in_e4m3(v * Fraction(2) ** (6 - d)) for v in E2M1)]
    assert exact == list(range(15))  # 2^0 to 2^14
    assert not all(in_e4m3(v * 2**7) for v in E2M1)  # 6 * 2^7 > 448: a larger factor than 2^6 does not fit
    normal = [d for d in range(30) if Fraction(1, 2) * Fraction(2) ** (6 - d) >= Fraction(2) ** -6]
    assert max(normal) == 11


def test_the_enumeration_finds_the_same(runs):
    assert runs.values("lossless_exponent", "largest") == {0: 14}
    assert runs.values("normal_exponent", "largest") == {0: 11}
    assert runs.values("lossless_exponent", "smallest") == {0: 0}
    assert runs.values("lossless_exponent", "amax") == {0: -1}  # not even where all scales are equal
    # At 2^15 the 512 sub-blocks cycle through 16 scales, so 32 of them lie 15 octaves down.
    assert runs.values("changed", "largest@d15")[0] == 32 * _lost_per_sub_block()


def _lost_per_sub_block():
    """Codes of a sub-block of 32 (two of each) that 15 octaves lose: 0.5 and 1.5, of both signs."""
    lost = [v for v in E2M1 if not in_e4m3(v * Fraction(2) ** (6 - 15))]
    assert lost == [Fraction(1, 2), Fraction(3, 2)]
    return 2 * 2 * len(lost)


def test_every_block_holds_every_code_and_both_ends():
    q = M.block_with(11, 5)
    assert q.codes.reshape(-1, 32).shape == (512, 32)
    assert all(set(row) == set(range(16)) for row in np.asarray(q.codes).reshape(-1, 32))
    scales = np.asarray(q.scale).astype(np.float64)
    assert scales.max() == 2.0**5 and scales.min() == 2.0**-6


def test_other_factors_reach_less_far():
    reach = M.reach_of_any_scale()
    assert reach == {"reach_exponent": 14, "reach_exponent_other": 12}
    # 1.5 * {1, 1.5} = 1.5, 2.25 fit three bits; so do 1.25 and 1.875; 1.75 * 1.5 = 2.625 = 21 / 8 does not.
    keeps = [s for s in range(8, 16) if all(in_e4m3(v * Fraction(s, 8)) for v in E2M1)]
    assert keeps == [8, 10, 12]


def test_verdicts(runs):
    verdicts = decide_all(EXPERIMENT.claims_for(SMOKE), runs)
    assert {v.label for v in verdicts} == {"supported"}, [v.reason for v in verdicts if v.label != "supported"]
    assert {v.control_label for v in verdicts} == {"contradicted"}


def test_a_cast_that_flushes_subnormals_fails_beyond_the_bound(monkeypatch):
    def flushing(x, scale):
        x_hat, small = kept(x, scale)
        return np.where(small, np.copysign(np.float32(0), x_hat), x_hat), small

    kept = M.to_e4m3
    monkeypatch.setattr(M, "to_e4m3", flushing)
    found = {r.arm: r.metrics for r in M.enumerated(SMOKE) if not r.point}
    assert found["largest"]["lossless_exponent"] == 11 and found["largest"]["changed_to_bound"] == 0


def test_signs_of_zero_count():
    assert M.bits_changed(np.float32([0.0, -0.0, 1.0]), np.float32([0.0, 0.0, 1.0])) == 1


def test_presets_are_checked():
    assert EXPERIMENT.presets["cpu"].evidence and not SMOKE.evidence
    for change in ({"largest_exponent": 12}, {"bases": (120,)}, {"spreads": (0.0,)}, {"draws": 0}):
        with pytest.raises(ReproError):
            dataclasses.replace(SMOKE, **change)
