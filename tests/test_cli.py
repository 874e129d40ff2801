"""The command line: what it shows, and every refusal in one sentence."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import repro
from repro.claims import LEDGER

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_version_and_help(command):
    assert command("--version") == (0, f"{repro.__version__}\n", "")
    assert all(word in command()[1] for word in ("list", "show", "run", "resume", "verdict", "report", "doctor"))


def test_list_shows_every_claim_and_what_runs_it(command):
    code, out, err = command("list")
    assert code == 0 and err == ""
    rows: dict[str, str] = {}
    for line in filter(str.split, out.splitlines()):  # a long list of experiments goes on below
        if (first := line.split()[0]) in LEDGER:
            rows[first] = ""
        if rows:
            rows[next(reversed(rows))] += line
    assert rows.keys() == LEDGER.keys()
    assert all("logit-explosion" in rows[i] for i in ("K2-1", "K2-2", "K2-3", "K2-4", "S-1", "S-7"))
    assert "logit-explosion" not in rows["V3-1"]


def test_show_a_claim(command):
    code, out, _ = command("show", "k2-1")
    assert (
        code == 0
        and "Kimi K2" in out
        and "repro run logit-explosion" in out
        and "Control: arms exchanged" in " ".join(out.split())
    )
    rows = [line.split() for line in command("list")[1].splitlines() if "not run" in line]
    assert "no experiment judges it" in command("show", next(row[0] for row in rows if row[0] in LEDGER))[1]


def test_show_an_experiment(command):
    for spelling in ("logit-explosion", "logit_explosion"):
        code, out, _ = command("show", spelling)
        assert code == 0 and "muon_decay_clip" in out and "K2-2" in out and "smoke" in out


def test_doctor(command):
    code, out, err = command("doctor")
    assert code == 0 and err == ""
    assert "jax " in out and "Corpus kjv: 4,152,808 tokens" in out and "as expected" in out
    assert "--preset smoke: can run here" in out and "--preset gpu: cannot run here" in out


def test_the_ledger_of_a_published_size(command):
    code, out, err = command("ledger", "--parameters", "27,781,427,952")
    assert code == 0 and err == "" and "27,781,427,952 parameters" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    assert rows["fp32_adam"][1:4] == ["16", "444.5", "1"] and rows["v3"][1:4] == ["12", "333.4", "0.75"]
    assert rows["mxfp4"][1:] == ["e2m1", "4.25", "0.25"] and rows["nvfp4"][2] == "4.5"


def test_the_ledger_of_a_model_by_role(command):
    from repro.models import ModelConfig, abstract

    code, out, _ = command(
        "ledger", "--size", "xs", "--policy", "v3", "--role", "second-moment=none", "--role", "ema=bf16"
    )
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    assert code == 0 and "second_moment" not in rows and "shown: second_moment none, ema bf16." in out
    assert rows["ema"][-4:-1] == ["bf16", "16", "2"] and rows["total"][1:3] == ["v3", "12"]
    import jax

    assert rows[out.split()[0]][0] == f"{sum(x.size for x in jax.tree.leaves(abstract(ModelConfig()))):,}"


def test_the_ledger_alone_compares_policies_and_formats(command):
    code, out, _ = command("ledger")
    assert code == 0 and "GB" not in out and "bf16_only" in out and "nf4" in out


def test_help_of_run_lists_the_fields(command):
    code, out, _ = command("run", "logit-explosion", "--help")
    assert code == 0 and all(
        f"--{field}" in out for field in ("seeds", "out", "train.steps", "train.model.vocab-size", "data", "rates")
    )
    assert "logit-explosion" in command("run", "--help")[1]


REFUSALS = [
    (["dance"], "invalid choice: 'dance'"),
    (["list", "--all"], "unrecognized arguments: --all"),
    (["show"], "required: ID"),
    (["show", "Z-1"], "'Z-1' is neither a claim nor an experiment"),
    (["run"], "which experiment? Known are "),
    (["run", "nope"], "experiment 'nope' is unknown"),
    (["run", "logit-explosion", "--preset", "huge"], "preset 'huge' is unknown for logit-explosion; known are smoke, cpu"),
    (["run", "logit-explosion", "--seeds", "some"], "invalid int value: 'some'"),
    (["run", "logit-explosion", "--seeds", "0"], "--seeds is 0"),
    (["run", "logit-explosion", "--seeds", "41"], "the exact test takes at most 40 test seeds, not 41"),
    (["run", "logit-explosion", "--train.speed", "3"], "speed"),
    (["run", "logit-explosion", "--train.steps", "many"], "many"),
    (["run", "logit-explosion", "--train.schedule", "linear"], "linear"),
    (["run", "logit-explosion", "--train.tau", "30"], "train.tau is set by the arms"),
    (["run", "logit-explosion", "--sizes", "xs", "w32", "--train.length", "8"], "contradict each other"),
    (["run", "logit-explosion", "--preset", "gpu"], "made for a GPU with about 80 GB of memory and JAX sees only cpu"),
    (["ledger", "--parameters", "many"], "--parameters is many; it must be a whole number of at least 1."),
    (["ledger", "--parameters", "-3"], "--parameters is -3"),
    (["ledger", "--size", "huge"], "size 'huge' is unknown; known are tiny, w32"),
    (["ledger", "--size", "xs", "--parameters", "3"], "contradict each other"),
    (["ledger", "--policy", "v9"], "'v9' is unknown; known are fp32_adam"),
    (["ledger", "--role", "ema"], "--role ema is not ROLE=FORMAT"),
    (["ledger", "--role", "momentum=fp32"], "no role 'momentum'; there is parameters"),
    (["ledger", "--role", "ema=fp7"], "'fp7' is no format"),
    (["resume"], "required: DIR"),
    (["resume", "nowhere"], "nowhere holds no run.json"),
    (["verdict", "."], "holds no run.json; give the folder that `repro run` wrote"),
    (["verdict", "--check", "nowhere"], "nowhere holds no run.json"),
    (["report", "nowhere"], "nowhere holds no run.json"),
]  # fmt: skip


COMPUTED = [
    (["--seeds", "3"], "--seeds 3 has no meaning for tally, which has no test seeds; leave it out."),
    (["--trials", "3"], "trials"),
    (["--counts", "many"], "many"),
    (["--counts", "0"], "counts is (0,); give numbers of at least 1."),
    (["--preset", "gpu"], "preset 'gpu' is unknown for tally; known are smoke, cpu."),
]


@pytest.mark.parametrize(("words", "message"), COMPUTED, ids=[" ".join(words) for words, _ in COMPUTED])
def test_refusals_of_an_experiment_that_only_computes(refused, toy, tmp_path, words, message):
    assert message in refused("run", "tally", "--out", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def test_help_of_an_experiment_with_its_own_preset_lists_its_own_fields(command, toy):
    code, out, _ = command("run", "tally", "--help")
    assert code == 0 and "--counts" in out and "--train.steps" not in out and "--seeds" not in out


@pytest.mark.parametrize(("words", "message"), REFUSALS, ids=[" ".join(words) for words, _ in REFUSALS])
def test_refusals(refused, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*words)
    assert not list(tmp_path.rglob("run.json")), "nothing is begun"


DATA = [
    ("missing.txt", "There is no corpus or file 'missing.txt'"),
    ("empty.txt", "There is no text in empty.txt"),
    ("short.txt", "training split of text:short.txt has"),
    (".", "is a folder: name the files in it"),
    ("text:*.none", "No file matches *.none"),
    ("llmc:bad.bin", "begins with magic"),
    ("nanogpt:beyond.bin", "has 50257 token ids and the model 256; set train.model.vocab-size to at least 50257"),
    ("nanogpt:far.bin", "has id 60000 but the vocabulary has 50257"),
]


@pytest.mark.parametrize(("spec", "message"), DATA, ids=[spec for spec, _ in DATA])
def test_data_that_cannot_be_used(refused, tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "short.txt").write_text("It was a bright cold day. ")
    np.arange(5000, dtype="<u2").tofile("beyond.bin")
    np.full(2000, 60000, "<u2").tofile("far.bin")
    np.full(2000, 7, "<u4").tofile("bad.bin")
    words = ["run", "logit-explosion", "--preset", "smoke", "--data", spec, "--out", "out"]
    assert message in refused(*words)
    assert message in refused(*words), "the folder is still empty, so a corrected command may use it"


def test_a_used_folder(refused, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not an empty folder" in refused("run", "logit-explosion", "--preset", "smoke", "--out", tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("run.json", None, "holds no run.json"),
        ("verdict.json", None, "is incomplete: verdict.json is missing"),
        ("metrics.parquet", None, "is incomplete: metrics.parquet is missing"),
        ("runs.parquet", b"\x00", "was edited after its verdict"),
        ("run.json", b"{}", "was edited after its verdict"),
        ("verdict.json", b"{}", "has schema None"),
        ("verdict.json", b"{", "cannot be read as JSON"),
    ],
)
def test_folders_that_are_no_longer_what_was_judged(refused, toy, toy_run, tmp_path, name, change, message):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    (folder / name).unlink() if change is None else (folder / name).write_bytes(change)
    for words in (["verdict"], ["verdict", "--check"], ["report"]):
        assert message in refused(*words, folder)


def test_a_preset_of_another_version(refused, toy, toy_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(toy_run, folder)
    (folder / "verdict.json").unlink()
    about = json.loads((folder / "run.json").read_text())
    for preset in ({**about["preset"], "colour": "red"}, {**about["preset"], "rates": "fast"}, None):
        (folder / "run.json").write_text(json.dumps({**about, "preset": preset}))
        message = refused("resume", folder)
        assert "of another version" in message or "have changed since" in message
    (folder / "run.json").write_text(json.dumps({**about, "experiment": "gone"}))
    assert "experiment 'gone' is unknown" in refused("resume", folder)


def losses(folder):
    import polars as pl

    return pl.read_parquet(folder / "metrics.parquet").filter(phase="test")["loss"]


def test_ones_own_text_trains(command, toy, tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text("Nobody had wound the clocks. " * 60)
    code, out, err = command(
        "run", "race", "--preset", "smoke", "--data", f"text:{tmp_path}/*.txt", "--out", tmp_path / "run"
    )
    assert (
        code == 0
        and err == ""
        and "Changed from the preset: data; the verdicts do not count as evidence" in " ".join(out.split())
    )
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["corpus"]["name"] == "text:0.txt, 1.txt" and about["corpus"]["tokens"] == 2 * 60 * 29 + 1
    assert losses(tmp_path / "run").is_finite().all()


@pytest.mark.slow
def test_token_shards_train(command, toy, tmp_path):
    rng = np.random.default_rng(0)
    rng.integers(0, 50257, 3000).astype("<u2").tofile(tmp_path / "train.bin")
    rng.integers(0, 50257, 600).astype("<u2").tofile(tmp_path / "val.bin")
    data = f"nanogpt:{tmp_path}/train.bin|{tmp_path}/val.bin"
    code, _, err = command(
        "run", "race", "--preset", "smoke", "--data", data, "--train.model.vocab-size", 50257, "--train.steps", 2, "--seeds", 1,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0 and err == ""
    first = losses(tmp_path / "run")[0]
    assert abs(first - np.log(50257)) < 1.5, "an untrained model guesses among all ids"


@pytest.mark.slow
def test_the_module_is_the_command(tmp_path):
    for module in ("repro", "repro.cli"):
        done = subprocess.run(
            [sys.executable, "-m", module, "show", "nope"], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == "repro: 'nope' is neither a claim nor an experiment; `repro list` shows both.\n"
