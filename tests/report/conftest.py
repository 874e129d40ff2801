"""A made-up experiment with everything a report can meet: ten arms, three sizes, eight seeds, diverged runs."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest

from repro.claims import (
    Arm,
    AtMost,
    Claim,
    Control,
    Equivalent,
    Exact,
    Experiment,
    Greater,
    NonInferior,
    Ratio,
    Run,
    Runs,
    decide_all,
    swapped,
)
from repro.report import Curve, Effects, Ladder, Width, draw

LABELS = {
    "adamw": "AdamW",
    "muon": "Muon",
    "muon_clip": "Muon with QK-Clip, τ = 100",
    "muon_clip30": "Muon with QK-Clip, τ = 30",
    "per_head": "Per-Head Muon",
    "qk_norm": "Muon with QK-Norm",
    "softcap": "Muon with logit soft-cap",
    "hot": "AdamW at three times its best rate",
    "sgd": "SGD with momentum",
    "harmful": "Muon with QK-Clip, τ = 5",
}
GROWTH = dict(zip(LABELS, (3, 5000, 100, 30, 2500, 12, 50, 400, 4, 5), strict=True))
LOSS = dict(zip(LABELS, (1.72, 1.60, 1.60, 1.61, 1.59, 1.61, 1.62, 1.9, 2.3, 1.75), strict=True))
SIZES = ("xs", "s", "m")
STEPS = 300
TEST = tuple(range(100, 108))
TUNING = (0, 1, 2)
FIGURES = (
    Curve("max_logit", "max_logit", "Largest attention logit", "max logit", log=True, line=100, line_label="τ = 100"),
    Curve("loss", "loss", "Training loss", "loss (nats per byte)", smooth=10, start=50),
    Ladder("ladder", "loss", "Validation loss over learning rates", "loss (nats per byte)"),
    Effects("effects", "Effects of the claims"),
    Width(
        "width", "max_logit", "muon@best", "adamw@best", "Muon's logits over AdamW's, by model width",
        "ratio of max logits", (("xs", 64), ("s", 128), ("m", 256)),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    steps: int = STEPS
    sizes: tuple[str, ...] = SIZES
    tuning_seeds: tuple[int, ...] = TUNING
    test_seeds: tuple[int, ...] = TEST


def make_claims():
    grows = Greater("max_logit", "muon@best/s", "adamw@best/s", smallest=1.5)
    twice = Ratio("max_logit", "muon@best/m", "muon_clip@best/m", at_least=2)
    harm = NonInferior("loss", "muon_clip@best/s", "muon@best/s", margin=0.01)
    return (
        Claim("K2-1", "Kimi K2, section 2.1", "Muon's attention logits grow beyond AdamW's", "above 1000",
              "9B active parameters", "D", grows, Control("arms exchanged", swapped(grows)), family="K2",
              variant="Muon against AdamW, each at its best rate, s"),
        Claim("K2-2", "Kimi K2, section 2.1", "QK-Clip bounds the logits", "at most 100", "one run", "D", twice,
              Control("arms exchanged", swapped(twice)), family="K2"),
        Claim("K2-3", "Kimi K2, section 2.1", "QK-Clip does no harm", "no change of the loss", "one run", "D", harm,
              Control("a bound of 5", NonInferior("loss", "harmful@best/s", "muon@best/s", margin=0.01)), family="K2"),
        Claim("V3-1", "DeepSeek-V3, section 3.3", "Losses agree within 0.25 %", "0.25 %", "16B", "D",
              Equivalent("loss", "per_head@best/s", "muon@best/s", margin=0.0025, relative=True),
              Control("a bad rate", Equivalent("loss", "hot@best/s", "muon@best/s", margin=0.0025, relative=True))),
        Claim("K2-4", "Kimi K2", "The loss stays below two", "", "", "D", AtMost("loss", "adamw@best/s", 2.0),
              Control("SGD", AtMost("loss", "sgd@best/s", 2.0))),
        Claim("K2-5", "Kimi K2", "A factor is exactly one half", "", "", "M", Exact("factor", "check", 0.5),
              Control("wrong formula", Exact("wrong_factor", "check", 0.5))),
        Claim("V4-1", "DeepSeek-V4", "A trillion parameters train without a spike", "no spike", "15.5T tokens", "S",
              None, None, reason_untestable="it would need a trillion parameters"),
    )  # fmt: skip


def make_experiment(figures=FIGURES, claims=None, arms=None):
    return Experiment(
        name="logit_explosion",
        title="Attention logits under Muon",
        claims=make_claims() if claims is None else claims,
        arms=arms or tuple(Arm(name, label) for name, label in LABELS.items()),
        presets={"cpu": Preset()},
        check_arms=("check",),
        figures=figures,
    )


def _runs():
    rng = np.random.default_rng(1)
    for index, size in enumerate(SIZES):
        for arm in LABELS:
            base = LOSS[arm] - 0.12 * index
            logit = 3 * (GROWTH[arm] / 3) ** (0.6 + 0.2 * index)
            best = 3e-3 if "muon" in arm else 1e-3
            for rate in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2):
                away = math.log10(rate / best) ** 2
                for seed in TUNING:
                    loss = base + 0.5 * away + 0.03 * rng.normal()
                    loss = math.nan if rate == 3e-2 and arm in ("adamw", "hot") else loss
                    yield Run(arm, seed, {"loss": loss}, size=size, rate=rate, phase="tuning")
            for seed in TEST:
                common = 0.02 * np.random.default_rng([seed, index]).normal()
                metrics = {
                    "loss": base + common + 0.004 * rng.normal(),
                    "train_loss": base - 0.05 + common,
                    "max_logit": logit * math.exp(0.15 * rng.normal()),
                    "peak_max_logit": 1.3 * logit * math.exp(0.15 * rng.normal()),
                }
                if "clip" in arm:
                    metrics["clipped_share"] = rng.uniform(0.1, 0.3)
                yield Run(arm, seed, metrics, "best", size, best)
    yield Run("check", 0, {"factor": 0.5, "wrong_factor": 0.25})


@functools.cache
def make_runs():
    return Runs(_runs())


@functools.cache
def make_curves():
    rng = np.random.default_rng(2)
    step = np.arange(STEPS)
    parts = []
    for index, size in enumerate(SIZES):
        for arm in LABELS:
            for seed in TEST:
                grown = (GROWTH[arm] / 3) ** (0.6 + 0.2 * index)
                logit = 3 * grown ** (1 - np.exp(-step / 80)) * np.exp(0.2 * rng.normal() * step / STEPS)
                logit *= np.exp(0.05 * rng.normal(size=STEPS))
                loss = LOSS[arm] - 0.12 * index + 3.8 * np.exp(-step / 25) + 0.05 * rng.normal(size=STEPS)
                if arm == "hot" and seed >= 103:
                    loss[150 + 10 * (seed - 100) :] = np.nan
                    logit[150 + 10 * (seed - 100) :] = np.inf
                parts.append(
                    pl.DataFrame({"step": step, "loss": loss, "max_logit": logit}).with_columns(
                        pl.lit(seed).alias("seed"), pl.lit(3e-3).alias("rate"),
                        *(pl.lit(v).alias(k) for k, v in
                          {"arm": arm, "size": size, "point": "best", "phase": "test"}.items()),
                    )
                )  # fmt: skip
    return pl.concat(parts)


@functools.cache
def make_verdicts():
    return decide_all(make_claims(), make_runs())


@pytest.fixture
def experiment():
    return make_experiment()


@pytest.fixture
def runs():
    return make_runs()


@pytest.fixture
def curves():
    return make_curves()


@pytest.fixture
def verdicts():
    return make_verdicts()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The files of every figure of the experiment."""
    folder = tmp_path_factory.mktemp("figures") / "made"
    return draw(make_experiment(), make_curves(), make_runs(), make_verdicts(), folder)
