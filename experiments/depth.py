"""What does depth do to updates, gradients and training under Post-LN, Pre-LN and DeepNorm?

Written before the first run on these seeds (pilots with another code base had suggested the thresholds). Feed-forward
blocks are GELU blocks of two matrices, matrices are Xavier-normal, norms are LayerNorms, as in the papers.

*One step at initialisation.* Only the matrices of the layers move; embedding, head and gains stay. The update is the
root mean square of the change of the final normalised hidden state, per unit of the rate, in the limit of a small rate:
a derivative along the step. (At the rates of training the bounded output saturates, which hides growth.) A slope is
that of the logarithm over the logarithm of the depth, per seed. DeepNet's argument is about a step along the gradient.
Adam's first step is g / (|g| + eps), which does not shrink with the gradient: by the same sum over 2 L sublayers, each
of weight 1 / sqrt(L), the update of DeepNorm should then grow as sqrt(L). That is derived here and judged as a claim of
its own.

*Gradients at initialisation.* The Frobenius norm of the gradient of the last layer's second feed-forward matrix,
geometric mean over seeds, against depth.

*Training.* Adam with one step of warm-up, a constant rate, no decay, no clip. Every scheme has its own search for a
rate; the schemes are compared at DeepNorm's best rate and each at its own. Post-LN runs longer as well, so that a slow
start is told from a stop: a model that has learned nothing but letter frequencies has the entropy of the validation
letters as its loss.

*Spike No More.* Small sublayers (deviation sqrt(2 / (5 D)), writers smaller by sqrt(2 L)) beside a large shortcut (the
embedding times sqrt(D)) bound the gradient of the first layer: |dL/dx_1| <= |dL/dy_L| prod (1 + a_l) (1 + f_l), with f
= s_1 s_2 / s_x' (sqrt(D) + sqrt(F))^2 and a = s_o / s_x 2 sqrt(D) |J_Z|, where s are the deviations of the matrices and
of the stream, the latter that of its quietest token, and J_Z is the Jacobian of the mixed values before the output
projection, whose norm comes from power iteration. In training a null is expected: the smallest published model has 350
million parameters. The arm "embedding of that size" has the same function at first without the factor, which also
multiplies the rate.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from repro.claims import (
    All,
    Arm,
    AtLeast,
    AtMost,
    Cell,
    Claim,
    Control,
    Equivalent,
    Experiment,
    Greater,
    Ratio,
    Run,
    Within,
    swapped,
)
from repro.claims.statistics import slope
from repro.data import load_corpus
from repro.errors import ReproError
from repro.models import ModelConfig, abstract, declarations, init_and_apply
from repro.optim import from_declarations
from repro.optim.layout import matched
from repro.report import Curve, Dose, Effects, Ladder
from repro.train import JobResult, Program, TrainConfig, with_settings
from repro.train.optimizer import OptimizerConfig
from repro.train.preset import Preset, tuned
from repro.train.step import cross_entropy
from repro.train.summary import tail

DEEPNET, XIONG = "DeepNet (arXiv 2203.00555)", "Xiong et al. (arXiv 2002.04745)"
SPIKE = "Spike No More (arXiv 2312.16903)"
ADAM_EPS = 1e-8
_QUICKLY = {"xla_backend_optimization_level": 1}  # for programs that run once and take longer to compile
GAP, FLAT, NEAR = 0.5, 0.15, 0.15
"""Difference of slopes, a slope that is none, nats within which schemes are alike."""
_POST = {"model.residual.kind": "post_norm", "model.embedding_norm": True}
_DEEP = _POST | {"model.residual.kind": "deep_norm"}
_SMALL = {"model.init": "small", "small_embedding": True}
ARMS = (
    Arm("post", "Post-LN", _POST),
    Arm("pre", "Pre-LN"),
    Arm("deep_norm", "DeepNorm", _DEEP),
    Arm("post_warm", "Post-LN, long warm-up", _POST | {"warmup": 0.5}),
    Arm("vanilla", "small sublayers, small embedding", _SMALL),
    Arm("scaled", "embedding times sqrt(D)", _SMALL | {"large_shortcut": "factor"}),
    Arm("large", "embedding of that size, no factor", _SMALL | {"large_shortcut": "start"}),
)
SCHEMES = ("post", "pre", "deep_norm")


def depth_point(layers: int) -> str:
    return f"L{layers}"


def width_point(width: int) -> str:
    return f"d{width}"


@dataclasses.dataclass(frozen=True)
class DepthConfig(TrainConfig):
    """The decoder, where the embedding may follow the width as in Spike No More."""

    small_embedding: bool = False
    """Embedding with the deviation of small sublayers, sqrt(2 / (5 D))."""
    large_shortcut: str = "none"
    """With it, how the embedding comes to sqrt(2 / 5): not at all, by a factor sqrt(D) in the forward pass, or at "
    "start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.large_shortcut not in ("none", "factor", "start"):
            raise ReproError(f"train.large_shortcut is {self.large_shortcut!r}; it must be none, factor or start.")
        if self.large_shortcut != "none" and not self.small_embedding:
            raise ReproError("train.large_shortcut is for runs with train.small_embedding.")
        if self.small_embedding:
            D = self.model.width
            std = math.sqrt(2 / 5) * (1.0 if self.large_shortcut == "start" else D**-0.5)
            scale = math.sqrt(D) if self.large_shortcut == "factor" else 1.0
            object.__setattr__(self, "model", dataclasses.replace(self.model, embedding_std=std, embedding_scale=scale))

    @classmethod
    def program_class(cls) -> type[Program]:
        return DepthProgram

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        model = self.model
        words = (
            f"{model.residual.kind}, embedding of deviation {model.embedding_std:.3g} times {model.embedding_scale:.3g}"
        )
        return {"N7": {"residual": words + (", normed" if model.embedding_norm else "")}}


