"""Do attention logits explode under Muon, and what do QK-Clip, QK norm and a soft-cap do about it?

Written before the first run: the claims, their rules and controls below, the arms, and how rates are chosen.

Rates. The best rate of AdamW and of Muon is searched for on tuning seeds, in steps of sqrt(2), by validation loss; the
test seeds then run at it ("best"). All other comparisons are at fixed rates of the shared ladder: the lowest ("low")
and the highest ("stress"). The stress rate is several times above every arm's best rate. It is an amplifier, declared
in each claim that uses it, and the same question is put at the best rate beside it.

Thresholds. tau = 100 is Kimi K2's. The low tau of the no-harm claim is 0.6 of the peak logit that Muon's tuning runs
reach at the best rate, the harmful one of its control 0.05 of it: so the clip acts, at a scale where 100 is not reached.
"""

import dataclasses
from collections import defaultdict

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
    Runs,
    Trend,
    Within,
    swapped,
)  # fmt: skip
from repro.models import SIZES, ModelConfig
from repro.models.attention import MultiHeadAttention
from repro.optim import from_declarations, qk_clip
from repro.optim.qk_clip import qk_clip_factor
from repro.report import Curve, Effects, Ladder, Width
from repro.train import TrainConfig
from repro.train.preset import Preset, tuned

TAU = 100.0
CAP = 50.0

ARMS = (
    Arm("adamw", "AdamW", {"optimizer": "adamw"}),
    Arm("muon", "Muon", {"optimizer": "muon"}),
    Arm("muon_decay", "Muon + decay 0.1", {"optimizer": "muon", "weight_decay": 0.1}),
    Arm("muon_clip", "Muon + QK-Clip 100", {"optimizer": "muon", "tau": TAU}),
    Arm("muon_decay_clip", "Muon + decay + QK-Clip 100", {"optimizer": "muon", "weight_decay": 0.1, "tau": TAU}),
    Arm("muon_clip_low", "Muon + QK-Clip at 0.6 of the peak", {"optimizer": "muon"}),
    Arm("muon_clip_harm", "Muon + QK-Clip at 0.05 of the peak", {"optimizer": "muon"}),
    Arm("muon_qk_norm", "Muon + QK RMSNorm", {"optimizer": "muon", "model.qk_norm": "rms"}),
    Arm("muon_soft_cap", "Muon + soft-cap 50", {"optimizer": "muon", "model.soft_cap": CAP}),
    Arm("adamw_qk_norm", "AdamW + QK LayerNorm", {"optimizer": "adamw", "model.qk_norm": "layer"}),
)

K2 = "Kimi K2 (arXiv 2507.20534)"
PROXIES = "Wortsman et al. (arXiv 2309.14322)"
CAPPED = "Gemma 2 (arXiv 2408.00118) and Kimi K2 (arXiv 2507.20534)"

MECHANISM = Claim(
    id="K2-2", variant="mechanism", family=K2, tier="M", source=f"{K2}, section 2.1",
    statement="On the inputs it was computed from, QK-Clip brings the maximum logit of a head above tau to tau, scales "
    "all its logits by exactly gamma, and leaves the weights of every other head bitwise alone.",
    reported="The rule itself; applied per head after each optimizer step.",
    boundary="Multi-head attention in float32, random weights and inputs, one head inflated and one with a negative "
    "maximum. Says nothing of training.",
    criterion=All((
        Within("held_error", "qk_clip", 0.0, 1e-5),
        Within("scale_error", "qk_clip", 0.0, 1e-5),
        Exact("others_changed", "qk_clip", 0.0),
    )),
    control=Control("one gamma shared by all heads of the layer", All((
        Within("held_error", "qk_clip_shared", 0.0, 1e-5),
        Within("scale_error", "qk_clip_shared", 0.0, 1e-5),
        Exact("others_changed", "qk_clip_shared", 0.0),
    ))),
)  # fmt: skip


