"""Sizes and switches of the mixture of experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from repro.errors import ReproError

Affinity = Literal["sigmoid", "softmax", "sqrt_softplus"]
Balance = Literal["none", "sign", "quantile", "histogram"]
Dispatch = Literal["auto", "dense", "tiles", "ragged"]


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Routed experts beside shared ones; the defaults are off (no experts), and otherwise DeepSeek-V3's forms.

    Raises `ReproError` for sizes that do not fit together.
    """

    experts: int = 0
    """Routed experts E; 0 is a dense model."""
    active: int = 2
    """Experts per token."""
    ffn: int = 0
    """Hidden width of one expert, routed or shared; needed with experts."""
    shared: int = 0
    """Experts that see every token, fused into one of `shared` times the width."""
    dense_layers: int = 0
    """Layers at the bottom that keep a dense feed-forward block."""
    hash_layers: int = 0
    """Layers after those whose experts a fixed table of token ids chooses (DeepSeek-V4)."""
    latent: int = 0
    """LatentMoE: the width that routed experts work in; 0 is the model's own."""
    latent_norm: bool = True
    """LatentMoE: RMSNorm on the weighted sum, before it is projected up (Kimi K3, section on LatentMoE)."""
    affinity: Affinity = "sigmoid"
    """Score of an expert from its router logit."""
    groups: int = 1
    """Groups of neighbouring experts for group-limited selection, a divisor of the experts."""
    kept_groups: int = 1
    """Groups that a token may choose from."""
    normalise: bool = True
    """Whether the gates of the chosen experts sum to `scale`."""
    scale: float = 1.0
    """Factor on the gates."""
    balance: Balance = "none"
    """What moves the selection bias after each step: the sign of the load's excess (DeepSeek-V3), the quantile of the
    margins (Quantile Balancing, Kimi K3), exact or from a histogram, or nothing."""
    balance_rate: float = 1e-3
    """sign: the step of the bias."""
    balance_centred: bool = False
    """sign: take the mean of the steps away from them, so that the biases keep their mean."""
    sequence_loss: float = 0.0
    """Coefficient of the sequence-wise balance loss."""
    router_z_loss: float = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE)."""
    dispatch: Dispatch = "auto"
    """How tokens reach experts: all tokens in every expert (the oracle), sorted into padded tiles, or a ragged product.
    auto: tiles on a CPU, ragged elsewhere."""

    def __post_init__(self) -> None:
        for name in ("experts", "ffn", "shared", "dense_layers", "hash_layers", "latent"):
            if getattr(self, name) < 0:
                raise ReproError(f"model.moe.{name} is {getattr(self, name)}; it must be zero or positive.")
        for name, known in (("affinity", Affinity), ("balance", Balance), ("dispatch", Dispatch)):
            if getattr(self, name) not in known.__args__:
                raise ReproError(f"model.moe.{name} is {getattr(self, name)!r}; known are {', '.join(known.__args__)}.")
        for name in ("balance_rate", "sequence_loss", "router_z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ReproError(f"model.moe.{name} is {getattr(self, name)}; it must be zero or positive, and finite.")
        if not 0 < self.scale < math.inf:
            raise ReproError(f"model.moe.scale is {self.scale}; it must be positive and finite.")
        if not self.experts:
            off = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
            if off:
                raise ReproError(f"model.moe.{off[0]} is set and model.moe.experts is 0; give the number of experts.")
            return
        if not self.ffn:
            raise ReproError("model.moe.ffn is 0; experts need a hidden width.")
        if not 1 <= self.active <= self.experts:
            raise ReproError(
                f"model.moe.active is {self.active} of model.moe.experts {self.experts}; a token needs at least one "
                "expert and can have no more than there are."
            )
        if self.groups < 1 or self.experts % self.groups:
            raise ReproError(f"model.moe.groups {self.groups} does not divide model.moe.experts {self.experts}.")
        if not 1 <= self.kept_groups <= self.groups:
            raise ReproError(
                f"model.moe.kept_groups is {self.kept_groups}; it must lie between 1 and model.moe.groups {self.groups}."
            )
        if self.active > self.kept_groups * (self.experts // self.groups):
            raise ReproError(
                f"model.moe.active {self.active} experts do not fit into {self.kept_groups} kept groups of "
                f"{self.experts // self.groups}."
            )
        if self.balance in ("quantile", "histogram") and self.active == self.experts:
            raise ReproError(
                f"model.moe.balance {self.balance} needs an expert that is not chosen; set fewer active ones than "
                f"{self.experts}."
            )
        if self.balance in ("quantile", "histogram") and self.kept_groups < self.groups:
            raise ReproError(
                f"model.moe.balance {self.balance} weighs every expert for every token; with groups it is not defined."
            )
        if self.balance == "histogram" and self.affinity == "sqrt_softplus":
            raise ReproError(
                "model.moe.balance histogram has bins for scores between 0 and 1, and sqrt_softplus goes beyond 1; take "
                "quantile."
            )
        if self.balance != "sign" and (self.balance_centred or self.balance_rate != MoEConfig.balance_rate):
            raise ReproError("model.moe.balance_rate and balance_centred belong to model.moe.balance sign.")
        if not self.latent and not self.latent_norm:
            raise ReproError("model.moe.latent_norm is off and model.moe.latent is 0; there is no norm to leave out.")
