"""Muon against four steps of PyTorch's own (see data/PROVENANCE.md)."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from repro.optim import Layout, muon

pytestmark = pytest.mark.usefixtures("quick_compile")

TOLERANCE = 2.5e-3
# The two conventions for the factor of an update, kernels being [out, in]; divided by sqrt(max(out, in)), which `muon`
# multiplies with, they are its `rms`.
FACTORS = {
    "match_rms_adamw": lambda out, inputs: 0.2 * max(out, inputs) ** 0.5,
    "original": lambda out, inputs: max(1.0, out / inputs) ** 0.5,
}


@pytest.fixture(scope="module")
def steps():
    with np.load(Path(__file__).with_name("data") / "torch_muon.npz") as file:
        return dict(file)


@functools.partial(jax.jit, static_argnames="options")
def step(params, grads, state, factor, weight_decay, momentum, options=()):
    tx = muon(
        0.05, layouts={"w": Layout("matrix", inputs=(1,), outputs=(0,))}, weight_decay=weight_decay, rms=factor,
        momentum=momentum, **dict(options),
    )  # fmt: skip
    updates, state = tx.update(grads, tx.init(params) if state is None else state, params)
    return optax.apply_updates(params, updates), state


def follows_torch(steps, case, *, factor=1.0, weight_decay=0.1, momentum=0.95, options=()):
    """Runs `muon` over the stored gradients and compares the parameters after every step."""
    params = {"w": jnp.asarray(steps[f"{case}/p0"])}
    sides = params["w"].shape
    rms = factor * FACTORS[str(steps[f"{case}/adjust"])](*sides) / max(sides) ** 0.5
    state = None
    for t in range(4):
        params, state = step(params, {"w": steps[f"{case}/g{t}"]}, state, rms, weight_decay, momentum, options)
        off = np.abs(params["w"] - steps[f"{case}/p{t + 1}"]).max()
        assert off < TOLERANCE, (t, off)


@pytest.mark.parametrize("case", ["0", "1", "2", "3"])
def test_follows_torch(steps, case):
    follows_torch(steps, case)
    for wrong in [{"factor": 0.9}, {"factor": 1.1}, {"momentum": 0.9}, {"weight_decay": 0.0}]:
        with pytest.raises(AssertionError):
            follows_torch(steps, case, **wrong)


def test_follows_torch_with_bfloat16_products(steps):
    follows_torch(steps, "1", options=(("dtype", jnp.bfloat16),))


@pytest.mark.parametrize(
    "option", [("nesterov", False), ("decay", "independent"), ("schedule", "hybrid10")], ids=lambda o: o[0]
)
def test_another_rule_does_not(steps, option):
    with pytest.raises(AssertionError):
        follows_torch(steps, "1", options=(option,))
