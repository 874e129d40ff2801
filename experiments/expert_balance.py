"""Do bias rules balance experts without an auxiliary loss, and does a router z-loss keep router logits small?

Written before the first run. The decoder has two layers of 8 experts, 2 per token and hidden units of 32, beside a
shared expert of 64; nothing limits an expert's tokens, so imbalance itself costs no token. Pilots with another code
base had seen such models collapse without balancing (MaxVio, the largest load over the mean minus 1, near its ceiling
of 3). That MaxVio should be above 1 without balancing and below 0.3 with it was set before those pilots, the other bars
after them.

The sign rule moves a bias by gamma per step, so its reach is gamma times the steps: with the published gamma of 0.001,
0.25 in these 250 steps, about the spread of sigmoid scores. A gamma of 0.01 is the amplifier, the published one is
judged too. Quantile Balancing has no such constant; it is also asked for balance between steps 5 and 24.

All arms train at one rate, the best of the arm without balancing, found on tuning seeds, which favours that arm. The
auxiliary loss is the sequence-wise one with a coefficient of 0.01. The z-loss is asked of softmax routers, for which it
was made, with a coefficient of 0.001 and, as an amplifier, 0.01; nothing balances those arms, so that nothing else acts
on their routers.

Four checks compute the rules on given scores, each beside one that is wrong on purpose.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import (
    All,
    Arm,
    AtLeast,
    AtMost,
    Cell,
    Claim,
    Control,
    Exact,
    Experiment,
    Greater,
    NonInferior,
    Ratio,
    Run,
    Within,
    swapped,
)
from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig
from repro.models.functional import (
    histogram_bias,
    loads,
    margin_histogram,
    quantile_bias,
    select,
    sign_update,
    top_k_gates,
)
from repro.report import Curve, Effects, Ladder
from repro.train import TrainConfig
from repro.train.optimizer import OptimizerConfig
from repro.train.preset import Preset, tuned

V3, K3, ST = "DeepSeek-V3 (arXiv 2412.19437)", "Kimi K3", "ST-MoE (arXiv 2202.08906)"
COLLAPSED, BALANCED, STARVED, EARLY, MARGIN, HARM = 1.0, 0.3, 0.5, 0.5, 0.02, 5.0
"""MaxVio without and with balancing, least load over the mean, early MaxVio, nats that are no harm, and the factor on
the rate that is."""
PUBLISHED, FAST = 1e-3, 1e-2
_SIGN = {"model.moe.balance": "sign"}
_SOFTMAX = {"model.moe.affinity": "softmax"}
ARMS = (
    Arm("none", "no balancing"),
    Arm("sign_published", "sign rule, gamma 0.001", _SIGN | {"model.moe.balance_rate": PUBLISHED}),
    Arm("sign", "sign rule, gamma 0.01", _SIGN | {"model.moe.balance_rate": FAST}),
    Arm("quantile", "Quantile Balancing", {"model.moe.balance": "quantile"}),
    Arm("auxiliary", "sequence-wise loss, 0.01", {"model.moe.sequence_loss": 1e-2}),
    Arm("softmax", "softmax router", _SOFTMAX),
    Arm("z_loss", "softmax router, z-loss 0.001", _SOFTMAX | {"model.moe.router_z_loss": 1e-3}),
    Arm("z_strong", "softmax router, z-loss 0.01", _SOFTMAX | {"model.moe.router_z_loss": 1e-2}),
)
_NAMES = tuple(arm.name for arm in ARMS)
CHECKS = (
    "selected_only", "biased_gates", "sign_rule", "sign_reversed", "margins", "biased_margins", "bins_1000", "bins_10",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BalancePreset(Preset):
    """The sweep of this experiment."""

    arms: tuple[str, ...] = _NAMES
    """The arms that run; a claim is judged where all that it reads does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "none" not in self.arms or not set(self.arms) <= set(_NAMES):
            raise ReproError(f"arms is {self.arms}; take none and any of {', '.join(_NAMES)}.")


