"""Optimizers as Optax transforms over parameter trees with declared roles; see README.md."""

from repro.optim.adafactor import adafactor, scale_by_adafactor
from repro.optim.adalayer import adalayer, scale_by_adalayer
from repro.optim.adamw import adamw
from repro.optim.clipping import ClipState, clip_by_global_norm
from repro.optim.distributed import distributed_muon, momentum_spec, scale_by_distributed_muon
from repro.optim.families import OPTIMIZERS, adam, lion, optimizer, sgd, signum
from repro.optim.layout import (
    Layout,
    Part,
    Parts,
    check_layouts,
    declare,
    describe,
    equal_parts,
    from_declarations,
    per_head,
    split_parts,
)
from repro.optim.loss_scale import LossScale, with_loss_scale
from repro.optim.low_precision_state import with_low_precision_state
from repro.optim.master_weights import with_master_weights
from repro.optim.muon import MuonState, muon, orthogonalise, scale_by_muon, update_factor
from repro.optim.newton_schulz import NS_SCHEDULES, newton_schulz
from repro.optim.qk_clip import QKClipState, qk_clip, qk_clip_factor, with_qk_clip
from repro.optim.schedules import warmup_constant_cosine, warmup_multistep, warmup_stable_decay
from repro.optim.shampoo import scale_by_shampoo, shampoo
from repro.optim.soap import scale_by_soap, soap
from repro.optim.stable_adamw import scale_by_stable_adam, stable_adamw
from repro.optim.width_rules import factor_tree, scale_by_width_rule, width_factors

__all__ = [
    "ClipState", "Layout", "LossScale", "MuonState", "NS_SCHEDULES", "OPTIMIZERS", "Part", "Parts", "QKClipState",
    "adafactor", "adalayer", "adam", "adamw", "check_layouts", "clip_by_global_norm", "declare", "describe",
    "distributed_muon", "equal_parts", "factor_tree", "from_declarations", "lion", "momentum_spec", "muon",
    "newton_schulz", "optimizer", "orthogonalise", "per_head", "qk_clip", "qk_clip_factor", "scale_by_adafactor",
    "scale_by_adalayer", "scale_by_distributed_muon", "scale_by_muon", "scale_by_shampoo", "scale_by_soap",
    "scale_by_stable_adam", "scale_by_width_rule", "sgd", "shampoo", "signum", "soap", "split_parts",
    "stable_adamw", "update_factor", "warmup_constant_cosine", "warmup_multistep", "warmup_stable_decay",
    "width_factors", "with_loss_scale", "with_low_precision_state", "with_master_weights", "with_qk_clip",
]  # fmt: skip