def _claims_at_size(size: str) -> list[Claim]:
    """The claims about training that are judged at every size."""
    at = lambda place: f"{place}/{size}"
    shape = f"At size {size}: a few hundred steps on bytes"
    return [
        Claim(
            id="K2-1", variant=f"growth at the stress rate, {size}", family=K2, tier="D", source=f"{K2}, section 2.1",
            statement="Under Muon without weight decay the maximum attention logit grows beyond 100.",
            reported="Above 1000 under vanilla Muon.",
            boundary=f"{shape}, at a learning rate several times above the best one (the amplifier). The paper: 9B "
            "active of 53B parameters at a usual rate.",
            criterion=AtLeast("max_logit", at("muon@stress"), TAU, log=True),
            control=Control("the mechanism switched off: QK RMSNorm at the same rate",
                            AtLeast("max_logit", at("muon_qk_norm@stress"), TAU, log=True)),
        ),
        Claim(
            id="K2-1", variant=f"Muon against AdamW, each at its best rate, {size}", family=K2, tier="D",
            source=f"{K2}, section 2.1",
            statement="With each optimizer at its own best rate, the maximum logit under Muon is at least a quarter "
            "larger than under AdamW.",
            reported="Explosion is described as more frequent with Muon than with AdamW; no ratio is given.",
            boundary=f"{shape}, no weight decay, rates tuned by validation loss on a sqrt(2) ladder.",
            criterion=Greater("max_logit", at("muon@best"), at("adamw@best"), smallest=1.25),
            control=Control("arms exchanged",
                            swapped(Greater("max_logit", at("muon@best"), at("adamw@best"), smallest=1.25))),
        ),
        Claim(
            id="K2-2", variant=f"held in training, {size}", family=K2, tier="D", source=f"{K2}, section 2.1",
            statement="With QK-Clip at tau = 100 the maximum logit stays at tau: at most a tenth above it over the last "
            "tenth of training, the growth of one step being allowed.",
            reported="Maximum logits capped at 100 for the whole run.",
            boundary=f"{shape}, at the stress rate, where it would not stay there by itself.",
            criterion=AtMost("max_logit", at("muon_clip@stress"), 1.1 * TAU, log=True),
            control=Control("no clip", AtMost("max_logit", at("muon@stress"), 1.1 * TAU, log=True)),
        ),
        Claim(
            id="K2-3", variant=f"no harm at the best rate, {size}", family=K2, tier="D",
            source=f"{K2}, appendix D",
            statement="QK-Clip that acts (tau at 0.6 of the observed peak) costs less than 0.02 nats of validation loss.",
            reported="Loss curves overlap with tau = 30 in a 0.5B-active, 3B-parameter model.",
            boundary=f"{shape}, at Muon's best rate. No harm within a margin is not the same as no effect.",
            criterion=NonInferior("loss", at("muon_clip_low@best"), at("muon@best"), margin=0.02),
            control=Control("a harmful clip, tau at 0.05 of the observed peak",
                            NonInferior("loss", at("muon_clip_harm@best"), at("muon@best"), margin=0.02)),
        ),
        Claim(
            id="K2-4", variant=f"switches itself off, {size}", family=K2, tier="D", source=f"{K2}, section 2.1",
            statement="With weight decay 0.1, clipping acts on at least 5 % of the heads at its height and on at most "
            "1 % in the last tenth of training.",
            reported="Heads were clipped during the first 70k of about 220k steps and none afterwards.",
            boundary=f"{shape}, at the stress rate under a cosine; at the best rate no head reaches 100 and the "
            "question would be empty.",
            criterion=All((
                AtLeast("clipped_share_peak", at("muon_decay_clip@stress"), 0.05),
                AtMost("clipped_share_last", at("muon_decay_clip@stress"), 0.01),
            )),
            control=Control("no weight decay", All((
                AtLeast("clipped_share_peak", at("muon_clip@stress"), 0.05),
                AtMost("clipped_share_last", at("muon_clip@stress"), 0.01),
            ))),
        ),
        Claim(
            id="S-7", variant=f"capped, {size}", family=CAPPED, tier="M",
            source="Gemma 2 (arXiv 2408.00118), section 2",
            statement="A soft-cap of 50 keeps the magnitude of every logit that the softmax sees at or below 50.",
            reported="Attention logits capped at 50.",
            boundary=f"{shape}, over every step of training at the stress rate.",
            criterion=Within("max_capped_logit", at("muon_soft_cap@stress"), 0.0, CAP),
            control=Control("no cap", Within("max_capped_logit", at("muon@stress"), 0.0, CAP)),
        ),
        Claim(
            id="S-7", variant=f"raw, {size}", family=CAPPED, tier="D", source=f"{K2}, section 2.1",
            statement="The soft-cap does not bound the raw logit: it reaches at least half of what it is without a cap.",
            reported="Raw logits are said to explode under a soft-cap; no number is given.",
            boundary=f"{shape}, at the stress rate.",
            criterion=Ratio("max_logit", at("muon_soft_cap@stress"), at("muon@stress"), at_least=0.5),
            control=Control("QK RMSNorm in place of the cap",
                            Ratio("max_logit", at("muon_qk_norm@stress"), at("muon@stress"), at_least=0.5)),
        ),
    ]  # fmt: skip


