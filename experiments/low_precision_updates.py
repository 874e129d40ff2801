"""Which parts of an update survive few bits: gradients, their sums, moments and weights?

Written before the first run. What is exact is checked by example: FP16 turns what is at most 2^-25 into zero and a loss
scale prevents it; updates of half a spacing vanish in FP16 and BF16 weights alike; an FP16 sum of ones ends at 2048;
BF16 has the range of float32. What may happen in training is judged on the decoder under AdamW, with one part at a time
in few bits and everything else in float32:

- Gradients in FP16 and BF16. Natural ones, of about 1e-3, are far from 2^-25 here, so the amplifier is declared: they
  are multiplied by 2^-20 before they are rounded and by 2^20 after, as if they were a million times smaller; the
  natural setting stands beside it, as a control. With a loss scale of 2^24 they should be as good as float32. What is
  rounded is the finished gradient of each weight; the backward pass is float32.
- Weights kept in FP16 without a float32 copy. Around |w| = 1/8 half a spacing is 2^-14 = 6e-5, so updates of a peak
  rate of 4e-5 should be lost and those of 1e-2 not. The low rate is the amplifier.
- Moments in BF16, in linear and in dynamic 8-bit codes. Linear codes of a second moment are declared harmful: entries
  below 1/254 of the largest of their block become 0, and Adam then divides by eps alone.
- The gradient as a mean over eight shards of the batch, each rounded to BF16. Stochastic rounding and a float32 sum (an
  all-to-all exchange) should leave an error that is smaller than that of a running sum in BF16 (a ring), by a factor
  that grows with the number R of shards:

      ratio^2 = 1/2 + (R + 1) / 4 - 1 / (2 R)

  for shards that are independent and of mean zero: rounding stochastically has twice the variance of rounding to
  nearest, which is 1/12 of a squared spacing, and a running sum of k shards has sqrt(k) times their spacing. An effect
  on the loss of a network of this size is not expected: the error is about a hundredth of the gradient, far below the
  noise of a batch. That the exchange "beats" a BF16 reduction is judged on both, error and loss.

A tree of BF16 sums is only drawn: the same reasoning gives (1 + log2 R) / 2, but sums of two numbers of one spacing are
often half a spacing of the result away from it, so that their errors are not uniform, and larger by about a tenth.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from repro.claims import (
    Arm,
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
from repro.optim import adamw, with_low_precision_state
from repro.optim.low_precision_state import pack, unpack
from repro.quant import round_to
from repro.report import Curve, Dose, Effects
from repro.train import JobResult, Program, TrainConfig, TrainState
from repro.train.optimizer import Name
from repro.train.preset import Sweep

ARMS = (
    Arm("fp32", "float32"),
    Arm("fp16_gradients", "FP16 gradients", {"gradient_format": "fp16"}),
    Arm("bf16_gradients", "BF16 gradients", {"gradient_format": "bf16"}),
    Arm("fp16_weights", "FP16 weights", {"fp16_weights": True}),
    Arm("bf16_moments", "BF16 moments", {"optim.state": "bf16"}),
    Arm("dynamic8_moments", "dynamic 8-bit moments", {"optim.state": "dynamic8"}),
    Arm("int8_moments", "linear 8-bit moments", {"optim.state": "int8"}),
    Arm("stochastic", "shards in BF16, stochastically, float32 sum", {"exchange": "stochastic"}),
    Arm("ring", "shards in BF16, BF16 running sum", {"exchange": "ring"}),
)
CHECKS = (
    Arm("fp16", "FP16"), Arm("bf16", "BF16"), Arm("float32", "float32"), Arm("b0.999", "b2 = 0.999"),
    Arm("b0.95", "b2 = 0.95"), Arm("int8", "linear 8-bit codes"), Arm("dynamic8", "dynamic 8-bit codes"),
    Arm("sum_stochastic", "stochastic, float32 sum"), Arm("sum_ring", "BF16 running sum"),
    Arm("sum_tree", "BF16 tree"),
)  # fmt: skip
SHRINK, LOSS_SCALE = 2.0**-20, 2.0**24
POINTS = {
    "usual": {}, "low": {}, "shrunk": {"shrink": SHRINK}, "scaled": {"shrink": SHRINK, "loss_scale": LOSS_SCALE},
}  # fmt: skip
"""Settings of the points: the usual and the low rate; the usual one with small gradients, without and with a scale."""
SHARDS = (4, 16, 64, 256)
"""Numbers R of shards whose sums are compared with closed forms."""

MIXED, KALAMKAR = "Micikevicius et al. (arXiv 1710.03740)", "Kalamkar et al. (arXiv 1905.12322)"
V3, V4 = "DeepSeek-V3 (arXiv 2412.19437)", "DeepSeek-V4 report, section 3.4.1"
DETTMERS = "Dettmers et al. (arXiv 2110.02861)"
_MIXED_SAID = "FP16 training needs a loss scale, a float32 copy of the weights and float32 sums."
_V4_SAID = "Gradients of experts are exchanged in BF16, rounded stochastically, and summed in float32; no comparison."


@dataclasses.dataclass(frozen=True)
class UpdatesConfig(TrainConfig):
    """The decoder with one part of its update in few bits."""

    numeric = (*TrainConfig.numeric, "shrink", "loss_scale")
    optimizer: Name = "adamw"
    gradient_format: Literal["fp32", "fp16", "bf16"] = "fp32"
    """What the gradient is rounded to, to nearest."""
    shrink: float = 1.0
    """A power of two that the gradient is multiplied by before it is rounded and divided by after (the amplifier)."""
    loss_scale: float = 1.0
    """A power of two that the loss is multiplied by, and the rounded gradient divided by."""
    fp16_weights: bool = False
    """Whether weights are rounded to FP16 after every step."""
    exchange: Literal["fp32", "stochastic", "ring"] = "fp32"
    """How the gradients of the shards of a batch are summed up; fp32 does not cut the batch."""
    shards: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shrink", "loss_scale"):
            value = getattr(self, name)
            if not 0 < value < math.inf or math.frexp(value)[0] != 0.5:
                raise ReproError(f"train.{name} is {value}; it must be a power of two, which changes no digit.")
        if self.gradient_format not in ("fp32", "fp16", "bf16"):
            raise ReproError(f"train.gradient_format is {self.gradient_format!r}; it must be fp32, fp16 or bf16.")
        if self.exchange not in ("fp32", "stochastic", "ring"):
            raise ReproError(f"train.exchange is {self.exchange!r}; it must be fp32, stochastic or ring.")
        if self.gradient_format == "fp32" and self.shrink * self.loss_scale != 1:
            raise ReproError(
                "train.shrink and train.loss_scale matter only where train.gradient_format is fp16 or bf16."
            )
        if self.exchange != "fp32" and self.gradient_format != "fp32":
            raise ReproError("train.exchange rounds gradients itself; leave train.gradient_format at fp32.")
        if self.exchange != "fp32" and (self.shards < 1 or self.batch_size % self.shards or self.model.dots.stochastic):
            raise ReproError(f"{self.shards} shards must divide the batch, and matrix products must not be stochastic.")
        if self.fp16_weights and self.weights != "fp32":
            raise ReproError("train.fp16_weights and train.weights both say how weights are stored; set one.")

    @classmethod
    def program_class(cls) -> type[Program]:
        return UpdatesProgram

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        rows: dict[str, dict[str, str]] = {"N1": {}, "N2": {}, "N4": {}}
        if self.gradient_format != "fp32":
            rows["N1"]["gradients"] = f"{self.gradient_format}, to nearest, after the backward pass"
            rows["N2"]["gradients"] = f"loss scale {self.loss_scale:g}, made smaller by {self.shrink:g}"
        if self.exchange != "fp32":
            way = "stochastically" if self.exchange == "stochastic" else "to nearest"
            rows["N1"]["gradients"] = f"those of {self.shards} shards of a batch in bfloat16, {way}"
            rows["N4"]["sums over a batch"] = (
                "over shards in float32"
                if self.exchange == "stochastic"
                else "over shards in bfloat16, one after another"
            )
        if self.fp16_weights:
            rows["N1"]["parameters"] = "FP16, no float32 copy, rounded to nearest after each step"
        return rows


def stochastic_sum(parts: jax.Array, key: jax.Array) -> jax.Array:
    """The sum over the first axis in float32 of `parts` rounded to BF16 stochastically."""
    return jnp.sum(round_to(parts, "bf16", rounding="stochastic", key=key), 0)


def ring_sum(parts: jax.Array) -> jax.Array:
    """The sum over the first axis, one after another, of `parts` in BF16, rounded to BF16 after every addition."""
    parts = round_to(parts, "bf16")
    return jax.lax.scan(lambda s, part: (round_to(s + part, "bf16"), None), parts[0], parts[1:])[0]


def tree_sum(parts: jax.Array) -> jax.Array:
    """The sum over the first axis, whose length is a power of two, by pairs, rounded to BF16 after every addition."""
    parts = round_to(parts, "bf16")
    while len(parts) > 1:
        parts = round_to(parts[0::2] + parts[1::2], "bf16")
    return parts[0]


class UpdatesProgram(Program):
    """The engine's program with gradients or weights in few bits, and their relative error."""

    def init(self, seed) -> TrainState:
        return self._narrow(super().init(seed))

    def _narrow(self, state: TrainState) -> TrainState:
        if not self.config.fp16_weights:
            return state
        return dataclasses.replace(state, params=jax.tree.map(lambda w: round_to(w, "fp16"), state.params))

    def shard_gradients(self, params, window_BT1, z_loss):
        """The gradient of every shard of the batch: the parameters' tree with a first axis of shards."""
        shards_RBT1 = window_BT1.reshape(self.config.shards, -1, window_BT1.shape[-1])
        return jax.vmap(lambda window: jax.grad(lambda p: self.loss(p, window, z_loss)[0])(params))(shards_RBT1)

    def exchanged(self, shards, key):
        """The mean of the shards' gradients as the exchange gives it."""
        leaves, tree = jax.tree.flatten(shards)
        if self.config.exchange == "ring":
            sums = [ring_sum(g) for g in leaves]
        else:
            sums = [stochastic_sum(g, jax.random.fold_in(key, i)) for i, g in enumerate(leaves)]
        return tree.unflatten([s / self.config.shards for s in sums])

    def rounded(self, grads, numbers):
        """The gradients in the format: multiplied by `shrink * loss_scale`, rounded, and divided by it again."""
        factor = numbers.shrink * numbers.loss_scale
        return jax.tree.map(
            lambda g: round_to(g * factor, self.config.gradient_format, overflow="ieee") / factor, grads
        )

    def step(self, state: TrainState, window_BT1, numbers):
        """Beside the engine's metrics `grad_error`, |received - exact| / |exact| of the gradient; `lost`, the share of
        its elements that are zero only after rounding; and `retained`, what arrives of an update in FP16 weights."""
        config, measured = self.config, {}

        def received(grads, numbers):
            if config.exchange != "fp32":
                shards = self.shard_gradients(state.params, window_BT1.astype(jnp.int32), numbers.z_loss)
                grads = jax.tree.map(lambda g: jnp.mean(g, 0), shards)
                purpose = jax.random.fold_in(jax.random.key(state.seed), 0x65786368)
                got = self.exchanged(shards, jax.random.fold_in(purpose, state.step))
            elif config.gradient_format != "fp32":
                got = self.rounded(grads, numbers)
            else:
                return grads
            measured["grad_error"] = optax.tree.norm(jax.tree.map(jnp.subtract, got, grads)) / optax.tree.norm(grads)
            lost = jax.tree.map(lambda a, b: jnp.sum((a == 0) & (b != 0)), got, grads)
            measured["lost"] = optax.tree.sum(lost) / sum(g.size for g in jax.tree.leaves(grads))
            return got

        own = copy.copy(self)  # the engine's step with other gradients
        own.gradients = received
        after, metrics = Program.step(own, state, window_BT1, numbers)
        if config.fp16_weights:
            after = self._narrow(after)
            moved = optax.tree.norm(jax.tree.map(jnp.subtract, after.params, state.params))
            measured["retained"] = moved / metrics["update_norm"]
        return after, metrics | measured

    @staticmethod
    def scalars(result: JobResult, configs) -> list[dict[str, float]]:
        rows = Program.scalars(result, configs)
        for name in ("grad_error", "lost"):
            if name in result.curves:
                for lane, row in enumerate(rows):
                    row[name] = float(result.curves[name][:, lane].astype(np.float64).mean())
        return rows


