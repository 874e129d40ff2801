"""The rules of depth, and its definitions against closed forms and an independent forward pass."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro import catalogue
from repro.claims import Run
from repro.errors import ReproError
from repro.models import ModelConfig, ResidualConfig, init_and_apply
from repro.runner import lane_config
from repro.train import JobResult
from repro.train.step import cross_entropy

EXPERIMENT = catalogue.load("depth")
MODULE = __import__("sys").modules[EXPERIMENT.plan.__module__]
CPU = EXPERIMENT.presets["cpu"]
SLOPES = {"post": (1.7, 1.6), "pre": (0.5, 0.7), "deep_norm": (0.02, 0.5)}
"""Of the updates after a step along the gradient and of Adam."""
LAST = {"post": 0.05, "pre": -0.55, "deep_norm": -0.5}
LOSSES = {
    ("post", "common"): 3.1, ("post", "best"): 2.8, ("post", "long"): 3.05, ("post_warm", "common"): 2.6,
    ("pre", "common"): 2.28, ("post", "shallow"): 2.52, ("deep_norm", "shallow"): 2.5,
}  # fmt: skip


def given(slopes=SLOPES, last=LAST, over_bound=0.01, grows=0.4):
    """Checks in a world of these slopes."""

    def checks(preset):
        for arm, (gradient, adam) in slopes.items():
            for seed in preset.init_seeds:
                off = 0.01 * math.sin(seed)
                yield Run(arm, seed, {"gradient_slope": gradient + off, "adam_slope": adam + off}, point="fit")
            yield Run(arm, 0, {"last_gradient_slope": last[arm]}, point="mean")
        for arm in ("vanilla", "scaled"):
            for width in preset.bound_widths:
                yield Run(arm, 10, {"over_bound": over_bound, "over_last": 3.0}, point=f"d{width}")
        for arm, slope in (("vanilla", grows), ("large", 0.0)):
            yield Run(arm, 0, {"first_gradient_slope": slope}, point="mean")

    return dataclasses.replace(EXPERIMENT, checks=checks)


def world(arm, point, seed):
    loss = LOSSES.get((arm, point), 2.3)
    return {"loss": loss, "gained": 3.1 - loss, "gradient_spike": 9.0 if arm == "vanilla" else 4.0}


def test_claims_and_controls(check_that_claims_can_hold):
    check_that_claims_can_hold(given(), world)


def test_other_worlds(verdicts):
    flat = dict.fromkeys(SLOPES, (0.0, 0.0))
    calm = lambda arm, point, seed: {"loss": 2.3, "gained": 0.8, "gradient_spike": 4.0}
    found = verdicts(given(flat, dict.fromkeys(LAST, 0.0), over_bound=2.0, grows=0.0), CPU, calm)
    labels = {f"{v.claim_id}: {v.variant}": v.label for v in found}
    assert labels["S-3: gradient step: Post-LN grows faster"] == "not supported"
    assert labels["S-3: gradient step: DeepNorm does not grow"] == "inconclusive"  # Post-LN does not grow either
    assert labels["S-3: Adam step: DeepNorm grows as a root"] == "contradicted"
    assert labels["S-3: training: Post-LN fails"] == labels["S-3: training: warm-up helps"] == "not supported"
    assert labels["S-3: training: stuck"] == "contradicted"
    assert labels["S-3: training: not when shallow"] == "inconclusive"  # nor when deep
    assert labels["S-4: Post-LN"] == "inconclusive" and labels["S-4: Pre-LN"] == "contradicted"
    assert labels["S-5: bound"] == labels["S-5: grows with width"] == "contradicted"
    assert labels["S-5: training: calmer"] == "contradicted"


def test_the_plan_takes_the_common_rate_from_deepnorm_and_keeps_what_differs_apart():
    asked = []

    def train(cells):
        for cell in cells:
            asked.append(cell)
            target = {"post": 0.00025, "pre": 0.002}.get(cell.arm, 0.004)
            for seed in cell.seeds:
                loss = 2 + abs(math.log2(cell.rate / target))
                yield Run(
                    cell.arm, seed, world(*(cell.arm, cell.point, seed)) | {"loss": loss}, cell.point, cell.size,
                    cell.rate, cell.phase,
                )  # fmt: skip

    from repro.claims import gather

    gather(given(), CPU, train)
    test = {(c.arm, c.point): c for c in asked if c.phase == "test"}
    assert {c.rate for (_, point), c in test.items() if point in ("common", "long", "shallow")} == {0.004}
    assert {arm: test[arm, "best"].rate for arm in MODULE.SCHEMES} == {
        "post": 0.00025,
        "pre": 0.002,
        "deep_norm": 0.004,
    }
    tried = {c.rate for c in asked if c.arm == "post" and c.phase == "tuning"}
    assert tried == {0.000125, 0.00025, 0.0005, 0.001}
    configs = {key: lane_config(EXPERIMENT, CPU, cell) for key, cell in test.items()}
    assert configs["post", "shallow"].model.layers == 2 and configs["post", "common"].model.layers == 12
    assert configs["post", "long"].steps == 1000
    kinds = {arm: configs[arm, "common"].model.residual.kind for arm in MODULE.SCHEMES}
    assert kinds == {"post": "post_norm", "pre": "pre_norm", "deep_norm": "deep_norm"}
    assert configs["post_warm", "common"].warmup == 0.5 and configs["post", "common"].warmup == 0.0


def test_three_embeddings_of_spike_no_more():
    of = {arm: CPU.model(arm, width=64) for arm in ("vanilla", "scaled", "large")}
    found = {arm: (config.embedding_std, config.embedding_scale, config.init) for arm, config in of.items()}
    small = math.sqrt(2 / (5 * 64))
    assert found == {
        "vanilla": (pytest.approx(small), 1.0, "small"), "scaled": (pytest.approx(small), 8.0, "small"),
        "large": (pytest.approx(8 * small), 1.0, "small"),
    }  # fmt: skip


def layer_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def by_hand(params, x, alpha):
    """Every hidden state of a Post-LN decoder whose queries are zero, so that each position takes the mean so far."""
    gelu = lambda z: 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    states, blocks = [x], params["blocks"]
    for layer in range(len(blocks["ffn"]["up_DF"])):
        own = jax.tree.map(lambda w, layer=layer: np.asarray(w[layer], np.float64), blocks)
        v = np.einsum("btd,dhv->bthv", x, own["attention"]["v_DHV"])
        mean = np.cumsum(v, 1) / np.arange(1, x.shape[1] + 1)[:, None, None]
        x = layer_norm(alpha * x + np.einsum("bthv,hvd->btd", mean, own["attention"]["o_HVD"]))
        x = layer_norm(alpha * x + gelu(x @ own["ffn"]["up_DF"]) @ own["ffn"]["down_FD"])
        states.append(x)
    return states[:-1] + [layer_norm(x)]


@pytest.mark.usefixtures("quick_compile")
def test_deepnorm_is_its_equation():
    """Hidden states against NumPy: norm(alpha x + f(x)) with alpha = (2 L)^(1/4), and not with other alphas."""
    L = 3
    config = CPU.model("deep_norm", layers=L)
    init, apply = init_and_apply(config)

    @jax.jit
    def run(key):
        params = init(key)
        params["blocks"]["attention"]["q_DHK"] *= 0
        tokens = jax.random.randint(key, (2, 6), 0, 256)
        return params, apply(params, tokens, hidden=True).hidden

    params, hidden = run(jax.random.key(0))
    hidden = np.asarray(hidden, np.float64)
    np.testing.assert_allclose(hidden, by_hand(params, hidden[0], (2 * L) ** 0.25), atol=2e-5)
    for wrong in (1.0, (2 * L) ** 0.5):  # Post-LN, and GLM-130B's variant
        assert np.abs(hidden[-1] - by_hand(params, hidden[0], wrong)[-1]).max() > 0.05
    np.testing.assert_allclose((hidden[0] ** 2).mean(-1), 1.0, rtol=1e-3)  # the embedding is normed

    # Matrices of the branches start smaller by (8 L)^(-1/4); queries and keys do not.
    beta, of = (8 * L) ** -0.25, lambda n, m: math.sqrt(2 / (n + m))
    attention, ffn = params["blocks"]["attention"], params["blocks"]["ffn"]
    assert float(ffn["up_DF"].std()) == pytest.approx(beta * of(32, 128), rel=0.03)
    assert float(ffn["down_FD"].std()) == pytest.approx(beta * of(32, 128), rel=0.03)
    assert float(attention["v_DHV"].std()) == pytest.approx(beta * of(32, 32), rel=0.05)
    assert float(attention["k_DHK"].std()) == pytest.approx(of(32, 32), rel=0.05)


@pytest.mark.usefixtures("quick_compile")
def test_one_step_against_differences():
    """The update of a gradient step against a finite one, and that of Adam against lr g / (|g| + eps)."""
    config = CPU.model("pre", layers=1)
    window = np.random.default_rng(0).integers(0, 256, (1, 2, 9))
    found = MODULE.one_step(config, (3,), window)
    init, apply = init_and_apply(config)

    @jax.jit
    def by_differences(key):
        params, tokens = init(key), jnp.asarray(window[0], jnp.int32)
        loss = lambda p: cross_entropy(apply(p, tokens[:, :-1]).logits, tokens[:, 1:])[0]
        grads = jax.grad(loss)(params)
        moves = lambda step: jax.tree_util.tree_map_with_path(
            lambda path, g: step(g) if path[0].key == "blocks" and path[-1].key != "gain" else 0 * g, grads
        )
        final = lambda p: apply(p, tokens[:, :-1], hidden=True).hidden[-1]
        after = lambda step: final(jax.tree.map(jnp.add, params, moves(step)))
        rms = lambda x: jnp.sqrt(jnp.mean(x * x))
        gradient = rms(after(lambda g: -1e-3 * g) - after(lambda g: 1e-3 * g)) / 2e-3
        adam = rms(after(lambda g: -1e-5 * g / (jnp.abs(g) + 1e-8)) - final(params)) / 1e-5
        return gradient, adam, jnp.linalg.norm(grads["blocks"]["ffn"]["down_FD"][0])

    gradient, adam, down = map(float, by_differences(jax.random.key(3)))
    assert found["gradient_update"][0] == pytest.approx(gradient, rel=0.01)
    assert found["adam_update"][0] == pytest.approx(adam, rel=0.01)
    assert found["first_gradient"][0] == found["last_gradient"][0] == pytest.approx(down, rel=1e-4)


@pytest.mark.usefixtures("quick_compile")
def test_the_first_gradient_is_that_of_the_embedding_and_lies_below_the_bound():
    config = CPU.model("scaled", layers=2)
    found = MODULE.first_gradient(config, (11,), batch_size=1, length=5)
    init, apply = init_and_apply(config)

    @jax.jit
    def through_the_table(seed):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), 2)
        ids = jax.random.randint(keys[0], (1, 6), 0, 256)
        loss = lambda p: cross_entropy(apply(p, ids[:, :-1]).logits, ids[:, 1:])[0]
        return ids, jax.grad(loss)(init(jax.random.key(seed)))["embedding_ZD"]

    ids, table = through_the_table(jnp.uint32(11))
    assert len(set(ids[0, :-1].tolist())) == 5  # each row of the table is then the gradient at one position
    assert found["gradient"][0] == pytest.approx(float(jnp.linalg.norm(table)) / config.embedding_scale, rel=1e-4)
    assert 0 < found["over_bound"][0] < 1 < found["over_last"][0]


def test_the_spectral_norm_of_a_jacobian():
    matrix = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    x = jnp.zeros((2, 4))
    norm = MODULE.spectral_norm(lambda x: jnp.sin(x @ matrix.T), x, jax.random.key(0), 60)
    assert float(norm) == pytest.approx(np.linalg.svd(matrix)[1][0], rel=1e-3)


def test_scalars(monkeypatch):
    steps = 100
    norms = np.ones((steps, 1)) + 0.01 * np.sin(np.arange(steps))[:, None]
    norms[0], norms[60] = 50.0, 7.0  # the first is in the warm-up
    result = JobResult({"loss": np.zeros((steps, 1)), "grad_norm": norms}, {"unigram": np.array([3.0])}, None)
    monkeypatch.setattr(MODULE.Program, "scalars", staticmethod(lambda result, configs: [{"loss": 2.4}]))
    (row,) = MODULE.DepthProgram.scalars(result, [None])
    assert row["gained"] == pytest.approx(0.6)
    assert 6 < row["gradient_spike"] < 7


@pytest.mark.usefixtures("quick_compile")
def test_what_letter_frequencies_give(monkeypatch):
    monkeypatch.setattr(MODULE.Program, "evaluate", lambda self, params, windows: {"loss": 0.0})
    program = MODULE.DepthProgram(CPU.train)
    windows = np.zeros((4, 17), np.uint16)
    windows[:, 1:9] = 1  # targets: half of them 1, half 0
    found = program.evaluate(None, jnp.asarray(windows))
    assert set(found) == {"loss", "unigram"} and float(found["unigram"]) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"update_depths": (6,)}, "two or more"),
        ({"bound_widths": (64, 32)}, "ascending"),
        ({"update_depths": ()}, "not complete"),
        ({"sizes": ("xs", "w32")}, "one size"),
    ],
)
def test_what_a_preset_refuses(change, said):
    with pytest.raises(ReproError, match=said):
        dataclasses.replace(CPU, **change)


def test_what_a_config_refuses():
    with pytest.raises(ReproError, match="none, factor or start"):
        dataclasses.replace(CPU.train, small_embedding=True, large_shortcut="both")
    with pytest.raises(ReproError, match="small_embedding"):
        dataclasses.replace(CPU.train, large_shortcut="factor")
    with pytest.raises(ReproError, match="pre-norm"):
        MODULE.first_gradient(ModelConfig(residual=ResidualConfig("post_norm")), (0,))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_smoke_preset(command, tmp_path):
    code, _, err = command("run", "depth", "--preset", "smoke", "--out", tmp_path / "run")
    assert code == 0 and err == ""
    assert command("verdict", "--check", tmp_path / "run")[0] == 0
