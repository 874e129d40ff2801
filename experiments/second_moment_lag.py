"""Does a second moment that lags behind its gradients make Adam overshoot, and what removes that?

Written before the first run: the claims, their rules and controls below (a pilot had suggested the thresholds).

*The problem.* Linear regression y = x_a w_a + x_b w_b + noise with d weights in each block. x_b is exactly zero for a
long quiet phase and of full size from then on; w_b starts at its optimum, so whatever excess risk |w - w*|^2 there is
in block b afterwards was made by the optimizer. An exact zero matters: tiny gradients would be normalised to full
steps. One tensor per block; the weights are kept as the distance from the optimum.

*Closed forms.* In the first step after the switch the debiased second moment is (1 - b2) / (1 - b2^t) of g^2, so
RMS_t = sqrt(mean(g^2 / u)) = sqrt((1 - b2^t) / (1 - b2)). Where the gradient then stays constant, the k-th update is
(1 - b1^k) / sqrt(1 - b2^k) times the rate: for b2 = 0.999 it grows for a dozen steps, to 6.57, since the first moment
arrives much sooner than the second. Scaling all those gradients changes neither, so clipping the gradient cannot help
while the second moment still holds what came before. StableAdamW divides by RMS_t, which leaves 1 - b1^k.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from repro.claims import (
    All,
    Arm,
    AtLeast,
    AtMost,
    Claim,
    Control,
    Exact,
    Experiment,
    Greater,
    Ratio,
    Run,
    Within,
)
from repro.errors import ReproError
from repro.optim import adafactor, adamw, stable_adamw
from repro.report import Dose, Effects, Reference

BETA1, SLOW = 0.9, "b0.999"
PLAIN = {"b0.9": 0.9, "b0.95": 0.95, "b0.99": 0.99, SLOW: 0.999}
ARMS = (
    Arm("b0.9", "Adam, b2 = 0.9"),
    Arm("b0.95", "Adam, b2 = 0.95"),
    Arm("b0.99", "Adam, b2 = 0.99"),
    Arm(SLOW, "Adam, b2 = 0.999"),
    Arm("clip_gradient", "0.999, gradient clipped at 1"),
    Arm("clip_tight", "0.999, gradient clipped at 0.1"),
    Arm("clip_update", "0.999, update clipped at RMS 1"),
    Arm("stable", "StableAdamW, 0.999"),
    Arm("adafactor_plain", "Adafactor, not clipped"),
    Arm("adafactor_gradient", "Adafactor, gradient clipped at 1"),
    Arm("adafactor_update", "Adafactor, update clipped at RMS 1"),
)
NOISE = 0.3  # standard deviation of y
OVERSHOOT, CURED, KEPT, REMOVED = 3.0, 1.5, 0.25, 0.75  # smallest effects that count
SHAPES = ((8, 8), (64, 64), (32, 128), (512, 16))  # whose state is counted
CONSTANT_ARMS, CONSTANT_STEPS = ("b0.95", SLOW, "clip_tight", "clip_update", "stable"), 60

ADAFACTOR, STABLE = "Adafactor (arXiv 1804.04235)", "StableAdamW (arXiv 2304.13013)"
_CONSTANT = "A constant gradient after a quiet phase of any length; betas 0.9 and 0.999 unless said."
_REGRESSION = (
    "Linear regression with a block that is silent for a long time and then is not: the switch is put there by hand. "
    "Not a loss spike of a network."
)


def rate_point(rate: float) -> str:
    return f"lr{rate:g}"


def size_name(width: int) -> str:
    return f"d{width}"


CLAIMS_EXACT = (
    Claim(
        id="O-4", variant="constant gradient: builds up", tier="M", source="derived here",
        statement="After a quiet phase the update of Adam with b2 = 0.999 grows to 6.57 times the rate, to 1 %, within "
        "10 to 15 steps.",
        reported="Spikes are reported 1 to 8 steps after RMS_t rises.", boundary=_CONSTANT,
        criterion=All((Within("constant_peak", SLOW, 6.504, 6.636), Within("constant_peak_step", SLOW, 10.0, 15.0))),
        control=Control("b2 = 0.95", All((
            Within("constant_peak", "b0.95", 6.504, 6.636), Within("constant_peak_step", "b0.95", 10.0, 15.0),
        ))),
    ),
    Claim(
        id="O-4", variant="constant gradient: StableAdamW", tier="M", source=f"{STABLE}; derived here",
        statement="With StableAdamW the k-th update is 1 - 0.9^k times the rate, to 0.001, and so never above it.",
        reported="Said to make gradient clipping unnecessary.", boundary=_CONSTANT,
        criterion=Within("off_one_minus_power", "stable", 0.0, 1e-3),
        control=Control("Adam with b2 = 0.999", Within("off_one_minus_power", SLOW, 0.0, 1e-3)),
    ),
    Claim(
        id="O-2", variant="constant gradient: clipping it", tier="M", source=f"{ADAFACTOR}, section 5; derived here",
        statement="A clip that shrinks the gradient leaves the largest update as it was, to 0.1 %.",
        reported="Gradient clipping is said not to address updates that are too large.", boundary=_CONSTANT,
        criterion=Within("constant_peak_over_plain", "clip_tight", 0.999, 1.001),
        control=Control("clipping the update", Within("constant_peak_over_plain", "clip_update", 0.999, 1.001)),
    ),
    Claim(
        id="O-2", variant="memory", tier="M", source=f"{ADAFACTOR}, section 3",
        statement="Adafactor's second moment of an n x m matrix is n + m numbers.",
        reported="O(n + m).", boundary="Four shapes; without momentum, which would be n m more.",
        criterion=Exact("state_beyond_n_plus_m", "adafactor_update", 0.0),
        control=Control("Adam's second moment", Exact("state_beyond_n_plus_m", SLOW, 0.0)),
    ),
    Claim(
        id="O-2", variant="rank one", tier="M", source=f"{ADAFACTOR}, section 3",
        statement="Where all squared gradients have rank one, the factored second moment is the whole one: updates of "
        "one size, to 1e-5.",
        reported="The factored form is exact for matrices of rank one.", boundary="Outer products of normal vectors.",
        criterion=Within("factored_off", "adafactor_plain", 0.0, 1e-5),
        control=Control("normal matrices", Within("unfactored_off", "adafactor_plain", 0.0, 1e-5)),
    ),
)  # fmt: skip


def claims(preset: "Preset") -> tuple[Claim, ...]:
    """Those on exact forms, and for every size those on the regression, at every rate."""
    found = list(CLAIMS_EXACT)
    for width in preset.widths:
        found += _claims_at(width, preset)
    return tuple(found)


def _claims_at(width: int, preset: "Preset") -> list[Claim]:
    places = [f"@{rate_point(rate)}/{size_name(width)}" for rate in preset.rates]
    more = f", d = {width}" if preset.widths != (64,) else ""

    def every(rule) -> All:
        parts = [part for place in places for part in rule(place)]
        return parts[0] if len(parts) == 1 else All(tuple(parts))

    def rising(at: str, betas: tuple[str, ...]) -> list[Greater]:
        return [Greater("peak_excess", b + at, a + at) for a, b in zip(betas, betas[1:], strict=False)]

    return [
        Claim(
            id="O-4", variant=f"RMS_t{more}", tier="M", source=f"{STABLE}; the form is derived here",
            statement="In the first step after the switch RMS_t is sqrt((1 - b2^t) / (1 - b2)), to 2 %, for each b2.",
            reported="RMS_t rises before a loss spike.", boundary=_REGRESSION,
            criterion=every(lambda at: [Within("rms_over_formula", arm + at, 0.98, 1.02) for arm in PLAIN]),
            control=Control("1 / sqrt(1 - b2), without the debiasing",
                            Within("rms_over_undebiased", SLOW + places[-1], 0.98, 1.02)),
        ),
        Claim(
            id="O-4", variant=f"lag{more}", tier="M", source="a pilot of our own",
            statement="With b2 = 0.999 the excess risk peaks 3 to 25 steps after the switch, in every seed.",
            reported="Loss spikes 1 to 8 steps after RMS_t; the risk here sums up updates and peaks later.",
            boundary=_REGRESSION,
            criterion=every(lambda at: [Within("lag", SLOW + at, 3.0, 25.0)]),
            control=Control("the peak of RMS_t", every(lambda at: [Within("rms_lag", SLOW + at, 3.0, 25.0)])),
        ),
        Claim(
            id="O-4", variant=f"overshoot{more}", tier="D", family=STABLE, source=STABLE,
            statement=f"The peak of the excess risk is more than {OVERSHOOT:g} times larger with b2 = 0.999 than with "
            "0.95, at every rate.",
            reported="Spikes with larger b2, rate and model.", boundary=_REGRESSION,
            criterion=every(lambda at: [Ratio("peak_excess", SLOW + at, "b0.95" + at, at_least=OVERSHOOT)]),
            control=Control("arms exchanged", every(
                lambda at: [Ratio("peak_excess", "b0.95" + at, SLOW + at, at_least=OVERSHOOT)]
            )),
        ),
        Claim(
            id="O-4", variant=f"grows with b2{more}", tier="D", family=STABLE, source=STABLE,
            statement="The peak grows with b2 over 0.9, 0.95, 0.99 and 0.999, at every rate.",
            reported="More spikes with larger b2.", boundary=_REGRESSION,
            criterion=every(lambda at: rising(at, tuple(PLAIN))),
            control=Control("arms exchanged", every(lambda at: rising(at, tuple(PLAIN)[::-1]))),
        ),
        Claim(
            id="O-4", variant=f"StableAdamW removes it{more}", tier="D", family=STABLE, source=STABLE,
            statement=f"With StableAdamW at b2 = 0.999 the peak is less than {CURED:g} times that of Adam at 0.95, at "
            "every rate.",
            reported="No spikes with StableAdamW.", boundary=_REGRESSION,
            criterion=every(lambda at: [Ratio("peak_excess", "b0.95" + at, "stable" + at, at_least=1 / CURED)]),
            control=Control("Adam at 0.999 in its place", every(
                lambda at: [Ratio("peak_excess", "b0.95" + at, SLOW + at, at_least=1 / CURED)]
            )),
        ),
        Claim(
            id="O-2", variant=f"clipping the gradient does not{more}", tier="D", family=ADAFACTOR,
            source=f"{ADAFACTOR}, section 5",
            statement=f"Clipping the gradient at 1 or at 0.1 removes less than {KEPT:g} of the overshoot of Adam at b2 "
            "= 0.999, at every rate.",
            reported="The update should be clipped, not the gradient.",
            boundary=f"{_REGRESSION} 1 lies above the gradients' norm at the switch, 0.1 below.",
            criterion=every(lambda at: [
                AtMost("removed", arm + at, KEPT, log=False) for arm in ("clip_gradient", "clip_tight")
            ]),
            control=Control("StableAdamW", every(lambda at: [AtMost("removed", "stable" + at, KEPT, log=False)])),
        ),
        Claim(
            id="O-2", variant=f"clipping the update does, in Adafactor{more}", tier="D", family=ADAFACTOR,
            source=f"{ADAFACTOR}, sections 5 and 6",
            statement=f"Adafactor's own clip of the update removes more than {REMOVED:g} of its overshoot, at every "
            "rate.",
            reported="Update clipping stabilises training with a slow second moment.",
            boundary=f"{_REGRESSION} b2 = 1 - t^-0.8, no momentum.",
            criterion=every(lambda at: [AtLeast("removed", "adafactor_update" + at, REMOVED, log=False)]),
            control=Control("Adafactor with its gradient clipped at 1",
                            every(lambda at: [AtLeast("removed", "adafactor_gradient" + at, REMOVED, log=False)])),
        ),
        Claim(
            id="O-2", variant=f"clipping the update does, in Adam{more}", tier="D", family=ADAFACTOR,
            source=f"{ADAFACTOR}, section 6, put to Adam's momentum",
            statement=f"Clipping the update of Adam at b2 = 0.999 to an RMS of 1 removes more than {REMOVED:g} of its "
            "overshoot, at every rate.",
            reported="Not reported for an update with momentum; a pilot of ours removed a third.", boundary=_REGRESSION,
            criterion=every(lambda at: [AtLeast("removed", "clip_update" + at, REMOVED, log=False)]),
            control=Control("the gradient clipped at 1",
                            every(lambda at: [AtLeast("removed", "clip_gradient" + at, REMOVED, log=False)])),
        ),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of the regression."""

    test_seeds: tuple[int, ...] = tuple(range(8))
    """Optimum, inputs and noise of each; every arm sees the same."""
    widths: tuple[int, ...] = (64,)
    """Weights d of a block; square numbers, since Adafactor sees a square matrix."""
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    batch: int = 32
    quiet: int = 1000
    """Steps before the switch. sqrt((1 - b2^t) / (1 - b2)) bounds RMS_t, so a short phase cannot show much."""
    after: int = 150
    evidence: bool = True
    """Whether verdicts count as evidence; false for a quick look and for a preset changed by hand."""

    def __post_init__(self) -> None:
        if not self.test_seeds or not self.rates or min(self.rates) <= 0:
            raise ReproError("test_seeds and rates hold at least one value each, and rates are positive.")
        if not self.widths or any(width < 1 or round(width**0.5) ** 2 != width for width in self.widths):
            raise ReproError(f"widths {self.widths} must be square numbers.")
        if self.batch < 1 or self.quiet < 100 or self.after < 40:
            raise ReproError("batch is at least 1, quiet at least 100 and after at least 40 steps.")


