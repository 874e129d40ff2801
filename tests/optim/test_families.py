import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from repro.errors import ReproError
from repro.optim import OPTIMIZERS, Layout, optimizer

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYOUTS = {
    "w_LDF": Layout("matrix", (1,), (2,), layer=0),
    "norm_LD": Layout("norm", layer=0),
    "head_DZ": Layout("head", (0,), (1,)),
}
SHAPES = {"w_LDF": (2, 4, 3), "norm_LD": (2, 4), "head_DZ": (4, 5)}
OWN = ("sgd", "adafactor", "stable_adamw", "adalayer", "shampoo", "soap")  # the rest is Optax, or tested beside Muon
DECAYS = ("coupled", "independent", "none", "l2")


def normal_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


PARAMS, GRADS = normal_tree(0), [normal_tree(1 + t) for t in range(3)]


def run(tx, grads=GRADS):
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(lambda p, s, g: one_step(tx, p, s, g))
    for g in grads:
        params, state = step(params, state, g)
    return params


def one_step(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def close(got, want, **kwargs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **({"rtol": 2e-5, "atol": 2e-6} | kwargs)), got, want)


def after_all(name, rate, decay):
    tx = optimizer(name, rate, weight_decay=decay, layouts=LAYOUTS)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *GRADS)
    return jax.lax.scan(lambda c, g: (one_step(tx, *c, g), None), (PARAMS, tx.init(PARAMS)), stacked)[0][0]


@pytest.fixture(scope="module")
def singles(quick_compile_module):
    """Parameters after three steps at the rate 0.03 and the decay 0.1."""
    return jax.jit(lambda: {name: after_all(name, 0.03, 0.1) for name in OWN})()


def test_lanes_of_traced_rates_equal_single_runs(singles):
    rates, decays = jnp.array([0.01, 0.03]), jnp.array([0.0, 0.1])
    lanes = jax.jit(lambda *x: {n: jax.vmap(lambda *y, n=n: after_all(n, *y))(*x) for n in OWN})(rates, decays)
    for name in OWN:
        close(jax.tree.map(lambda x: x[1], lanes[name]), singles[name], rtol=2e-4, atol=2e-5)
        assert not np.allclose(lanes[name]["w_LDF"][0], lanes[name]["w_LDF"][1], atol=1e-3), name


@pytest.mark.parametrize("name", ["stable_adamw", "soap"])
def test_inside_the_wrappers_of_optax(name, singles):
    kind = OPTIMIZERS[name]
    extra = {"layouts": LAYOUTS} if "layouts" in inspect.signature(kind).parameters else {}
    inner = optax.inject_hyperparams(kind, static_args=tuple(extra))(learning_rate=0.03, weight_decay=0.1, **extra)
    # Outside, since MultiSteps would keep a NaN in its sum for good.
    tx = optax.apply_if_finite(optax.MultiSteps(optax.chain(optax.identity(), inner), 2).gradient_transformation(), 5)
    bad = jax.tree.map(lambda g: g * jnp.nan, GRADS[0])
    got = run(tx, [GRADS[0], GRADS[0], GRADS[1], bad, GRADS[1], GRADS[2], GRADS[2]])
    close(got, singles[name], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("sgd", {"weight_decay": 0.0}, optax.sgd(0.1, momentum=0.9)),
        ("adam", {"b2": 0.999, "weight_decay": 0.0}, optax.adam(0.1)),
        ("lion", {}, optax.lion(0.1, weight_decay=0.1)),
        ("signum", {"weight_decay": 0.0}, optax.signum(0.1)),
    ],
)
def test_what_optax_has_is_its_own_bit_for_bit(name, options, theirs):
    got, want = run(optimizer(name, 0.1, **options)), run(theirs)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def sgd_by_hand(decay, lr=0.1, wd=0.5, mu=0.9):
    w, m = np.asarray(PARAMS["w_LDF"], np.float64), 0.0
    for tree in GRADS:
        g = np.asarray(tree["w_LDF"], np.float64)
        m = mu * m + g + (wd * w if decay == "l2" else 0)
        w = w - lr * m - {"coupled": lr * wd, "independent": wd}.get(decay, 0) * w
    return w