class DepthProgram(Program):
    """The engine's program, which also says what letter frequencies alone would give."""

    def evaluate(self, params, windows_NT1, **options):
        targets = windows_NT1[:, 1:].reshape(-1).astype(jnp.int32)
        share_Z = jnp.bincount(targets, length=self.config.model.vocab_size) / targets.size
        return super().evaluate(params, windows_NT1, **options) | {"unigram": jax.scipy.special.entr(share_Z).sum()}

    @staticmethod
    def scalars(result: JobResult, configs: list[TrainConfig]) -> list[dict[str, float]]:
        """Beside the engine's, gained: the entropy of the validation letters minus the loss, nats. gradient_spike: the
        99.9 % quantile of the gradient's norm over its median, after the first tenth of the steps."""
        rows = Program.scalars(result, configs)
        norms = result.curves["grad_norm"][tail(len(result.curves["loss"])) :].astype(np.float64)
        for lane, row in enumerate(rows):
            own = norms[:, lane] if len(norms) else np.ones(1)
            row["gained"] = float(result.final["unigram"][lane]) - row["loss"]
            row["gradient_spike"] = float(np.quantile(own, 0.999) / np.median(own))
        return rows


@dataclasses.dataclass(frozen=True)
class DepthPreset(Preset):
    """The sweep of this experiment, at the shape that `train` gives or at one named size."""

    complete: bool = True
    """Whether everything runs, or only Post-LN against DeepNorm at one rate."""
    post_rates: tuple[float, ...] = (0.00025, 0.0005, 0.001)
    """Where Post-LN's search starts."""
    shallow_layers: int = 2
    long_steps: int = 1000
    update_depths: tuple[int, ...] = (6, 12, 24, 48)
    """Depths of one step at initialisation; none to leave it out."""
    init_seeds: tuple[int, ...] = tuple(range(10, 20))
    """Seeds of one step at initialisation."""
    bound_widths: tuple[int, ...] = (64, 128, 256, 512)
    bound_seeds: tuple[int, ...] = (10, 11, 12)
    spike_rate: float = 0.003

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) != 1:
            raise ReproError(f"sizes is {self.sizes}; this experiment takes one size.")
        for name in ("update_depths", "bound_widths"):
            values = getattr(self, name)
            if name == "update_depths" and not values:
                continue
            if len(values) < 2 or list(values) != sorted(set(values)) or values[0] < 1:
                raise ReproError(f"{name} is {values}; give two or more, ascending.")
        if not self.init_seeds or not self.bound_seeds:
            raise ReproError("init_seeds and bound_seeds need at least one each.")
        if self.complete and not self.update_depths:
            raise ReproError("update_depths is empty; only a preset that is not complete leaves the steps out.")

    def model(self, arm: str, **changes: Any) -> ModelConfig:
        """The model of an arm with another depth or width."""
        config = dataclasses.replace(self.train, model=dataclasses.replace(self.train.model, **changes))
        settings = next(a.settings for a in ARMS if a.name == arm)
        return with_settings(config, dict(settings)).model


