"""The rules of logit-explosion, without training: on made-up runs, and on stored results where there are some."""

import dataclasses
import json
import math
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import repro
from repro import catalogue
from repro.claims import Cell, Run, Runs, decide, decide_all, gather
from repro.claims.runs import parse_place
from repro.data import load_corpus
from repro.models import SIZES
from repro.runner import Job
from repro.train import Numbers, Program

ROOT = Path(repro.__file__).parents[1]
EXPERIMENT = catalogue.load("logit-explosion")
MODULE = sys.modules["repro.experiments.logit_explosion"]
EVIDENCE = [name for name, preset in EXPERIMENT.presets.items() if preset.evidence]

# What a world looks like in which every claim holds: (arm, point) -> largest logit.
LOGITS = {
    ("adamw", "best"): 20, ("muon", "best"): 250, ("muon_clip_low", "best"): 60, ("muon_clip_harm", "best"): 10,
    ("adamw", "low"): 8, ("muon", "low"): 80, ("adamw_qk_norm", "low"): 5,
    ("adamw", "stress"): 400, ("muon", "stress"): 2000, ("adamw_qk_norm", "stress"): 9,
    ("muon_decay", "stress"): 300, ("muon_clip", "stress"): 100, ("muon_decay_clip", "stress"): 90,
    ("muon_qk_norm", "stress"): 12, ("muon_soft_cap", "stress"): 3000,
}  # fmt: skip


def made_up(cells, optimum=0.01414):
    """Runs of the cells in such a world; the best rate of every arm is `optimum`."""
    for cell in cells:
        for seed in cell.seeds:
            noise = np.random.default_rng([seed, len(cell.arm)]).normal()
            wide = (SIZES[cell.size].width / 32) ** 0.4 if (cell.arm, cell.point) == ("muon", "best") else 1.0
            logit = LOGITS.get((cell.arm, cell.point), 50) * wide * math.exp(0.02 * noise)
            loss = 2 + math.log(cell.rate / optimum) ** 2 * (0.01 if cell.arm == "adamw_qk_norm" else 1) + 0.001 * noise
            clipped = {
                "muon_decay_clip": (0.3, 0.001, 0.1),
                "muon_clip": (0.4, 0.3, 0.8),
                "muon_clip_harm": (0.9, 0.9, 0.95),
            }
            peak, last, ever = clipped.get(cell.arm, (0.0, 0.0, 0.0))
            metrics = {
                "loss": loss + {"muon_clip_low": 0.002, "muon_clip_harm": 0.3}.get(cell.arm, 0.0), "initial_loss": 9.0,
                "max_logit": logit, "peak_max_logit": 1.3 * logit,
                "max_capped_logit": min(logit, 49.9) if cell.arm == "muon_soft_cap" else logit,
                "clipped_share_peak": peak + 0.001 * abs(noise), "clipped_share_last": last + 1e-4 * abs(noise),
                "clipped_heads_ever": ever + 0.001 * abs(noise),
            }  # fmt: skip
            yield Run(cell.arm, seed, metrics, cell.point, cell.size, cell.rate, cell.phase)


def of_preset(name):
    preset = EXPERIMENT.presets[name]
    return EXPERIMENT.claims_for(preset), gather(
        dataclasses.replace(EXPERIMENT, checks=lambda p: CHECKS), preset, made_up
    )


CHECKS = MODULE.checks(None)


@pytest.mark.parametrize("name", EXPERIMENT.presets)
def test_every_preset_can_be_judged(name):
    preset = EXPERIMENT.presets[name]
    EXPERIMENT.check(preset)
    assert preset.evidence or name == "smoke"
    claims, runs = of_preset(name)
    assert len(decide_all(claims, runs)) == len(claims) >= 8
    for size in (*preset.sizes, *preset.trend_sizes):
        for arm in EXPERIMENT.arms:
            assert MODULE.TrainConfig is type(preset.config(size)), arm


