"""The loss over time and by kind of token, and on validation text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from repro.train.monitors.monitor import Metrics, Monitor, Observation

if TYPE_CHECKING:
    from repro.train.monitors.config import MonitorConfig


def _bytes(vocab_size: int) -> np.ndarray:
    kinds = {"letter": str.isalpha, "digit": str.isdigit, "space": str.isspace}
    names = TOKEN_CLASSES["bytes"][0]

    def kind(code: int) -> str:
        if code >= 128:
            return "other"
        found = next((name for name, test in kinds.items() if test(chr(code))), None)
        return found or ("punctuation" if 32 < code < 127 else "other")

    return np.array([names.index(kind(code)) for code in range(vocab_size)], np.int32)


def _quarters(vocab_size: int) -> np.ndarray:
    return (np.arange(vocab_size) * 4 // vocab_size).astype(np.int32)


TOKEN_CLASSES: Mapping[str, tuple[tuple[str, ...], Callable[[int], np.ndarray]]] = MappingProxyType(
    {
        # ASCII text, one token per byte.
        "bytes": (("letter", "space", "digit", "punctuation", "other"), _bytes),
        # Ids in four equal ranges; in vocabularies that are sorted by frequency, from common to rare tokens.
        "quarters": (("quarter1", "quarter2", "quarter3", "quarter4"), _quarters),
    }
)
"""Kinds of tokens: their names, and for a vocabulary size the table [Z] that gives the number of each token's kind."""


def token_losses(logits_BTZ: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Cross entropy [B, T] of every token, nats."""
    chosen_BT = jnp.take_along_axis(logits_BTZ, targets_BT[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits_BTZ, -1) - chosen_BT


def class_means(losses_BT: jax.Array, targets_BT: jax.Array, table_Z: np.ndarray, classes: int) -> jax.Array:
    """Mean loss of the tokens of each class, [C]; NaN for a class that no target has."""
    class_BT = jnp.asarray(table_Z)[targets_BT]
    mine_BTC = class_BT[..., None] == np.arange(classes)
    return jnp.where(mine_BTC, losses_BT[..., None], 0.0).sum((0, 1)) / mine_BTC.sum((0, 1))


def _domains(config: MonitorConfig, seen: Observation) -> Metrics:
    names, table = TOKEN_CLASSES[config.classes]
    logits_BTZ, targets_BT = seen.output.logits, seen.window_BT1[:, 1:].astype(jnp.int32)
    means_C = class_means(token_losses(logits_BTZ, targets_BT), targets_BT, table(logits_BTZ.shape[-1]), len(names))
    return {f"loss_{name}": means_C[i] for i, name in enumerate(names)}


def _remember(config: MonitorConfig, seen: Observation) -> Metrics:
    """A loss that is not finite is left out, or the mean would never recover."""
    finite, old = jnp.isfinite(seen.loss), seen.memory
    mixed = lambda name, new: config.ema * old[name] + (1 - config.ema) * new
    new = {"loss_sum": mixed("loss_sum", jnp.where(finite, seen.loss, 0.0)), "loss_weight": mixed("loss_weight", 1.0)}
    return {name: jnp.where(finite, value, old[name]) for name, value in new.items()}


def _ema(config: MonitorConfig, seen: Observation) -> Metrics:
    total, weight = seen.memory["loss_sum"], seen.memory["loss_weight"]
    return {"loss_ema": jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), seen.loss)}


def _validation(config: MonitorConfig, seen: Observation) -> Metrics:
    targets_NT = seen.validation_NT1[:, 1:].astype(jnp.int32)
    return {"validation_loss": token_losses(seen.probe.logits, targets_NT).mean()}


_REST = "what caused a change"

LOSS_EMA = Monitor(
    name="loss_ema",
    group="loss",
    dear=False,
    sees="that training has left its trend: the loss against its own recent mean",
    cannot_prove=f"{_REST}; a mean lags, and a loss that is not finite is left out of it",
    metrics={"loss_ema": "debiased running mean of finite losses, weight 1 - `ema` for the newest"},
    measure=_ema,
    start={"loss_sum": 0.0, "loss_weight": 0.0},
    remember=_remember,
)

LOSS_DOMAINS = Monitor(
    name="loss_domains",
    group="loss",
    dear=False,
    sees="which kind of token a change of the loss belongs to",
    cannot_prove=f"{_REST}; kinds are those of the target token alone, and a rare kind is a mean over few tokens",
    metrics={
        f"loss_{name}": f"mean loss of targets of this kind (`classes` {kind}); NaN where the batch has none"
        for kind, (names, _) in TOKEN_CLASSES.items()
        for name in names
    },
    measure=_domains,
)

VALIDATION = Monitor(
    name="validation",
    group="loss",
    dear=True,
    sees="whether what training does to its own batches holds on text it does not see",
    cannot_prove=f"{_REST}; a few windows have noise of their own, which is the same at every step",
    metrics={"validation_loss": "mean cross entropy of the fixed validation windows, before the step"},
    measure=_validation,
    probes=True,
)

MONITORS = (LOSS_EMA, LOSS_DOMAINS, VALIDATION)