def _update_claims(preset: DepthPreset) -> list[Claim]:
    depths = ", ".join(map(str, preset.update_depths))
    shape = (
        f"Depths {depths}, width {preset.train.model.width}, one batch of bytes per seed, one step at initialisation."
    )
    faster = lambda step: Greater(f"{step}_slope", "post@fit", "deep_norm@fit", log=False, smallest=GAP)
    between = lambda step, arm, low, high: All(
        (AtLeast(f"{step}_slope", f"{arm}@fit", low), AtMost(f"{step}_slope", f"{arm}@fit", high))
    )
    post = lambda step, low, high: Control("Post-LN", between(step, "post", low, high))
    arms_exchanged = lambda step: Control("arms exchanged", swapped(faster(step)))
    shared = dict(id="S-3", tier="D", boundary=shape)
    return [
        Claim(
            variant="gradient step: Post-LN grows faster", family=DEEPNET, source=f"{DEEPNET}, section 3", **shared,
            statement=f"The slope of the update over depth is more than {GAP:g} larger for Post-LN than for DeepNorm, "
            "after a step along the gradient.",
            reported="Post-LN's update explodes with depth, DeepNorm's is bounded by a constant.",
            criterion=faster("gradient"), control=arms_exchanged("gradient"),
        ),
        Claim(
            variant="gradient step: DeepNorm does not grow", family=DEEPNET, source=f"{DEEPNET}, section 4.2", **shared,
            statement=f"After a step along the gradient the slope of DeepNorm's update lies within {FLAT:g} of 0.",
            reported="The update is of the order of the rate, independent of depth.",
            criterion=between("gradient", "deep_norm", -FLAT, FLAT), control=post("gradient", -FLAT, FLAT),
        ),
        Claim(
            variant="Adam step: Post-LN grows faster", family=DEEPNET, source=f"{DEEPNET}, section 3", **shared,
            statement=f"After a step of Adam the slope is more than {GAP:g} larger for Post-LN than for DeepNorm.",
            reported="Models are trained with Adam; the argument is about a gradient step.",
            criterion=faster("adam"), control=arms_exchanged("adam"),
        ),
        Claim(
            variant="Adam step: DeepNorm grows as a root", family="derived here", source="derived here", **shared,
            statement="After a step of Adam DeepNorm's update is not independent of depth: its slope lies between 0.35 "
            "and 0.65.",
            reported="1/2 by the paper's own sum, if a layer's step does not shrink with its gradient.",
            criterion=between("adam", "deep_norm", 0.35, 0.65), control=post("adam", 0.35, 0.65),
        ),
    ]  # fmt: skip