def _claims_at_one_size(size: str) -> list[Claim]:
    """Further claims, judged where there is one size: with more, the family would outgrow what 8 seeds can decide."""
    at = lambda place: f"{place}/{size}"
    shape = f"At size {size}: a few hundred steps on bytes"
    return [
        Claim(
            id="K2-1", variant=f"growth at the best rate, {size}", family=K2, tier="D", source=f"{K2}, section 2.1",
            statement="Under Muon without weight decay and at its best rate the maximum attention logit grows beyond 100.",
            reported="Above 1000 under vanilla Muon.",
            boundary=f"{shape}; the plain setting, without an amplifier. A null here is not a null at scale.",
            criterion=AtLeast("max_logit", at("muon@best"), TAU, log=True),
            control=Control("clipped at 0.6 of the observed peak",
                            AtLeast("max_logit", at("muon_clip_low@best"), TAU, log=True)),
        ),
        Claim(
            id="K2-4", variant=f"rare, {size}", family=K2, tier="D", source=f"{K2}, appendix D",
            statement="With weight decay 0.1, at most a quarter of the heads are ever clipped.",
            reported="12.7 % of the heads in the first 70k steps.",
            boundary=f"{shape}, at the stress rate.",
            criterion=AtMost("clipped_heads_ever", at("muon_decay_clip@stress"), 0.25),
            control=Control("tau at 0.05 of the observed peak",
                            AtMost("clipped_heads_ever", at("muon_clip_harm@best"), 0.25)),
        ),
    ]  # fmt: skip