def optimizer(arm: str, rate: jax.Array | float) -> optax.GradientTransformation:
    """The transform of an arm; none of them decays weights."""
    if arm in PLAIN:
        return adamw(rate, b1=BETA1, b2=PLAIN[arm], weight_decay=0.0)
    if arm == "stable":
        return stable_adamw(rate, b1=BETA1, b2=PLAIN[SLOW], weight_decay=0.0)
    if arm == "clip_update":
        adam = optax.scale_by_adam(b1=BETA1, b2=PLAIN[SLOW])
        return optax.chain(adam, optax.clip_by_block_rms(1.0), optax.scale_by_learning_rate(rate))
    if arm in ("clip_gradient", "clip_tight"):
        return optax.chain(optax.clip_by_global_norm(1.0 if arm == "clip_gradient" else 0.1), optimizer(SLOW, rate))
    threshold = 1.0 if arm == "adafactor_update" else 1e30
    rule = adafactor(rate, weight_decay=0.0, threshold=threshold)
    return optax.chain(optax.clip_by_global_norm(1.0), rule) if arm == "adafactor_gradient" else rule


@functools.partial(jax.jit, static_argnames=("width", "preset"))
def regression(keys: jax.Array, rates: jax.Array, *, width: int, preset: Preset) -> tuple[dict, dict]:
    """By arm, for each seed and rate: the excess risk `[seeds, rates, steps]` before every step, and, of arms of plain
    Adam, RMS_t of block b in the step."""
    steps, side = preset.quiet + preset.after, round(width**0.5)
    names = [arm.name for arm in ARMS]

    def lane(key: jax.Array, rate: jax.Array) -> tuple[dict, dict]:
        rules = {name: optimizer(name, rate) for name in names}
        # Distances from the optimum; that of block a is of length about 1 at the start.
        start = {
            "a": jax.random.normal(jax.random.fold_in(key, steps), (side, side)) / side,
            "b": jnp.zeros((side, side)),
        }

        def step(carry, i):
            x = jax.random.normal(jax.random.fold_in(key, i), (preset.batch, 2 * width + 1))
            x_a, x_b, noise = x[:, :width], jnp.where(i < preset.quiet, 0.0, x[:, width:-1]), NOISE * x[:, -1]
            excess, rms = {}, {}
            done = {}
            for name, (w, state, second) in carry.items():
                excess[name] = sum(jnp.sum(jnp.square(block)) for block in w.values())
                error = x_a @ w["a"].ravel() + x_b @ w["b"].ravel() - noise
                g = {k: (error @ x_k / preset.batch).reshape(side, side) for k, x_k in (("a", x_a), ("b", x_b))}
                if name in PLAIN:
                    second, rms[name] = rms_of(second, g["b"], i + 1, PLAIN[name])
                updates, state = rules[name].update(g, state, w)
                done[name] = optax.apply_updates(w, updates), state, second
            return done, (excess, rms)

        first = {name: (start, rule.init(start), jnp.zeros((side, side))) for name, rule in rules.items()}
        return jax.lax.scan(step, first, jnp.arange(steps))[1]

    # Lanes of one key share its data.
    return jax.vmap(jax.vmap(lane, (None, 0)), (0, None))(keys, rates)