def _gradient_claims(preset: DepthPreset) -> list[Claim]:
    level = lambda arm: Within("last_gradient_slope", f"{arm}@mean", -FLAT, FLAT)
    falls = lambda arm: Within("last_gradient_slope", f"{arm}@mean", -0.5 - FLAT, -0.5 + FLAT)
    shared = dict(
        id="S-4", tier="M", source=f"{XIONG}, theorem 1",
        boundary=f"Depths {', '.join(map(str, preset.update_depths))}, width {preset.train.model.width}, geometric "
        f"mean over {len(preset.init_seeds)} seeds. The theorem has no attention weights at first; here they are "
        "Xavier-normal.",
    )  # fmt: skip
    return [
        Claim(
            variant="Post-LN", **shared,
            statement=f"The slope of the last layer's gradient over depth lies within {FLAT:g} of 0 for Post-LN.",
            reported="O(D sqrt(ln D)), without the depth.",
            criterion=level("post"), control=Control("Pre-LN", level("pre")),
        ),
        Claim(
            variant="Pre-LN", **shared, statement=f"It lies within {FLAT:g} of -1/2 for Pre-LN.",
            reported="O(D sqrt(ln D / L)).", criterion=falls("pre"), control=Control("Post-LN", falls("post")),
        ),
    ]  # fmt: skip


def _training_claims(preset: DepthPreset) -> list[Claim]:
    deep, shallow = preset.train.model.layers, preset.shallow_layers
    behind = lambda at, nats: Greater("loss", f"post@{at}", f"deep_norm@{at}", log=False, smallest=nats)
    alike = lambda arm, other, at: Equivalent("loss", f"{arm}@{at}", f"{other}@{at}", margin=NEAR)
    narrows = Greater("loss", "post@common", "post_warm@common", log=False, smallest=NEAR)
    stays = lambda at: AtMost("gained", at, 0.1)

    def claim(variant, statement, reported, rule, control):
        return Claim(
            id="S-3", variant=variant, family=DEEPNET, tier="D", source=DEEPNET, statement=statement, reported=reported,
            boundary=f"{deep} layers of width {preset.train.model.width}, {preset.train.steps} steps of "
            f"{preset.train.batch_size} windows of {preset.train.length} bytes, Adam, one step of warm-up, no clip. "
            "The paper: translation, hundreds of layers.",
            criterion=rule, control=control,
        )  # fmt: skip

    fails = "Post-LN is unstable or diverges at depth; DeepNorm trains at 1,000 layers."
    found = [
        claim("training: Post-LN fails", "At DeepNorm's best rate Post-LN ends more than 0.3 nats above it.", fails,
              behind("common", 0.3), Control("arms exchanged", swapped(behind("common", 0.3)))),
    ]  # fmt: skip
    if not preset.complete:
        return found
    return found + [
        claim("training: Post-LN fails at its own rate", "Each at its own best rate, Post-LN ends more than 0.1 nats "
              "above DeepNorm.", fails, behind("best", 0.1), Control("arms exchanged", swapped(behind("best", 0.1)))),
        claim("training: stuck", f"After {preset.long_steps} steps at DeepNorm's best rate Post-LN is less than 0.1 "
              "nats below what letter frequencies give.", "Post-LN is stuck in a bad optimum early.",
              stays("post@long"), Control("DeepNorm", stays("deep_norm@common"))),
        claim("training: Pre-LN does not fail", f"At that rate Pre-LN ends within {NEAR:g} nats of DeepNorm.",
              "Pre-LN is stable too, and somewhat worse.", alike("pre", "deep_norm", "common"),
              Control("Post-LN in its place", alike("post", "deep_norm", "common"))),
        claim("training: warm-up helps", "Warm-up over half of the steps lowers Post-LN's loss there by more than "
              f"{NEAR:g} nats.", "Post-LN needs warm-up.", narrows, Control("arms exchanged", swapped(narrows))),
        claim("training: not when shallow", f"With {shallow} layers Post-LN ends within {NEAR:g} nats of DeepNorm at "
              "that rate.", "The failure grows with depth.", alike("post", "deep_norm", "shallow"),
              Control(f"{deep} layers", alike("post", "deep_norm", "common"))),
    ]  # fmt: skip


