"""Low-precision number formats, block scaling and quantised products; see README.md."""

from repro.quant.accumulator import Accumulator, accumulate
from repro.quant.codes import decode, encode
from repro.quant.delayed import DelayedScale
from repro.quant.delayed_dot import DelayedScales, delayed_dot
from repro.quant.dot import dot
from repro.quant.fake import fake_quantize
from repro.quant.formats import FORMATS, Format
from repro.quant.hadamard import hadamard
from repro.quant.ledger import STATE_POLICIES, StatePolicy, state_ledger, storage_bits
from repro.quant.native import native_reason
from repro.quant.policies import POLICIES, GemmPolicy
from repro.quant.precision import PRECISIONS, Precision, precision_of, stored
from repro.quant.qtensor import QTensor, quantize
from repro.quant.recipes import RECIPES, Recipe
from repro.quant.rounding import round_to

__all__ = [
    "Accumulator", "DelayedScale", "DelayedScales", "FORMATS", "Format", "GemmPolicy", "POLICIES", "PRECISIONS",
    "Precision", "QTensor", "RECIPES", "Recipe", "STATE_POLICIES", "StatePolicy", "accumulate", "decode",
    "delayed_dot", "dot", "encode", "fake_quantize", "hadamard", "native_reason", "precision_of", "quantize",
    "round_to", "state_ledger", "storage_bits", "stored",
]  # fmt: skip
