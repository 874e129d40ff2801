"""Does QK-Clip hold the logits of multi-head latent attention, at no cost, and does it switch itself off?

Written before the first run. The logit of a latent head is the sum of a part whose key the head owns and of a rotary
part whose key all heads share. QK-Clip scales own queries and keys by sqrt(gamma), rotary queries by gamma and the
shared key not at all. Two checks compute this on one layer, each beside a rule that is wrong on purpose.

In training, the decoder has latent attention of one shape (ranks 24 and 16, heads of 16 + 8) at two widths, under Muon.
Its best rate is searched for on tuning seeds. Models of this size hardly reach Kimi K2's tau of 100, so tau is set from
what is observed: 0.6 of the peak logit that the same runs reach on tuning seeds without a clip, and 0.05 of it for the
harmful control. So the clip acts, but nothing follows about an explosion that it would have prevented.

Whether clipping ends is asked at a constant rate: under a cosine, logits stop growing because the rate falls. What
could end it then is weight decay, and how far decay gets is the product of rate, decay and steps. With the published
decay of 0.1 that is below 1 in these short runs. So the question is put with 0.1, and with 0.5, an amplifier that makes
the product about 4; both beside runs without decay. Each has the tau of its own peak.
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
    NonInferior,
    Run,
    Runs,
    Within,
)
from repro.models import ModelConfig, abstract, declarations, init_and_apply, rms_norm, rope
from repro.optim import from_declarations, qk_clip, qk_clip_factor
from repro.report import Curve, Effects, Ladder
from repro.train import TrainConfig
from repro.train.preset import Preset, tuned

K2 = "Kimi K2 (arXiv 2507.20534)"
LOW, HARMFUL, TAU = 0.6, 0.05, 100.0
LATENT = dict(attention="mla", q_rank=24, kv_rank=16, nope_size=16, rope_size=8, value_size=16)

ARMS = (
    Arm("muon", "no clip"),
    Arm("clip_low", "QK-Clip at 0.6 of the peak"),
    Arm("clip_harm", "QK-Clip at 0.05 of the peak"),
    Arm("constant", "constant rate, QK-Clip at 0.6 of the peak", {"schedule": "constant"}),
    Arm("constant_decay", "the same with decay 0.1", {"schedule": "constant", "weight_decay": 0.1}),
    Arm("constant_strong", "the same with decay 0.5", {"schedule": "constant", "weight_decay": 0.5}),
)
HELD = ("constant", "constant_decay", "constant_strong")


def _mechanism() -> list[Claim]:
    scaled = lambda arm: All((Within("held_error", arm, 0.0, 1e-5), Within("scale_error", arm, 0.0, 1e-5)))
    alone = lambda arm: All((Exact("others_changed", arm, 0.0), Within("others_moved", arm, 0.0, 1e-6)))
    about = "One layer in float32, random weights and inputs, one head inflated. Says nothing of training."
    shared = dict(id="K2-2", family=K2, tier="M", source=f"{K2}, section 2.1", boundary=about)
    return [
        Claim(
            variant="logits", **shared,
            statement="On the inputs it was computed from, QK-Clip brings the maximum logit of a latent head above tau "
            "to tau and scales all its logits by exactly gamma.",
            reported="Own queries and keys by sqrt(gamma), rotary queries by gamma, the shared rotary key untouched.",
            criterion=scaled("qk_clip"),
            control=Control("sqrt(gamma) on the rotary queries too", scaled("sqrt_rotary")),
        ),
        Claim(
            variant="other heads", **shared,
            statement="It changes neither a weight nor a logit of any other head.",
            reported="The rotary key is shared by all heads, and left alone for that reason.",
            criterion=alone("qk_clip"),
            control=Control("sqrt(gamma) on the rotary queries and on the shared key", alone("scaled_shared_key")),
        ),
    ]  # fmt: skip


def _claims_at(preset: Preset, size: str) -> list[Claim]:
    at = lambda arm, point="best": f"{arm}@{point}/{size}"
    shape = f"Latent attention at size {size}, {preset.train.steps} steps on bytes, Muon at its best rate"
    off = lambda arm: All((
        AtLeast("clipped_share_peak", at(arm, "constant"), 0.05),
        AtMost("clipped_share_last", at(arm, "constant"), 0.01),
    ))  # fmt: skip
    held = lambda arm: All((
        AtMost("over_tau", at(arm, "threshold"), 1.1, log=True),
        AtMost("peak_over_tau", at(arm, "threshold"), 1.4, log=True),
    ))  # fmt: skip
    harmless = lambda arm: NonInferior("loss", at(arm), at("muon"), margin=0.02)
    rare = lambda place: AtMost("clipped_heads_ever", place, 0.25)

    def claim(id, variant, section, statement, reported, boundary, rule, control):
        return Claim(
            id=id, variant=f"{variant}, {size}", family=K2, tier="D", source=f"{K2}, {section}", statement=statement,
            reported=reported, boundary=f"{shape}; {boundary}", criterion=rule, control=control,
        )  # fmt: skip

    inert = "Heads were clipped during the first 70k of about 220k steps and none afterwards."
    own = "at a constant rate, tau at 0.6 of the peak that the same runs reach without a clip"
    return [
        claim(
            "K2-2", "held in training", "section 2.1",
            "With QK-Clip the largest logit of all heads stays at tau: at most a tenth above it over the last tenth of "
            "training, and never more than 1.4 times it, the growth of one step being allowed.",
            "Maximum logits capped at 100 for the whole run.", "no decay, tau at 0.6 of the observed peak.",
            held("clip_low"), Control("no clip", held("muon")),
        ),
        claim(
            "K2-3", "no harm", "appendix D",
            "QK-Clip that acts (tau at 0.6 of the observed peak) costs less than 0.02 nats of validation loss.",
            "Loss curves overlap with tau = 30 in a 0.5B-active, 3B-parameter model.",
            "no decay. No harm within a margin is not the same as no effect.",
            harmless("clip_low"), Control("a harmful clip, tau at 0.05 of the observed peak", harmless("clip_harm")),
        ),
        claim(
            "K2-4", "switches itself off, decay 0.1", "section 2.1",
            "With weight decay 0.1, clipping acts on at least 5 % of the heads at its height and on at most 1 % in the "
            "last tenth of training.", inert, f"{own}. Rate x decay x steps is below 1.",
            off("constant_decay"), Control("no decay", off("constant")),
        ),
        claim(
            "K2-4", "switches itself off, decay 0.5", "section 2.1",
            "With weight decay 0.5, clipping acts on at least 5 % of the heads at its height and on at most 1 % in the "
            "last tenth of training.", inert, f"{own}. The decay is the amplifier: rate x decay x steps is about 4.",
            off("constant_strong"), Control("no decay", off("constant")),
        ),
        claim(
            "K2-4", "rare", "appendix D", "With weight decay 0.1, at most a quarter of the heads are ever clipped.",
            "12.7 % of the heads in the first 70k steps.", f"{own}; how rare depends on where tau lies.",
            rare(at("constant_decay", "constant")), Control("tau at 0.05 of the observed peak", rare(at("clip_harm"))),
        ),
    ]  # fmt: skip


def claims(preset: Preset) -> tuple[Claim, ...]:
    return (*_mechanism(), *(claim for size in preset.sizes for claim in _claims_at(preset, size)))


def peak(runs: Runs, arm: str, size: str, rate: float) -> float:
    """The largest logit that an arm's tuning runs reach at a rate, mean over seeds."""
    found = [r.metrics["peak_max_logit"] for r in runs.select(arm, size=size, phase="tuning") if r.rate == rate]
    return float(np.mean(found))