def _spike_claims(preset: DepthPreset) -> list[Claim]:
    source = f"{SPIKE}, section 3"
    train = preset.train
    widths = ", ".join(map(str, preset.bound_widths))
    about = f"Widths {widths}, {train.model.layers} layers, at initialisation, random ids."
    places = [f"{arm}@{width_point(width)}" for arm in ("vanilla", "scaled") for width in preset.bound_widths]
    inside = lambda metric: All(tuple(Within(metric, at, 0.0, 1.0) for at in places))
    grows = lambda arm: Within("first_gradient_slope", f"{arm}@mean", 0.3, math.inf)
    calmer = lambda a, b: All((
        Ratio("gradient_spike", f"{a}@spike", f"{b}@spike", at_least=1.5),
        Ratio("gradient_spike", f"{a}@spike", "large@spike", at_least=1.5),
    ))  # fmt: skip
    return [
        Claim(
            id="S-5", variant="bound", tier="M", source=source, boundary=about,
            statement="With a small and with a large shortcut the gradient of the first layer is at most what the "
            "bound allows.",
            reported="An upper bound, for activations that are the identity.", criterion=inside("over_bound"),
            control=Control("a bound by the shortcut alone, all factors 1", inside("over_last")),
        ),
        Claim(
            id="S-5", variant="grows with width", tier="M", source=source, boundary=about,
            statement="The first layer's gradient with a small shortcut, over that with a large one, grows with width: "
            "slope above 0.3, geometric mean over seeds.",
            reported="Small embeddings make large gradients; no slope.", criterion=grows("vanilla"),
            control=Control("an embedding that starts at that size, without a factor", grows("large")),
        ),
        Claim(
            id="S-5", variant="training: calmer", family=SPIKE, tier="D", source=source,
            statement="In training the highest gradient norms (99.9 % quantile over the median) of the small shortcut "
            "are more than 1.5 times those of both large ones.",
            reported="1.7 billion parameters spiked at 13,000 steps without, and not with, the scaling.",
            boundary=f"{train.model.layers} layers of width {train.model.width}, {2 * train.steps} steps at "
            f"{preset.spike_rate:g}. A null is expected, and would say nothing of the reported sizes.",
            criterion=calmer("vanilla", "scaled"), control=Control("arms exchanged", calmer("scaled", "vanilla")),
        ),
    ]  # fmt: skip


def claims(preset: DepthPreset) -> tuple[Claim, ...]:
    found = (_update_claims(preset) if preset.update_depths else []) + _training_claims(preset)
    return (*found, *_gradient_claims(preset), *_spike_claims(preset)) if preset.complete else tuple(found)


def plan(preset: DepthPreset):
    size, test = preset.sizes[0], preset.test_seeds
    cell = lambda arm, rate, point, **settings: Cell(arm, size, rate, point, "test", test, settings)
    schemes = SCHEMES if preset.complete else ("post", "deep_norm")
    wanted = schemes if preset.complete else ("deep_norm",)
    _, best = yield from tuned(preset, [(arm, size) for arm in wanted], starts={"post": preset.post_rates}, factor=2.0)
    common = best["deep_norm", size]
    cells = [cell(arm, common, "common") for arm in schemes]
    if preset.complete:
        cells += [cell(arm, best[arm, size], "best") for arm in SCHEMES]
        cells += [cell("post_warm", common, "common"), cell("post", common, "long", steps=preset.long_steps)]
        cells += [
            cell(arm, common, "shallow", **{"model.layers": preset.shallow_layers}) for arm in ("post", "deep_norm")
        ]
        steps = 2 * preset.train.steps
        cells += [cell(arm, preset.spike_rate, "spike", steps=steps) for arm in ("vanilla", "scaled", "large")]
    yield cells


