"""What bounds attention logits, and what keeps attention from collapsing: norms, a cap, a reparametrisation.

Written before the first run of any of these arms. Multi-head latent attention of one shape (ranks 24 and 16, heads of
16 + 8), and multi-head attention beside it where a question has not been put to it yet: what a higher rate and a
soft-cap do to its logits is judged by logit-explosion. Norms act on whole heads, [16 | 8] in latent attention.

*DeepSeek-V4* drops QK-Clip because queries and keys pass an RMSNorm, with a gain on the keys alone. Then no logit
exceeds sqrt(head size) times the largest gain, which is checked on weights a thousand times too large, beside latent
attention that has only the norms on its latents. In training the gain may grow, so the claim is put at a rate several
times above the best one (the amplifier, "stress"), where logits exceed Kimi K2's tau of 100 without the norm. What the
norm costs is judged with each arm at its own best rate, found on tuning seeds.

*Sigma-reparametrisation* makes the spectral norm of every weight a learned scalar, under which the entropy of attention
has a lower bound. The bound is checked on random rows and on the worst one. Zhai et al. elicit the collapse of entropy
by a larger rate; here it is the stress rate under AdamW, for both arms. The scalars learn at that rate too. An entropy
is the least of all heads, mean over positions, over the last tenth of training; attention that is uniform over the 64
positions has 3.2 nats. A low one is not bad by itself, so the loss at that rate is judged beside it.
"""

import dataclasses
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from repro.claims import (
    All,
    Arm,
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
    Within,
    swapped,
)
from repro.errors import ReproError
from repro.models import ModelConfig, MultiHeadAttention, MultiHeadLatentAttention
from repro.models.sigma_reparam import SigmaReparam, entropy_bound, extremal_row
from repro.report import Curve, Effects, Ladder
from repro.train import TrainConfig
from repro.train.preset import Preset, tuned

V4 = "DeepSeek-V4 report"
PROXIES = "Wortsman et al. (arXiv 2309.14322)"
CAPPED = "Gemma 2 (arXiv 2408.00118) and Kimi K2 (arXiv 2507.20534)"
ZHAI = "Zhai et al. (arXiv 2303.06296)"
TAU, CAP, HARMFUL, COLLAPSED = 100.0, 50.0, 2.0, 0.1
LATENT = dict(attention="mla", q_rank=24, kv_rank=16, nope_size=16, rope_size=8, value_size=16)

_MHA = {"model.attention": "mha"} | {f"model.{name}": 0 for name in LATENT if name != "attention"}
_MUON, _ADAMW = {"optimizer": "muon"}, {"optimizer": "adamw"}
_NORM, _SIGMA = {"model.qk_norm": "v4"}, {"model.sigma_reparam": True}
ARMS = (
    Arm("muon", "Muon", _MUON),
    Arm("muon_norm", "Muon + norm as in V4", _MUON | _NORM),
    Arm("muon_harm", "Muon + QK-Clip at 2", _MUON | {"tau": HARMFUL}),
    Arm("muon_cap", "Muon + soft-cap 50", _MUON | {"model.soft_cap": CAP}),
    Arm("adamw", "AdamW", _ADAMW),
    Arm("adamw_norm", "AdamW + QK LayerNorm", _ADAMW | {"model.qk_norm": "layer"}),
    Arm("adamw_sigma", "AdamW + sigma-reparametrisation", _ADAMW | _SIGMA),
    Arm("mha_muon", "multi-head: Muon", _MHA | _MUON),
    Arm("mha_muon_norm", "multi-head: Muon + norm as in V4", _MHA | _MUON | _NORM),
    Arm("mha_adamw", "multi-head: AdamW", _MHA | _ADAMW),
    Arm("mha_adamw_sigma", "multi-head: AdamW + sigma-reparametrisation", _MHA | _ADAMW | _SIGMA),
)
_KINDS = {"mla": ("", "latent attention"), "mha": ("mha_", "multi-head attention")}


