"""Is an L2 penalty in Adam weight decay, and what does the decay of AdamW depend on?

Written before the first run: the claims, their rules and controls below. Weights start at 1 and see gradients that are
noise of mean zero and nothing else, with standard deviations from 0.1 to 1000, so that all that happens to their mean
is decay. Let r be the mean decay per step, from the same noise with and without decay:

    r = -ln(mean w(decay) / mean w(no decay)) / steps

- *AdamW* (decoupled) multiplies a weight by 1 - lr * decay: r = lr * decay at every noise.
- *L2 in Adam* adds decay * w to the gradient, which is then divided by the root mean square s of the noise: r = lr *
  decay / s, up to a factor near 1 that does not depend on s, while decay * w is small against s. Weights whose
  gradients are loud are hardly decayed at all.
- *SGD* divides by nothing, and the two are one algorithm.
- *Coupled* decay, as in PyTorch and Optax, is multiplied by the learning rate; *independent* decay is not. Over a sweep
  of learning rates the first follows the rate and the second stays.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from repro.claims import Arm, Claim, Control, Experiment, Run, Within
from repro.errors import ReproError
from repro.optim import adamw
from repro.report import Dose, Reference

DECAY, RATE = 0.1, 1e-3
QUIET, LOUD = 1.0, 100.0  # standard deviations that claims name
ARMS = (
    Arm("adamw", "AdamW, coupled"),
    Arm("independent", "AdamW, independent"),
    Arm("adam_l2", "Adam with L2"),
    Arm("sgd_l2", "SGD with L2"),
    Arm("sgd_decoupled", "SGD, decoupled"),
)

PAPER = "Loshchilov and Hutter (arXiv 1711.05101)"
WORTSMAN = "Wortsman et al. (arXiv 2309.14322), section 3.2.1"
_NOISE = "Gradients of noise alone, no loss; lr 1e-3, decay 0.1, betas 0.9 and 0.95."


def sd_point(sd: float) -> str:
    return f"sd{sd:g}"


def rate_point(rate: float) -> str:
    return f"lr{rate:g}"


def _slope(arm: str, low: float, high: float) -> Within:
    return Within("slope_over_rates", arm, low, high)


CLAIMS = (
    Claim(
        id="O-1", variant="AdamW decays all alike", tier="M", source=PAPER,
        statement="Under AdamW weights with noise of 1 and of 100 decay at the same rate, to 5 %.",
        reported="Decoupled decay shrinks all weights by the same factor.", boundary=_NOISE,
        criterion=Within("quiet_over_loud", "adamw", 0.95, 1.05),
        control=Control("L2 in Adam", Within("quiet_over_loud", "adam_l2", 0.95, 1.05)),
    ),
    Claim(
        id="O-1", variant="L2 does not", tier="M", source=PAPER,
        statement="With L2 in Adam weights with noise of 1 decay more than 30 times faster than weights with noise of "
        "100.",
        reported="Weights with large gradients are regularised less; no number.", boundary=_NOISE,
        criterion=Within("quiet_over_loud", "adam_l2", 30.0, np.inf),
        control=Control("AdamW", Within("quiet_over_loud", "adamw", 30.0, np.inf)),
    ),
    Claim(
        id="O-1", variant="L2 by how much", tier="M", source="derived here",
        statement="With L2 in Adam the decay is inversely proportional to the noise from 1 to 1000: its logarithm has "
        "the slope -1, to 0.05, over that of the noise.",
        reported="Not reported as a formula.", boundary=_NOISE,
        criterion=Within("slope_over_noise", "adam_l2", -1.05, -0.95),
        control=Control("AdamW", Within("slope_over_noise", "adamw", -1.05, -0.95)),
    ),
    Claim(
        id="O-1", variant="SGD", tier="M", source=PAPER,
        statement="Under SGD L2 and decoupled decay give the same weights, to 1e-6 of their root mean square.",
        reported="Equivalent for a rescaled decay.", boundary=f"{_NOISE} float32.",
        criterion=Within("apart", "sgd_l2", 0.0, 1e-6),
        control=Control("Adam", Within("apart", "adam_l2", 0.0, 1e-6)),
    ),
    Claim(
        id="O-1", variant="coupled decay follows the rate", tier="M", source=f"{PAPER}; the form of PyTorch and Optax",
        statement="Coupled decay per step is proportional to the learning rate: slope 1, to 0.02, from 1e-4 to 1e-2.",
        reported="A property of the implementations, not of the paper's form.", boundary="Noise of 1, decay 0.1.",
        criterion=_slope("adamw", 0.98, 1.02), control=Control("independent decay", _slope("independent", 0.98, 1.02)),
    ),
    Claim(
        id="O-1", variant="independent decay does not", tier="M", source=WORTSMAN,
        statement="Independent decay per step is the same at every learning rate: slope 0, to 0.02.",
        reported="Said to make the best rate less sensitive.", boundary="Noise of 1, decay 1e-4 a step; no training.",
        criterion=_slope("independent", -0.02, 0.02), control=Control("coupled decay", _slope("adamw", -0.02, 0.02)),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is drawn."""

    draws: int = 8
    """Independent noise; a claim has to hold with every one."""
    steps: int = 500
    weights: int = 512
    """Weights of each standard deviation."""
    deviations: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
    """Standard deviations of the noise, among them 1, 100 and 1000."""
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    """Learning rates of the sweep, among them 1e-4, 1e-3 and 1e-2."""
    evidence: bool = True
    """Whether verdicts count as evidence; false for a quick look and for a preset changed by hand."""

    def __post_init__(self) -> None:
        if not {QUIET, LOUD, 1000.0} <= set(self.deviations) or min(self.deviations) <= 0:
            raise ReproError(f"deviations {self.deviations} must hold 1, 100 and 1000, and be positive.")
        if not {1e-4, RATE, 1e-2} <= set(self.rates) or min(self.rates) <= 0:
            raise ReproError(f"rates {self.rates} must hold 1e-4, 1e-3 and 1e-2, and be positive.")
        if self.draws < 1 or self.steps < 100 or self.weights < 1:
            raise ReproError("draws and weights are at least 1, steps at least 100.")


