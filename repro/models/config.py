"""Sizes and switches of the decoder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from repro.errors import ReproError
from repro.models.moe_config import MoEConfig
from repro.models.pattern import Kind, kinds
from repro.models.residual_config import ResidualConfig
from repro.quant.precision import Precision, precision_of

QKNorm = Literal["none", "rms", "layer", "rms_plain", "l2", "v4"]
AttentionKind = Literal["mha", "mla"]
GLU = Literal["swiglu", "clamped", "situ", "smooth", "powlu", "gelu"]
_LATENT = ("q_rank", "kv_rank", "nope_size", "rope_size", "value_size")


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """RoPE stretched to longer windows (YaRN, arXiv 2309.00071, section 3); the default is off.

    Raises `ReproError` for values out of range.
    """

    factor: float = 1.0
    """How many times longer windows become; 1 is off, whatever the other fields say."""
    original: int = 4096
    """Window length before the stretch."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Pairs that turn more than `beta_fast` times over the original window keep their frequency, those that turn less
    than `beta_slow` times are slowed by `factor`."""
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    """DeepSeek: m(c) = 0.1 c ln(factor) + 1 multiplies the logits by m(mscale_all_dim)^2, and the rotated components by
    m(mscale) / m(mscale_all_dim)."""

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf or self.original < 1:
            raise ReproError(f"model.yarn needs a factor of at least 1 and an original length, not {self.factor:g}.")
        if not 0 < self.beta_slow <= self.beta_fast:  # Kimi K2 has 1 for both: a step between two neighbouring pairs
            raise ReproError("model.yarn.beta_slow must be positive and no larger than model.yarn.beta_fast.")
        if not (0 <= self.mscale < math.inf and 0 <= self.mscale_all_dim < math.inf):
            raise ReproError("model.yarn.mscale and mscale_all_dim must be zero or positive, and finite.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder; the defaults are a pre-norm one of the size `xs`.

    Raises `ReproError` for sizes that do not fit together.
    """

    vocab_size: int = 256
    layers: int = 2
    width: int = 64
    heads: int = 4
    ffn: int = 172
    """Hidden width F of the dense feed-forward block."""
    glu: GLU = "swiglu"
    """What the hidden units of every feed-forward block and expert do (`repro.models.functional`); gelu has no gate."""
    glu_limit: float = 10.0
    """clamped: upper bound of the gate's input and bound of the other branch (DeepSeek-V4)."""
    situ_gate: float = 4.0
    situ_up: float = 25.0
    """situ: the two betas (Kimi K3)."""
    powlu_m: float = 3.0
    """powlu: the exponent m."""
    moe: MoEConfig = MoEConfig()
    pattern: str = ""
    """Blocks from the bottom up, such as `dense, 3*(moe, mha.moe)`: what stands before a dot is the attention, otherwise
    `attention`. Empty: as `moe` says."""
    residual: ResidualConfig = ResidualConfig()
    embedding_scale: float = 1.0
    """Factor on the embedding as it enters the first layer (Spike No More, arXiv 2312.16903: sqrt(width))."""
    embedding_std: float = 1.0
    """Standard deviation of the initial embedding."""
    embedding_norm: bool = False
    """RMSNorm on the embedding."""
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
    latent_norm_eps: float = 0.0
    """mla: epsilon of the norms on the latents; 0 is `norm_eps`. The released DeepSeek and Kimi code has 1e-6 there whatever
    the other norms have."""
    rope_interleaved: bool = False
    """RoPE turns neighbours (2i, 2i + 1) in place of the pairs (i, i + size / 2)."""
    position: Literal["rope", "none"] = "rope"
    """none: no rotation anywhere, also of the rotary part of latent attention (Kimi K3's NoPE)."""
    yarn: YarnConfig = YarnConfig()
    output_gate: bool = False
    """Multiply the mixed values by sigmoid(x W) before the output projection (gated attention of Kimi K3)."""
    attention_sink: bool = False
    """A learned logit per head in the softmax's denominator, without a value (DeepSeek-V4, gpt-oss)."""
    sigma_reparam: bool = False
    """Weights of all linear layers of the blocks as gamma / sigma(W) W (Zhai et al., arXiv 2303.06296)."""
    qk_norm: QKNorm = "none"
    """Normalisation of queries and keys over the head axis: rms and layer with one gain for all heads, rms_plain without
    gain, l2 to unit length with one learned scale in place of 1/sqrt(K) (Henry et al., arXiv 2010.04245), v4 queries
    without and keys with a gain (DeepSeek-V4)."""
    soft_cap: float = 0.0
    """Attention logits become cap * tanh(logit / cap); 0 leaves them alone (Gemma 2, arXiv 2408.00118, section 2)."""
    init: Literal["fan_in", "xavier", "small"] = "fan_in"
    """Standard deviations of matrices. fan_in: 1 / sqrt(fan-in), those that write into the residual stream smaller by
    sqrt(2 L). xavier: sqrt(2 / (fan-in + fan-out)). small: sqrt(2 / (5 width)), writers again smaller (Spike No More,
    arXiv 2312.16903)."""
    head_gain: float = 1.0
    """Factor on the initial head; at 1 logits have unit variance and the first loss is ln Z + 1/2."""
    norm: Literal["rms", "layer"] = "rms"
    """Norms around the blocks: RMSNorm, or LayerNorm without bias."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products and activations; parameters, attention logits and the loss stay float32."""

    precision: str = "plain"
    """Formats of the linear layers: a name of `repro.quant.PRECISIONS`, or a policy per role: `ffn=mxfp4,head=bf16`."""

    remat: bool = False
    """Recompute each block in the backward pass instead of keeping its activations: less memory, a third more time."""
    remat_policy: Literal["nothing", "dots", "unbatched_dots"] = "nothing"
    """With `remat`, what is kept all the same: nothing, the results of matrix products, or those of products without a
    batch axis (of the weights, not of attention)."""

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
        if not 0 <= self.latent_norm_eps < math.inf:
            raise ReproError(f"model.latent_norm_eps is {self.latent_norm_eps}; it must be positive, or 0 for norm_eps.")
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ReproError(f"model.{name} is {getattr(self, name)}; it must be positive.")
        for name, known in (
            ("qk_norm", QKNorm.__args__),
            ("glu", GLU.__args__),
            ("position", ("rope", "none")),
            ("init", ("fan_in", "xavier", "small")),
            ("norm", ("rms", "layer")),
                            ("remat_policy", ("nothing", "dots", "unbatched_dots")),
        ):
            if getattr(self, name) not in known:
                choices = f"{', '.join(known[:-1])} or {known[-1]}"
                raise ReproError(f"model.{name} is {getattr(self, name)!r}; it must be {choices}.")
        for name in ("glu_limit", "situ_gate", "situ_up", "embedding_scale", "embedding_std", "head_gain"):
            if not 0 < getattr(self, name) < math.inf:
                raise ReproError(f"model.{name} is {getattr(self, name)}; it must be positive and finite.")
        if self.yarn.factor > 1 and (self.position == "none" or self.rope_theta <= 1):
            raise ReproError(
                f"model.yarn.factor {self.yarn.factor:g} stretches RoPE; it needs model.position rope and a "
                "model.rope_theta above 1."
            )
        if not 0 < self.powlu_m < 10:
            raise ReproError(f"model.powlu_m is {self.powlu_m}; it must lie between 0 and 10.")
        if self.moe.experts and self.moe.dense_layers + self.moe.hash_layers > self.layers:
            raise ReproError(
                f"model.moe.dense_layers {self.moe.dense_layers} and hash_layers {self.moe.hash_layers} are more than "
                f"model.layers {self.layers}."
            )
        _ = self.segments  # a pattern that does not fit is refused here
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ReproError(f"model.compute_dtype is {self.compute_dtype!r}; it must be float32 or bfloat16.")
        if self.remat_policy != "nothing" and not self.remat:
            raise ReproError(f"model.remat_policy {self.remat_policy} says what model.remat keeps; set model.remat too.")
        precision_of(self.precision)

    def _check_multi_head(self) -> None:
        for name in _LATENT:
            if getattr(self, name) and not self.mixed:
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
            if getattr(self, name) and not self.mixed:
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

    @property
    def mixed(self) -> bool:
        """Whether some layers may have the other kind of attention."""
        return "." in self.pattern

    @property
    def segments(self) -> tuple[tuple[tuple[Kind, ...], int], ...]:
        """Blocks from the bottom up, as (unit of blocks, repeats)."""
        return kinds(self.pattern, self.attention, self.layers, self.moe)

    @property
    def head_size(self) -> int:
        """Components of one query or key head, whose root scales the logits."""
        return self.nope_size + self.rope_size if self.attention == "mla" else self.head_dim or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def deep_norm(self) -> tuple[float, float]:
        """DeepNorm's (alpha, beta): the factor on the shortcut, and the initial gain of the value and output projections
        and of feed-forward matrices (DeepNet, arXiv 2203.00555, figure 2, decoder-only)."""
        if self.residual.kind != "deep_norm":
            return 1.0, 1.0
        return (2 * self.layers) ** 0.25, (8 * self.layers) ** -0.25

    def std(self, fan_in: int, fan_out: int, *, writer: bool = False, branch: bool = False) -> float:
        """Initial standard deviation of a matrix. `writer` is one that writes into the residual stream, `branch` one
        that DeepNorm makes smaller (values, outputs, feed-forward)."""
        depth = (2 * self.layers) ** -0.5 if writer else 1.0
        gain = self.deep_norm[1] if branch else 1.0
        if self.init == "xavier":
            return gain * (2 / (fan_in + fan_out)) ** 0.5
        if self.init == "small":
            return gain * depth * (2 / (5 * self.width)) ** 0.5
        return gain * depth / fan_in**0.5

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
        # About 350M parameters with a vocabulary of 32k.
        "medium": Size(layers=24, width=1024, heads=16, ffn=2816, length=1024, batch_size=16),
    }
)