@dataclasses.dataclass(frozen=True)
class AttentionPreset(Preset):
    """The sweep of this experiment."""

    complete: bool = True
    """Whether everything runs, or only V4's norm on latent attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rates) != 3:
            raise ReproError(f"rates is {self.rates}; the sensitivity is a mean over three.")


def _mechanism() -> list[Claim]:
    bounded = lambda arm: All(tuple(Within(f"over_bound_{kind}", arm, 0.0, 1 + 1e-5) for kind in _KINDS))
    tight = lambda arm: All((Exact("violations", arm, 0.0), Within("extremal_error", arm, 0.0, 1e-6)))
    held = lambda arm: Within("norm_error", arm, 0.0, 1e-4)
    one = "One layer in float32 with random weights and inputs. Says nothing of training."
    return [
        Claim(
            id="V4-3", variant="bound", family=V4, tier="M", source=f"{V4}, section 2.4",
            statement="With RMSNorm on queries and keys no logit exceeds sqrt(head size) times the largest gain.",
            reported="The norms are there so that logits cannot explode.",
            boundary=f"{one} Keys and values of V4 are one vector; here they are two, and the norm is the keys'.",
            criterion=bounded("norm"), control=Control("no such norm, but those on the latents", bounded("no_norm")),
        ),
        Claim(
            id="S-6", variant="entropy bound", family=ZHAI, tier="M", source=f"{ZHAI}, theorem 3.1",
            statement="No softmax over logits of a given norm (less their mean) has less entropy than the bound, and "
            "one row attains it.", reported="The bound is tight.",
            boundary="20,000 random rows of 2 to 256 logits in float64. It falls as exp(-norm): a floor of any use "
            "needs norms of a few units.",
            criterion=tight("bound"), control=Control("the exponent without its root", tight("wrong_bound")),
        ),
        Claim(
            id="S-6", variant="spectral norms", family=ZHAI, tier="M", source=f"{ZHAI}, section 3.2",
            statement="The spectral norm of every reparametrised weight is its scalar, to 1e-4.",
            reported="The definition.", boundary=f"{one} After power iterations at fixed weights.",
            criterion=held("sigma"), control=Control("the Frobenius norm in its place", held("frobenius")),
        ),
    ]  # fmt: skip


def _claims_at(preset: AttentionPreset, size: str) -> list[Claim]:
    at = lambda arm, point="stress": f"{arm}@{point}/{size}"
    shape = f"At size {size}, {preset.train.steps} steps on bytes"
    stress = f"{shape}, at a rate several times above the best one (the amplifier)"

    def claim(id, variant, family, source, statement, reported, boundary, rule, control, tier="D"):
        return Claim(
            id=id, variant=f"{variant}, {size}", family=family, tier=tier, source=source, statement=statement,
            reported=reported, boundary=boundary, criterion=rule, control=control,
        )  # fmt: skip

    harmless = lambda arm: NonInferior("loss", at(arm, "best"), at("muon", "best"), margin=0.02)
    grows = lambda arm: Greater("max_logit", at(arm), at(arm, "low"), smallest=10.0)
    sensitive = Greater("lr_sensitivity", at("adamw", "ladder"), at("adamw_norm", "ladder"), log=False, smallest=0.02)
    capped = lambda arm: Within("max_capped_logit", at(arm), 0.0, CAP)
    raw = lambda arm: Ratio("max_logit", at(arm), at("muon"), at_least=0.5)
    found = [
        claim(
            "V4-3", "no harm", V4, f"{V4}, section 2.4",
            "The norm costs less than 0.02 nats of validation loss.",
            "Trained with it at 284 billion and 1.6 trillion parameters; no comparison without it.",
            f"{shape}, latent attention under Muon, each arm at its own best rate. No harm within a margin is not the "
            "same as no effect.",
            harmless("muon_norm"), Control("a harmful bound, QK-Clip at 2", harmless("muon_harm")),
        ),
        claim(
            "S-1", "growth with the rate", PROXIES, f"{PROXIES}, section 3.1.1",
            "Under AdamW the maximum logit of latent attention at the highest rate of the ladder is at least ten times "
            "that at the lowest.", "Logits grow with the rate; runs above 10,000 diverge.",
            f"{shape}. The paper: multi-head attention, 100k steps.",
            grows("adamw"), Control("with QK LayerNorm", grows("adamw_norm")),
        ),
        claim(
            "S-1", "sensitivity", PROXIES, f"{PROXIES}, sections 2.2 and 3.1.1",
            "On latent attention QK LayerNorm lowers the learning-rate sensitivity under AdamW by at least 0.02 nats.",
            "Lower sensitivity at every size, shown in figures.",
            f"{shape}; the mean over three rates a half-decade apart, the same for both arms.",
            sensitive, Control("arms exchanged", swapped(sensitive)),
        ),
        claim(
            "S-7", "capped", CAPPED, "Gemma 2 (arXiv 2408.00118), section 2",
            "A soft-cap of 50 keeps the magnitude of every logit that the softmax sees at or below 50.",
            "Attention logits capped at 50.", f"{stress}, latent attention, over every step.",
            capped("muon_cap"), Control("no cap", capped("muon")), "M",
        ),
        claim(
            "S-7", "raw", CAPPED, "Kimi K2 (arXiv 2507.20534), section 2.1",
            "The soft-cap does not bound the raw logit of latent attention: it reaches at least half of what it is "
            "without a cap.", "Raw logits are said to explode under a soft-cap; no number is given.", stress,
            raw("muon_cap"), Control("the norm in place of the cap", raw("muon_norm")),
        ),
    ]  # fmt: skip
    found = found if preset.complete else found[:1]
    for kind, (prefix, words) in _KINDS.items():
        low = lambda arm, prefix=prefix: AtMost("peak_max_logit", at(prefix + arm), TAU, log=True)
        collapses = lambda arm, prefix=prefix: AtMost("entropy_min", at(prefix + arm), COLLAPSED, log=True)
        plain, sigma = at(f"{prefix}adamw"), at(f"{prefix}adamw_sigma")
        entropy = Ratio("entropy_min", sigma, plain, at_least=2.0)
        loss = Greater("loss", plain, sigma, log=False, smallest=0.02)
        found += [
            claim(
                "V4-3", f"bounded in training, {kind}", V4, f"{V4}, section 2.4",
                f"Under Muon with the norm no logit of {words} ever exceeds 100, so that Kimi K2's QK-Clip would do "
                "nothing.", "No QK-Clip in either model.", f"{stress}, no weight decay.",
                low("muon_norm"), Control("no norm", low("muon")),
            ),
            claim(
                "S-6", f"collapse without it, {kind}", ZHAI, f"{ZHAI}, section 3.3",
                f"At the stress rate the least entropy of a head of {words} falls below 0.1 nats.",
                "Entropy collapses in plain models at a doubled rate; shown in figures.", stress,
                collapses("adamw"), Control("with sigma-reparametrisation", collapses("adamw_sigma")),
            ),
            claim(
                "S-6", f"entropy, {kind}", ZHAI, f"{ZHAI}, section 3.3",
                f"At the stress rate sigma-reparametrisation at least doubles the least entropy of a head of {words}.",
                "Entropy stays where it would collapse; shown in figures.",
                f"{stress}. The learned scalars bound the entropy only as far as they stay small.",
                entropy, Control("arms exchanged", swapped(entropy)),
            ),
            claim(
                "S-6", f"loss, {kind}", ZHAI, f"{ZHAI}, section 4",
                "At the stress rate sigma-reparametrisation lowers the validation loss by at least 0.02 nats.",
                "Trains without warm-up and adaptive optimizers where plain models fail.",
                f"{stress}, {words}, with warm-up and norms in both arms, so that plain training does not fail either.",
                loss, Control("arms exchanged", swapped(loss)),
            ),
        ]  # fmt: skip
        if not preset.complete:
            return found[:2]
    return found


def claims(preset: AttentionPreset) -> tuple[Claim, ...]:
    return (*_mechanism(), *(claim for size in preset.sizes for claim in _claims_at(preset, size)))


def plan(preset: AttentionPreset):
    """The best rates of Muon with and without the norm, then the test."""
    tuned_arms = ("muon", "muon_norm")
    _, best = yield from tuned(preset, [(arm, size) for size in preset.sizes for arm in tuned_arms])
    cells, stress = [], preset.rates[-1]
    for size in preset.sizes:
        test = lambda arm, rate, point, size=size: cells.append(Cell(arm, size, rate, point, "test", preset.test_seeds))
        for arm in ("muon", "muon_norm", "muon_harm"):
            test(arm, best["muon_norm" if arm == "muon_norm" else "muon", size], "best")
        for arm in ("muon", "muon_norm"):
            test(arm, stress, "stress")
        if not preset.complete:
            continue
        for arm in (
            "adamw",
            "adamw_sigma",
            "muon_cap",
            "adamw_norm",
            "mha_muon",
            "mha_muon_norm",
            "mha_adamw",
            "mha_adamw_sigma",
        ):
            test(arm, stress, "stress")
        for rate, point in zip(preset.rates[:-1], ("low", "mid"), strict=True):
            for arm in ("adamw", "adamw_norm"):
                test(arm, rate, point)
    yield cells


def derive(runs: Runs) -> list[Run]:
    """Learning-rate sensitivity per seed: the mean over the ladder of min(loss, initial loss) - best loss
    (Wortsman et al., section 2.2)."""
    ladders = defaultdict(list)
    for run in runs.select(phase="test"):
        if run.arm in ("adamw", "adamw_norm"):
            ladders[run.arm, run.size, run.seed].append(min(run.metrics["loss"], run.metrics["initial_loss"]))
    return [
        Run(arm, seed, {"lr_sensitivity": float(np.mean(losses) - np.min(losses))}, point="ladder", size=size)
        for (arm, size, seed), losses in ladders.items()
    ]


def checks(preset: AttentionPreset) -> list[Run]:
    """The bound of the norm, the bound of the entropy and the spectral norms, each beside a wrong form."""
    found = norm_metrics() | entropy_metrics() | spectral_metrics()
    return [Run(name, 0, metrics, point="") for name, metrics in found.items()]


def _drawn(module: type[nnx.Module], config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State, dict]:
    """The structure of a layer, its state, and random weights of about the size of real ones (gains around 1)."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))

    def draw(path, x):
        gain = "gain" in str(path[-1])
        return np.float32(rng.normal(gain, 0.5 if gain else max(x.shape[0], 1) ** -0.5, size=x.shape))

    return graphdef, state, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state))


