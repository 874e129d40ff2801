"""Optimizers as Optax transforms over parameter trees with declared roles; see README.md."""

from repro.optim.adamw import adamw
from repro.optim.layout import (
    Layout,
    Part,
    Parts,
    check_layouts,
    describe,
    equal_parts,
    from_declarations,
    per_head,
    split_parts,
)
from repro.optim.muon import MuonState, muon, orthogonalise, scale_by_muon, update_factor
from repro.optim.newton_schulz import NS_SCHEDULES, newton_schulz
from repro.optim.qk_clip import qk_clip, qk_clip_factor

__all__ = [
    "Layout", "MuonState", "NS_SCHEDULES", "Part", "Parts", "adamw", "check_layouts", "describe", "equal_parts",
    "from_declarations", "muon", "newton_schulz", "orthogonalise", "per_head", "qk_clip", "qk_clip_factor",
    "scale_by_muon", "split_parts", "update_factor",
]  # fmt: skip