def test_every_kind_of_decay_by_hand():
    for decay in DECAYS:
        got = run(optimizer("sgd", 0.1, weight_decay=0.5, decay=decay))["w_LDF"]
        for other in DECAYS:
            same = np.allclose(got, sgd_by_hand(other), atol=1e-5)
            assert same == (other == decay), (decay, other)


def test_decay_in_the_gradient_leaves_noisy_coordinates_undecayed_in_adam_alone():
    """Two coordinates under noise of size 1 and 100; noise and its negative are averaged, so that the decay stays."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (400, 1))
    noise = jnp.asarray(signs * [1.0, 100.0], jnp.float32)

    def shrunk(name, wd):
        def final(sign):
            tx = optimizer(name, 1e-3, weight_decay=wd)
            state = jnp.ones(2), tx.init(jnp.ones(2))
            return jax.lax.scan(lambda c, g: (one_step(tx, *c, sign * g), None), state, noise)[0][0]

        return 1 - jnp.mean(jax.vmap(final)(jnp.array([1.0, -1.0])), 0)

    got = jax.jit(lambda: {name: shrunk(name, wd) for name, wd in {"adamw": 0.1, "adam": 0.1, "sgd": 0.1}.items()})()
    assert 0.95 < got["adamw"][0] / got["adamw"][1] < 1.05
    assert got["adam"][0] / got["adam"][1] > 30
    assert 0.95 < got["sgd"][0] / got["sgd"][1] < 1.05


def test_refusals():
    for name in OPTIMIZERS:
        for bad in ({"learning_rate": jnp.nan.__float__()}, {"learning_rate": 0.1, "weight_decay": float("inf")}):
            with pytest.raises(ReproError, match="must be a"):
                optimizer(name, layouts=LAYOUTS, **bad)
        with pytest.raises(ReproError, match="decay 'often' is unknown; known are coupled"):
            optimizer(name, 0.1, decay="often", layouts=LAYOUTS)
        for b in ("b1", "b2", "eps"):
            if b in inspect.signature(OPTIMIZERS[name]).parameters and name != "muon":
                with pytest.raises(ReproError, match=b):
                    optimizer(name, 0.1, layouts=LAYOUTS, **{b: -0.1})
    for name, option, bad in (
        ("adafactor", "threshold", 0.0), ("adafactor", "exponent", -0.8), ("adafactor", "b1", 1.0),
        ("stable_adamw", "eps", 0.0), ("shampoo", "eps", 0.0), ("shampoo", "rms", -0.2), ("soap", "refresh", 0),
        ("soap", "refresh", 2.5), ("sgd", "momentum", 1.0),
    ):  # fmt: skip
        with pytest.raises(ReproError, match=f"{option} is {bad}"):
            optimizer(name, 0.1, layouts=LAYOUTS, **{option: bad})
    with pytest.raises(ReproError, match="'adamx' is unknown; known are sgd, adam, adamw"):
        optimizer("adamx", 0.1)
    with pytest.raises(ReproError, match="has no option 'b3'"):
        optimizer("lion", 0.1, b3=0.5)
    with pytest.raises(ReproError, match="soap needs layouts"):
        optimizer("soap", 0.1)
    with pytest.raises(ReproError, match="needs a momentum"):
        optimizer("sgd", 0.1, momentum=None, nesterov=True)
    with pytest.raises(ReproError, match="role 'heads' is unknown"):
        optimizer("adalayer", 0.1, layouts=LAYOUTS, coordinate_roles=("heads",))
    with pytest.raises(ReproError, match="coordinate_roles needs layouts"):
        optimizer("adalayer", 0.1, coordinate_roles=("head",))
    with pytest.raises(ReproError, match="parameter norm_LD of role norm names no input"):
        optimizer("shampoo", 0.1, layouts=LAYOUTS, roles=("matrix", "norm")).init(PARAMS)