def norm_metrics() -> dict[str, dict[str, float]]:
    """over_bound of each kind of attention: max |logit| over sqrt(head size) max |key gain| (1 without the norm), where
    the weights of queries and keys are a thousand times too large."""
    kinds = {
        "mla": (MultiHeadLatentAttention, ModelConfig(**LATENT), ("q_up_CHJ", "k_up_CHK", "k_rope_DR")),
        "mha": (MultiHeadAttention, ModelConfig(), ("q_DHK", "k_DHK")),
    }
    found: dict[str, dict[str, float]] = {"norm": {}, "no_norm": {}}
    for kind, (module, config, large) in kinds.items():
        x_BTD = jnp.asarray(np.random.default_rng(1).normal(size=(4, 32, config.width)), jnp.float32)
        for name, norm in (("norm", "v4"), ("no_norm", "none")):
            config = dataclasses.replace(config, qk_norm=norm)
            graphdef, state, weights = _drawn(module, config)
            nnx.replace_by_pure_dict(state, weights | {n: np.float32(1e3) * weights[n] for n in large})
            top = jax.jit(lambda s, x, g=graphdef: nnx.merge(g, s)(x)[1]["max_abs_logit"].max())(state, x_BTD)
            gain = max([float(np.abs(w).max()) for n, w in weights.items() if n.startswith("k_gain")], default=1.0)
            found[name][f"over_bound_{kind}"] = float(top) / config.head_size**0.5 / gain
    return found


