import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from repro.errors import ReproError
from repro.optim import Layout, MuonState, adamw, muon, newton_schulz, per_head, qk_clip, scale_by_muon

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYOUTS = {
    "q_DHK": Layout("matrix", (0,), (1, 2), head=1),
    "o_HKD": Layout("matrix", (0, 1), (2,), head=0),
    "stack_LDF": Layout("matrix", (1,), (2,), layer=0),
    "norm_LD": Layout("norm", layer=0),
    "embedding_ZD": Layout("embedding"),
    "head_DZ": Layout("head"),
    "bias": Layout("bias"),
    "router_DE": Layout("router", (0,), (1,)),
    "gate": Layout("gate"),
}
SHAPES = {
    "q_DHK": (6, 2, 4), "o_HKD": (2, 4, 6), "stack_LDF": (3, 6, 5), "norm_LD": (3, 6), "embedding_ZD": (7, 6),
    "head_DZ": (6, 7), "bias": (), "router_DE": (6, 4), "gate": (6,),
}  # fmt: skip
MATRICES = ("q_DHK", "o_HKD", "stack_LDF")
STEPS = 3


def normal_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


PARAMS = normal_tree(0)
GRADS = [normal_tree(1 + t) for t in range(STEPS)]


def run(tx, params=PARAMS, grads=GRADS):
    """The parameters after each step."""

    @jax.jit
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state, history = tx.init(params), []
    for g in grads:
        params, state = step(params, state, g)
        history.append(params)
    return history


def only(tree, *names):
    return {name: tree[name] for name in names}


def run_only(names, tx):
    return run(tx, only(PARAMS, *names), [only(g, *names) for g in GRADS])


def blocks_of(name, split_heads=False):
    """For one parameter the function from it to its matrices, written out by hand, and the inverse."""
    if name == "q_DHK" and split_heads:
        return (lambda x: x.transpose(1, 0, 2)), (lambda y: y.transpose(1, 0, 2))
    if name == "q_DHK":
        return (lambda x: x.reshape(1, 6, 8)), (lambda y: y.reshape(6, 2, 4))
    if name == "o_HKD":
        return (lambda x: x.reshape(1, 8, 6)), (lambda y: y.reshape(2, 4, 6))
    return (lambda x: x), (lambda y: y)


def polar5(n):
    """Five Newton–Schulz steps on one matrix, float64."""
    wide = n if n.shape[0] <= n.shape[1] else n.T
    x = wide / np.linalg.norm(wide)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if n.shape[0] <= n.shape[1] else x.T


def by_hand(name, *, lr=0.05, wd=0.1, mu=0.95, rms=0.2, split=False, decay="coupled", nesterov=True, wrong=""):
    """W after each step of Moonlight's rule in float64; `wrong` names a deliberate error."""
    forth, back = blocks_of(name, split)
    w, m, history = np.asarray(PARAMS[name], np.float64), 0.0, []
    if wrong == "momentum 0.9":
        mu = 0.9
    for tree in GRADS:
        g = np.asarray(tree[name], np.float64)
        m = mu * m + (1 - mu if wrong == "average" else 1) * g
        n = g + mu * m if nesterov else m
        if wrong == "gradient only":
            n = g
        blocks = forth(n)
        sides = blocks.shape[-2:] if wrong != "factor of the whole" else (6, 8)
        factor = rms * np.sqrt({"smaller side": min, "": max}.get(wrong, max)(sides))
        if wrong == "original factor":
            factor = np.sqrt(max(1, sides[1] / sides[0]))
        o = factor * back(np.stack([polar5(b) for b in blocks]))
        shrink = lr * wd if decay == "coupled" else wd
        if wrong == "decay times factor":
            shrink *= factor
        if wrong == "no decay":
            shrink = 0
        w = (w - lr * o) * (1 - shrink) if wrong == "decay after the step" else w - lr * o - shrink * w
        history.append(w)
    return history


def equal(history, name, expected):
    for got, want in zip(history, expected, strict=True):
        np.testing.assert_allclose(got[name], want, atol=2e-6)


