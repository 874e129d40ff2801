"""When does Adam's epsilon matter? Adam divides by sqrt(v) + eps, so it is blind to the scale of the loss until its
gradients come near eps.

Written before the first run. Multiplying the loss by c multiplies m by c and v by c^2, so the update becomes

    c m / (c sqrt(v) + eps),

which is m / sqrt(v) while c sqrt(v) is far above eps, and c m / eps, gradient descent with momentum, far below it. The
root mean square of the gradient should be about 1e-3 here at its natural scale; no small network reaches 1e-8 by
itself. The amplifier is declared: the loss times 1e-6, which brings gradients to about 1e-9, near the usual eps. With
eps = 1e-15 nothing should change but rounding; with 1e-8 updates shrink about tenfold; with 1e-6 hardly anything is
left of them. Beside it stands the natural scale, where none of these values should matter.

Rounding alone sends two runs of a factor 1e-6 apart, so the equivalence to 0.01 nats is asked of 16 seeds. Gradients
are multiplied after the backward pass, which is linear, and not the loss before it: the difference is rounding.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from repro.claims import (
    Arm,
    AtLeast,
    Cell,
    Claim,
    Control,
    Equivalent,
    Exact,
    Experiment,
    Greater,
    NonInferior,
    Run,
    Within,
)
from repro.errors import ReproError
from repro.optim import adamw
from repro.report import Curve, Dose, Effects, Reference
from repro.train import JobResult, Program, TrainConfig, TrainState
from repro.train.optimizer import Name, OptimizerConfig
from repro.train.preset import Sweep
from repro.train.summary import tail

EPS = {"eps1e-15": 1e-15, "eps1e-8": 1e-8, "eps1e-6": 1e-6}
ARMS = tuple(Arm(name, f"eps = {eps:g}", {"eps": eps}) for name, eps in EPS.items())
SCALES = {"natural": 1.0, "c1e-2": 1e-2, "c1e-4": 1e-4, "c1e-6": 1e-6}
"""Factors of the loss by the name of their point; claims read the first and the last."""
WORTSMAN = "Wortsman et al. (arXiv 2309.14322)"
_REPORTED = (
    "Gradients shrink with model size and rate until they reach eps = 1e-8; at 4.8B parameters 1e-15 then helps and "
    "1e-6 diverges (from digests of the paper)."
)


@dataclasses.dataclass(frozen=True)
class EpsilonConfig(TrainConfig):
    """The decoder under AdamW with eps as a number, and a factor of its gradients."""

    numeric = (*TrainConfig.numeric, "eps", "loss_scale")
    optimizer: Name = "adamw"
    eps: float = 1e-8
    """In place of `optim.eps`, so that runs of several values share a program."""
    loss_scale: float = 1.0
    """What the loss, and so every gradient, is multiplied by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("eps", "loss_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ReproError(f"train.{name} is {getattr(self, name)}; it must be positive and finite.")
        own = dataclasses.replace(self.optim, b1=0.9, b2=0.95)
        if self.optimizer != "adamw" or own != OptimizerConfig():
            raise ReproError("this experiment trains with plain AdamW: of train.optim only b1 and b2 may be set.")

    @classmethod
    def program_class(cls) -> type[Program]:
        return EpsilonProgram

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        words = f"AdamW, betas {self.optim.b1:g} and {self.optim.b2:g}, eps {self.eps:g}, bias-corrected"
        return {"N6": {"matrices": words, "embedding, head, gains": words, "loss": f"times {self.loss_scale:g}"}}


class EpsilonProgram(Program):
    """The engine's program with a scaled loss, which also measures the gradient of every tensor."""

    def optimizer(self, numbers, part, seed=0) -> optax.GradientTransformation:
        config = self.config
        return adamw(
            numbers.learning_rate * part, b1=config.optim.b1, b2=config.optim.b2,
            eps=getattr(numbers, "eps", config.eps),  # `init` has no numbers of ours; the state does not depend on eps
            weight_decay=numbers.weight_decay * (part if config.decay == "independent" else 1.0), decay=config.decay,
        )  # fmt: skip

    def gradients(self, grads, numbers):
        return jax.tree.map(lambda g: g * numbers.loss_scale, grads)

    def step(self, state: TrainState, window_BT1, numbers):
        """`tensor_grad_rms` [tensors]: sqrt of the mean of Adam's own debiased second moment, for every tensor of every
        layer; `least_grad_rms`: the smallest of them; `grad_rms`: that of all parameters."""
        after, metrics = super().step(state, window_BT1, numbers)
        second = optax.tree.get(after.opt_state, "nu")
        debias = 1 - self.config.optim.b2 ** (after.step.astype(jnp.float32))
        layers = [jnp.mean(v, range(1, v.ndim)) for v in jax.tree.leaves(second["blocks"])]
        others = [jnp.mean(v)[None] for name, part in second.items() if name != "blocks" for v in jax.tree.leaves(part)]
        mean_squares = jnp.concatenate(layers + others) / debias
        total = optax.tree.sum(second) / sum(v.size for v in jax.tree.leaves(second)) / debias
        rms = jnp.sqrt(mean_squares)
        return after, metrics | {"tensor_grad_rms": rms, "least_grad_rms": rms.min(), "grad_rms": jnp.sqrt(total)}

    @staticmethod
    def scalars(result: JobResult, configs) -> list[dict[str, float]]:
        rows = Program.scalars(result, configs)
        for name in ("grad_rms", "least_grad_rms"):
            last = result.curves[name][-tail(len(result.curves[name])) :].astype(np.float64)
            for lane, row in enumerate(rows):
                row[name] = float(last[:, lane].mean())
        return rows


CLAIMS_EXACT = (
    Claim(
        id="O-5", variant="closed form", tier="M", source=f"{WORTSMAN}; derived here",
        statement="With the loss times c the update of Adam is c m / (c sqrt(v) + eps), with the debiased moments m "
        "and v at c = 1, to 1e-5 of c sqrt(v) / (c sqrt(v) + eps).",
        reported=_REPORTED, boundary="20 steps of normal gradients of sizes from 1e-4 to 1; c and eps from 1 to 1e-15.",
        criterion=Within("off", "adam", 0.0, 1e-5),
        control=Control("eps inside the root", Within("off_inside", "adam", 0.0, 1e-5)),
    ),
    Claim(
        id="O-5", variant="only the ratio counts", tier="M", source="derived here",
        statement="If the loss and eps are both multiplied by 2^-20, no bit of an update changes.",
        reported="Not reported as such.", boundary="The same gradients, float32, eps 1e-8, 1e-6 and 1e-4.",
        criterion=Exact("bits_both", "adam", 0.0),
        control=Control("the loss alone multiplied", Exact("bits_loss", "adam", 0.0)),
    ),
)  # fmt: skip


def _claims_at(preset: "EpsilonPreset", size: str) -> list[Claim]:
    at = lambda arm, point: f"{arm}@{point}/{size}"
    costs = lambda arm, smallest: Greater(
        "loss", at(arm, "c1e-6"), at(arm, "natural"), log=False, smallest=smallest
    )  # fmt: skip
    same = lambda arm: Equivalent("loss", at(arm, "c1e-6"), at(arm, "natural"), margin=0.01)
    harmless = lambda point: NonInferior("loss", at("eps1e-6", point), at("eps1e-15", point), margin=0.02)
    far = lambda point: AtLeast("least_grad_rms", at("eps1e-8", point), 1e-6, log=True)

    about = (
        f"Size {size}, AdamW without decay, {preset.train.steps} steps on bytes at {preset.train.learning_rate:g}, "
        "float32; small gradients are made by the factor 1e-6 of the loss (the amplifier), not by size."
    )

    def claim(variant, statement, rule, control):
        return Claim(
            id="O-5", variant=f"{variant}, {size}", family=WORTSMAN, tier="D", source=WORTSMAN, statement=statement,
            reported=_REPORTED, criterion=rule, control=control,
            boundary=about,
        )  # fmt: skip

    return [
        claim(
            "eps 1e-15: scale is nothing",
            "With eps = 1e-15 training on the loss times 1e-6 ends within 0.01 nats of training on the loss itself.",
            same("eps1e-15"), Control("eps = 1e-6", same("eps1e-6")),
        ),
        claim(
            "eps 1e-6: training fails",
            "With eps = 1e-6 the loss times 1e-6 ends at least 0.2 nats above the loss itself.",
            costs("eps1e-6", 0.2), Control("eps = 1e-15", costs("eps1e-15", 0.2)),
        ),
        claim(
            "eps 1e-8: training suffers",
            "With eps = 1e-8 the loss times 1e-6 ends at least 0.05 nats above the loss itself.",
            costs("eps1e-8", 0.05), Control("eps = 1e-15", costs("eps1e-15", 0.05)),
        ),
        claim(
            "natural scale: eps is nothing", "At the natural scale eps = 1e-6 costs less than 0.02 nats against 1e-15.",
            harmless("natural"), Control("the loss times 1e-6", harmless("c1e-6")),
        ),
        claim(
            "natural gradients",
            "At the natural scale the gradient of every tensor ends with a root mean square above 1e-6, a hundred "
            "times the usual eps.", far("natural"), Control("the loss times 1e-6", far("c1e-6")),
        ),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EpsilonPreset(Sweep):
    """The sweep of this experiment: one rate."""

    train: EpsilonConfig = EpsilonConfig(steps=300, learning_rate=0.01, eval_windows=256)
    sizes: tuple[str, ...] = ("w32", "xs")
    test_seeds: tuple[int, ...] = tuple(range(16))
    between: bool = True
    """Whether eps = 1e-8 and 1e-6 also run at the scales between, on the first half of the seeds, for a figure."""


def claims(preset: EpsilonPreset) -> tuple[Claim, ...]:
    return CLAIMS_EXACT + tuple(claim for size in preset.sizes for claim in _claims_at(preset, size))


def plan(preset: EpsilonPreset):
    rate, seeds = preset.train.learning_rate, preset.test_seeds
    half = seeds[: max(1, len(seeds) // 2)]
    cells = [(arm, point, seeds) for arm in EPS for point in ("natural", "c1e-6")]
    if preset.between:
        cells += [(arm, point, half) for arm in ("eps1e-8", "eps1e-6") for point in ("c1e-2", "c1e-4")]
    yield [
        Cell(arm, size, rate, point, "test", own, {"loss_scale": SCALES[point]})
        for size in preset.sizes for arm, point, own in cells
    ]  # fmt: skip


@functools.partial(jax.jit, static_argnames=("b1", "b2"))
def updates(g_TN: jax.Array, eps: jax.Array, *, b1: float = 0.9, b2: float = 0.95) -> jax.Array:
    """Adam's update over the rate `[T, N]`, step by step, for gradients `[T, N]`."""
    rule = adamw(1.0, b1=b1, b2=b2, eps=eps, weight_decay=0.0)
    w = jnp.zeros(g_TN.shape[1:])

    def step(state, g):
        u, state = rule.update(g, state, w)
        return state, -u

    return jax.lax.scan(step, rule.init(w), g_TN)[1]


def closed_form(g_TN: np.ndarray, c: float, eps: float, b1: float = 0.9, b2: float = 0.95) -> dict[str, np.ndarray]:
    """In float64, each [T, N]: the update `u`, what bounds it where m^2 <= v, `bound`, and `inside`, with eps inside
    the root."""
    m, v, found = np.zeros(g_TN.shape[1]), np.zeros(g_TN.shape[1]), {"u": [], "bound": [], "inside": []}
    for t, g in enumerate(g_TN.astype(np.float64), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        m_hat, root = m / (1 - b1**t), np.sqrt(v / (1 - b2**t))
        found["u"].append(c * m_hat / (c * root + eps))
        found["bound"].append(c * root / (c * root + eps))
        found["inside"].append(c * m_hat / np.sqrt((c * root) ** 2 + eps**2))
    return {name: np.stack(rows) for name, rows in found.items()}


def checks(preset: EpsilonPreset) -> list[Run]:
    """Adam's update against its closed form, and the bits of scaled ones."""
    rng = np.random.default_rng(0)
    g = (rng.normal(size=(20, 64)) * 10 ** rng.uniform(-4, 0, 64)).astype(np.float32)
    off, off_inside = [], []
    for c in (1.0, 1e-3, 1e-6):
        for eps in (1e-15, 1e-8, 1e-6):
            u = np.asarray(updates(jnp.asarray(g * np.float32(c)), jnp.float32(eps)), np.float64)
            form = closed_form(g, c, eps)
            off.append(np.max(np.abs(u - form["u"]) / form["bound"]))
            off_inside.append(np.max(np.abs(u - form["inside"]) / form["bound"]))
    both = loss = 0
    for eps in map(np.float32, (1e-8, 1e-6, 1e-4)):
        plain, small = (np.asarray(updates(jnp.asarray(x), jnp.float32(eps))) for x in (g, g * np.float32(2.0**-20)))
        scaled = np.asarray(updates(jnp.asarray(g * np.float32(2.0**-20)), jnp.float32(eps * np.float32(2.0**-20))))
        both += int((plain != scaled).sum())
        loss += int((plain != small).sum())
    metrics = {"off": max(off), "off_inside": max(off_inside), "bits_both": both, "bits_loss": loss}
    return [Run("adam", 0, metrics, point="exact")]


_POINTS = tuple((name, 1 / c) for name, c in SCALES.items())
FIGURES = (
    Curve("loss", "loss", "Training on the loss times 1e-6", "loss (nats per byte)", point="c1e-6", smooth=20,
          start=20),
    Curve("natural", "loss", "Training loss at its natural scale", "loss (nats per byte)", point="natural", smooth=20,
          start=20),
    Curve("gradients", "grad_rms", "Root mean square of the gradient at its natural scale", "root mean square",
          point="natural", log=True, line=1e-8, line_label="eps = 1e-8"),
    Dose("scale", "loss", "Validation loss against the factor of the loss", "1 / c", "loss (nats per byte)", _POINTS,
         log_x=10),
    Dose("rms", "least_grad_rms", "Gradient of the tensor where it is smallest", "1 / c",
         "smallest RMS gradient of a tensor", _POINTS, log_x=10, log_y=True, lines=(Reference("eps = 1e-8", y=1e-8),)),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_CPU = EpsilonPreset()
PRESETS = {
    "smoke": dataclasses.replace(_CPU.quick_look(), between=False),
    "cpu": _CPU,
}

EXPERIMENT = Experiment(
    name="adam-epsilon",
    title="Adam's epsilon and the scale of the gradients",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    check_arms=("adam",),
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
