"""Decompositions equal those of NumPy, and a program over several CPU devices does not stand still in them."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from repro import decompositions

X = np.random.default_rng(0).standard_normal((2, 3, 6, 4)).astype(np.float32)
S = X @ X.swapaxes(-1, -2)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_each_matrix_is_decomposed(quick_compile):
    u, s, v = jax.jit(decompositions.svd)(X)
    assert u.shape == (2, 3, 6, 4) and s.shape == (2, 3, 4) and v.shape == (2, 3, 4, 4)
    close(s, np.linalg.svd(X)[1])
    close((u * s[..., None, :]) @ v, X)
    values, vectors = jax.jit(jax.vmap(decompositions.eigh))(S)
    close(values, np.linalg.eigh(S)[0])
    close((vectors * values[..., None, :]) @ vectors.swapaxes(-1, -2), S)
    close(decompositions.eigvalsh(S[0, 0]), np.linalg.eigvalsh(S[0, 0]))
    q, r = jax.jit(decompositions.qr)(X)
    close(q @ r, X)
    close(np.abs(np.asarray(r)), np.abs(np.linalg.qr(X)[1]))


PROGRAM = """
import functools, os, sys

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # before the thread pool starts: one thread per device
import jax, jax.numpy as jnp, numpy as np
from repro.models import ModelConfig, sigma_reparam
from repro.train import Program, TrainConfig, lane_mesh
from repro.train.mesh import Seats, over_lanes

jax.config.update("jax_disable_most_optimizations", True)
if sys.argv[1] == "batched":
    sigma_reparam.svd = functools.partial(jnp.linalg.svd, full_matrices=False)
config = TrainConfig(model=ModelConfig(layers=2, width=64, heads=2, ffn=128, sigma_reparam=True), optimizer="adamw")
seats = Seats(8, lane_mesh())
run = jax.jit(over_lanes(Program(config).init, seats.mesh))
seeds = seats.put(np.arange(8, dtype=np.uint32))
for _ in range(3):
    jax.block_until_ready(run(seats.counts, seeds))
print(len(jax.devices()), "devices done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="how many cores a process may use is asked of Linux")
def test_devices_do_not_wait_for_each_other():
    """As many devices as threads of the pool, each in LAPACK: with the batched calls of jaxlib they wait for ever."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "ours"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout == "2 devices done\n", result.stderr