def plan(preset: Preset):
    """The best rate, then the peaks at a constant rate, then the test with the thresholds that follow from them."""
    runs, best = yield from tuned(preset, [("muon", size) for size in preset.sizes])
    rates = {size: best["muon", size] for size in preset.sizes}
    runs = yield [
        Cell(arm, size, rates[size], "peak", "tuning", preset.tuning_seeds) for size in preset.sizes for arm in HELD
    ]
    cells = []
    for size, rate in rates.items():
        top = {arm: peak(runs, arm, size, rate) for arm in ("muon", *HELD)}
        taus = {
            "muon": {},
            "clip_low": {"tau": LOW * top["muon"]},
            "clip_harm": {"tau": HARMFUL * top["muon"]},
            **{arm: {"tau": LOW * top[arm]} for arm in HELD},
        }
        cells += [
            Cell(arm, size, rate, "constant" if arm in HELD else "best", "test", preset.test_seeds, settings)
            for arm, settings in taus.items()
        ]
    yield cells


def derive(runs: Runs) -> list[Run]:
    """Largest logits over the threshold of `clip_low`, of the arms with and without the clip: in the last tenth of
    training (geometric mean), and over all steps."""
    derived = []
    for run in runs.select(point="best"):
        if run.arm in ("muon", "clip_low"):
            tau = LOW * peak(runs, "muon", run.size, run.rate)
            ratios = {"over_tau": run.metrics["max_logit"] / tau, "peak_over_tau": run.metrics["peak_max_logit"] / tau}
            derived.append(Run(run.arm, run.seed, ratios, point="threshold", size=run.size))
    return derived