def _claims_over_rates(size: str) -> list[Claim]:
    """Claims that compare rates of the shared ladder."""
    at = lambda place: f"{place}/{size}"
    shape = f"At size {size}: a few hundred steps on bytes"
    equal = Greater("max_logit", at("muon@low"), at("adamw@low"), smallest=1.25)
    sensitivity = Greater("lr_sensitivity", at("adamw@ladder"), at("adamw_qk_norm@ladder"), log=False, smallest=0.02)
    return [
        Claim(
            id="K2-1", variant=f"Muon against AdamW at an equal rate, {size}", family=K2, tier="D", source=f"{K2}, section 2.1",
            statement="At the same learning rate, with matched update size, the maximum logit under Muon is at least a "
            "quarter larger than under AdamW.",
            reported="Explosion is described as more frequent with Muon than with AdamW; no ratio is given.",
            boundary=f"{shape}, no weight decay, at the lowest rate of the shared ladder.",
            criterion=equal, control=Control("arms exchanged", swapped(equal)),
        ),
        Claim(
            id="S-1", variant=f"growth with the rate, {size}", family=PROXIES, tier="D", source=f"{PROXIES}, section 3.1.1",
            statement="Under AdamW the maximum logit at the highest rate of the ladder is at least ten times that at "
            "the lowest.",
            reported="Logits grow with the rate; runs above 10,000 diverge.",
            boundary=f"{shape}. The paper: 2.4M to 4.8B parameters, 100k steps.",
            criterion=Greater("max_logit", at("adamw@stress"), at("adamw@low"), smallest=10.0),
            control=Control("with QK LayerNorm",
                            Greater("max_logit", at("adamw_qk_norm@stress"), at("adamw_qk_norm@low"), smallest=10.0)),
        ),
        Claim(
            id="S-1", variant=f"sensitivity, {size}", family=PROXIES, tier="D", source=f"{PROXIES}, sections 2.2 and 3.1.1",
            statement="QK LayerNorm lowers the learning-rate sensitivity under AdamW by at least 0.02 nats.",
            reported="Lower sensitivity at every size, shown in figures.",
            boundary=f"{shape}; the mean over three rates a half-decade apart, the same for both arms.",
            criterion=sensitivity, control=Control("arms exchanged", swapped(sensitivity)),
        ),
    ]  # fmt: skip


def _trend(sizes: tuple[str, ...]) -> Claim:
    rule = Trend("max_logit", "muon@best", "adamw@best", sizes=tuple((s, float(SIZES[s].width)) for s in sizes))
    return Claim(
        id="K2-1", variant="Muon against AdamW over width", family=K2, tier="D", source=f"{K2}, section 2.1",
        statement="The ratio of maximum logits, Muon to AdamW, each at its best rate, rises with width.",
        reported="Nothing over width; the claim is made at 9B active of 53B parameters.",
        boundary=f"Widths {', '.join(str(SIZES[s].width) for s in sizes)}; a trend over a factor of four says nothing "
        "about a factor of a hundred.",
        criterion=rule, control=Control("arms exchanged", swapped(rule)),
    )  # fmt: skip


def claims(preset: Preset) -> tuple[Claim, ...]:
    chosen = [MECHANISM] if len(preset.sizes) == 1 else []
    for size in preset.sizes:
        chosen += _claims_at_size(size)
    if len(preset.sizes) == 1:
        chosen += _claims_at_one_size(preset.sizes[0])
        if len(preset.rates) > 2:
            chosen += _claims_over_rates(preset.sizes[0])
    if len(preset.trend_sizes) > 2:
        chosen.append(_trend(preset.trend_sizes))
    return tuple(chosen)


def point_names(rates: tuple[float, ...]) -> dict[float, str]:
    """What the rates of the shared ladder are called: low, mid1, ..., stress."""
    names = ["low", *(f"mid{i}" for i in range(1, len(rates) - 1)), "stress"][-len(rates) :]
    return dict(zip(rates, names, strict=True))


def plan(preset: Preset):
    """Tune, then test: a generator of lists of cells (see `repro.claims.Experiment`)."""
    sizes = preset.all_sizes()
    runs, best = yield from tuned(preset, [(arm, size) for arm in ("adamw", "muon") for size in sizes])
    cells = []
    for size in sizes:
        test = lambda arm, rate, point, size=size, **settings: cells.append(
            Cell(arm, size, rate, point, "test", preset.test_seeds, settings)
        )
        muon_rate = best["muon", size]
        test("adamw", best["adamw", size], "best")
        test("muon", muon_rate, "best")
        if size not in preset.sizes:
            continue
        peaks = [
            r.metrics["peak_max_logit"] for r in runs.select("muon", size=size, phase="tuning") if r.rate == muon_rate
        ]
        peak = float(np.mean(peaks))
        test("muon_clip_low", muon_rate, "best", tau=0.6 * peak)
        test("muon_clip_harm", muon_rate, "best", tau=0.05 * peak)
        for rate, point in point_names(preset.rates).items():
            for arm in ("adamw", "muon", "adamw_qk_norm"):
                test(arm, rate, point)
        for arm in ("muon_decay", "muon_clip", "muon_decay_clip", "muon_qk_norm", "muon_soft_cap"):
            test(arm, preset.rates[-1], "stress")
    yield cells