WRONG = ["momentum 0.9", "average", "gradient only", "smaller side", "original factor", "decay times factor",
         "no decay", "decay after the step"]  # fmt: skip


@functools.cache
def joint_history():
    return run(muon(0.05, layouts=LAYOUTS))


@functools.cache
def split_history():
    return run(muon(0.05, layouts=per_head(LAYOUTS)))


@pytest.mark.parametrize("name", MATRICES)
def test_steps_by_hand(name):
    equal(joint_history(), name, by_hand(name))
    for wrong in WRONG:
        with pytest.raises(AssertionError):
            equal(joint_history(), name, by_hand(name, wrong=wrong))
    with pytest.raises(AssertionError):
        equal(joint_history(), name, by_hand(name, nesterov=False))


def test_per_head_steps_by_hand():
    equal(split_history(), "q_DHK", by_hand("q_DHK", split=True))
    for wrong in [*WRONG, "factor of the whole"]:
        with pytest.raises(AssertionError):
            equal(split_history(), "q_DHK", by_hand("q_DHK", split=True, wrong=wrong))
    with pytest.raises(AssertionError):
        equal(split_history(), "q_DHK", by_hand("q_DHK"))
    equal(split_history(), "o_HKD", by_hand("o_HKD"))  # heads are inputs there: one matrix


def test_per_head_equals_separate_runs():
    name = "q_DHK"
    for h in range(2):
        one = lambda tree, h=h: {"w": tree[name][:, h]}
        alone = run(muon(0.05, layouts={"w": Layout("matrix", (0,), (1,))}), one(PARAMS), [one(g) for g in GRADS])
        for a, s, j in zip(alone, split_history(), joint_history(), strict=True):
            np.testing.assert_allclose(a["w"], s[name][:, h], atol=1e-6)
            assert np.abs(a["w"] - j[name][:, h]).max() > 1e-3


def test_a_head_with_a_zero_gradient_stays_put():
    grads = [{"q_DHK": g["q_DHK"].at[:, 0].set(0.0)} for g in GRADS]
    tx = muon(0.05, layouts=per_head(only(LAYOUTS, "q_DHK")), weight_decay=0.0)
    last = run(tx, only(PARAMS, "q_DHK"), grads)[-1]["q_DHK"]
    np.testing.assert_array_equal(last[:, 0], PARAMS["q_DHK"][:, 0])
    assert np.abs(last[:, 1] - PARAMS["q_DHK"][:, 1]).min() > 0


@pytest.mark.parametrize(
    "options",
    [{"nesterov": False}, {"decay": "independent"}, {"momentum": 0.5}, {"weight_decay": 0.0}, {"rms": 1.0}],
    ids=lambda o: next(iter(o)),
)
def test_every_option_by_hand(options):
    name = "o_HKD"
    expected = {"momentum": "mu", "weight_decay": "wd"}
    history = run_only([name], muon(0.05, layouts=only(LAYOUTS, name), **options))
    equal(history, name, by_hand(name, **{expected.get(k, k): v for k, v in options.items()}))
    with pytest.raises(AssertionError):
        equal(history, name, by_hand(name))


def test_schedule_and_dtype_reach_newton_schulz():
    name, options = "stack_LDF", {"schedule": ((1.5, -0.5, 0.0),), "dtype": jnp.bfloat16}
    g = only(GRADS[0], name)
    tx = scale_by_muon(only(LAYOUTS, name), **options)
    update, state = jax.jit(lambda g: tx.update(g, tx.init(g)))(g)
    want = lambda **o: 0.2 * 6**0.5 * jax.jit(functools.partial(newton_schulz, **o))(1.95 * g[name])
    np.testing.assert_allclose(update[name], want(**options), atol=2e-6)
    for other in [{}, {"schedule": options["schedule"]}]:
        assert np.abs(update[name] - want(**other)).max() > 1e-4
    assert isinstance(state, MuonState)
    np.testing.assert_array_equal(state.momentum[name], g[name])


def update_rms_is_near_a_fifth(update):
    for u in jax.tree.leaves(update):
        assert 0.15 <= np.sqrt(np.mean(np.square(u))) <= 0.21