def checks(preset: Preset) -> list[Run]:
    """QK-Clip against its definition, and two wrong rules, on one layer of latent attention."""
    return [Run(name, 0, metrics, point="") for name, metrics in mechanism_metrics().items()]


def mechanism_metrics() -> dict[str, dict[str, float]]:
    """What QK-Clip and two wrong rules do to the logits of a layer.

    held_error: |max logit after - tau| / tau of the inflated head. scale_error: largest |z' - gamma z| over its logits,
    relative to tau. others_changed: weights outside that head whose bits changed. others_moved: largest |z' - z| over
    the logits of the other heads, relative to tau.
    """
    config, hot, rng = ModelConfig(layers=1, **LATENT), 1, np.random.default_rng(0)
    shapes = jax.eval_shape(init_and_apply(config)[0], jax.random.key(0))["blocks"]["attention"]
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * x.shape[1] ** -0.5, jnp.float32)  # [1, inputs, ...]
    weights = jax.tree.map(draw, shapes)
    for norm in ("q_norm", "kv_norm"):
        weights[norm]["gain"] = 1.0 + weights[norm]["gain"]
    layouts = from_declarations(declarations(abstract(config)))["blocks"]["attention"]
    whole = dataclasses.replace(layouts["q_up_CHJ"], parts=None, qk="q")  # as if the head owned its rotary key
    wrong_layouts = layouts | {"q_up_CHJ": whole, "k_rope_DR": dataclasses.replace(layouts["k_rope_DR"], qk="")}
    grow = jnp.ones((1, 1, config.heads, 1)).at[0, 0, hot].set(20.0)
    weights = weights | {name: weights[name] * grow for name in ("q_up_CHJ", "k_up_CHK")}
    x_BTD = jnp.asarray(rng.normal(size=(4, 32, config.width)), jnp.float32)
    mask = np.tril(np.ones((32, 32), bool))

    def logits(w):
        w, K = jax.tree.map(lambda x: x[0], w), config.nope_size
        latent = lambda down, norm: rms_norm(x_BTD @ w[down], w[norm]["gain"], config.norm_eps)
        q = jnp.einsum("btc,chj->bthj", latent("q_down_DC", "q_norm"), w["q_up_CHJ"])
        k = jnp.einsum("bsc,chk->bshk", latent("kv_down_DC", "kv_norm"), w["k_up_CHK"])
        turned = rope(q[..., K:], config.rope_theta), rope((x_BTD @ w["k_rope_DR"])[:, :, None], config.rope_theta)
        z = jnp.einsum("bthk,bshk->bhts", q[..., :K], k) + jnp.einsum("bthr,bsr->bhts", turned[0], turned[1][:, :, 0])
        return jnp.where(mask, z * config.head_size**-0.5, 0.0)

    def others(w):
        """The weights with those of the inflated head set to zero."""
        kept = jnp.ones((1, 1, config.heads, 1)).at[0, 0, hot].set(0.0)
        return w | {name: w[name] * kept for name in ("q_up_CHJ", "k_up_CHK")}

    @jax.jit
    def measured(weights):
        before = logits(weights)
        top_LH = jnp.where(mask, before, -jnp.inf).max((0, 2, 3))[None]
        gamma = qk_clip_factor(top_LH, TAU)[0, hot]
        sqrt_rotary = qk_clip(weights, top_LH, tau=TAU, layouts=wrong_layouts)
        rules = {
            "qk_clip": qk_clip(weights, top_LH, tau=TAU, layouts=layouts),
            "sqrt_rotary": sqrt_rotary,
            "scaled_shared_key": sqrt_rotary | {"k_rope_DR": weights["k_rope_DR"] * jnp.sqrt(gamma)},
        }
        found = {}
        for name, clipped in rules.items():
            after = logits(clipped)
            changed = jax.tree.map(lambda a, b: jnp.sum(a != b), others(clipped), others(weights))
            found[name] = {
                "held_error": jnp.abs(jnp.where(mask, after, -jnp.inf)[:, hot].max() - TAU) / TAU,
                "scale_error": jnp.abs(after - gamma * before)[:, hot].max() / TAU,
                "others_changed": sum(jax.tree.leaves(changed)),
                "others_moved": jnp.abs(after - before).at[:, hot].set(0.0).max() / TAU,
            }
        return found

    return jax.tree.map(float, measured(weights))


