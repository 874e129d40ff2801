"""Flax NNX modules whose code reads like the papers; see README.md."""

from repro.models import functional
from repro.models.attention import MultiHeadAttention
from repro.models.attention_residual import BlockAttnRes
from repro.models.block import Block
from repro.models.config import ModelConfig, Size, YarnConfig
from repro.models.ffn import DenseFFN
from repro.models.functional import swiglu
from repro.models.hugging_face import assemble, config_from_hf, from_hf, load_hf, save_hf, take_apart, to_hf
from repro.models.latent_attention import MultiHeadLatentAttention
from repro.models.moe import LatentMoE, MoE
from repro.models.moe_config import MoEConfig
from repro.models.norm import LayerNorm, RMSNorm, layer_norm, rms_norm
from repro.models.output import MoEStats, Output, ResidualStats, Stats
from repro.models.parameter import Buffer, declarations, parameter
from repro.models.presets import MODELS, SIZES, NamedModel, released
from repro.models.residual_config import ResidualConfig
from repro.models.rope import rope
from repro.models.scale_down import scale_down
from repro.models.softmax import soft_cap
from repro.models.stream_links import HyperConnections, ManifoldHyperConnections
from repro.models.transformer import Transformer, abstract, by_group, init_and_apply, initial_buffers

__all__ = [
    "MODELS", "SIZES", "Block", "BlockAttnRes", "Buffer", "DenseFFN", "HyperConnections", "LatentMoE", "LayerNorm",
    "ManifoldHyperConnections", "MoE", "MoEConfig", "MoEStats", "ModelConfig", "MultiHeadAttention",
    "MultiHeadLatentAttention", "NamedModel", "Output", "RMSNorm", "ResidualConfig", "ResidualStats", "Size", "Stats",
    "Transformer", "YarnConfig", "abstract", "assemble", "by_group", "config_from_hf", "declarations", "from_hf",
    "functional", "init_and_apply", "initial_buffers", "layer_norm", "load_hf", "parameter", "released", "rms_norm",
    "rope", "save_hf", "scale_down", "soft_cap", "swiglu", "take_apart", "to_hf",
]  # fmt: skip
