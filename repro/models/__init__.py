"""Flax NNX modules whose code reads like the papers; see README.md."""

from repro.models import functional
from repro.models.attention import MultiHeadAttention, rope, soft_cap
from repro.models.config import SIZES, ModelConfig, Size
from repro.models.ffn import DenseFFN
from repro.models.functional import swiglu
from repro.models.latent_attention import MultiHeadLatentAttention
from repro.models.norm import RMSNorm, layer_norm, rms_norm
from repro.models.output import Output, Stats
from repro.models.parameter import declarations, parameter
from repro.models.transformer import Block, Transformer, abstract, init_and_apply

__all__ = [
    "SIZES", "Block", "DenseFFN", "ModelConfig", "MultiHeadAttention", "MultiHeadLatentAttention", "Output", "RMSNorm",
    "Size", "Stats", "Transformer", "abstract", "declarations", "functional", "init_and_apply", "layer_norm",
    "parameter", "rms_norm", "rope", "soft_cap", "swiglu",
]  # fmt: skip
