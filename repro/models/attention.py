"""What all kinds of attention share, and multi-head attention with or without grouped queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.config import ModelConfig
from repro.models.linear import folded, linear
from repro.models.parameter import matrix, parameter
from repro.models.qk_norm import QKNorm
from repro.models.rope import rope, yarn_logits
from repro.models.softmax import attend


class Attention(QKNorm, nnx.Module):
    """What all kinds of attention share: positions, the scale of the logits, the mix, the output gate and projection.

    A subclass makes its projections and `o_HVD`, then calls `add_rest`.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def add_rest(self, value_size: int, *, rngs: nnx.Rngs) -> None:
        """The parameters of what the config asks for besides: those of `QKNorm`, `gate_DHV` (Kimi K3, section on gated
        latent attention), and the sink's logits `sink_H`, 0 at first."""
        config = self.config
        self.add_qk_norm()
        if config.output_gate:
            self.gate_DHV = parameter(
                matrix(config, rngs.params(), (config.width, config.heads, value_size)),
                "matrix", inputs=(0,), outputs=(1, 2), head=1,
            )  # fmt: skip
        if config.attention_sink:
            self.sink_H = parameter(jnp.zeros(config.heads, jnp.float32), "bias", head=0)

    def turned(self, x_BTHR: jax.Array) -> jax.Array:
        """Queries or keys with their positions."""
        config = self.config
        if config.position == "none":
            return x_BTHR
        return rope(x_BTHR, config.rope_theta, interleaved=config.rope_interleaved, yarn=config.yarn)

    def logit_factor(self) -> float | jax.Array:
        """What multiplies q.k."""
        own = self.logit_scale[...] if self.config.qk_norm == "l2" else self.config.head_size**-0.5
        return own * yarn_logits(self.config.yarn)

    def output(
        self, x_BTD: jax.Array, raw_BHTS: jax.Array, v_BSHV: jax.Array, key: jax.Array | None, use: int, details: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The output [B, T, D] and the statistics of `logit_statistics` [H], from the scaled logits and the values.
        `use` is the number of the output projection among the uses of `key`, and the next one that of the gate;
        `details` asks for all statistics."""
        config = self.config
        sink_H = self.sink_H[...] if config.attention_sink else None
        mixed_BTHV, statistics = attend(raw_BHTS, v_BSHV, config.soft_cap, sink_H, details)
        if config.output_gate:
            gate_BTHV = linear(x_BTD, self.gate_DHV[...], config, "attention", folded(key, use + 1))
            mixed_BTHV = mixed_BTHV * jax.nn.sigmoid(gate_BTHV.astype(jnp.float32)).astype(mixed_BTHV.dtype)
        return linear(mixed_BTHV, self.o_HVD[...], config, "attention", folded(key, use), inputs=2), statistics


class MultiHeadAttention(Attention):
    """softmax(q.k / sqrt(K)) v over earlier positions, heads as an axis.

    With fewer `kv_heads` than heads, consecutive query heads share a key and a value head, and the head axis of `k_DHK`
    and `v_DHV` is the shorter one (grouped queries: Ainslie et al., arXiv 2305.13245, section 2.2). A norm of queries
    and keys is that of `QKNorm`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config)
        D, H, G, K = config.width, config.heads, config.key_heads, config.head_size
        q, k = ("q", "k") if G == H else ("q_shared", "k_shared")
        into_heads = dict(role="matrix", inputs=(0,), outputs=(1, 2), head=1)
        self.q_DHK = parameter(matrix(config, rngs.params(), (D, H, K)), qk=q, **into_heads)
        self.k_DHK = parameter(matrix(config, rngs.params(), (D, G, K)), qk=k, **into_heads)
        self.v_DHV = parameter(matrix(config, rngs.params(), (D, G, K), branch=True), **into_heads)
        self.o_HVD = parameter(
            matrix(config, rngs.params(), (H, K, D), 2, writer=True, branch=True),
            "matrix", inputs=(0, 1), outputs=(2,), head=0,
        )  # fmt: skip
        self.add_rest(K, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, key: jax.Array | None = None, details: bool = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the attention output [B, T, D] and the statistics of `logit_statistics` [H], with `details` all of
        them. `key` is for policies that round stochastically."""
        config = self.config
        with jax.named_scope("qkv"):
            q_BTHK, k_BSHK, v_BSHV = (
                linear(x_BTD, w[...], config, "attention", folded(key, i))
                for i, w in enumerate((self.q_DHK, self.k_DHK, self.v_DHV))
            )
        q_BTHK, k_BSHK = self.normed("q", q_BTHK), self.normed("k", k_BSHK)
        q_BTHK, k_BSHK = self.turned(q_BTHK), self.turned(k_BSHK)
        if config.key_heads < config.heads:
            k_BSHK, v_BSHV = (jnp.repeat(x, config.heads // config.key_heads, 2) for x in (k_BSHK, v_BSHV))
        with jax.named_scope("logits"):
            raw_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
            raw_BHTS = raw_BHTS * self.logit_factor()
        return self.output(x_BTD, raw_BHTS, v_BSHV, key, 3, details)