def derive(runs: Runs) -> list[Run]:
    """Learning-rate sensitivity per seed: the mean over the ladder of min(loss, initial loss) - best loss
    (Wortsman et al., section 2.2)."""
    ladders = defaultdict(list)
    for run in runs.select(phase="test"):
        if run.arm in ("adamw", "adamw_qk_norm") and (run.point in ("low", "stress") or run.point.startswith("mid")):
            ladders[run.arm, run.size, run.seed].append(run)
    derived = []
    for (arm, size, seed), ladder in ladders.items():
        losses = [min(r.metrics["loss"], r.metrics["initial_loss"]) for r in ladder]
        sensitivity = float(np.mean(losses) - np.min(losses))
        derived.append(Run(arm, seed, {"lr_sensitivity": sensitivity}, point="ladder", size=size))
    return derived


def checks(preset: Preset) -> list[Run]:
    """QK-Clip against its definition, and a wrong one, on one attention layer."""
    return [Run(name, 0, metrics, point="") for name, metrics in mechanism_metrics().items()]


def mechanism_metrics() -> dict[str, dict[str, float]]:
    """How far QK-Clip, and a version with one gamma per layer, are from what the claim says.

    held_error: |max logit after - tau| / tau of the inflated head. scale_error: largest |z' - gamma z| over its logits,
    relative to tau. others_changed: number of weights of other heads whose bits changed.
    """
    from flax import nnx

    config = ModelConfig()
    heads, hot = config.heads, 1
    with nnx.set_graph_mode(False):
        layer = MultiHeadAttention(config, rngs=nnx.Rngs(params=jax.random.key(0)))
        graphdef, state = nnx.split(layer)
        weights = {k: v[None] for k, v in nnx.to_pure_dict(state).items()}
        moved = lambda axes: tuple(axis + 1 for axis in axes)  # behind an axis of one layer
        layouts = {
            name: dict(role=d["role"], inputs=moved(d["inputs"]), outputs=moved(d["outputs"]), head=d["head"] + 1,
                       layer=0, qk=d["qk"])
            for (name,), v in nnx.to_flat_state(state)
            for d in [dict(v.get_metadata()["declaration"])]
        }  # fmt: skip
    layouts = from_declarations(layouts)
    grow = jnp.ones((1, 1, heads, 1)).at[0, 0, hot].set(20.0)
    weights = {**weights, "q_DHK": weights["q_DHK"] * grow, "k_DHK": weights["k_DHK"] * grow}
    x_BTD = jax.random.normal(jax.random.key(1), (4, 32, config.width))
    mask = np.tril(np.ones((32, 32), bool))

    def logits(w):
        q, k = (jnp.einsum("btd,dhk->bthk", x_BTD, w[n][0]) for n in ("q_DHK", "k_DHK"))
        return jnp.einsum("bthk,bshk->bhts", q, k) * config.head_size**-0.5

    @jax.jit
    def measured(weights):
        before = jnp.where(mask, logits(weights), -jnp.inf)
        top_LH = before.max((0, 2, 3))[None]
        gamma = qk_clip_factor(top_LH, TAU)[0, hot]
        found = {}
        for name, statistic in (("qk_clip", top_LH), ("qk_clip_shared", jnp.full_like(top_LH, top_LH.max()))):
            clipped = qk_clip(weights, statistic, tau=TAU, layouts=layouts)
            after = jnp.where(mask, logits(clipped), -jnp.inf)
            others = [h for h in range(heads) if h != hot]
            found[name] = {
                "held_error": jnp.abs(after[:, hot].max() - TAU) / TAU,
                "scale_error": jnp.where(mask, jnp.abs(after - gamma * before), 0.0)[:, hot].max() / TAU,
                "others_changed": sum(
                    jnp.sum(clipped[n][:, :, others] != weights[n][:, :, others]) for n in ("q_DHK", "k_DHK")
                ),
            }
        return found

    return jax.tree.map(float, measured(weights))


