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
AttentionKind = Literal["mha", "mla"]
_LATENT = ("q_rank", "kv_rank", "nope_size", "rope_size", "value_size")


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
    attention: AttentionKind = "mha"
    """Multi-head (with grouped queries on request), or multi-head latent attention."""
    kv_heads: int = 0
    """mha: heads of keys and values, a divisor of `heads`; 0 is as many as query heads."""
    head_dim: int = 0
    """mha: head size K, even; 0 is width / heads."""
    q_rank: int = 0
    """mla: size of the query latent; 0 projects queries straight from the residual stream."""
    kv_rank: int = 0
    """mla: size of the latent that keys and values share."""
    nope_size: int = 0
    """mla: components K of a query or key head that carry no position."""
    rope_size: int = 0
    """mla: components R that RoPE turns, even; their key is one for all heads."""
    value_size: int = 0
    """mla: size V of a value head."""
    rope_interleaved: bool = False
    """RoPE turns neighbours (2i, 2i + 1) in place of the pairs (i, i + size / 2)."""
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
        for name in ("kv_heads", "head_dim", *_LATENT):
            if getattr(self, name) < 0:
                raise ReproError(f"model.{name} is {getattr(self, name)}; it must be zero or positive.")
        if self.attention not in ("mha", "mla"):
            raise ReproError(f"model.attention is {self.attention!r}; it must be mha or mla.")
        self._check_multi_head() if self.attention == "mha" else self._check_latent()
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

    def _check_multi_head(self) -> None:
        for name in _LATENT:
            if getattr(self, name):
                raise ReproError(f"model.{name} belongs to model.attention mla; with mha it must stay 0.")
        if self.head_dim == 0 and (self.width % self.heads or (self.width // self.heads) % 2):
            raise ReproError(
                f"model.width {self.width} over model.heads {self.heads} gives no even head size; "
                "choose a width that is an even multiple of the heads, since RoPE rotates pairs, or set model.head_dim."
            )
        if self.head_dim % 2:
            raise ReproError(f"model.head_dim is {self.head_dim}; it must be even, since RoPE rotates pairs.")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ReproError(f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}.")

    def _check_latent(self) -> None:
        for name in ("kv_heads", "head_dim"):
            if getattr(self, name):
                raise ReproError(f"model.{name} belongs to model.attention mha; with mla it must stay 0.")
        for name in ("kv_rank", "nope_size", "rope_size", "value_size"):
            if not getattr(self, name):
                raise ReproError(f"model.{name} is 0; model.attention mla needs it to be positive.")
        for name in ("q_rank", "kv_rank"):
            if getattr(self, name) > self.width:
                raise ReproError(
                    f"model.{name} {getattr(self, name)} exceeds model.width {self.width}, so nothing is compressed."
                )
        if self.rope_size % 2:
            raise ReproError(f"model.rope_size is {self.rope_size}; it must be even, since RoPE rotates pairs.")
        if self.qk_norm != "none":
            raise ReproError(
                f"model.qk_norm is {self.qk_norm!r}, which is for model.attention mha; mla has norms on its latents."
            )

    @property
    def head_size(self) -> int:
        """Components of one query or key head, whose root scales the logits."""
        return self.nope_size + self.rope_size if self.attention == "mla" else self.head_dim or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

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
        # One layer, for a look at whether a program runs: what takes long there is compiling it.
        "tiny": Size(layers=1, width=32, heads=2, ffn=86, length=16, batch_size=2),
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
