"""The rules of mup, its measures against closed forms, and what a rule of width does to a model."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.claims import Cell, Run, Runs, decide_all, gather
from repro.errors import ReproError
from repro.models import SIZES
from repro.optim.layout import named_layouts, path_name
from repro.runner import lane_config

EXPERIMENT = catalogue.load("mup")
MODULE = __import__("sys").modules[EXPERIMENT.plan.__module__]
CPU = EXPERIMENT.presets["cpu"]
TRANSFER = dataclasses.replace(CPU, coordinate_widths=())


def trained(optimum, floor, asked=None):
    """A world whose loss is floor(arm) + (log2 rate - optimum(arm, doublings))^2 / 10, with noise of its own per run."""

    def train(cells):
        for cell in cells:
            if asked is not None:
                asked.append(cell)
            doublings = math.log2(SIZES[cell.size].width / 32)
            for seed in cell.seeds:
                noise = np.random.default_rng([seed, *map(ord, cell.arm + cell.point + cell.size)]).normal()
                off = math.log2(cell.rate) - optimum(cell.arm, doublings)
                loss = floor(cell.arm) + off**2 / 10 + 1e-4 * noise
                yield Run(cell.arm, seed, {"loss": loss}, cell.point, cell.size, cell.rate, cell.phase)

    return train


def labels(optimum, floor=lambda arm: 2.0, asked=None):
    runs = gather(EXPERIMENT, TRANSFER, trained(optimum, floor, asked))
    return {v.variant: v for v in decide_all(EXPERIMENT.claims_for(TRANSFER), runs)}


def as_claimed(arm, doublings):
    return -7.0 - (0.1 if arm == "mup" else 1.0) * doublings


def test_claims_and_controls_of_the_transfer():
    asked = []
    found = labels(as_claimed, lambda arm: 2.1 if arm == "standard" else 2.0, asked)
    for verdict in found.values():
        assert verdict.label == "supported", verdict.reason
        assert verdict.control_label != "supported", verdict.control_reason
    # The base model is trained once, and everything else under every rule.
    assert {cell.arm for cell in asked if cell.size == "w32"} == {"standard"}
    assert {(cell.arm, cell.size) for cell in asked if cell.size != "w32"} == {
        (arm.name, size) for arm in EXPERIMENT.arms for size in ("xs", "w128")
    }
    tried = {cell.rate for cell in asked if (cell.arm, cell.size, cell.phase) == ("standard", "w128", "tuning")}
    assert tried == {0.02 / 2**i for i in range(5)}  # the search went on to 2^-9.6, and past 2^-9 = 0.002


def test_both_parts_of_the_full_preset_fit_into_one_table(monkeypatch):
    """The coordinate check and the best rates name their points apart."""
    shape = (len(CPU.coordinate_seeds), 1, 1, 4)
    size = lambda config: 1.0 if config.rule == "mup" else config.model.width / 32
    grown = lambda config, seeds, windows: (np.zeros(shape), np.full(shape, size(config)))
    monkeypatch.setattr(MODULE, "changes", grown)
    runs = gather(EXPERIMENT, CPU, trained(as_claimed, lambda arm: 2.0))
    found = {v.variant: v for v in decide_all(EXPERIMENT.claims_for(CPU), runs)}
    assert found["features move with width under standard rates"].label == "supported"
    assert found["features move alike under muP"].label == "supported"


def test_other_worlds():
    exchanged = labels(lambda arm, n: -7.0 - (0.1 if arm == "standard" else 1.0) * n)
    assert exchanged["standard: the best rate falls"].label == "contradicted"
    assert exchanged["muP: the best rate holds"].label == "contradicted"
    assert exchanged["muP: less than half the drift"].label == "contradicted"
    still = labels(lambda arm, n: -7.0)  # nothing drifts: then that muP does not is worth nothing
    assert still["muP: the best rate holds"].label == "inconclusive"
    assert still["embedding rate alone: loss"].label == "inconclusive"


def test_the_lowest_point_of_a_parabola():
    rates = (0.01, 0.02, 0.04)
    for at in (-6.0, -5.5, -4.9):
        assert MODULE.lowest(rates, [3 + 0.2 * (math.log2(r) - at) ** 2 for r in rates]) == pytest.approx(at)
    assert MODULE.lowest(rates, [3 + (math.log2(r) + 9) ** 2 for r in rates]) == pytest.approx(
        math.log2(0.01)
    )  # an end
    assert MODULE.lowest(rates, (1.0, 2.0, 2.5)) == pytest.approx(math.log2(0.01))  # bent down
    assert MODULE.lowest(rates, (2.0, 1.0, math.inf)) == pytest.approx(math.log2(0.02))
    assert MODULE.lowest(rates, (2.0, 1.0, math.nan)) == pytest.approx(math.log2(0.02))


def test_claims_and_controls_of_the_coordinate_check():
    def runs(standard, mup, off):
        for arm, slope in (("standard", standard), ("mup", mup)):
            for seed in range(5):
                yield Run(arm, seed, {"slope": slope + 0.01 * seed}, point="coordinates")
                for width in (32, 64):
                    yield (
                        Run("mup", seed, {"off_standard": off if width == 32 else 0.3}, point=f"d{width}")
                        if (arm == "mup")
                        else Run(arm, seed, {"feature_change": 1.0}, point=f"d{width}")
                    )

    judged = [claim for claim in EXPERIMENT.claims_for(CPU) if claim.tier == "M"]
    assert len(judged) == 3
    for verdict in decide_all(judged, Runs(runs(1.2, 0.05, 0.0))):
        assert (verdict.label, verdict.control_label) == ("supported", "contradicted")
    assert {v.label for v in decide_all(judged, Runs(runs(0.3, 0.25, 1e-7)))} == {"contradicted"}


def config_of(rule):
    preset = dataclasses.replace(CPU, layers=1)
    return lane_config(EXPERIMENT, preset, Cell(rule, "xs", 0.01, "best", "test", (0,)))


@pytest.mark.usefixtures("quick_compile")
def test_the_rule_in_the_model():
    """Spread, output and rates at m = 2: those of the table of muP in the form of its package."""
    programs = {arm.name: MODULE.WidthProgram(config_of(arm.name)) for arm in EXPERIMENT.arms}

    @jax.jit
    def all_at_once(seed):
        starts = {name: programs[name].init(seed).params for name in ("standard", "mup")}
        grads = jax.tree.map(lambda x: jnp.full(x.shape, 0.5), starts["mup"])
        updates = {}
        for name, program in programs.items():
            tx = program.optimizer(program.config.numbers(), 1.0)
            updates[name] = tx.update(grads, tx.init(grads), grads)[0]
        return starts, programs["mup"].multiplied(starts["mup"]), updates

    params, out, updates = all_at_once(jnp.uint32(0))
    sd = {name: float(tree["head_DZ"].std()) for name, tree in params.items()}
    assert sd["standard"] == pytest.approx(64**-0.5, rel=0.02) and sd["mup"] == pytest.approx(32**-0.5, rel=0.02)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), params["mup"], params["standard"])
    assert all(jax.tree.leaves(same["blocks"])) and same["embedding_ZD"] and not same["head_DZ"]
    np.testing.assert_allclose(out["head_DZ"], params["mup"]["head_DZ"] / 2)
    assert programs["standard"].multiplied(params["standard"])["head_DZ"] is params["standard"]["head_DZ"]

    table = {"standard": (1, 1, 1), "mup": (1, 1 / 2, 1), "embedding": (2, 1, 1)}
    for name, (embedding, matrix, rest) in table.items():
        found = {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(updates[name])[0]}
        for path, update in found.items():
            role = named_layouts(programs[name].layouts)[path].role
            want = {"embedding": embedding, "matrix": matrix}.get(role, rest)
            np.testing.assert_allclose(update, -0.01 * want, rtol=1e-4, err_msg=f"{name} {path}")


def small(rule, width):
    return dataclasses.replace(CPU, layers=1, coordinate_steps=2, length=8, batch_size=2).coordinate_config(width, rule)


def test_at_the_base_width_mup_is_the_standard_program():
    def text(rule, width):
        program = MODULE.WidthProgram(small(rule, width))
        numbers = program.config.numbers()
        whole = jax.jit(lambda seed, window: program.step(program.init(seed), window, numbers))
        return whole.lower(jnp.uint32(0), jnp.zeros((2, 9), jnp.uint16)).as_text()

    assert text("mup", 32) == text("standard", 32)
    assert text("mup", 64) != text("standard", 64)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_features_before_and_after_a_few_steps():
    window = np.random.default_rng(0).integers(0, 256, (2, 9)).astype(np.uint16)
    before, after = MODULE.changes(small("mup", 64), (0, 0), np.stack([window, window[::-1]]))
    assert before.shape == after.shape == (2, 2, 8, 64)
    np.testing.assert_allclose(before[0], before[1][::-1], atol=1e-5)  # one model, the windows in another order
    np.testing.assert_allclose(after[0], after[1][::-1], atol=1e-3)
    assert np.sqrt(np.mean((after - before) ** 2)) > 0.05


def test_change_and_slope_of_the_coordinate_check(monkeypatch):
    def changes(config, seeds, windows):
        assert windows.shape == (len(seeds), config.batch_size, config.length + 1) and config.steps == 4
        grow = 1.5 if config.rule == "standard" else 0.0
        start = np.ones((len(seeds), 2, 3, config.model.width))
        sizes = 0.25 * (config.model.width / 32) ** grow * (1.0 + np.array(seeds))
        return start, start + sizes[:, None, None, None] * np.array([1, -1, 1])[:, None]

    monkeypatch.setattr(MODULE, "changes", changes)
    runs = Runs(EXPERIMENT.checks(CPU))
    assert [*runs.values("slope", "standard@coordinates").values()] == pytest.approx([1.5] * 5)
    assert [*runs.values("slope", "mup@coordinates").values()] == pytest.approx([0.0] * 5)
    assert runs.values("feature_change", "standard@d128")[1] == pytest.approx(0.5 * 4**1.5)
    assert set(runs.values("off_standard", "mup@d32").values()) == {0.0}
    assert min(runs.values("off_standard", "mup@d64").values()) > 0.4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sizes": ("w32",)}, "two or more"),
        ({"sizes": ("xs", "w128")}, "32 first"),
        ({"coordinate_widths": (32, 128, 64)}, "growing"),
        ({"coordinate_rate": 0.0}, "positive"),
    ],
)
def test_what_a_preset_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rule": "ntk"}, "known are"),
        ({"weight_decay": 0.1}, "without weight decay"),
        ({"model": dataclasses.replace(CPU.train.model, ffn=171)}, "no counterpart"),
    ],
)
def test_what_a_config_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU.train, **change)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "mup", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