@pytest.mark.parametrize("name", EVIDENCE)
def test_a_world_in_which_all_claims_hold(name):
    claims, runs = of_preset(name)
    for claim, verdict in zip(claims, decide_all(claims, runs), strict=True):
        assert verdict.label == "supported", f"{claim.name}: {verdict.reason}"
        assert verdict.control_label != "supported", f"{claim.name}: {verdict.control_reason}"


@pytest.mark.parametrize("name", EVIDENCE)
def test_what_the_control_ran_does_not_pass_as_the_claim(name):
    """The values of the control's arms in place of the claim's: for two arms exchanged, the opposite is found."""
    claims, runs = of_preset(name)
    for claim in claims:
        source = dict(zip(claim.criterion.reads(), claim.control.criterion.reads(), strict=True))
        values = {tuple(parse_place(at)): tuple(parse_place(frm)) for at, frm in source.items()}

        def moved(run, values=values):
            for (arm, point, size), frm in values.items():
                if run.arm == arm and (point is None or run.point == point) and (size is None or run.size == size):
                    (twin,) = [
                        r for r in runs.select(frm[0], frm[1], size=run.size if frm[2] is None else frm[2])
                        if r.seed == run.seed and r.phase == run.phase
                    ]  # fmt: skip
                    return dataclasses.replace(run, metrics=twin.metrics)
            return run

        verdict = decide(claim, Runs(moved(run) if run.phase == "test" else run for run in runs))
        assert verdict.label != "supported", claim.name
        if claim.control.description == "arms exchanged":
            assert verdict.label == "contradicted" and verdict.control_label == "supported"


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/verdict.json")), ids=lambda path: path.parent.name)
def test_controls_of_stored_results(path):
    stored = json.loads(path.read_text())
    if stored["experiment"] != EXPERIMENT.name:
        pytest.skip("of another experiment")
    for verdict in stored["verdicts"]:
        # Where the control is the claim with its arms exchanged, a contradicted claim has a supported control.
        assert verdict["control_label"] != "supported" or verdict["label"] == "contradicted", verdict["variant"]


def follow(preset, optimum):
    """All cells that the plan asks for, list by list, in a world with this best rate."""
    plan, runs, asked = EXPERIMENT.plan(preset), Runs(), []
    cells = next(plan)
    while True:
        asked.append(cells)
        runs += made_up(cells, optimum)
        try:
            cells = plan.send(runs)
        except StopIteration:
            return asked, runs


CPU = EXPERIMENT.presets["cpu"]


def rates(lists):
    return sorted({cell.rate for cells in lists for cell in cells if cell.arm == "muon" and cell.phase == "tuning"})


def test_the_rate_is_chosen_on_tuning_seeds_and_tested_on_others():
    (tuning, test), runs = follow(CPU, 0.01414)
    assert {(c.arm, c.phase, c.seeds) for c in tuning} == {(a, "tuning", CPU.tuning_seeds) for a in ("adamw", "muon")}
    assert {(c.phase, c.seeds) for c in test} == {("test", CPU.test_seeds)}
    assert not set(CPU.tuning_seeds) & set(CPU.test_seeds)
    at_best = [c for c in test if c.point == "best"]
    assert {c.rate for c in at_best} == {0.01414}
    assert {c.arm for c in at_best} == {"adamw", "muon", "muon_clip_low", "muon_clip_harm"}
    peaks = [r.metrics["peak_max_logit"] for r in runs if r.arm == "muon" and r.phase == "tuning" and r.rate == 0.01414]
    taus = {c.arm: c.settings["tau"] for c in at_best if c.settings}
    assert taus == pytest.approx({"muon_clip_low": 0.6 * np.mean(peaks), "muon_clip_harm": 0.05 * np.mean(peaks)})
    ladder = {(c.arm, c.point, c.rate) for c in test if c.arm == "adamw_qk_norm"}
    assert ladder == {("adamw_qk_norm", p, r) for p, r in zip(("low", "mid1", "stress"), CPU.rates, strict=True)}
    assert {c.rate for c in test if c.arm == "muon_soft_cap"} == {CPU.rates[-1]}


