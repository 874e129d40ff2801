"""Names, groups and the page."""

from pathlib import Path

import pytest

import repro.train.monitors as package
from repro.errors import ReproError
from repro.train import TrainConfig, with_settings
from repro.train.monitors import DEAR, GROUPS, MONITORS, MonitorConfig, group_of
from repro.train.monitors.table import table


def test_every_row_of_the_control_room_has_a_monitor_that_says_what_it_cannot_prove():
    groups = {monitor.group for monitor in MONITORS.values()}
    rows = {
        "loss",
        "attention",
        "activation",
        "gradient",
        "update",
        "weight",
        "quantisation",
        "optimizer",
        "experts",
        "system",
    }
    assert groups == rows and {"logits", "entropy"} <= set(MONITORS), "attention is two rows"
    for name, monitor in MONITORS.items():
        assert monitor.name == name and monitor.sees and monitor.cannot_prove and monitor.metrics
        assert not (monitor.probes or monitor.start) or monitor.dear == monitor.probes
    names = [metric for monitor in MONITORS.values() for metric in monitor.metrics]
    assert len(names) == len(set(names))


def test_groups_cover_what_is_always_measured():
    assert GROUPS["loss"] == "loss" and GROUPS["grad_norm"] == "gradient" and GROUPS["gain_forward_max"] == "residual"
    assert group_of("max_violation") == group_of("expert_loads") == "experts"
    assert group_of("token_range") == "task", "a metric of an experiment's own program"
    assert "validation_loss" in DEAR and "loss_ema" not in DEAR


def test_the_page_has_the_table_of_the_monitors():
    page = Path(package.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert table() in page, "write it anew: python -m repro.train.monitors.table"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"names": ("loss_ema", "losses")}, "'losses' is unknown; known are loss_ema, loss_domains, .*, and all"),
        ({"interval": 0}, "interval is 0"),
        ({"classes": "words"}, "'words'; known are bytes, quarters"),
        ({"recipe": "mxfp5"}, "'mxfp5'; it must be one of fp8_tensor"),
        ({"recipe": "fp8_delayed"}, "'fp8_delayed'"),
        ({"ema": 1.0}, "ema is 1.0"),
    ],
)
def test_what_is_refused(settings, words):
    with pytest.raises(ReproError, match=words):
        MonitorConfig(**settings)


def test_choosing():
    assert MonitorConfig().chosen(dear=False) == MonitorConfig().chosen(dear=True) == ()
    everything = MonitorConfig(names=("all",))
    assert (*everything.chosen(dear=False), *everything.chosen(dear=True)) != tuple(MONITORS.values())
    assert {m.name for dear in (False, True) for m in everything.chosen(dear=dear)} == set(MONITORS)
    config = with_settings(TrainConfig(), {"monitors.names": ("weight", "gradient")})
    assert [m.name for m in config.monitors.chosen(dear=False)] == ["gradient", "weight"]
