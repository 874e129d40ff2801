"""Optimizers as Optax transforms over parameter trees with declared roles; see README.md."""

from repro.optim.layout import Layout, check_layouts, describe, from_declarations, per_head
from repro.optim.muon import MuonState, adamw, muon, scale_by_muon
from repro.optim.newton_schulz import NS_SCHEDULES, newton_schulz
from repro.optim.qk_clip import qk_clip, qk_clip_factor

__all__ = [
    "Layout", "MuonState", "NS_SCHEDULES", "adamw", "check_layouts", "describe", "from_declarations", "muon",
    "newton_schulz", "per_head", "qk_clip", "qk_clip_factor", "scale_by_muon",
]  # fmt: skip
