"""Low-precision number formats, block scaling and quantised products; see README.md."""

from repro.quant.codes import decode, encode
from repro.quant.formats import FORMATS, Format
from repro.quant.rounding import round_to

__all__ = ["FORMATS", "Format", "decode", "encode", "round_to"]
