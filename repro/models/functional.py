"""Equations without parameters."""

from __future__ import annotations

from repro.models.glu import clamped_swiglu, gelu, powlu, situ_glu, smooth_swiglu, swiglu
from repro.models.hyper_connections import mhc_maps, sinkhorn
from repro.models.routing import (
    AFFINITIES,
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
    top_k_gates,
)

__all__ = [
    "AFFINITIES", "affinity", "clamped_swiglu", "gates", "gelu", "hash_table", "histogram_bias", "loads",
    "margin_histogram", "mhc_maps", "powlu", "quantile_bias", "router_z_loss", "select", "sequence_balance_loss",
    "sign_update", "sinkhorn", "situ_glu", "smooth_swiglu", "swiglu", "top_k_gates",
]  # fmt: skip
