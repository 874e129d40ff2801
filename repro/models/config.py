"""Sizes and switches of the decoder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from repro.errors import ReproError
from repro.quant.precision import Precision, precision_of

QKNorm = Literal["none", "rms", "layer"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder; the defaults are the size `xs`.

    Raises `ReproError` for sizes that do not fit together.
    """

    vocab_size: int = 256
    layers: int = 2
    width: int = 64
    heads: int = 4
    ffn: int = 172
    """Hidden width F of the SwiGLU feed-forward block."""
    qk_norm: QKNorm = "none"
    """Normalisation of queries and keys over the head axis: RMSNorm or LayerNorm, each with one gain for all heads."""
    soft_cap: float = 0.0
    """Attention logits become cap * tanh(logit / cap); 0 leaves them alone (Gemma 2, arXiv 2408.00118, section 2)."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products and activations; parameters, attention logits and the loss stay float32."""

    precision: str = "plain"
    """Formats of the linear layers: a name of `repro.quant.PRECISIONS`, or a policy per role: `ffn=mxfp4,head=bf16`."""

    remat: bool = False
    """Recompute each block in the backward pass instead of keeping its activations: less memory, a third more time."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "ffn"):
            if getattr(self, name) < 1:
                raise ReproError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ReproError(
                f"model.width {self.width} over model.heads {self.heads} gives no even head size; "
                "choose a width that is an even multiple of the heads, since RoPE rotates pairs."
            )
        if not 0 <= self.soft_cap < math.inf:
            raise ReproError(f"model.soft_cap is {self.soft_cap}; it must be positive, or 0 for no cap.")
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ReproError(f"model.{name} is {getattr(self, name)}; it must be positive.")
        if self.qk_norm not in ("none", "rms", "layer"):
            raise ReproError(f"model.qk_norm is {self.qk_norm!r}; it must be none, rms or layer.")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ReproError(f"model.compute_dtype is {self.compute_dtype!r}; it must be float32 or bfloat16.")
        precision_of(self.precision)

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def dots(self) -> Precision:
        """The policy of each role."""
        return precision_of(self.precision)


@dataclasses.dataclass(frozen=True)
class Size:
    """A named size: the model's shape with the batch that it is trained on."""

    layers: int
    width: int
    heads: int
    ffn: int
    length: int
    batch_size: int

    def apply(self, config: ModelConfig) -> ModelConfig:
        """`config` with this size's shape, its switches kept."""
        return dataclasses.replace(config, layers=self.layers, width=self.width, heads=self.heads, ffn=self.ffn)


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        # One family in width alone (layers, head size, length and batch fixed), for trends over width.
        "w32": Size(layers=2, width=32, heads=2, ffn=86, length=64, batch_size=16),
        "xs": Size(layers=2, width=64, heads=4, ffn=172, length=64, batch_size=16),
        "w128": Size(layers=2, width=128, heads=8, ffn=344, length=64, batch_size=16),
        "s": Size(layers=4, width=128, heads=4, ffn=344, length=128, batch_size=16),
        "m": Size(layers=6, width=256, heads=8, ffn=688, length=256, batch_size=16),
        "deep": Size(layers=24, width=32, heads=4, ffn=86, length=32, batch_size=8),
        "gpt2": Size(layers=12, width=768, heads=12, ffn=2048, length=512, batch_size=64),
    }
)