def rms_of(second: jax.Array, g: jax.Array, t: jax.Array, b2: float, eps: float = 1e-8) -> tuple[jax.Array, jax.Array]:
    """(second moment with g, RMS_t = sqrt(mean(g^2 / max(u, eps^2))) of its debiased form u) in step t from 1."""
    second = b2 * second + (1 - b2) * g**2
    return second, jnp.sqrt(jnp.mean(g**2 / jnp.maximum(second / (1 - b2**t), eps**2)))


def regression_runs(width: int, preset: Preset) -> Iterator[Run]:
    """Peaks, lags and RMS_t of every arm, rate and seed, and mean curves at the last rate."""
    keys = jnp.stack([jax.random.key(seed) for seed in preset.test_seeds])
    excess, rms = jax.device_get(regression(keys, jnp.asarray(preset.rates, jnp.float32), width=width, preset=preset))
    size, t = size_name(width), preset.quiet + 1
    before = {arm: e[..., preset.quiet - 100 : preset.quiet].mean(-1, dtype=np.float64) for arm, e in excess.items()}
    after = {arm: e[..., preset.quiet :].astype(np.float64) for arm, e in excess.items()}
    for arm in excess:
        overshoot = after[arm].max(-1) - before[arm]
        base = "adafactor_plain" if arm.startswith("adafactor") else SLOW
        removed = 1 - overshoot / (after[base].max(-1) - before[base])
        for s, seed in enumerate(preset.test_seeds):
            for r, rate in enumerate(preset.rates):
                metrics = {
                    "peak_excess": after[arm][s, r].max(), "excess_before": before[arm][s, r],
                    "lag": after[arm][s, r].argmax(), "removed": removed[s, r],
                }  # fmt: skip
                if arm in PLAIN:
                    seen, b2 = rms[arm][s, r, preset.quiet :], PLAIN[arm]
                    metrics |= {
                        "rms_at_switch": seen[0], "rms_lag": seen.argmax(),
                        "rms_over_formula": seen[0] / np.sqrt((1 - b2**t) / (1 - b2)),
                        "rms_over_undebiased": seen[0] * np.sqrt(1 - b2),
                    }  # fmt: skip
                yield Run(arm, seed, metrics, point=rate_point(rate), size=size, rate=rate)
        for name, k in _STEPS:
            if k < preset.after:
                metrics = {"mean_excess": excess[arm][:, -1, preset.quiet + int(k)].mean()}
                if arm in rms:
                    metrics["mean_rms"] = rms[arm][:, -1, preset.quiet + int(k)].mean()
                yield Run(arm, 0, metrics, point=name, size=size)


