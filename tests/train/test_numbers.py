"""What needs no training: schedules, configurations, chunk lengths and the scalars of a run."""

import dataclasses
import math

import numpy as np
import pytest

from repro.errors import ReproError
from repro.models import SIZES, ModelConfig, MoEConfig
from repro.models.config import QKNorm
from repro.train import NUMERIC, JobResult, TrainConfig, at_size, summarise, with_settings
from repro.train.compiled import chunk_length
from repro.train.monitors import MonitorConfig
from repro.train.optimizer import OptimizerConfig
from repro.train.schedule import fraction
from repro.train.summary import tail


def fractions(config):
    return np.asarray(fraction(config, np.arange(config.steps)))


def test_warm_up_reaches_one_and_the_cosine_its_end():
    config = TrainConfig(steps=100, warmup=0.1, final_fraction=0.25)
    found = fractions(config)
    steps = np.arange(1, 101)
    wanted = np.where(
        steps < 10, steps / 10, 0.25 + 0.75 * 0.5 * (1 + np.cos(np.pi * np.clip((steps - 10) / 90, 0, 1)))
    )
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert found[9] == 1 and (found[:9] < 1).all() and (np.diff(found[9:]) < 0).all()
    assert found[-1] == pytest.approx(0.25, abs=1e-6)
    assert not np.allclose(found, np.where(steps < 10, steps / 10, 1.0)), "a constant would pass"


def test_constant_schedule_and_no_warm_up():
    found = fractions(TrainConfig(steps=20, warmup=0.25, schedule="constant"))
    np.testing.assert_allclose(found, np.minimum(np.arange(1, 21) / 5, 1), rtol=1e-6)
    assert fractions(TrainConfig(steps=7, warmup=0.0))[0] == 1
    assert fractions(TrainConfig(steps=1)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("steps", "most", "chunk"),
    [(300, 50, 50), (300, 10, 10), (20, 50, 20), (70, 50, 35), (53, 50, 50), (7, 10, 7), (1, 10, 1)],
)
def test_chunks_divide_the_steps_where_that_is_not_far_below(steps, most, chunk):
    assert chunk_length(steps, most) == chunk


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "train.steps is 0"),
        ({"eval_windows": 0}, "train.eval_windows is 0"),
        ({"learning_rate": 0.0}, "train.learning_rate is 0"),
        ({"learning_rate": math.inf}, "train.learning_rate is inf"),
        ({"weight_decay": -1.0}, "train.weight_decay is -1"),
        ({"z_loss": math.nan}, "train.z_loss is nan"),
        ({"warmup": 1.0}, "train.warmup must lie"),
        ({"final_fraction": 1.5}, "train.final_fraction"),
        ({"tau": 0.0}, "train.tau is 0"),
        ({"tau": math.nan}, "train.tau is nan"),
        *(({"tau": 100.0, "model.qk_norm": norm}, "beside QK norm") for norm in QKNorm.__args__[1:]),
        ({"tau": 100.0, "model.soft_cap": 50.0}, "or a soft-cap"),
        ({"tau": 100.0, "model.sigma_reparam": True}, "sigma-reparametrisation"),
        ({"taus": 1.0}, "setting taus does not exist; there is length"),
        ({"model.depth": 1}, "setting model.depth does not exist; there is model.vocab_size"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ReproError) as error:
        with_settings(TrainConfig(), settings)
    assert message in str(error.value) or message.split(";")[0] in str(error.value)


def test_structure_leaves_out_the_numbers_and_nothing_else():
    config = TrainConfig()
    numeric = dataclasses.replace(config, learning_rate=0.5, weight_decay=1.0, tau=3.0, z_loss=0.1)
    assert numeric.structure() == config.structure() and numeric.numbers() == (0.5, 1.0, 3.0, 0.1)
    others = {f.name for f in dataclasses.fields(config)} - set(NUMERIC)
    values = {
        "model": ModelConfig(layers=1), "length": 8, "batch_size": 2, "steps": 5, "optimizer": "adamw", "warmup": 0.5,
        "optim": OptimizerConfig(rms=0.1), "schedule": "constant", "final_fraction": 0.0, "decay": "independent", "eval_windows": 3, "weights": "bf16",
        "monitors": MonitorConfig(("gradient",)), "guards": ("when loss > 9 then skip",), "routing_lag": 2,
    }  # fmt: skip
    assert set(values) == others
    config = TrainConfig(model=ModelConfig(moe=MoEConfig(experts=4, active=2, ffn=8)))
    for name, value in values.items():
        assert dataclasses.replace(config, **{name: value}).structure() != config.structure()