@pytest.mark.parametrize(("optimum", "step"), [(0.005, 1 / math.sqrt(2)), (0.04, math.sqrt(2))])
def test_the_search_goes_on_at_either_end(optimum, step):
    lists, _ = follow(CPU, optimum)
    found = rates(lists)
    new = [r for r in found if r not in CPU.tuning_rates]
    start = min(CPU.tuning_rates) if step < 1 else max(CPU.tuning_rates)
    assert sorted(new, reverse=step < 1) == pytest.approx([start * step ** (i + 1) for i in range(len(new))]) and new
    best = {c.rate for c in lists[-1] if c.point == "best" and c.arm == "muon"}
    assert len(best) == 1 and found[0] < min(best) < found[-1], "the best is inside"
    assert min(best) == min(found, key=lambda r: abs(math.log(r / optimum)))


def test_the_search_stops_at_its_limit():
    lists, _ = follow(dataclasses.replace(CPU, tuning_limit=5), 1e-6)
    assert len(rates(lists)) == 5 and {c.rate for c in lists[-1] if c.point == "best"} == {min(rates(lists))}
    assert len(lists) == 4


def test_all_cells_name_settings_that_exist():
    from repro.runner import jobs

    lists, _ = follow(CPU, 0.01414)
    made = list(jobs(EXPERIMENT, CPU, lists[-1], 32))
    assert sum(len(job.lanes) for job in made) == sum(len(c.seeds) for c in lists[-1])
    assert all(len(job.lanes) <= 32 for job in made)
    structures = list(dict.fromkeys(job.config for job in made))
    assert len(structures) == 5, "AdamW, Muon, two norms and the cap; everything else is numbers"
    for job in made:
        for cell, config, _ in job.lanes:
            assert config.structure() == job.config and config.learning_rate == cell.rate
            assert math.isfinite(config.tau) == ("clip" in cell.arm)
            assert config.weight_decay == (0.1 if "decay" in cell.arm else 0.0)


def test_sensitivity_by_hand():
    def ladder(arm, seed, losses):
        for point, loss in zip(("low", "mid1", "stress"), losses, strict=True):
            yield Run(arm, seed, {"loss": loss, "initial_loss": 5.0}, point, "xs", 0.1)

    best = Run("adamw", 0, {"loss": 0.1, "initial_loss": 5.0}, "best", "xs", 0.1)
    runs = Runs([*ladder("adamw", 0, (2.0, 3.0, 9.0)), *ladder("adamw_qk_norm", 0, (2.0, 2.0, math.inf)), best,
                 *ladder("muon", 0, (1.0, 1.0, 1.0))])  # fmt: skip
    found = {(run.arm, run.point, run.size, run.seed): run.metrics["lr_sensitivity"] for run in EXPERIMENT.derive(runs)}
    # min(loss, initial loss): 2, 3, 5 and 2, 2, 5; the mean less the best
    assert found == {
        ("adamw", "ladder", "xs", 0): pytest.approx(4 / 3),
        ("adamw_qk_norm", "ladder", "xs", 0): pytest.approx(1.0),
    }


def parts(found):
    return found["held_error"] <= 1e-5, found["scale_error"] <= 1e-5, found["others_changed"] == 0


def test_the_mechanism_holds_and_one_gamma_per_layer_does_not():
    found = {run.arm: run.metrics for run in CHECKS}
    assert parts(found["qk_clip"]) == (True, True, True)
    assert not all(parts(found["qk_clip_shared"])) and found["qk_clip_shared"]["others_changed"] > 100
    verdict = decide(MODULE.MECHANISM, Runs(CHECKS))
    assert (verdict.label, verdict.control_label) == ("supported", "contradicted")


@pytest.mark.parametrize(
    ("wrong", "failing"),
    [
        (lambda clip: lambda p, s, **k: clip(clip(p, s, **k), s, **k), (False, False, True)),  # gamma twice
        (lambda clip: lambda p, s, **k: p, (False, False, True)),  # not at all
        (lambda clip: lambda p, s, **k: jax.tree.map(lambda w: w * 1.0001, clip(p, s, **k)), (False, False, False)),
    ],
    ids=["twice", "off", "all heads a little"],
)
def test_the_mechanism_check_refuses_wrong_clips(monkeypatch, wrong, failing):
    monkeypatch.setattr(MODULE, "qk_clip", wrong(MODULE.qk_clip))
    assert parts(MODULE.mechanism_metrics()["qk_clip"]) == failing