def one_step(config: ModelConfig, seeds: tuple[int, ...], windows_SBT1: np.ndarray) -> dict[str, np.ndarray]:
    """What one step at initialisation does, [seeds] each.

    gradient_update, adam_update: RMS change of the final hidden state per unit of rate; see the module. first_gradient,
    last_gradient: Frobenius norms of the gradients of the second feed-forward matrix of the first and the last layer;
    gradient_norm: that of all matrices of the layers.
    """
    init, apply = init_and_apply(config)
    layouts = from_declarations(declarations(abstract(config)))
    rms = lambda x: jnp.sqrt(jnp.mean(x * x))

    def one(seed, window_BT1):
        params = init(jax.random.key(seed))
        tokens_BT, targets_BT = window_BT1[:, :-1].astype(jnp.int32), window_BT1[:, 1:].astype(jnp.int32)
        grads = jax.grad(lambda p: cross_entropy(apply(p, tokens_BT).logits, targets_BT)[0])(params)
        down = jnp.linalg.norm(grads["blocks"]["ffn"]["down_FD"], axis=(1, 2))
        steps = [
            _matrices(grads, layouts),
            _matrices(jax.tree.map(lambda g: g / (jnp.abs(g) + ADAM_EPS), grads), layouts),
        ]
        _, change = jax.linearize(lambda p: apply(p, tokens_BT, hidden=True).hidden[-1], params)
        changes = jax.lax.map(change, jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps))
        return {
            "gradient_update": rms(changes[0]), "adam_update": rms(changes[1]),
            "first_gradient": down[0], "last_gradient": down[-1],
            "gradient_norm": jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(steps[0]))),
        }  # fmt: skip

    run = jax.jit(lambda *of: jax.lax.map(lambda a: one(*a), of), compiler_options=_QUICKLY)
    found = run(np.array(seeds, np.uint32), windows_SBT1)
    return {name: np.asarray(values, np.float64) for name, values in found.items()}


def _matrices(tree: Any, layouts: Any) -> Any:
    """The tree with zeros for all but the matrices of the layers."""
    kept = [leaf if layout.role == "matrix" else jnp.zeros_like(leaf) for _, leaf, layout in matched(tree, layouts)]
    return jax.tree.unflatten(jax.tree.structure(tree), kept)


def spectral_norm(f: Any, x: jax.Array, key: jax.Array, iterations: int) -> jax.Array:
    """Largest singular value of the Jacobian of f at x, from below, by power iteration."""
    _, back = jax.vjp(f, x)

    def iterate(v, _):
        image = jax.jvp(f, (x,), (v,))[1]
        v = back(image)[0]
        return v / jnp.linalg.norm(v), jnp.linalg.norm(image)

    first = jax.random.normal(key, x.shape)
    return jax.lax.scan(iterate, first / jnp.linalg.norm(first), None, length=iterations)[1][-1]


