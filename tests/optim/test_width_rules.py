import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from repro.errors import ReproError
from repro.optim import Layout, factor_tree, scale_by_width_rule, update_factor, width_factors
from repro.optim.width_rules import WidthFactors

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYOUTS = {
    "embedding_ZD": Layout("embedding"),
    "q_LDHK": Layout("matrix", (1,), (2, 3), head=2, layer=0),
    "down_LFD": Layout("matrix", (1,), (2,), layer=0),
    "router_DE": Layout("router", (0,), (1,)),
    "norm_LD": Layout("norm", layer=0),
    "head_DZ": Layout("head"),
}


def shapes(D, H, F, Z=10, E=4, L=2, K=8):
    sizes = {
        "embedding_ZD": (Z, D), "q_LDHK": (L, D, H, K), "down_LFD": (L, F, D), "router_DE": (D, E), "norm_LD": (L, D),
        "head_DZ": (D, Z),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


BASE, WIDE = shapes(16, 2, 32), shapes(64, 8, 256)  # m = 4 for D, 8 for F


def test_the_table():
    """Rate, initial sd and output, for m = 4 (q, router, head) and m = 8 (down); n = 4."""
    ones = (1, 1, 1)
    hidden = {"q_LDHK": (1 / 4, 1 / 2, 1), "down_LFD": (1 / 8, 8**-0.5, 1), "router_DE": (1 / 4, 1 / 2, 1)}
    rest = {"embedding_ZD": ones, "norm_LD": ones}
    heads = {"mup": (1, 1, 1 / 4), "mup_table3": (1 / 4, 1 / 4, 1)}
    for rule, head in heads.items():
        for name, want in {**hidden, **rest, "head_DZ": head}.items():
            assert width_factors(WIDE, BASE, LAYOUTS, rule=rule)[name] == pytest.approx(want), (rule, name)
    spectral = width_factors(WIDE, BASE, LAYOUTS, rule="spectral")
    down = 1 / 8 * (64 / 16) ** 0.5  # min(1, sqrt(D / F)) / sqrt(F) at F = 256 against F = 32
    assert spectral["down_LFD"] == pytest.approx((1 / 8, down, 1))
    assert spectral["head_DZ"] == pytest.approx((1 / 4, 1 / 4, 1)) and spectral["q_LDHK"] == pytest.approx(
        hidden["q_LDHK"]
    )
    for rule in ("mup", "mup_table3", "spectral"):
        for matrices in ("adam", "orthogonal", "rms_matched"):
            same = width_factors(BASE, BASE, LAYOUTS, rule=rule, matrices=matrices)
            assert set(map(tuple, same.values())) == {ones}


def spectral_norm_is_of_order_one(matrices, update):
    """||rate * dW||_2 / sqrt(out / in) is the same at every width, for an update of the given norm."""
    ratios = []
    for D, F in ((16, 32), (64, 32), (64, 512), (256, 300)):
        rate = width_factors(shapes(D, 2, F), BASE, LAYOUTS, matrices=matrices)["down_LFD"].rate
        ratios.append(rate * update(F, D) / (D / F) ** 0.5)
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-9)


UPDATES = {
    "adam": lambda rows, columns: (rows * columns) ** 0.5,  # entries of size one, aligned
    "orthogonal": lambda rows, columns: 1.0,
    "rms_matched": lambda rows, columns: update_factor(0.2, rows, columns),
}


def test_updates_keep_the_spectral_norm_over_width():
    for kind, update in UPDATES.items():
        spectral_norm_is_of_order_one(kind, update)
        for other, wrong in UPDATES.items():
            if other != kind:
                with pytest.raises(AssertionError):
                    spectral_norm_is_of_order_one(kind, wrong)


def change_of_features(width, factors):
    """Mean |change| of the last hidden features after four Adam steps of a network with two hidden layers."""
    rng = np.random.default_rng(width)
    x, y = (jnp.asarray(rng.normal(size=(32, n)), jnp.float32) for n in (8, 1))
    base_sd = {"in": 8**-0.5, "hidden": 32**-0.5, "head": 32**-0.5}
    sizes = {"in": (8, width), "hidden": (width, width), "head": (width, 1)}
    params = {
        name: jnp.asarray(rng.normal(size=sizes[name]) * base_sd[name] * factors[name].init, jnp.float32)
        for name in sizes
    }

    def hidden(p):
        return jnp.tanh(jnp.tanh(x @ p["in"]) @ p["hidden"])

    def loss(p):
        return jnp.mean((hidden(p) @ p["head"] * factors["head"].forward - y) ** 2)

    tx = optax.chain(optax.scale_by_adam(), scale_by_width_rule(factors), optax.scale(-0.01))

    def step(carry, _):
        p, state = carry
        updates, state = tx.update(jax.grad(loss)(p), state, p)
        return (optax.apply_updates(p, updates), state), None

    after = jax.lax.scan(step, (params, tx.init(params)), None, 4)[0][0]
    return jnp.mean(jnp.abs(hidden(after) - hidden(params)))


def test_features_change_alike_at_every_width_and_without_the_rule_they_do_not():
    layouts = {"in": Layout("embedding"), "hidden": Layout("matrix", (0,), (1,)), "head": Layout("head")}

    def tree(width):
        return {"in": np.zeros((8, width)), "hidden": np.zeros((width, width)), "head": np.zeros((width, 1))}

    def factors(rule, width):
        if rule == "standard":  # one rate for all, initial values by fan-in
            narrow = (32 / width) ** 0.5
            return {name: WidthFactors(1.0, 1.0 if name == "in" else narrow, 1.0) for name in layouts}
        return width_factors(tree(width), tree(32), layouts, rule=rule)

    widths, rules = (32, 128, 512), ("mup", "mup_table3", "standard")
    changes = jax.jit(lambda: {r: [change_of_features(w, factors(r, w)) for w in widths] for r in rules})()
    slopes = {rule: np.polyfit(np.log2(widths), np.log2(changes[rule]), 1)[0] for rule in rules}
    assert abs(slopes["mup"]) < 0.2 and abs(slopes["mup_table3"]) < 0.2, slopes
    assert slopes["standard"] > 0.3, slopes


def test_the_transform_multiplies_and_one_changes_no_bit():
    updates = {
        name: jnp.asarray(np.random.default_rng(0).normal(size=s.shape), jnp.bfloat16) for name, s in WIDE.items()
    }
    factors = width_factors(WIDE, BASE, LAYOUTS)
    tx = scale_by_width_rule(factors)
    got = tx.update(updates, tx.init(updates))[0]
    for name, u in updates.items():
        np.testing.assert_array_equal(got[name], u * jnp.bfloat16(factors[name].rate))
        assert got[name].dtype == u.dtype
        assert (got[name] is u) == (factors[name].rate == 1)
    assert factor_tree(updates, factors, "forward")["head_DZ"] == 1 / 4


def test_refusals():
    with pytest.raises(ReproError, match="width rule 'mu' is unknown; known are mup, mup_table3, spectral"):
        width_factors(WIDE, BASE, LAYOUTS, rule="mu")
    with pytest.raises(ReproError, match="update of matrices 'muon' is unknown; known are adam, orthogonal"):
        width_factors(WIDE, BASE, LAYOUTS, matrices="muon")
    with pytest.raises(ReproError, match="parameter down_LFD is not in the base model"):
        width_factors(WIDE, {"head_DZ": BASE["head_DZ"]}, LAYOUTS)
    with pytest.raises(ReproError, match="parameter w has no width factors"):
        factor_tree({"w": 1}, width_factors(WIDE, BASE, LAYOUTS), "rate")
