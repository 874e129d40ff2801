"""Equations without parameters."""

from __future__ import annotations

import jax


def swiglu(g: jax.Array, u: jax.Array) -> jax.Array:
    """g * sigmoid(g) * u, elementwise (Shazeer, arXiv 2002.05202, eq. 5)."""
    return jax.nn.silu(g) * u