def first_gradient(
    config: ModelConfig, seeds: tuple[int, ...], *, batch_size: int = 2, length: int = 16, iterations: int = 10
) -> dict[str, np.ndarray]:
    """|dL/dx_1| of a pre-norm decoder at initialisation (`gradient`), over |dL/dy_L| (`over_last`), and that over the
    bound of Spike No More (`over_bound`); [seeds] each."""
    if config.residual.kind != "pre_norm":
        raise ReproError("The bound of Spike No More is for the pre-norm residual.")
    init, apply = init_and_apply(config)
    D, F, eye = config.width, config.ffn, jnp.eye(config.width)
    ffn_factor = config.std(D, F, branch=True) * config.std(F, D, writer=True, branch=True) * (D**0.5 + F**0.5) ** 2
    attention_factor = config.std(D, D, writer=True, branch=True) * 2 * D**0.5
    with nnx.set_graph_mode(False):
        model = abstract(config)
        block_def = nnx.split(model.blocks)[0]
        norm_def = nnx.split(model.final_norm)[0]

    def merged(graphdef, state, params):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graphdef, state)

    def block(params):
        state = jax.tree.map(lambda leaf: leaf, nnx.split(model.blocks)[1])
        return merged(block_def, state, params)

    def layer(x_BTD, params):
        own = block(params)
        middle_BTD, _ = own.attention_link(x_BTD, own.attention_norm, own.attention, 0)
        y_BTD, _ = own.ffn_link(middle_BTD, own.ffn_norm, own.ffn, 1)
        return y_BTD, (x_BTD, middle_BTD)

    def mixing_norm(params, x_BTD, key):
        """Largest singular value of the Jacobian of the mixed values with respect to the normed input."""
        own = block(params | {"attention": params["attention"] | {"o_HVD": eye.reshape(config.heads, -1, D)}})
        return spectral_norm(lambda n_BTD: own.attention(n_BTD)[0], own.attention_norm(x_BTD), key, iterations)

    def one(seed):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), 2)
        params = init(jax.random.key(seed))
        ids_BT1 = jax.random.randint(keys[0], (batch_size, length + 1), 0, config.vocab_size)
        entered_BTD = apply(params, ids_BT1[:, :-1], hidden=True).hidden[0]

        def end(y_BTD):
            state = jax.tree.map(lambda leaf: leaf, nnx.split(model.final_norm)[1])
            normed_BTD = merged(norm_def, state, params["final_norm"])(y_BTD)
            return cross_entropy(normed_BTD @ params["head_DZ"], ids_BT1[:, 1:])[0]

        last_BTD, streams = jax.lax.scan(layer, entered_BTD, params["blocks"])
        last = jnp.linalg.norm(jax.grad(end)(last_BTD))
        whole = lambda x_BTD: end(jax.lax.scan(layer, x_BTD, params["blocks"])[0])
        gradient = jnp.linalg.norm(jax.grad(whole)(entered_BTD))
        quietest = lambda x_LBTD: x_LBTD.std(-1).min((1, 2))
        layer_keys = jax.random.split(keys[1], config.layers)
        mixing_L = jax.lax.map(lambda of: mixing_norm(*of), (params["blocks"], streams[0], layer_keys))
        a_L = attention_factor * mixing_L / quietest(streams[0])
        f_L = ffn_factor / quietest(streams[1])
        bound = (jnp.log1p(a_L) + jnp.log1p(f_L)).sum()
        log_ratio = jnp.log(gradient / last)
        return {"gradient": gradient, "over_last": jnp.exp(log_ratio), "over_bound": jnp.exp(log_ratio - bound)}

    with nnx.set_graph_mode(False):
        run = jax.jit(lambda of: jax.lax.map(one, of), compiler_options=_QUICKLY)
        found = run(np.array(seeds, np.uint32))
    return {name: np.asarray(values, np.float64) for name, values in found.items()}


def checks(preset: DepthPreset) -> Iterator[Run]:
    """One step at initialisation at every depth, and with small and large shortcuts at every width."""
    if not preset.update_depths:
        return
    train, corpus = preset.train, load_corpus(preset.data)
    windows = np.stack(
        [corpus.batch(seed, 0, batch_size=train.batch_size, length=train.length) for seed in preset.init_seeds]
    )
    depths = np.log(preset.update_depths)
    schemes = SCHEMES if preset.complete else ("post", "deep_norm")
    for arm in schemes:
        found = [
            one_step(preset.model(arm, layers=layers), preset.init_seeds, windows) for layers in preset.update_depths
        ]
        for layers, values in zip(preset.update_depths, found, strict=True):
            for i, seed in enumerate(preset.init_seeds):
                yield Run(arm, seed, {name: v[i] for name, v in values.items()}, point=depth_point(layers))
        logs = {name: np.log([values[name] for values in found]) for name in found[0]}  # [depths, seeds]
        for i, seed in enumerate(preset.init_seeds):
            slopes = {
                f"{step}_slope": float(slope(depths, logs[f"{step}_update"][:, i])) for step in ("gradient", "adam")
            }
            yield Run(arm, seed, slopes, point="fit")
        names = ("first_gradient", "last_gradient", "gradient_norm")
        yield Run(arm, 0, {f"{name}_slope": float(slope(depths, logs[name].mean(1))) for name in names}, point="mean")
    if preset.complete:
        yield from _bounds(preset)