@jax.jit
def constant_updates() -> dict[str, jax.Array]:
    """Updates over the rate, `[steps]`, for a constant gradient of norm 0.8 after a very long quiet phase, by arm."""
    rules = {arm: optimizer(arm, 1.0) for arm in CONSTANT_ARMS}
    g = {"b": jnp.full((8, 8), 0.1)}
    # Long ago: counters are large and moments zero.
    states = {arm: rule.init(g) for arm, rule in rules.items()}
    states = jax.tree.map(lambda x: x + 10**6 if jnp.issubdtype(x.dtype, jnp.integer) else x, states)

    def step(states, _):
        done = {arm: rule.update(g, states[arm], g) for arm, rule in rules.items()}
        return {arm: state for arm, (_, state) in done.items()}, {arm: -u["b"][0, 0] for arm, (u, _) in done.items()}

    return jax.lax.scan(step, states, None, length=CONSTANT_STEPS)[1]


def constant_runs() -> Iterator[Run]:
    """The largest update for a constant gradient, when it comes, and the curves of a figure."""
    found = {arm: np.asarray(u, np.float64) for arm, u in constant_updates().items()}
    k = np.arange(1, CONSTANT_STEPS + 1)
    for arm, u in found.items():
        yield Run(arm, 0, {
            "constant_peak": u.max(), "constant_peak_step": k[u.argmax()],
            "constant_peak_over_plain": u.max() / found[SLOW].max(),
            "off_one_minus_power": np.abs(u - (1 - BETA1**k)).max(),
        }, point="constant")  # fmt: skip
        yield from (Run(arm, 0, {"constant_update": u[i - 1]}, point=f"c{i}") for i in k)


