"""Multi-head latent attention: keys and values of all heads from one small latent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from repro.models.attention import Attention
from repro.models.config import ModelConfig
from repro.models.linear import folded, linear
from repro.models.norm import RMSNorm
from repro.models.parameter import matrix, parameter


class MultiHeadLatentAttention(Attention):
    """softmax((q_nope.k_nope + q_rope.k_rope) / sqrt(K + R)) v over earlier positions (DeepSeek-V2, arXiv 2405.04434,
    section 2.1; DeepSeek-V3, arXiv 2412.19437, section 2.1.1).

    Keys and values come from a latent of size C = `kv_rank`, queries from one of `q_rank`, or straight from x with
    `q_rank` 0 (then `q_DHJ`, and no norm). Each latent passes an RMSNorm (DeepSeek-V3, section 4.2). A query head has K
    components without position, then R that RoPE turns; the rotary key is one for all heads and has no norm.

    A norm of queries and keys (`QKNorm`) acts on whole heads of K + R components, before RoPE; so each head gets a
    rotary key of its own length. With `position` none nothing turns, and the rotary key stays a shared one (Kimi K3).
    """

    letter = "J"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, H, C, K, R, V = (
            getattr(config, n) for n in ("width", "heads", "kv_rank", "nope_size", "rope_size", "value_size")
        )
        super().__init__(config)
        into_heads = dict(role="matrix", inputs=(0,), outputs=(1, 2), head=1)
        down = dict(role="matrix", inputs=(0,), outputs=(1,))
        # A head's own key scales with the rest of the head; the rotary one belongs to other heads too.
        query = dict(parts=(2, (("nope", K, "q"), ("rope", R, "q_shared")), False), **into_heads)
        latent_norm = lambda size: RMSNorm(size, config.latent_norm_eps or config.norm_eps, config.dots.policy("norm"))
        if config.q_rank:
            self.q_down_DC = parameter(matrix(config, rngs.params(), (D, config.q_rank)), **down)
            self.q_norm = latent_norm(config.q_rank)
            self.q_up_CHJ = parameter(matrix(config, rngs.params(), (config.q_rank, H, K + R)), **query)
        else:
            self.q_DHJ = parameter(matrix(config, rngs.params(), (D, H, K + R)), **query)
        self.kv_down_DC = parameter(matrix(config, rngs.params(), (D, C)), **down)
        self.kv_norm = latent_norm(C)
        self.k_rope_DR = parameter(matrix(config, rngs.params(), (D, R)), qk="k_shared", **down)
        self.k_up_CHK = parameter(matrix(config, rngs.params(), (C, H, K)), qk="k", **into_heads)
        self.v_up_CHV = parameter(matrix(config, rngs.params(), (C, H, V), branch=True), **into_heads)
        self.o_HVD = parameter(
            matrix(config, rngs.params(), (H, V, D), 2, writer=True, branch=True),
            "matrix", inputs=(0, 1), outputs=(2,), head=0,
        )  # fmt: skip
        self.add_rest(V, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, key: jax.Array | None = None, details: bool = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the attention output [B, T, D] and the statistics of `logit_statistics` [H], with `details` all of
        them. `key` is for policies that round stochastically."""
        config, K = self.config, self.config.nope_size
        apply = lambda x, w, i: linear(x, w[...], config, "attention", folded(key, i))
        with jax.named_scope("q"):
            if config.q_rank:
                q_BTHJ = apply(self.q_norm(apply(x_BTD, self.q_down_DC, 0)), self.q_up_CHJ, 1)
            else:
                q_BTHJ = apply(x_BTD, self.q_DHJ, 1)
            q_BTHJ = self.normed("q", q_BTHJ)
            q_BTHK, q_BTHR = q_BTHJ[..., :K], self.turned(q_BTHJ[..., K:])
        with jax.named_scope("kv"):
            latent_BSC = self.kv_norm(apply(x_BTD, self.kv_down_DC, 2))
            k_BSHK, v_BSHV = apply(latent_BSC, self.k_up_CHK, 3), apply(latent_BSC, self.v_up_CHV, 4)
            k_BS1R = apply(x_BTD, self.k_rope_DR, 5)[:, :, None]
            if config.qk_norm == "none":
                k_BSR = self.turned(k_BS1R)[:, :, 0]
            else:
                own_BSHR = jnp.broadcast_to(k_BS1R, (*k_BSHK.shape[:3], config.rope_size))
                k_BSHJ = self.normed("k", jnp.concatenate([k_BSHK, own_BSHR], -1))
                k_BSHK, k_BSHR = k_BSHJ[..., :K], self.turned(k_BSHJ[..., K:])
        with jax.named_scope("logits"):
            raw_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
            if config.qk_norm == "none":
                raw_BHTS += jnp.einsum("bthr,bsr->bhts", q_BTHR, k_BSR, preferred_element_type=jnp.float32)
            else:
                raw_BHTS += jnp.einsum("bthr,bshr->bhts", q_BTHR, k_BSHR, preferred_element_type=jnp.float32)
            raw_BHTS *= self.logit_factor()
        return self.output(x_BTD, raw_BHTS, v_BSHV, key, 6, details)