def test_the_root_mean_square_of_an_update():
    rng = np.random.default_rng(0)
    shapes = {"tall": (64, 16), "wide": (16, 96), "stack": (2, 48, 24)}
    g = {name: jnp.asarray(rng.normal(size=shape) * 1e-4, jnp.float32) for name, shape in shapes.items()}
    layouts = {name: Layout("matrix", (len(shape) - 2,), (len(shape) - 1,)) for name, shape in shapes.items()}

    @jax.jit
    def update(rms):
        tx = muon(1.0, layouts=layouts, weight_decay=0.0, rms=rms)
        return tx.update(g, tx.init(g), g)[0]

    update_rms_is_near_a_fifth(update(0.2))
    for wrong in [0.15, 0.25, 0.2 * 2**-0.5]:  # the last one: the factor of the smaller side, for `stack`
        with pytest.raises(AssertionError):
            update_rms_is_near_a_fifth(update(wrong))


OTHERS = [name for name in SHAPES if name not in MATRICES]


def test_the_other_group_equals_optax_adamw_bit_for_bit():
    plain = run_only(OTHERS, optax.adamw(0.05, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1))
    for a, b in zip(joint_history(), plain, strict=True):
        for name in OTHERS:
            np.testing.assert_array_equal(a[name], b[name])
    off = run_only(OTHERS, optax.adamw(0.05, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1))
    assert all((joint_history()[-1][name] != off[-1][name]).any() for name in OTHERS)


def test_options_of_adamw_reach_it():
    options = dict(b1=0.8, b2=0.97, eps=1e-2, weight_decay=0.3)
    names = ["head_DZ", "bias"]
    mixed = run_only(names, muon(0.05, layouts=only(LAYOUTS, *names), **options))
    plain = run_only(names, optax.adamw(0.05, **options))
    for a, b in zip(mixed, plain, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_adamw_equals_optax_and_decays_independently():
    names = ["head_DZ"]
    same = run_only(names, optax.adamw(0.05, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1))
    for a, b in zip(run_only(names, adamw(0.05)), same, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    bare = optax.adam(0.05, b1=0.9, b2=0.95, eps=1e-8)
    w, update = only(PARAMS, *names), jax.jit(bare.update)
    state = bare.init(w)
    for g, got in zip(GRADS, run_only(names, adamw(0.05, weight_decay=0.01, decay="independent")), strict=True):
        u, state = update(only(g, *names), state)
        w = jax.tree.map(lambda p, d: (1 - 0.01) * p + d, w, u)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), got, w)
    coupled = run_only(names, adamw(0.05, weight_decay=0.01))
    assert np.abs(coupled[-1]["head_DZ"] - w["head_DZ"]).max() > 1e-2


def test_role_decides_and_not_the_number_of_axes():
    w = {"w": PARAMS["router_DE"]}
    grads = [{"w": g["router_DE"]} for g in GRADS]
    as_adamw = run(optax.adamw(0.05, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1), w, grads)
    for role in ["norm", "embedding", "router"]:
        got = run(muon(0.05, layouts={"w": Layout(role, (0,), (1,))}), w, grads)
        np.testing.assert_array_equal(got[-1]["w"], as_adamw[-1]["w"])
    got = run(muon(0.05, layouts={"w": Layout("matrix", (0,), (1,))}), w, grads)
    assert np.abs(got[-1]["w"] - as_adamw[-1]["w"]).max() > 1e-3