def _exact(id, variant, source, statement, reported, boundary, rule, control) -> Claim:
    return Claim(
        id=id, variant=variant, tier="M", source=source, statement=statement, reported=reported, boundary=boundary,
        criterion=rule, control=control,
    )  # fmt: skip


_FORMAT = "By the formats; no network."
_SHARDS = f"Normal shards, independent and of mean zero, R = {', '.join(map(str, SHARDS))}; no network, no traffic."
CLAIMS_EXACT = (
    _exact(
        "FP-1", "underflow", MIXED, "FP16 turns a number into zero if its magnitude is at most 2^-25, and only then.",
        _MIXED_SAID, _FORMAT, Exact("zero_mismatches", "fp16", 0.0),
        Control("the smallest subnormal number, 2^-24, as the bound", Exact("zero_mismatches_subnormal", "fp16", 0.0)),
    ),
    _exact(
        "FP-1", "loss scale", MIXED,
        "Numbers of 11 significant bits from 2^-30 up come through FP16 without a change if "
        "they are multiplied by 2^16 before and divided by it after.",
        _MIXED_SAID, "512 numbers from 2^-30 to 2^-16.", Exact("changed", "fp16", 0.0),
        Control("a scale of 2^8", Exact("changed_small_scale", "fp16", 0.0)),
    ),
    _exact(
        "FP-1", "weights", MIXED, "1000 updates of 1/2048 of a weight of 1 leave it at 1 in FP16.",
        _MIXED_SAID, _FORMAT, Exact("weight_2048", "fp16", 1.0),
        Control("a float32 copy", Exact("weight_2048", "float32", 1.0)),
    ),
    _exact(
        "FP-1", "sums", MIXED, "The sum of 4096 ones is 2048 in FP16.", _MIXED_SAID, _FORMAT,
        Exact("ones", "fp16", 2048.0), Control("a float32 sum", Exact("ones", "float32", 2048.0)),
    ),
    _exact(
        "FP-2", "range", KALAMKAR, "No number from 2^-120 to 2^120 becomes zero or infinite in BF16.",
        "No loss scale is needed.", _FORMAT, Exact("out_of_range", "bf16", 0.0),
        Control("FP16", Exact("out_of_range", "fp16", 0.0)),
    ),
    _exact(
        "FP-2", "spacing", KALAMKAR, "1000 updates of 1/256 of a weight of 1 leave it at 1 in BF16.",
        "Keeps a float32 copy of the weights.", _FORMAT, Exact("weight_256", "bf16", 1.0),
        Control("FP16", Exact("weight_256", "fp16", 1.0)),
    ),
    _exact(
        "V3-5", "a moment at rest", f"{V3}, section 3.3.3; derived here",
        "With b2 = 0.999 a second moment in BF16 does not fall in 1000 steps without a gradient: there BF16 moments "
        "would lose something.", "Uses b2 = 0.95.", "One gradient of 1 and then none; rounding to nearest.",
        Exact("left_of_moment", "b0.999", 1.0), Control("b2 = 0.95", Exact("left_of_moment", "b0.95", 1.0)),
    ),
    _exact(
        "Q-7", "small entries of a block", DETTMERS,
        "In dynamic codes no entry down to 1e-6 of the largest of its block becomes zero.",
        "Dynamic codes keep small and large entries.", "Magnitudes from 1e-6 to 1, blocks of 256.",
        Exact("zeros", "dynamic8", 0.0), Control("linear codes", Exact("zeros", "int8", 0.0)),
    ),
    _exact(
        "V4-8", "unbiased", V4, "The mean over many exchanges of the same shards is their sum, to 5.5 standard errors "
        "of the closed form.", _V4_SAID, _SHARDS, Within("worst_z", "sum_stochastic", 0.0, 5.5),
        Control("the running sum", Within("worst_z", "sum_ring", 0.0, 5.5)),
    ),
    _exact(
        "V4-8", "error of a ring", f"{V4}; derived here", "A BF16 running sum of R shards has an error of sqrt(1/2 + "
        "(R + 1) / 4 - 1 / (2 R)) times that of the exchange, to 10 %: 8 times at R = 256.",
        _V4_SAID, _SHARDS, Within("over_ring_form", "sum_ring", 0.9, 1.1),
        Control("sums as small as their terms", Within("over_flat_form", "sum_ring", 0.9, 1.1)),
    ),
)  # fmt: skip


