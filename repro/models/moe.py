"""Mixtures of experts: routed experts beside shared ones, at the model's width or in a latent space."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from repro.errors import ReproError
from repro.models.config import ModelConfig
from repro.models.dispatch import Hidden, Weights, routed
from repro.models.draws import normal
from repro.models.ffn import DenseFFN
from repro.models.linear import folded, linear
from repro.models.norm import RMSNorm
from repro.models.output import FFNRecord, MoEStats
from repro.models.parameter import Buffer, matrix, parameter
from repro.models.routing import (
    affinity,
    gates,
    hash_table,
    histogram_bias,
    loads,
    margin_histogram,
    quantile_bias,
    router_z_loss,
    select,
    sequence_balance_loss,
    sign_update,
)


class MoE(nnx.Module):
    """shared(x) + sum over chosen experts of gate * expert(x) (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    Raises `ReproError` for a ragged dispatch under a policy of the role `experts`.

    The router works in float32 on x. It chooses by score + bias, where the bias is a buffer that no gradient reaches:
    its next value is a function of this batch and `config.moe.balance`, and is returned, not written. Gates are the
    scores without it. With `hashed` a fixed table of token ids chooses instead, and there is no bias (DeepSeek-V4,
    section 2.1); `layer` then picks the table.
    """

    def __init__(
        self, config: ModelConfig, *, hashed: bool = False, layer: jax.Array | int = 0, rngs: nnx.Rngs
    ) -> None:
        D, moe = config.width, config.moe
        if moe.dispatch == "ragged" and config.dots.policy("experts") is not None:
            raise ReproError(
                "model.moe.dispatch ragged multiplies plain numbers; under a policy for experts take tiles."
            )
        self.config = config
        self.router_DE = parameter(matrix(config, rngs.params(), (D, moe.experts)), "router", inputs=(0,), outputs=(1,))
        if hashed:
            self.table_ZK = Buffer(hash_table(config.vocab_size, moe.experts, moe.active, layer))
        else:
            self.bias_E = Buffer(jnp.zeros(moe.experts, jnp.float32))
        self._add_experts(moe.latent or D, writer=not moe.latent, rngs=rngs)
        if moe.shared:
            self.shared = DenseFFN(dataclasses.replace(config, ffn=moe.shared * moe.ffn), rngs=rngs)

    def _add_experts(self, C: int, *, writer: bool, rngs: nnx.Rngs) -> None:
        """Experts from C to C."""
        config, F = self.config, self.config.moe.ffn

        def stack(inputs: int, outputs: int, **how: bool) -> nnx.Param:
            std = config.std(inputs, outputs, branch=True, **how)
            value = normal(rngs.params(), (config.moe.experts, inputs, outputs), std)
            return parameter(value, "matrix", inputs=(1,), outputs=(2,), expert=0)

        # D stands for the width that experts work in, in LatentMoE too.
        if config.glu != "gelu":
            self.gate_EDF = stack(C, F)
        self.up_EDF = stack(C, F)
        self.down_EFD = stack(F, C, writer=writer)

    @property
    def hashed(self) -> bool:
        return hasattr(self, "table_ZK")

    def __call__(
        self,
        x_BTD: jax.Array,
        key: jax.Array | None = None,
        tokens_BT: jax.Array | None = None,
        routes_BTK: jax.Array | None = None,
    ) -> tuple[jax.Array, FFNRecord]:
        """The output [B, T, D] and its record. `key` is for policies that round stochastically, `tokens_BT` for hash
        routing (`ReproError` without them).

        `routes_BTK` are experts chosen elsewhere, such as by older parameters (Anticipatory Routing: DeepSeek-V4,
        section 4.2.3): they take the place of the router's, with gates from the present scores. The bias is then
        updated by their load, or by the margins of the present scores.
        """
        moe = self.config.moe
        (B, T, D), E, K = x_BTD.shape, moe.experts, moe.active
        x_PD = x_BTD.reshape(B * T, D)
        with jax.named_scope("router"):
            logits_PE = self._logits(x_PD, folded(key, 0))
            scores_PE = affinity(logits_PE, moe.affinity)
            cutoff_P = None
            if self.hashed:
                experts_PK = self._looked_up(tokens_BT)
            else:
                experts_PK, cutoff_P = select(
                    scores_PE, self.bias_E[...], K, groups=moe.groups, kept_groups=moe.kept_groups
                )
            if routes_BTK is not None:
                experts_PK = routes_BTK.reshape(B * T, K)
            gates_PK = gates(scores_PE, experts_PK, scale=moe.scale, normalise=moe.normalise)
        with jax.named_scope("experts"):
            y_PD, sum_PC, hidden = self._routed(x_PD, gates_PK, experts_PK, folded(key, 1))
        load_E = loads(experts_PK, E)
        record = FFNRecord(
            hidden_max=hidden.max_E.max(),
            hidden_rms=jnp.sqrt(hidden.square_sum / (B * T * K * moe.ffn)),
            aux_loss=self._aux_loss(logits_PE, scores_PE.reshape(B, T, E), experts_PK.reshape(B, T, K)),
            routes=experts_PK.reshape(B, T, K),
            buffers=self._next_buffers(scores_PE, cutoff_P, load_E),
            moe=_statistics(logits_PE, load_E / (B * T * K), hidden, sum_PC, y_PD),
        )
        y_BTD = y_PD.reshape(B, T, D)
        return y_BTD + self.shared(x_BTD, folded(key, 2))[0] if moe.shared else y_BTD, record

    def _logits(self, x_PD: jax.Array, key: jax.Array | None) -> jax.Array:
        """The router's logits in float32, whatever the type of x."""
        x_PD, router_DE = x_PD.astype(jnp.float32), self.router_DE[...]
        if self.config.dots.policy("router") is None:
            return jnp.matmul(x_PD, router_DE, precision="highest")
        return linear(x_PD, router_DE, self.config, "router", key)

    def _looked_up(self, tokens_BT: jax.Array | None) -> jax.Array:
        if tokens_BT is None:
            raise ReproError("Hash routing looks experts up by token; pass tokens_BT.")
        return self.table_ZK[...][tokens_BT.reshape(-1)]

    @property
    def _weights(self) -> Weights:
        gate = {} if self.config.glu == "gelu" else {"gate": self.gate_EDF[...]}
        return {**gate, "up": self.up_EDF[...], "down": self.down_EFD[...]}

    def _routed(
        self, x_PD: jax.Array, gates_PK: jax.Array, experts_PK: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Hidden]:
        """What is added to the shared experts [P, D], the gated sum that it is made of, and statistics."""
        sum_PD, hidden = routed(self.config, x_PD, gates_PK, experts_PK, self._weights, key)
        return sum_PD, sum_PD, hidden

    def _aux_loss(self, logits_PE: jax.Array, scores_BTE: jax.Array, experts_BTK: jax.Array) -> jax.Array:
        moe, loss = self.config.moe, jnp.zeros((), jnp.float32)
        if moe.sequence_loss:
            loss += moe.sequence_loss * sequence_balance_loss(scores_BTE, experts_BTK)
        if moe.router_z_loss:
            loss += moe.router_z_loss * router_z_loss(logits_PE)
        return loss

    def _next_buffers(
        self, scores_PE: jax.Array, cutoff_P: jax.Array | None, load_E: jax.Array
    ) -> dict[str, jax.Array]:
        """What the next step starts with."""
        if self.hashed:
            return {"table_ZK": self.table_ZK[...]}
        moe, bias_E, scores_PE = self.config.moe, self.bias_E[...], jax.lax.stop_gradient(scores_PE)
        match moe.balance:
            case "sign":
                bias_E = sign_update(bias_E, load_E, moe.balance_rate, centred=moe.balance_centred)
            case "quantile":
                bias_E = quantile_bias(scores_PE, cutoff_P, moe.active)
            case "histogram":
                bias_E = histogram_bias(*margin_histogram(scores_PE, cutoff_P, bias_E), moe.active)
        return {"bias_E": bias_E}


class LatentMoE(MoE):
    """shared(x) + up(norm(sum over chosen experts of gate * expert(down(x)))) (Kimi K3, eq. 11).

    The router sees x at full width, experts the latent of size C = `config.moe.latent`, which is projected once per
    token before dispatch. The RMSNorm stands after the complete sum, so that the branch does not depend on the size of
    the gates or of the experts' outputs; `config.moe.latent_norm` false leaves it out. Both projections see every token
    and follow the role `ffn` of the precision.
    """

    def __init__(
        self, config: ModelConfig, *, hashed: bool = False, layer: jax.Array | int = 0, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, hashed=hashed, layer=layer, rngs=rngs)
        D, C = config.width, config.moe.latent
        shape = dict(role="matrix", inputs=(0,), outputs=(1,))
        self.latent_down_DC = parameter(matrix(config, rngs.params(), (D, C), branch=True), **shape)
        self.latent_up_CD = parameter(matrix(config, rngs.params(), (C, D), writer=True, branch=True), **shape)
        if config.moe.latent_norm:
            self.latent_norm = RMSNorm(C, config.norm_eps, config.dots.policy("norm"))

    def _routed(
        self, x_PD: jax.Array, gates_PK: jax.Array, experts_PK: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Hidden]:
        project = lambda x, w, i: linear(x, w[...], self.config, "ffn", folded(key, i))
        z_PC = project(x_PD, self.latent_down_DC, 3)
        sum_PC, hidden = routed(self.config, z_PC, gates_PK, experts_PK, self._weights, key)
        normed_PC = self.latent_norm(sum_PC) if self.config.moe.latent_norm else sum_PC
        return project(normed_PC, self.latent_up_CD, 4), sum_PC, hidden


def feed_forward(config: ModelConfig, ffn: str, layer: jax.Array | int, *, rngs: nnx.Rngs) -> DenseFFN | MoE:
    """The feed-forward block of a kind: `dense`, `moe` or `hash`."""
    if ffn == "dense":
        return DenseFFN(config, rngs=rngs)
    return (LatentMoE if config.moe.latent else MoE)(config, hashed=ffn == "hash", layer=layer, rngs=rngs)


def _statistics(
    logits_PE: jax.Array, load_E: jax.Array, hidden: Hidden, sum_PC: jax.Array, y_PD: jax.Array
) -> MoEStats:
    logits_PE, sum_PC, y_PD = jax.lax.stop_gradient((logits_PE, sum_PC, y_PD))
    rms = lambda x: jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2))
    return MoEStats(
        load=load_E,
        max_violation=load_E.max() * load_E.shape[0] - 1,
        router_logit_max=jnp.abs(logits_PE).max(),
        router_log_z=rms(jax.nn.logsumexp(logits_PE, -1)),
        expert_hidden_max=hidden.max_E,
        sum_rms=rms(sum_PC),
        routed_rms=rms(y_PD),
    )