def _bounds(preset: DepthPreset) -> Iterator[Run]:
    widths, heads = np.log(preset.bound_widths), preset.train.model.heads
    logs = {}
    for arm in ("vanilla", "scaled", "large"):
        of_width = []
        for width in preset.bound_widths:
            found = first_gradient(preset.model(arm, width=width, ffn=4 * width, heads=heads), preset.bound_seeds)
            of_width.append(np.log(found["gradient"]).mean())
            for i, seed in enumerate(preset.bound_seeds):
                yield Run(arm, seed, {name: values[i] for name, values in found.items()}, point=width_point(width))
        logs[arm] = np.array(of_width)
    for arm in ("vanilla", "large"):
        yield Run(arm, 0, {"first_gradient_slope": float(slope(widths, logs[arm] - logs["scaled"]))}, point="mean")


_DEPTHS = tuple((depth_point(layers), float(layers)) for layers in (6, 12, 24, 48))
_WIDTHS = tuple((width_point(width), float(width)) for width in (64, 128, 256, 512))
FIGURES = (
    Dose("gradient_update", "gradient_update", "Update after a gradient step at initialisation", "layers",
         "RMS change of the output over the rate", points=_DEPTHS, arms=SCHEMES, log_x=2, log_y=True),
    Dose("adam_update", "adam_update", "Update after an Adam step at initialisation", "layers",
         "RMS change of the output over the rate", points=_DEPTHS, arms=SCHEMES, log_x=2, log_y=True),
    Dose("last_gradient", "last_gradient", "Gradient of the last feed-forward block at initialisation", "layers",
         "Frobenius norm", points=_DEPTHS, arms=SCHEMES, log_x=2, log_y=True),
    Curve("loss", "loss", "Training loss at DeepNorm's best rate", "loss (nats per byte)",
          arms=(*SCHEMES, "post_warm"), point="common", smooth=10),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)", arms=SCHEMES, log=False),
    Dose("first_gradient", "gradient", "Gradient of the first layer at initialisation", "width", "gradient norm",
         points=_WIDTHS,
         arms=("vanilla", "scaled", "large"), log_x=2, log_y=True),
    Curve("gradient_norm", "grad_norm", "Norm of the gradient with small and large shortcuts", "gradient norm",
          arms=("vanilla", "scaled", "large"), point="spike", log=True, start=10),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_MODEL = ModelConfig(layers=12, width=32, heads=4, ffn=128, glu="gelu", init="xavier", norm="layer", norm_eps=1e-5)
_TRAIN = DepthConfig(
    model=_MODEL, length=32, batch_size=8, steps=200, optimizer="adamw", optim=OptimizerConfig(b2=0.98), warmup=0.0,
    schedule="constant", eval_windows=256,
)  # fmt: skip
_CPU = DepthPreset(train=_TRAIN, sizes=("custom",), rates=(0.001,), tuning_rates=(0.001, 0.002, 0.004), tuning_limit=6)
PRESETS = {
    "smoke": dataclasses.replace(
        _CPU.quick_look(), complete=False, tuning_rates=(0.001, 0.002), post_rates=(0.001, 0.002), tuning_limit=2,
        tuning_seeds=(1000,), update_depths=(),
    ),
    "cpu": _CPU,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="depth",
    title="Updates, gradients and training over depth: Post-LN, Pre-LN, DeepNorm, and a large shortcut",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    figures=FIGURES,
    words={
        "gained": "entropy of single letters minus loss (nats per token)",
        "adam_slope": "power of the depth in the first change of the output, Adam",
        "gradient_slope": "power of the depth in the first change of the output, gradient",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