def _claims_at(preset: "UpdatesPreset", size: str) -> list[Claim]:
    at = lambda arm, point="usual": f"{arm}@{point}/{size}"
    costs = lambda arm, point, base: Greater("loss", at(arm, point), at("fp32", base), log=False, smallest=0.05)
    keeps = lambda arm, point="usual": NonInferior("loss", at(arm, point), at("fp32"), margin=0.02)
    small = f"gradients made smaller by 2^{math.log2(SHRINK):g} before they are rounded (the amplifier)"
    about = f"Size {size}, AdamW, {preset.train.steps} steps on bytes at {preset.train.learning_rate:g}, else float32"
    linear = Control("linear codes", keeps("int8_moments"))
    underflow = Control("FP16 without a loss scale, " + small, keeps("fp16_gradients", "shrunk"))
    error = Ratio("grad_error", at("ring"), at("stochastic"), at_least=1.3)
    gain = Greater("loss", at("ring"), at("stochastic"), log=False, smallest=0.01)

    def claim(id, variant, family, statement, reported, rule, control, more=""):
        return Claim(
            id=id, variant=f"{variant}, {size}", family=family, tier="D", source=family, statement=statement,
            reported=reported, boundary=f"{about}{more and '; '}{more}.", criterion=rule, control=control,
        )  # fmt: skip

    return [
        claim(
            "FP-1", "gradients without a loss scale", MIXED,
            "FP16 gradients without a loss scale cost at least 0.05 nats where gradients are small.", _MIXED_SAID,
            costs("fp16_gradients", "shrunk", "usual"),
            Control("natural gradients", costs("fp16_gradients", "usual", "usual")), small,
        ),
        claim(
            "FP-1", "gradients with a loss scale", MIXED,
            "With a loss scale of 2^24 the same small gradients cost less than 0.02 nats.", _MIXED_SAID,
            keeps("fp16_gradients", "scaled"), Control("no loss scale", keeps("fp16_gradients", "shrunk")), small,
        ),
        claim(
            "FP-1", "weights", MIXED,
            "FP16 weights without a float32 copy cost at least 0.05 nats at the low rate.", _MIXED_SAID,
            costs("fp16_weights", "low", "low"), Control("the usual rate", costs("fp16_weights", "usual", "usual")),
            f"the low rate of {preset.low_rate:g} is the amplifier",
        ),
        claim(
            "FP-2", "gradients without a loss scale", KALAMKAR,
            "BF16 gradients without a loss scale cost less than 0.02 nats where gradients are small.",
            "No loss scale is needed.", keeps("bf16_gradients", "shrunk"),
            Control("FP16 gradients", keeps("fp16_gradients", "shrunk")), small,
        ),
        claim(
            "V3-5", "BF16 moments", V3, "AdamW's moments in BF16 cost less than 0.02 nats.", "No observable loss.",
            keeps("bf16_moments"), linear, "b2 = 0.95",
        ),
        claim(
            "Q-7", "dynamic 8-bit moments", DETTMERS,
            "AdamW's moments in dynamic 8-bit codes, blocks of 256, cost less than 0.02 nats.",
            "The performance of 32-bit states.", keeps("dynamic8_moments"), linear, "b2 = 0.95",
        ),
        claim(
            "V4-8", "no harm", V4, "The exchange in BF16 with stochastic rounding costs less than 0.02 nats against "
            "float32.", _V4_SAID, keeps("stochastic"), underflow, "eight shards of two windows",
        ),
        claim(
            "V4-8", "gradient error", V4, "The relative error of the gradient is more than 1.3 times larger with a "
            "BF16 running sum than with the exchange.", _V4_SAID, error, Control("arms exchanged", swapped(error)),
            "eight shards of two windows; the closed form for independent shards is 1.64",
        ),
        claim(
            "V4-8", "loss", V4, "The exchange ends at least 0.01 nats below a BF16 running sum.",
            f"{_V4_SAID} Not expected at this size.", gain, Control("arms exchanged", swapped(gain)),
            "eight shards of two windows",
        ),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class UpdatesPreset(Sweep):
    """The sweep of this experiment: one rate, and a low one for weights."""

    train: UpdatesConfig = UpdatesConfig(steps=300, learning_rate=0.01, weight_decay=0.1, eval_windows=256)
    sizes: tuple[str, ...] = ("w32", "xs")
    low_rate: float = 4e-5
    """Peak rate at which FP16 weights should lose updates."""
    only: tuple[str, ...] = ()
    """Which claims on training are judged, such as `V4-8 (loss)`; empty for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low_rate < math.inf:
            raise ReproError(f"low_rate is {self.low_rate}; it must be positive and finite.")
        known = [_without_size(claim) for claim in _claims_at(self, self.sizes[0])]
        for name in self.only:
            if name not in known:
                raise ReproError(f"only names {name!r}, and there is {', '.join(known)}.")


def _without_size(claim: Claim) -> str:
    return f"{claim.id} ({claim.variant.rpartition(', ')[0]})"


def _on_training(preset: UpdatesPreset) -> list[Claim]:
    found = [claim for size in preset.sizes for claim in _claims_at(preset, size)]
    return [claim for claim in found if not preset.only or _without_size(claim) in preset.only]


def claims(preset: UpdatesPreset) -> tuple[Claim, ...]:
    return (*CLAIMS_EXACT, *_on_training(preset))


def plan(preset: UpdatesPreset):
    """The runs that the claims read, and no others."""
    rules = [rule for c in _on_training(preset) for rule in (c.criterion, c.control.criterion)]
    read = {at for rule in rules for at in rule.reads()}
    yield [
        Cell(arm.name, size, preset.low_rate if point == "low" else preset.train.learning_rate, point, "test",
             preset.test_seeds, settings)
        for size in preset.sizes for arm in ARMS for point, settings in POINTS.items()
        if f"{arm.name}@{point}/{size}" in read
    ]  # fmt: skip


def format_runs() -> Iterator[Run]:
    """Underflow, range, and what becomes of many small updates, in FP16, BF16 and float32."""
    places = 1 + np.arange(8) / 8

    def numbers(low: int, high: int) -> np.ndarray:
        x = (2.0 ** np.arange(low, high + 1)[:, None] * places).ravel()
        return np.concatenate([x, -x, [2.0**-25 * (1 + 2.0**-23)]]).astype(np.float32)

    small, wide = numbers(-30, -20), numbers(-120, 119)
    zero = np.asarray(round_to(jnp.asarray(small), "fp16")) == 0
    rng = np.random.default_rng(0)
    bits11 = (rng.integers(1024, 2048, 512) * 2.0 ** (rng.integers(-30, -15, 512) - 10)).astype(np.float32)

    def changed(scale: float) -> int:
        return int((np.asarray(round_to(jnp.asarray(bits11 * np.float32(scale)), "fp16")) / scale != bits11).sum())

    for fmt in ("fp16", "bf16", "float32"):
        kept = (lambda x: x) if fmt == "float32" else (lambda x, fmt=fmt: round_to(x, fmt, overflow="ieee"))

        @jax.jit
        def summed(update: float, count: int, start: float, kept=kept) -> jax.Array:
            return jax.lax.fori_loop(0, count, lambda i, w: kept(w + update), jnp.float32(start))

        through = np.asarray(kept(jnp.asarray(wide)))
        metrics = {
            "out_of_range": int(((through == 0) | ~np.isfinite(through)).sum()), "ones": float(summed(1.0, 4096, 0.0)),
            "weight_2048": float(summed(2.0**-11, 1000, 1.0)), "weight_256": float(summed(2.0**-8, 1000, 1.0)),
        }  # fmt: skip
        if fmt == "fp16":
            metrics |= {
                "zero_mismatches": int((zero != (np.abs(small) <= 2.0**-25)).sum()),
                "zero_mismatches_subnormal": int((zero != (np.abs(small) < 2.0**-24)).sum()),
                "changed": changed(2.0**16), "changed_small_scale": changed(2.0**8),
            }  # fmt: skip
        yield Run(fmt, 0, metrics, point="format")


def state_runs() -> Iterator[Run]:
    """A second moment without gradients, and small entries of a block."""
    for b2 in (0.999, 0.95):
        rule = with_low_precision_state(adamw(1.0, b2=b2, weight_decay=0.0), "bf16")
        w = jnp.zeros(1)

        def step(state, g, rule=rule, w=w):
            state = rule.update(g, state, w)[1]
            return state, optax.tree.get(state, "nu").astype(jnp.float32)[0]

        second = jax.jit(lambda g, rule=rule, w=w: jax.lax.scan(step, rule.init(w), g)[1])(np.eye(1001, 1, dtype=np.float32))
        yield Run(f"b{b2:g}", 0, {"left_of_moment": float(second[-1] / second[0])}, point="state")
    x = jnp.asarray(10.0 ** np.linspace(-6, 0, 256), jnp.float32)
    for arm, fmt in (("dynamic8", "dynamic8_unsigned"), ("int8", "int8")):
        back = jax.jit(lambda x, fmt=fmt: unpack(pack(x, fmt, 256, None)))(x)
        yield Run(arm, 0, {"zeros": int((back == 0).sum())}, point="state")


def ring_form(shards: int) -> float:
    """Error of a BF16 running sum over that of the exchange, for independent shards."""
    return math.sqrt(0.5 + (shards + 1) / 4 - 1 / (2 * shards))


def flat_form(shards: int) -> float:
    """The wrong form: every partial sum is as large as one shard."""
    return math.sqrt(0.5 + (shards - 1) / (2 * shards))


@functools.partial(jax.jit, static_argnames="draws")
def sums(parts: jax.Array, key: jax.Array, *, draws: int) -> dict[str, jax.Array]:
    """Each of the three sums of `parts` [R, N] by the name of its arm: [draws, N] or [1, N] where it has no noise."""
    many = jax.lax.map(lambda i: stochastic_sum(parts, jax.random.fold_in(key, i)), jnp.arange(draws))
    return {"sum_stochastic": many, "sum_ring": ring_sum(parts)[None], "sum_tree": tree_sum(parts)[None]}


def sum_runs(elements: int = 4096, draws: int = 16) -> Iterator[Run]:
    """Errors of the three sums by the number of shards, and whether the exchange is right in the mean."""
    worst_z = dict.fromkeys(("sum_stochastic", "sum_ring"), 0.0)
    ratios: dict[str, dict[int, float]] = {"sum_ring": {}, "sum_tree": {}}
    for shards in SHARDS:
        parts = np.random.default_rng(shards).normal(size=(shards, elements)).astype(np.float32)
        found = jax.device_get(sums(jnp.asarray(parts), jax.random.key(shards), draws=draws))
        parts = parts.astype(np.float64)
        off = {arm: s.astype(np.float64) - parts.sum(0) for arm, s in found.items()}
        rms = {arm: float(np.sqrt(np.mean(o**2))) for arm, o in off.items()}
        for arm, of_arm in ratios.items():
            of_arm[shards] = rms[arm] / rms["sum_stochastic"]
            yield Run(arm, 0, {"over_exchange": of_arm[shards]}, point=f"r{shards}")
        h = 2.0 ** (np.frexp(parts)[1] - 8)  # the distance of a number's neighbours
        p = np.abs(parts) / h % 1  # its chance to go up, so that the variance is p (1 - p) h^2
        error = np.sqrt((p * (1 - p) * h**2).sum(0) / draws)
        for arm, z in worst_z.items():
            worst_z[arm] = max(z, float(np.abs(off[arm].mean(0) / error).max()))
    for arm, z in worst_z.items():
        yield Run(arm, 0, {"worst_z": z}, point="mean")
    for arm, of_arm in ratios.items():
        forms = {"over_ring_form": ring_form, "over_flat_form": flat_form}
        over = {name: [ratio / form(r) for r, ratio in of_arm.items()] for name, form in forms.items()}
        yield Run(arm, 0, {name: max(v, key=lambda q: abs(math.log(q))) for name, v in over.items()}, point="forms")


def checks(preset: UpdatesPreset) -> list[Run]:
    """All of the above; a quarter of the elements where it is no evidence."""
    return [*format_runs(), *state_runs(), *sum_runs(4096 if preset.evidence else 1024)]


_SHARD_POINTS = tuple((f"r{r}", float(r)) for r in SHARDS)
FIGURES = (
    Curve("loss", "loss", "Training loss at the usual rate", "loss (nats per byte)",
          arms=tuple(arm.name for arm in ARMS if arm.name != "int8_moments"), point="usual", smooth=20, start=20),
    Curve("int8", "loss", "Training loss with linear 8-bit moments", "loss (nats per byte)",
          arms=("fp32", "int8_moments"), point="usual", log=True, smooth=20, start=20),
    Curve("small", "loss", "Training loss with small gradients and no loss scale", "loss (nats per byte)",
          arms=("fp16_gradients", "bf16_gradients"), point="shrunk", smooth=20),
    Curve("low", "loss", "Training loss at the low rate", "loss (nats per byte)", arms=("fp32", "fp16_weights"),
          point="low", smooth=20),
    Curve("error", "grad_error", "Relative error of the gradient", "|received - exact| / |exact|",
          arms=("stochastic", "ring"), point="usual", log=True, smooth=10),
    Dose("shards", "over_exchange", "Error of BF16 sums over that of stochastic rounding and a float32 sum", "shards R",
         "ratio of root mean squares", _SHARD_POINTS, ("sum_ring", "sum_tree"), log_x=2, log_y=True),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_CPU = UpdatesPreset()
_QUICK = dataclasses.replace(_CPU, train=dataclasses.replace(_CPU.train, shards=2)).quick_look()
PRESETS = {
    "smoke": dataclasses.replace(_QUICK, only=("V4-8 (gradient error)", "V4-8 (loss)")),
    "cpu": _CPU,
}

EXPERIMENT = Experiment(
    name="low-precision-updates",
    title="Gradients, moments and weights in few bits",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    check_arms=CHECKS,
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