def test_the_step_of_the_gpu_preset_has_shapes():
    preset = EXPERIMENT.presets["gpu"]
    config = preset.config("gpt2")
    program = Program(config)
    state = jax.eval_shape(program.init, jax.ShapeDtypeStruct((), jnp.uint32))
    window = jax.ShapeDtypeStruct((config.batch_size, config.length + 1), jnp.uint16)
    numbers = Numbers(*[jax.ShapeDtypeStruct((), jnp.float32)] * 4)
    after, metrics = jax.eval_shape(program.step, state, window, numbers)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["head_logits"].shape == (config.model.layers, config.model.heads) == (12, 12)
    assert config.model.compute_dtype == "bfloat16" and metrics["loss"].dtype == jnp.float32
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) > 80e6 and preset.platform == "gpu"


def test_a_job_is_named_by_everything_it_depends_on():
    """What a checkpoint depends on is tested in tests/train/test_resume.py."""
    corpus, config = load_corpus("kjv"), CPU.config("xs")
    cell = Cell("adamw", "xs", 0.01, "best", "test", (0,))
    lane = (cell, config, 0)

    def name(*lanes, corpus=corpus):
        return Job(config, lanes).key(corpus)

    names = {
        name(lane), name(lane, lane), name((cell, config, 1)), name((cell, dataclasses.replace(config, steps=7), 0)),
        name((cell, dataclasses.replace(config, tau=1.0), 0)), name((dataclasses.replace(cell, arm="muon"), config, 0)),
        name(lane, corpus=dataclasses.replace(corpus, sha256="other")),
    }  # fmt: skip
    assert len(names) == 7 and name(lane) in names


@pytest.mark.slow
def test_the_script_is_the_command(command, quick_compile, tmp_path, monkeypatch, capsys):
    """One small run each way: equal files, all of them there."""
    shape = "--train.model.layers 1 --train.model.width 16 --train.model.heads 2 --train.model.ffn 16 --train.length 8".split()
    words = ["--preset", "smoke", "--train.steps", "20", "--train.batch-size", "2", *shape]
    code, out, err = command("run", "logit-explosion", *words, "--out", tmp_path / "command")
    assert code == 0 and err == "" and "compiling" in out
    monkeypatch.setattr(sys, "argv", ["logit_explosion.py", *words, "--out", str(tmp_path / "script")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "experiments" / "logit_explosion.py"), run_name="__main__")
    assert ended.value.code == 0 and "compiling" not in capsys.readouterr().out
    left = {}
    for way in ("command", "script"):
        folder = tmp_path / way
        left[way] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        assert {"run.json", "metrics.parquet", "runs.parquet", "verdict.json", "report.md"} <= set(left[way])
        figures = [p.stem for p in (folder / "figures").iterdir() if p.stat().st_size > 5000]
        assert set(figures) == {spec.name for spec in EXPERIMENT.figures} - {"width"}
        assert command("verdict", "--check", folder)[0] == 0
        assert not (folder / "jobs").exists() and not (folder / "checkpoints").exists()
        assert len(list((folder / "tensorboard").rglob("events*"))) > 15
        page = (folder / "report.md").read_text()
        assert all(claim.statement in page for claim in EXPERIMENT.claims_for(EXPERIMENT.presets["smoke"]))
    assert left["command"] == left["script"]
    for name in ("metrics.parquet", "runs.parquet"):
        assert (tmp_path / "command" / name).read_bytes() == (tmp_path / "script" / name).read_bytes()
    verdicts = [json.loads((tmp_path / way / "verdict.json").read_text())["verdicts"] for way in left]
    assert verdicts[0] == verdicts[1] and len(verdicts[0]) >= 8
    labels = {v["variant"]: v["label"] for v in verdicts[0]}
    assert labels["mechanism"] == "supported"
    # So small a model stays below 50 without a cap too, so the control passes, and the claim must not count.
    assert labels["capped, custom"] == "inconclusive"
