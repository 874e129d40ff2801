"""The loss by kind of token, and its running mean."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from repro.train.monitors import MONITORS, MonitorConfig, initial_memory
from repro.train.monitors.loss import TOKEN_CLASSES, class_means, token_losses

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_classes_of_bytes():
    names, table = TOKEN_CLASSES["bytes"]
    of = {text: names[table(256)[ord(text)]] for text in "aZ 9.\n~\x00"}
    assert of == {"a": "letter", "Z": "letter", " ": "space", "9": "digit", ".": "punctuation", "\n": "space",
                  "~": "punctuation", "\x00": "other"}  # fmt: skip
    assert names[table(256)[200]] == "other" and len(table(300)) == 300
    assert TOKEN_CLASSES["quarters"][1](8).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_mean_loss_of_every_class():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 5, 8)).astype(np.float32), rng.integers(0, 6, (2, 5))
    each = (
        np.log(np.exp(logits.astype(np.float64)).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    )
    table = TOKEN_CLASSES["quarters"][1](8)
    found = class_means(token_losses(jnp.asarray(logits), jnp.asarray(targets)), jnp.asarray(targets), table, 4)
    for kind in range(3):
        assert float(found[kind]) == pytest.approx(each[table[targets] == kind].mean(), rel=1e-5)
        assert float(found[kind]) != pytest.approx(each[table[targets] == kind].sum() / each.size, rel=1e-2)
    assert np.isnan(found[3]), "no target of the last class"


def test_running_mean_is_debiased_and_survives_what_is_not_finite():
    config = MonitorConfig(names=("loss_ema",), ema=0.9)
    monitor, memory, values = MONITORS["loss_ema"], initial_memory(config), []
    losses = [5.0, 4.0, np.nan, 3.0, np.inf, 2.0]
    for loss in losses:
        seen = SimpleNamespace(loss=jnp.float32(loss), memory=memory)
        memory = monitor.remember(config, seen)
        values.append(float(monitor.measure(config, SimpleNamespace(loss=seen.loss, memory=memory))["loss_ema"]))
    finite = [loss for loss in losses if np.isfinite(loss)]
    weights = 0.9 ** np.arange(len(finite))[::-1]
    assert values[-1] == pytest.approx(np.average(finite, weights=weights), rel=1e-6)
    assert values[0] == 5.0 and values[2] == values[1] and values[4] == values[3]
    assert 0.1 * sum(w * x for w, x in zip(weights, finite, strict=True)) < 0.5 * values[-1], "not debiased"