def test_three_axes_are_one_matrix():
    flat = lambda tree: {"w": tree["q_DHK"].reshape(6, 8)}
    alone = run(muon(0.05, layouts={"w": Layout("matrix", (0,), (1,))}), flat(PARAMS), [flat(g) for g in GRADS])
    for a, b in zip(alone, joint_history(), strict=True):
        np.testing.assert_allclose(a["w"], b["q_DHK"].reshape(6, 8), atol=1e-6)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({k: v for k, v in LAYOUTS.items() if k != "gate"}, "parameter gate has no layout"),
        (LAYOUTS | {"gate": Layout("matrix", (0,), (1,))}, r"parameter gate of shape \(6,\) has no axis 1"),
        (LAYOUTS | {"ghost": Layout("norm")}, "layout ghost belongs to no parameter"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_path(layouts, message):
    with pytest.raises(ReproError, match=message):
        muon(0.05, layouts=layouts).init(PARAMS)


def test_unknown_options_are_refused():
    with pytest.raises(ReproError, match="weight decay 'decoupled' is unknown"):
        muon(0.05, layouts=LAYOUTS, decay="decoupled")
    with pytest.raises(ReproError, match="weight decay 'decoupled' is unknown"):
        adamw(0.05, decay="decoupled")
    with pytest.raises(ReproError, match="schedule 'muon7' is unknown"):
        muon(0.05, layouts=LAYOUTS, schedule="muon7")


def test_one_momentum_for_matrices_and_two_for_the_rest():
    state = muon(0.05, layouts=LAYOUTS).init(PARAMS)
    size = lambda names: sum(PARAMS[n].size for n in names)
    floats = sum(x.size for x in jax.tree.leaves(state) if x.dtype == jnp.float32)
    assert floats == size(MATRICES) + 2 * size(n for n in SHAPES if n not in MATRICES)


def test_rate_schedules():
    names = ["o_HKD", "gate"]
    tx = muon(lambda count: jnp.where(count == 0, 0.05, 0.0), layouts=only(LAYOUTS, *names))
    history = run_only(names, tx)
    for name in names:
        np.testing.assert_allclose(history[0][name], joint_history()[0][name], atol=1e-6)
        np.testing.assert_array_equal(history[0][name], history[-1][name])


QK = {
    "q": Layout("matrix", (1,), (2, 3), head=2, layer=0, qk="q"),
    "k": Layout("matrix", (1,), (2, 3), head=2, layer=0, qk="k"),
    "gain": Layout("norm", layer=0),
}


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_traced_numbers_under_vmap(decay):
    rng = np.random.default_rng(0)
    shapes = {"q": (4, 2, 6, 3, 4), "k": (4, 2, 6, 3, 4), "gain": (4, 2, 6)}
    make = lambda: {name: rng.normal(size=shape) for name, shape in shapes.items()}
    params, grads = (jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), make()) for _ in range(2))
    logits = jnp.asarray(rng.uniform(-50, 200, size=(4, 2, 3)), jnp.float32)
    numbers = tuple(jnp.float32(x) for x in ([0.0, 1e-3, 0.1, 0.1], [0.1, 0.0, 0.3, 0.3], [50.0, 100.0, jnp.inf, 80.0]))

    def step(p, g, s, lr, wd, tau):
        tx = muon(lr, layouts=per_head(QK), weight_decay=wd, decay=decay, schedule=((1.5, -0.5, 0.0),))
        u, state = tx.update(g, tx.init(p), p)
        return qk_clip(optax.apply_updates(p, u), s, tau=tau, layouts=QK), state

    single = jax.jit(step)
    batched, states = jax.jit(jax.vmap(step))(params, grads, logits, *numbers)
    for i in range(4):
        at = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree)
        alone, state = single(at(params), at(grads), logits[i], *(x[i] for x in numbers))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), at(batched), alone)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), at(states), state)
    assert np.abs(batched["q"][3] - batched["q"][2]).max() > 1e-3


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_parameters_keep_their_type(decay):
    half = jax.eval_shape(lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS))
    tx = muon(0.05, layouts=LAYOUTS, decay=decay)

    def step(p):
        return optax.apply_updates(p, tx.update(p, tx.init(p), p)[0])

    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(step, half))} == {jnp.dtype(jnp.bfloat16)}


def test_the_defaults_are_the_published_setting():
    spelled = muon(
        0.05, layouts=only(LAYOUTS, "o_HKD"), momentum=0.95, nesterov=True, weight_decay=0.1,
        schedule=((3.4445, -4.7750, 2.0315),) * 5, rms=0.2, decay="coupled", dtype=jnp.float32,
    )  # fmt: skip
    for a, b in zip(run_only(["o_HKD"], spelled), joint_history(), strict=True):
        np.testing.assert_allclose(a["o_HKD"], b["o_HKD"], atol=1e-6)