def _mechanism() -> list[Claim]:
    about = "Scores of 4,096 tokens for 8 experts, drawn once and held fixed. Says nothing of training."
    selects = lambda arm: All((Within("gate_error", arm, 0.0, 1e-6), Exact("bias_gradient", arm, 0.0)))

    def claim(id, variant, source, statement, reported, rule, right, control, wrong):
        return Claim(
            id=id, variant=variant, tier="M", family=source.split(",")[0], source=source, statement=statement,
            reported=reported, boundary=about, criterion=rule(right), control=Control(control, rule(wrong)),
        )  # fmt: skip

    return [
        claim(
            "V3-8", "selection only", f"{V3}, section 2.1.2",
            "The bias decides who is chosen and nothing else: gates are shares of the scores without it, and no "
            "gradient reaches it.",
            "Used for routing only; the gating value comes from the original score.",
            selects, "selected_only", "gates from biased scores", "biased_gates",
        ),
        claim(
            "V3-8", "rule", f"{V3}, section 2.1.2",
            "On scores that do not change, 1,000 steps of the sign rule with gamma 0.001 bring MaxVio below 0.05.",
            "Overloaded experts get less bias, underloaded ones more.",
            lambda arm: Within("violation_after", arm, 0.0, 0.05), "sign_rule", "the other sign", "sign_reversed",
        ),
        claim(
            "K3-4", "margins", f"{K3}, eq. 13",
            "At the cutoffs of one step, the next bias of an expert lets in its share of the tokens, T k / E = 1,024: "
            "not more have a margin above it, not fewer one that reaches it, to 2 tokens.",
            "The bias is a quantile of the margins of unbiased scores to each token's cutoff.",
            lambda arm: Within("choosers_off", arm, 0.0, 2.0), "margins", "margins of biased scores", "biased_margins",
        ),
        claim(
            "K3-4", "histogram", f"{K3}, eq. 13",
            "The form with 1,000 bins finds the biases of the exact form to two widths of its bins.",
            "Counts of 1,000 uniform bins, so that one reduction over all devices suffices.",
            lambda arm: Within("bins_off", arm, 0.0, 2.0), "bins_1000", "10 bins", "bins_10",
        ),
    ]  # fmt: skip


def _claims_at(preset: BalancePreset, size: str) -> list[Claim]:
    at = lambda arm, point="shared": f"{arm}@{point}/{size}"
    shape = (
        f"Size {size}, 8 experts of 32 hidden units, 2 per token, {preset.train.steps} steps of "
        f"{preset.config(size).batch_size * preset.config(size).length} bytes, AdamW at the best rate without balancing"
    )

    def balanced(arm):
        return All((
            AtLeast("max_violation", at("none"), COLLAPSED), AtMost("max_violation", at(arm), BALANCED),
            AtLeast("least_load", at(arm), STARVED),
        ))  # fmt: skip

    def early(arm):
        return All((
            AtMost("early_violation", at(arm), EARLY), Greater("early_violation", at("sign"), at(arm)),
        ))  # fmt: skip

    harmless = lambda arm, reference="none": NonInferior("loss", at(arm), at(reference), margin=MARGIN)
    harmful = Control(
        f"no balancing at {HARM:g} times the rate", NonInferior("loss", at("none", "high"), at("none"), margin=MARGIN)
    )
    off = Control(
        "no balancing", All((AtMost("max_violation", at("none"), BALANCED), AtLeast("least_load", at("none"), STARVED)))
    )

    def smaller(arm):
        return All((
            Ratio("router_log_z", at("softmax"), at(arm), at_least=2.0),
            Greater("router_logit_max", at("softmax"), at(arm)),
        ))  # fmt: skip

    def exchanged(rule):
        return Control("arms exchanged", All(tuple(map(swapped, rule.criteria))))

    def claim(id, variant, family, section, statement, reported, rule, control, boundary=shape):
        return Claim(
            id=id, variant=f"{variant}, {size}", family=family, tier="D", source=f"{family}, {section}",
            statement=statement, reported=reported, boundary=boundary, criterion=rule, control=control,
        )  # fmt: skip

    bars = (
        "in the last tenth MaxVio, above 1 without balancing, is below 0.3, and the least loaded expert of any layer "
        "gets at least half of an even share."
    )
    even = "Gamma 0.001 over 14.3T tokens, bias only in selection, no token dropped."
    z = "From memory of the paper: the penalty stabilises training at no cost in quality."
    return [
        claim("V3-8", "gamma 0.001", V3, "section 2.1.2", f"With the published gamma of the sign rule, {bars}", even,
              balanced("sign_published"), off, f"{shape}; the rule's reach is 0.25 in so few steps."),
        claim("V3-8", "gamma 0.01", V3, "section 2.1.2", f"With gamma ten times the published one, {bars}", even,
              balanced("sign"), off, f"{shape}; gamma is the amplifier."),
        claim("V3-8", "no harm", V3, "section 2.1.2",
              "Balancing by the sign rule with gamma 0.01 costs less than 0.02 nats of validation loss.",
              even, harmless("sign"), harmful),
        claim("V3-8", "no auxiliary loss", V3, "section 2.1.2",
              "The sign rule with gamma 0.01 is at most 0.02 nats worse than a sequence-wise auxiliary loss of 0.01.",
              even, harmless("sign", "auxiliary"), harmful),
        claim("K3-4", "balance", K3, "eq. 13", f"With Quantile Balancing, {bars}", "No number.",
              balanced("quantile"), off),
        claim("K3-4", "from the start", K3, "eq. 13",
              "Between steps 5 and 24 Quantile Balancing has a MaxVio below 0.5, and below that of the sign rule with "
              "gamma 0.01.", "No constant of speed: one step's margins decide.", early("quantile"),
              Control("no balancing", early("none"))),
        claim("K3-4", "no harm", K3, "eq. 13",
              "Quantile Balancing costs less than 0.02 nats of validation loss.", "No number.", harmless("quantile"),
              harmful),
        *(
            claim("S-9", f"coefficient {words}", ST, "router z-loss",
                  f"A router z-loss with coefficient {words} halves the log-sum-exp of the router's logits (root mean "
                  "square, last tenth) at least, and the largest logit is smaller too.", z, smaller(arm),
                  exchanged(smaller(arm)), f"{shape}; softmax scores, nothing balances.")
            for arm, words in (("z_loss", "0.001"), ("z_strong", "0.01"))
        ),
        claim("S-9", "no harm", ST, "router z-loss",
              "A router z-loss with coefficient 0.001 costs less than 0.02 nats of validation loss.", z,
              harmless("z_loss", "softmax"), harmful, f"{shape}; softmax scores, nothing balances."),
    ]  # fmt: skip