def state_runs() -> Iterator[Run]:
    """How many numbers the second moment of a matrix is, and whether the factored form is exact."""
    beyond = {SLOW: 0, "adafactor_update": 0}
    for shape in SHAPES:
        w = jax.ShapeDtypeStruct(shape, jnp.float32)
        of_adam = optax.tree_utils.tree_get(jax.eval_shape(optimizer(SLOW, 1.0).init, w), "nu")
        of_adafactor = optax.tree_utils.tree_get(jax.eval_shape(optimizer("adafactor_update", 1.0).init, w), "second")
        for arm, tree in ((SLOW, of_adam), ("adafactor_update", of_adafactor)):
            beyond[arm] += sum(x.size for x in jax.tree.leaves(tree)) - sum(shape)
    for arm, count in beyond.items():
        yield Run(arm, 0, {"state_beyond_n_plus_m": count}, point="state")
    rng = np.random.default_rng(0)
    rank_one, normal = np.outer(rng.normal(size=8), rng.normal(size=16)), rng.normal(size=(8, 16))
    rule = optimizer("adafactor_plain", 1.0)
    first = jax.jit(lambda g: rule.update(g, rule.init(g), g)[0])
    # In the first step the whole second moment is g^2, and every update +-1.
    off = [np.abs(np.abs(first(jnp.asarray(g, jnp.float32))) - 1).max() for g in (rank_one, normal)]
    yield Run("adafactor_plain", 0, {"factored_off": off[0], "unfactored_off": off[1]}, point="state")


