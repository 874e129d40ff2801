"""`repro scale-down`: what it prints, writes and refuses, and that what it gives can be run."""

import json
import re

import pydantic
import pytest

from repro.models import ModelConfig, config_from_hf, released, scale_down
from repro.overrides import parse
from repro.train import TrainConfig
from repro.train.preset import Sweep


@pytest.fixture
def small():
    return scale_down(config_from_hf(released("kimi_k3")), 256, 6, experts=56)[0]


def test_a_config_file_becomes_a_table_and_a_file(command, tmp_path, small):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(released("kimi_k3")))
    words = ("--width", 256, "--layers", 6, "--experts", 56)
    code, out, err = command("scale-down", path, *words, "--out", tmp_path / "small.json")
    assert code == 0 and err == ""
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    assert rows["kv_rank"][1:6] == ["512", "18", "rounded", "18.29", "would"] and rows["moe.latent"][1:4] == [
        "3,584",
        "128",
        "kept",
    ]
    assert rows["vocab_size"][1:4] == ["163,840", "256", "dropped"] and rows["moe.experts"][1:4] == ["896", "56", "set"]
    assert "linear_attn_config" in out and "Kimi Delta Attention is not built" in " ".join(out.split())
    stored = json.loads((tmp_path / "small.json").read_text())
    config = pydantic.TypeAdapter(TrainConfig).validate_python(stored)
    assert config == TrainConfig(model=small, length=256)
    # The overrides that it shows make the same model.
    line = next(line for line in out.splitlines() if "repro run NAME" in line)
    asked = parse(Sweep(), re.split(r"\s+", line.strip().removeprefix("repro run NAME "))[0:], "repro run")
    assert asked.train == config


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4", "moonlight"])
def test_released_models_by_name(command, name):
    code, out, _ = command("scale-down", name, "--width", 128)
    assert code == 0 and "rounded" in out
    model = scale_down(config_from_hf(released(name)), 128)[0]
    line = next(line for line in out.splitlines() if "repro run NAME" in line)
    asked = parse(Sweep(), line.strip().removeprefix("repro run NAME ").split(), "repro run").train.model
    assert asked == model and asked != ModelConfig()


def test_the_published_number_of_parameters(command):
    assert "DeepSeek-V3, 671B parameters" in command("scale-down", "deepseek_v3", "--width", 64)[1]


REFUSALS = [
    (["scale-down"], "required: CONFIG, --width"),
    (["scale-down", "nowhere.json", "--width", "64"], "nowhere.json does not exist; give a config.json, its folder"),
    (["scale-down", "deepseek_v3"], "required: --width"),
    (["scale-down", "deepseek_v3", "--width", "wide"], "invalid int value: 'wide'"),
    (["scale-down", "deepseek_v3", "--width", "9000"], "width is 9000"),
    (["scale-down", "deepseek_v3", "--width", "64", "--layers", "1"], "layers is 1"),
    (["scale-down", "deepseek_v3", "--width", "64", "--experts", "999"], "experts is 999"),
    (["scale-down", "deepseek_v3", "--width", "64", "--out", "llama.json"], "llama.json exists; name a new file"),
    (["scale-down", "llama.json", "--width", "64"], "llama is not among the architectures that are read"),
    (["scale-down", "odd.json", "--width", "64"], "hc_mult is unknown for DeepSeek-V3; it looks like DeepSeek-V4"),
    (["scale-down", "broken.json", "--width", "64"], "broken.json is not JSON"),
    (["scale-down", ".", "--width", "64"], "config.json does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSALS, ids=[" ".join(words) for words, _ in REFUSALS])
def test_refusals(refused, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (tmp_path / "odd.json").write_text(json.dumps(released("deepseek_v3") | {"hc_mult": 4}))
    (tmp_path / "broken.json").write_text("{")
    assert message in refused(*words)