def entropy_metrics(rows: int = 20_000) -> dict[str, dict[str, float]]:
    """violations: rows whose entropy is below the bound by more than 1e-9; extremal_error: largest |entropy - bound| of
    the worst rows, nats."""
    rng = np.random.default_rng(0)

    def wrong_bound(norm, length):
        b = np.exp(-norm)
        share = b / (1 + (length - 1) * b)
        return np.log1p((length - 1) * b) + norm * np.sqrt(length * (length - 1)) * share

    def entropy(z):
        p = np.exp(z - z.max())
        p /= p.sum()
        return float(-(p * np.log(np.maximum(p, 1e-300))).sum())

    lengths, norms = rng.integers(2, 257, rows), np.exp(rng.uniform(-2, 3.5, rows))
    found = {name: {"violations": 0.0, "extremal_error": 0.0} for name in ("bound", "wrong_bound")}
    for i, (length, norm) in enumerate(zip(lengths, norms, strict=True)):
        z = rng.normal(size=length) ** (1 + 2 * (i % 3))  # with the higher powers, few entries stand out
        z -= z.mean()
        z *= norm / np.linalg.norm(z)
        own = entropy(z)
        for name, bound in (("bound", entropy_bound), ("wrong_bound", wrong_bound)):
            found[name]["violations"] += float(own < bound(norm, length) - 1e-9)
            if i % 100 == 0:
                off = abs(entropy(extremal_row(norm, length)) - float(bound(norm, length)))
                found[name]["extremal_error"] = max(found[name]["extremal_error"], off)
    return found


