"""Equations without parameters."""

from __future__ import annotations

from repro.models.glu import clamped_swiglu, gelu, powlu, situ_glu, smooth_swiglu, swiglu

__all__ = ["clamped_swiglu", "gelu", "powlu", "situ_glu", "smooth_swiglu", "swiglu"]