def optimizer(arm: str, rate: jax.Array, decay: jax.Array) -> optax.GradientTransformation:
    """`decay` is a multiple of the rate, or for `independent` of the usual rate of 1e-3."""
    if arm in ("adamw", "independent"):
        kind = "coupled" if arm == "adamw" else "independent"
        return adamw(rate, b1=0.9, b2=0.95, weight_decay=decay * (1.0 if arm == "adamw" else RATE), decay=kind)
    penalty, scale = optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
    if arm == "adam_l2":
        return optax.chain(penalty, optax.scale_by_adam(b1=0.9, b2=0.95), scale)
    if arm == "sgd_l2":
        return optax.chain(penalty, scale)
    return optax.chain(scale, optax.add_decayed_weights(-rate * decay))


@functools.partial(jax.jit, static_argnames=("arm", "steps", "weights"))
def trained(keys: jax.Array, sd: jax.Array, rates: jax.Array, *, arm: str, steps: int, weights: int) -> jax.Array:
    """Weights `[draws, rates, 2, deviations, weights]` after training from 1, without and with decay on one noise."""

    def lane(key: jax.Array, rate: jax.Array, decay: jax.Array) -> jax.Array:
        rule = optimizer(arm, rate, decay)

        def step(carry, i):
            w, state = carry
            noise = sd[:, None] * jax.random.normal(jax.random.fold_in(key, i), w.shape)
            updates, state = rule.update(noise, state, w)
            return (w + updates, state), None

        w = jnp.ones((len(sd), weights))
        return jax.lax.scan(step, (w, rule.init(w)), jnp.arange(steps))[0][0]

    # The key is mapped over last, so that lanes that share one share its noise.
    with_decay = jax.vmap(lane, (None, None, 0))
    return jax.vmap(jax.vmap(with_decay, (None, 0, None)), (0, None, None))(keys, rates, jnp.array([0.0, DECAY]))


def decay_per_step(w: np.ndarray, steps: int) -> np.ndarray:
    """r of the module's docstring, for weights [..., 2, deviations, weights]: [..., deviations]."""
    mean = w.astype(np.float64).mean(-1)
    return -np.log(mean[..., 1, :] / mean[..., 0, :]) / steps


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Least-squares slope of ln y over ln x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def checks(preset: Preset) -> Iterator[Run]:
    """Decay by noise at the usual rate, decay by rate at noise of 1, and the two forms under SGD and under Adam."""
    keys = jax.vmap(jax.random.key)(jnp.arange(preset.draws))
    sd, rates = np.array(preset.deviations), np.array(preset.rates)
    usual, quiet, loud = (list(v).index(x) for v, x in ((rates, RATE), (sd, QUIET), (sd, LOUD)))
    above = sd >= QUIET
    found = {}
    for arm in (a.name for a in ARMS):
        of_arm = rates if arm in ("adamw", "independent", "adam_l2") else np.array([RATE])
        w = trained(keys, jnp.asarray(sd), jnp.asarray(of_arm), arm=arm, steps=preset.steps, weights=preset.weights)
        found[arm] = np.asarray(w)
    for draw in range(preset.draws):
        for arm in ("adamw", "independent", "adam_l2"):
            r = decay_per_step(found[arm][draw], preset.steps)
            yield Run(arm, draw, {
                "quiet_over_loud": r[usual, quiet] / r[usual, loud],
                "slope_over_noise": slope(sd[above], r[usual, above]),
                "slope_over_rates": slope(rates, r[:, quiet]),
            })  # fmt: skip
            for i, deviation in enumerate(sd):
                yield Run(arm, draw, {"relative_decay": r[usual, i] / (RATE * DECAY)}, point=sd_point(deviation))
            for i, rate in enumerate(rates):
                yield Run(arm, draw, {"decay_per_step": r[i, quiet]}, point=rate_point(rate))
        pairs = {"sgd_l2": ("sgd_decoupled", 0), "adam_l2": ("adamw", usual)}
        for arm, (other, i) in pairs.items():
            left, right = (found[name][draw, i, 1].astype(np.float64) for name in (arm, other))
            apart = np.sqrt(np.mean((left - right) ** 2) / np.mean(right**2))
            yield Run(arm, draw, {"apart": apart}, point="decay 0.1")


_CPU = Preset()
_SD = tuple((sd_point(sd), sd) for sd in _CPU.deviations)
_RATES = tuple((rate_point(rate), rate) for rate in _CPU.rates)
FIGURES = (
    Dose("noise", "relative_decay", "Decay against the noise of the gradient, at one rate",
         "standard deviation of the gradient", "decay per step / (lr * 0.1)", _SD, ("adamw", "adam_l2"),
         log_x=10, log_y=True, lines=(Reference("lr * decay", y=1.0),)),
    Dose("rates", "decay_per_step", "Decay against the learning rate, noise of 1",
         "learning rate", "decay per step", _RATES, ("adamw", "independent", "adam_l2"), log_x=10, log_y=True),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="weight-decay",
    title="Weight decay and the L2 penalty in Adam",
    claims=CLAIMS,
    arms=ARMS,
    presets={
        "smoke": Preset(
            draws=2, steps=200, weights=128, deviations=(QUIET, LOUD, 1000.0), rates=(1e-4, RATE, 1e-2), evidence=False
        ),
        "cpu": _CPU,
    },
    checks=checks,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