def spectral_metrics(iterations: int = 200) -> dict[str, dict[str, float]]:
    """norm_error: largest |sigma(W_hat) / gamma - 1| over the weights of a layer of latent attention, where W_hat is
    gamma / norm(W) W: after power iterations from random vectors, and with the Frobenius norm."""
    rng = np.random.default_rng(2)
    graphdef, state, weights = _drawn(MultiHeadLatentAttention, ModelConfig(**LATENT))
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, weights))
    layer = nnx.merge(graphdef, state)
    graphdef, gammas, vectors = nnx.split(nnx.eval_shape(lambda: SigmaReparam({"attention": layer})), nnx.Param, ...)
    shapes = nnx.to_pure_dict(gammas)
    nnx.replace_by_pure_dict(gammas, {name: {"gamma": jnp.asarray(rng.uniform(1, 4), jnp.float32)} for name in shapes})
    start = jax.tree.map(lambda u: jnp.asarray(rng.normal(size=u.shape), jnp.float32), nnx.to_pure_dict(vectors))

    @jax.jit
    def scaled(start):
        def step(vectors_of, _):
            own = jax.tree.map(lambda leaf: leaf, vectors)
            nnx.replace_by_pure_dict(own, vectors_of)
            modules, after = nnx.merge(graphdef, gammas, own)({"attention": layer})
            return after, nnx.to_pure_dict(nnx.split(modules["attention"])[1])

        return jax.tree.map(lambda w: w[-1], jax.lax.scan(step, start, None, iterations)[1])

    with nnx.set_graph_mode(False):
        used = scaled(start)
    found = {"sigma": 0.0, "frobenius": 0.0}
    for child, gamma in nnx.to_pure_dict(gammas).items():
        name, gamma = child.removeprefix("attention_"), float(gamma["gamma"])
        inputs = int(np.prod(weights[name].shape[: 2 if name == "o_HVD" else 1]))
        w, w_hat = (np.float64(x[name]).reshape(inputs, -1) for x in (weights, used))
        for rule, x in (("sigma", w_hat), ("frobenius", gamma * w / np.linalg.norm(w))):
            top = np.linalg.svd(x, compute_uv=False)[0]
            found[rule] = max(found[rule], float(abs(top / gamma - 1)))
    return {name: {"norm_error": value} for name, value in found.items()}


_STRESSED = ("muon", "muon_norm", "muon_cap", "mha_muon", "mha_muon_norm")
_REPARAMETRISED = ("adamw", "adamw_norm", "adamw_sigma", "mha_adamw", "mha_adamw_sigma")
FIGURES = (
    Curve("max_logit", "max_logit", "Largest attention logit at the stress rate", "max logit", arms=_STRESSED,
          point="stress", log=True, line=TAU, line_label="tau = 100"),
    Curve("max_logit_best", "max_logit", "Largest attention logit at the best rate", "max logit",
          arms=("muon", "muon_norm", "muon_harm"), point="best", log=True),
    Curve("entropy", "entropy_min", "Least entropy of a head at the stress rate", "entropy (nats)",
          arms=_REPARAMETRISED, point="stress", log=True, line=COLLAPSED, line_label="0.1"),
    Curve("loss", "loss", "Training loss at the stress rate", "loss (nats per byte)", arms=_REPARAMETRISED,
          point="stress", smooth=10, start=30),
    Ladder("rates_loss", "loss", "Validation loss against the rate", "loss (nats per byte)",
           arms=("adamw", "adamw_norm", "muon", "muon_norm"), log=False),
    Ladder("rates_max_logit", "max_logit", "Largest logit against the rate", "max logit",
           arms=("adamw", "adamw_norm", "muon", "muon_norm")),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_CPU = AttentionPreset(
    train=TrainConfig(steps=200, eval_windows=256, model=ModelConfig(**LATENT)),
    tuning_rates=(0.02, 0.02828, 0.04),
    tuning_limit=6,
)
_LOOK = _CPU.quick_look()
_FEW_SHAPES = ModelConfig(attention="mla", kv_rank=32, nope_size=8, rope_size=8, value_size=16)
PRESETS = {
    # What takes long there is compiling: all jobs have two lanes, and Muon sees few shapes.
    "smoke": dataclasses.replace(
        _LOOK, train=dataclasses.replace(_LOOK.train, model=_FEW_SHAPES), complete=False,
        tuning_rates=(0.02, 0.02828), tuning_limit=2, tuning_seeds=(1000,), lanes_per_device=1,
    ),
    "cpu": _CPU,
    "cpu-sizes": dataclasses.replace(_CPU, sizes=("w32",)),
}  # fmt: skip

EXPERIMENT = Experiment(
    name="attention-norm",
    title="Norms, caps and reparametrisation against large logits and collapsed attention",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    derive=derive,
    check_arms=("norm", "no_norm", "bound", "wrong_bound", "sigma", "frobenius"),
    figures=FIGURES,
    words={
        "max_logit": "largest attention logit, last tenth",
        "max_capped_logit": "largest capped attention logit",
        "peak_max_logit": "largest attention logit of all steps",
        "lr_sensitivity": "learning-rate sensitivity (nats per token)",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