_STRESSED = ("adamw", "muon", "muon_decay", "muon_clip", "muon_decay_clip", "muon_qk_norm", "muon_soft_cap")
FIGURES = (
    Curve("max_logit", "max_logit", "Largest attention logit at the stress rate", "max logit", arms=_STRESSED,
          point="stress", log=True, line=TAU, line_label="tau = 100"),
    Curve("max_logit_best", "max_logit", "Largest attention logit at the best rate", "max logit",
          arms=("adamw", "muon", "muon_clip_low", "muon_clip_harm"), point="best", log=True),
    Curve("loss", "loss", "Training loss at the stress rate", "loss (nats per byte)", arms=_STRESSED, point="stress",
          smooth=10, start=30),
    Curve("loss_best", "loss", "Training loss at the best rate", "loss (nats per byte)",
          arms=("adamw", "muon", "muon_clip_low", "muon_clip_harm"), point="best", smooth=10, start=30),
    Curve("clipped_share", "clipped_share", "Share of heads clipped at the stress rate", "share of heads",
          arms=("muon_clip", "muon_decay_clip"), point="stress", smooth=10),
    Ladder("rates_loss", "loss", "Validation loss against the rate", "loss (nats per byte)",
           arms=("adamw", "adamw_qk_norm", "muon"), log=False),
    Ladder("rates_max_logit", "max_logit", "Largest logit against the rate", "max logit",
           arms=("adamw", "adamw_qk_norm", "muon")),
    Effects("effects", "Effects of all claims about training"),
    Width("width", "max_logit", "muon@best", "adamw@best", "Muon against AdamW, each at its best rate",
          "ratio of max logits", sizes=tuple((s, float(SIZES[s].width)) for s in ("w32", "xs", "w128"))),
)  # fmt: skip

_CPU = Preset()
PRESETS = {
    "smoke": Preset(
        train=TrainConfig(steps=10, batch_size=4, eval_windows=4), sizes=("w32",), tuning_limit=4, tuning_seeds=(1000,),
        test_seeds=(0, 1), evidence=False,
    ),
    "cpu": _CPU,
    "cpu-sizes": dataclasses.replace(_CPU, sizes=("w32", "w128"), trend_sizes=("w32", "xs", "w128"), rates=(0.1,)),
    "gpu": Preset(
        train=TrainConfig(steps=1000, model=ModelConfig(compute_dtype="bfloat16", remat=True)), sizes=("gpt2",),
        rates=(0.001, 0.00316, 0.01), tuning_rates=(0.001, 0.001414, 0.002), lanes_per_device=2, platform="gpu",
    ),
}  # fmt: skip

EXPERIMENT = Experiment(
    name="logit-explosion",
    title="Attention logits under Muon, and what holds them",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    derive=derive,
    check_arms=("qk_clip", "qk_clip_shared"),
    figures=FIGURES,
    words={
        "max_logit": "largest attention logit, last tenth",
        "max_capped_logit": "largest capped attention logit",
        "clipped_heads_ever": "share of heads ever above tau",
        "clipped_share_last": "share of heads above tau, last tenth",
        "clipped_share_peak": "share of heads above tau, worst tenth",
        "lr_sensitivity": "learning-rate sensitivity (nats per token)",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