FIGURES = (
    Curve("max_logit", "max_logit", "Largest attention logit at the best rate", "max logit",
          arms=("muon", "clip_low", "clip_harm"), point="best", log=True),
    Curve("loss", "loss", "Training loss at the best rate", "loss (nats per byte)",
          arms=("muon", "clip_low", "clip_harm"), point="best", smooth=10, start=30),
    Curve("clipped_share", "clipped_share", "Share of heads clipped at a constant rate", "share of heads", arms=HELD,
          point="constant", smooth=20),
    Curve("max_logit_constant", "max_logit", "Largest attention logit at a constant rate, clipped", "max logit",
          arms=HELD, point="constant", log=True),
    Ladder("rates", "loss", "Validation loss against the rate, no clip", "loss (nats per byte)", arms=("muon",),
           log=False),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_CPU = Preset(
    train=TrainConfig(steps=250, eval_windows=256, model=ModelConfig(**LATENT)),
    sizes=("w32", "xs"),
    rates=(0.02,),
    tuning_rates=(0.02, 0.02828, 0.04),
    tuning_limit=6,
)
_LOOK = _CPU.quick_look()
PRESETS = {
    "smoke": dataclasses.replace(
        _LOOK, tuning_rates=(0.02, 0.02828), tuning_limit=2, tuning_seeds=(1000,),
        train=dataclasses.replace(_LOOK.train, schedule="constant"),  # one program; three steps know no cosine
    ),
    "cpu": _CPU,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="qk-clip-mla",
    title="QK-Clip on multi-head latent attention",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    derive=derive,
    check_arms=("qk_clip", "sqrt_rotary", "scaled_shared_key"),
    figures=FIGURES,
    words={
        "peak_over_tau": "largest attention logit of all steps over tau",
        "clipped_heads_ever": "share of heads ever above tau",
        "clipped_share_last": "share of heads above tau, last tenth",
        "clipped_share_peak": "share of heads above tau, worst tenth",
        "over_tau": "largest attention logit over tau",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