def checks(preset: Preset) -> Iterator[Run]:
    """All of the above."""
    yield from constant_runs()
    yield from state_runs()
    for width in preset.widths:
        yield from regression_runs(width, preset)


_CPU = Preset()
_STEPS = tuple((f"k{k}", float(k)) for k in (*range(-10, 40, 2), *range(40, 150, 5)))
_CONSTANT_POINTS = tuple((f"c{k}", float(k)) for k in range(1, CONSTANT_STEPS + 1))
_RATES = tuple((rate_point(rate), rate) for rate in _CPU.rates)
_REMEDIES = ("b0.95", SLOW, "clip_gradient", "clip_tight", "clip_update", "stable")
_OWN = ("adafactor_plain", "adafactor_gradient", "adafactor_update")
FIGURES = (
    Dose("constant", "constant_update", "Updates for a constant gradient after a quiet phase", "steps after the switch",
         "update / rate", _CONSTANT_POINTS, CONSTANT_ARMS,
         lines=(Reference("1", y=1.0),)),
    Dose("excess", "mean_excess", "Excess risk around the switch, largest rate, mean over seeds",
         "steps after the switch", "|w - w*|^2", _STEPS, _REMEDIES, log_y=True),
    Dose("excess_b2", "mean_excess", "Excess risk by b2", "steps after the switch", "|w - w*|^2", _STEPS, tuple(PLAIN),
         log_y=True),
    Dose("excess_adafactor", "mean_excess", "Excess risk under Adafactor", "steps after the switch", "|w - w*|^2",
         _STEPS, _OWN, log_y=True),
    Dose("rms", "mean_rms", "RMS_t of the block that was silent", "steps after the switch", "RMS_t", _STEPS,
         tuple(PLAIN)),
    Dose("peaks", "peak_excess", "Peak of the excess risk against the learning rate", "learning rate",
         "peak of |w - w*|^2", _RATES, (*PLAIN, "clip_gradient", "clip_update", "stable"), log_x=10, log_y=True),
    Effects("effects", "Effects"),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="second-moment-lag",
    title="A second moment that lags, and what removes its overshoot",
    claims=claims,
    arms=ARMS,
    presets={
        "smoke": Preset(test_seeds=(0, 1), rates=(1e-2,), quiet=300, after=60, evidence=False),
        "cpu": _CPU,
        "cpu-sizes": Preset(widths=(16, 256)),
    },
    checks=checks,
    figures=FIGURES,
    words={
        "removed": "part of the overshoot that is removed",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