def claims(preset: BalancePreset) -> tuple[Claim, ...]:
    runs = set(preset.arms)
    reads = lambda claim: {
        at.partition("@")[0] for rule in (claim.criterion, claim.control.criterion) for at in rule.reads()
    }
    trained = (claim for size in preset.sizes for claim in _claims_at(preset, size))
    return (*_mechanism(), *(claim for claim in trained if reads(claim) <= runs))


def plan(preset: BalancePreset):
    """The best rate without balancing, then every arm at it, and the control at five times the rate."""
    _, best = yield from tuned(preset, [("none", size) for size in preset.sizes])
    yield [
        Cell(arm, size, factor * best["none", size], point, "test", preset.test_seeds)
        for size in preset.sizes
        for arm, point, factor in (*((arm, "shared", 1.0) for arm in preset.arms), ("none", "high", HARM))
    ]


def checks(preset: BalancePreset) -> list[Run]:
    """The rules on given scores, and four that are wrong."""
    return [Run(name, 0, metrics, point="") for name, metrics in mechanism_metrics().items()]


def mechanism_metrics() -> dict[str, dict[str, float]]:
    """What each rule does with scores that are skewed towards the later experts.

    gate_error: largest difference of a gate from the share of its unbiased score; bias_gradient: largest |derivative|
    of a function of the gates by the bias. violation_after: MaxVio after 1,000 steps of the sign rule. choosers_off:
    how far T k / E lies outside the numbers of tokens whose margins are above minus the bias and reach it, at the
    cutoffs of the step, the mean of the biases given back. bins_off: largest difference of the histogram's biases from
    the exact ones, in widths of 1,000 bins.
    """
    T, E, k = 4096, 8, 2
    rng = np.random.default_rng(0)
    scores = (1 / (1 + np.exp(-rng.normal(size=(T, E)) - np.linspace(-1, 1, E)))).astype(np.float32)
    bias = (0.2 * rng.normal(size=E)).astype(np.float32)

    @jax.jit
    def computed(scores, bias):
        def gates_of(shift, b):
            gates, experts = top_k_gates(scores + shift * b, (1 - shift) * b, k)
            return jnp.sin(gates).sum(), (gates, experts)

        def after(sign):
            step = lambda b, _: (sign_update(b, loads(select(scores, b, k)[0], E), sign * PUBLISHED), None)
            return loads(select(scores, jax.lax.scan(step, jnp.zeros(E), None, 1000)[0], k)[0], E)

        cutoff = select(scores, bias, k)[1]
        binned = {bins: margin_histogram(scores, cutoff, bias, bins) for bins in (1000, 10)}
        gates = {s: jax.grad(gates_of, 1, has_aux=True)(s, bias) for s in (0.0, 1.0)}
        return {
            "gates": gates, "after": {sign: after(sign) for sign in (1.0, -1.0)}, "cutoff": cutoff,
            "margins": {s: quantile_bias(scores + s * bias, cutoff, k) for s in (0.0, 1.0)},
            "histograms": {bins: histogram_bias(*found, k) for bins, found in binned.items()}, "width": binned[1000][2],
        }  # fmt: skip

    found = jax.tree.map(np.asarray, computed(scores, bias))
    margins = np.float64(scores) - np.float64(found["cutoff"])[:, None]
    raw = -np.sort(margins, 0)[T - 1 - T * k // E]  # by NumPy, and only for the mean that was taken away

    def gates(shift):
        gradient, (given, experts) = found["gates"][shift]
        own = np.take_along_axis(np.float64(scores), experts, 1)
        return {
            "gate_error": float(np.abs(given - own / own.sum(1, keepdims=True)).max()),
            "bias_gradient": float(np.abs(gradient).max()),
        }

    violation = lambda load: {"violation_after": float(load.max() / load.mean() - 1)}

    def choosers_off(b):
        # Where an expert is itself the cutoff of many tokens, these have one margin, so there are two counts.
        need = -(np.float64(b) - b.mean() + raw.mean())
        above, reached = (margins > need + 1e-6).sum(0), (margins > need - 1e-6).sum(0)
        return {"choosers_off": float(max((above - T * k / E).max(), (T * k / E - reached).max(), 0))}

    return {
        "selected_only": gates(0.0), "biased_gates": gates(1.0),
        "sign_rule": violation(found["after"][1.0]), "sign_reversed": violation(found["after"][-1.0]),
        **{
            name: choosers_off(found["margins"][shift])
            for name, shift in (("margins", 0.0), ("biased_margins", 1.0))
        },
        **{
            f"bins_{bins}": {
                "bins_off": float(np.abs(found["histograms"][bins] - found["margins"][0.0]).max() / found["width"])
            }
            for bins in (1000, 10)
        },
    }  # fmt: skip


_SIGMOID = ("none", "sign_published", "sign", "quantile", "auxiliary")
FIGURES = (
    Curve("violation", "max_violation", "Largest load over the mean, minus 1, worse layer", "MaxVio", arms=_SIGMOID,
          point="shared", smooth=5),
    Curve("least_load", "least_load", "Least load over the mean, any layer", "share of an even load", arms=_SIGMOID,
          point="shared", smooth=5),
    Curve("loss", "loss", "Training loss at the shared rate", "loss (nats per byte)", point="shared", smooth=10,
          start=30),
    Curve("log_z", "router_log_z", "Log-sum-exp of the router's logits, root mean square",
          "RMS log-sum-exp of the router (nats)", arms=("softmax", "z_loss", "z_strong"), point="shared", log=True),
    Curve("logits", "router_logit_max", "Largest router logit", "largest |router logit|",
          arms=("softmax", "z_loss", "z_strong"), point="shared", log=True),
    Ladder("rates", "loss", "Validation loss against the rate, no balancing", "loss (nats per byte)", arms=("none",),
           log=False),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_CPU = BalancePreset(
    train=TrainConfig(
        steps=250, eval_windows=256, optimizer="adamw", optim=OptimizerConfig(),
        model=ModelConfig(moe=MoEConfig(experts=8, active=2, ffn=32, shared=2)),
    ),
    sizes=("xs",),
    rates=(0.005,),
    tuning_rates=(0.0025, 0.005, 0.01),
    tuning_limit=6,
)  # fmt: skip
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), arms=("none", "quantile"), tuning_rates=(0.005, 0.01), tuning_limit=2, tuning_seeds=(1000,)
    ),
    "cpu": _CPU,
    "cpu-sizes": dataclasses.replace(_CPU, sizes=("w32", "w128")),
}  # fmt: skip

EXPERIMENT = Experiment(
    name="expert-balance",
    title="Balancing experts by a bias, and the router z-loss",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    check_arms=CHECKS,
    figures=FIGURES,
    words={
        "early_violation": "MaxVio, steps 5 to 24",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