def test_a_named_size_sets_the_shape_and_keeps_the_switches():
    config = TrainConfig(steps=7, model=ModelConfig(qk_norm="rms"))
    sized = at_size(config, "w32")
    assert (sized.model.width, sized.length, sized.batch_size) == (32, SIZES["w32"].length, SIZES["w32"].batch_size)
    assert sized.steps == 7 and sized.model.qk_norm == "rms"
    with pytest.raises(ReproError, match="size 'xxl' is unknown; known are tiny, w32, xs"):
        at_size(config, "xxl")


def made_up_result():
    """Twenty steps, two lanes, one layer of two heads; the second lane diverges."""
    steps = np.arange(20.0)
    lanes = lambda a, b: np.stack([np.broadcast_to(a, 20), np.broadcast_to(b, 20)], 1).astype(np.float32)
    head_logits = np.zeros((20, 2, 1, 2), np.float32)
    head_logits[5, 0, 0, 1] = 7.0
    head_logits[:, 1] = 9.0
    share = np.where((steps == 5) | (steps == 6), 0.5, 0.0)
    share[-1] = 0.25
    curves = {
        "loss": lanes(5 - steps / 10, 3),
        "max_logit": lanes(2.0 ** (steps - 18), np.where(steps == 3, 50.0, -1.0)),
        "max_abs_logit": lanes(np.where(steps == 19, 8.0, 2.0), 4),
        "max_capped_logit": lanes(np.where(steps == 2, 6.0, 1.0), 4),
        "clipped_share": lanes(share, 1),
        "entropy_min": lanes(np.where(steps == 18, 0.5, 1.5), 1),
        "activation_max": lanes(np.where(steps == 0, 11.0, 1.0), 1),
        "head_logits": head_logits,
    }
    return JobResult(curves, {"loss": np.array([3.25, np.nan]), "eval_max_logit": np.array([1.5, 2.5])}, params=None)


def test_scalars_by_hand():
    first, second = summarise(made_up_result(), taus=np.array([6.5, 10.0]))
    wanted = {
        "loss": 3.25, "eval_max_logit": 1.5, "train_loss": (3.2 + 3.1) / 2, "initial_loss": 5.0,
        "max_logit": math.sqrt(1.0 * 2.0), "max_abs_logit": math.sqrt(2.0 * 8.0), "max_capped_logit": 6.0,
        "peak_max_logit": 2.0,
        # the first ten: 2^-18 ... 2^-9, floored at 1e-3, of which only 2^-9 is above
        "early_max_logit": math.exp((9 * math.log(1e-3) + math.log(2**-9)) / 10),
        "clipped_share_last": 0.125, "clipped_share_peak": 0.25, "clipped_heads_ever": 0.5,
        "entropy_min": 1.0, "activation_max": 11.0,
    }  # fmt: skip
    assert set(first) == set(wanted)
    for name, value in wanted.items():
        assert first[name] == pytest.approx(value, rel=1e-6), name
    assert second["loss"] == math.inf and second["clipped_heads_ever"] == 0 and second["peak_max_logit"] == 50
    assert second["max_logit"] == pytest.approx(1e-3), "a negative maximum stands at the floor of the logarithm"
    # With another threshold the other head counts: the array of taus is read per lane.
    swapped = summarise(made_up_result(), taus=np.array([10.0, 6.5]))
    assert [row["clipped_heads_ever"] for row in swapped] == [0, 1]


def test_the_tail_is_a_tenth_and_never_empty():
    assert [tail(n) for n in (1, 9, 10, 19, 300)] == [1, 1, 1, 1, 30]
