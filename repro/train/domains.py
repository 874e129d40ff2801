"""A decoder of two domains whose Dgrad input is quantised, with tokens in a chosen order.

The setting of experiments/block_dgrad.py, and an example of a task of its own for the engine: a config, and a program of
pure functions. Odd rows of a batch belong to a quiet domain, a deterministic sequence on 16 ids, whose loss has a weight.
Each domain has an expert and a softmax of its own, so what a domain learns in the layers reaches it only through Dgrad.
Only dY in dX = Q(dY) W^T is quantised, for all linear layers inside the blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from repro.errors import ReproError
from repro.models import ModelConfig, rms_norm, rope
from repro.models.transformer import unrolled
from repro.optim import adamw
from repro.quant import POLICIES, fake_quantize
from repro.quant.bits import INFINITY, from_bits, magnitude
from repro.train.config import NUMERIC, TrainConfig
from repro.train.loop import JobResult
from repro.train.schedule import fraction
from repro.train.step import Program, TrainState

GROUP = 128
TEXT, QUIET = 256, 16
"""Ids of the text (bytes) and of the quiet domain."""

Order = Literal["token", "prescaled", "by_domain", "by_magnitude", "after_dispatch"]
FORMATS_TRIED = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


@dataclasses.dataclass(frozen=True)
class DgradConfig(TrainConfig):
    """A decoder with one expert and one softmax per domain, and a quantised Dgrad input. Only AdamW, without QK-Clip."""

    numeric: ClassVar[tuple[str, ...]] = (*NUMERIC, "quiet_weight")

    model: ModelConfig = ModelConfig(vocab_size=TEXT + QUIET, layers=2, width=32, heads=2, ffn=64)
    length: int = 64
    batch_size: int = 4
    steps: int = 1200
    optimizer: Literal["adamw"] = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    eps: float = 1e-18
    """Adam's epsilon, far below the gradients of the quiet domain."""
    domains: int = 2
    """2: odd rows are of the quiet domain. 1: text alone."""
    element: str = "none"
    """Format of dY, or none."""
    granularity: Literal["tile", "block"] = "tile"
    order: Order = "token"
    """How tokens stand when dY is quantised: as they come, each scaled by a power of two of its own, sorted by domain or
    by magnitude, or (for the experts' down-projection alone) sorted by domain, as after dispatch."""
    quiet_weight: float = 1.0
    gradient_errors: bool = False
    """Compare, after training, the gradients of tiles and blocks with the exact ones, layer by layer (E2M1 and E4M3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.element != "none" and self.element not in FORMATS_TRIED:
            raise ReproError(
                f"train.element is {self.element!r}; it must be none or one of {', '.join(FORMATS_TRIED)}."
            )
        if self.domains not in (1, 2) or self.batch_size % self.domains:
            raise ReproError(f"train.domains is {self.domains}; it must be 1 or 2, and divide the batch size.")
        if self.batch_size * self.length % (GROUP * self.domains):
            raise ReproError(
                f"train.batch_size times train.length must be a multiple of {GROUP * self.domains} tokens."
            )
        if not 0 < self.quiet_weight < math.inf:
            raise ReproError(f"train.quiet_weight is {self.quiet_weight}; it must be positive.")
        plain = ModelConfig(
            vocab_size=TEXT + QUIET, layers=self.model.layers, width=self.model.width, heads=self.model.heads,
            ffn=self.model.ffn, rope_theta=self.model.rope_theta, norm_eps=self.model.norm_eps,
        )  # fmt: skip
        if self.model != plain or self.optimizer != "adamw" or math.isfinite(self.tau) or self.z_loss:
            raise ReproError("This experiment has a decoder of its own: AdamW, float32, no QK norm, clip or z-loss.")

    @classmethod
    def program_class(cls) -> type[Program]:
        return DgradProgram

    def dgrad(self) -> Dgrad:
        return Dgrad(self.element, self.granularity, self.order, self.domains, self.length)

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        blocks = {"tile": "1x128", "block": "128x128"}[self.granularity]
        scale = (
            "no quantisation scale" if self.element == "none" else f"amax / max, float32, per {blocks}, {self.order}"
        )
        return {
            "N1": {"dY of Dgrad in the blocks": "float32" if self.element == "none" else self.element.upper()},
            "N2": {"all tensors": "no quantisation scale", "dY of Dgrad in the blocks": scale},
            "N6": {"loss": f"weight {self.quiet_weight:g} on the quiet domain" if self.domains == 2 else "unweighted"},
            "N7": {
                "experts": f"{self.domains} per layer, chosen by domain; a softmax for each domain; gains fixed at 1"
            },
        }


@dataclasses.dataclass(frozen=True)
class Dgrad:
    """How dY [tokens, channels] is quantised: `__call__(dy, dispatched)`, with `dispatched` for what an expert sees."""

    element: str
    granularity: str
    order: Order
    domains: int
    length: int

    def __call__(self, dy: jax.Array, dispatched: bool) -> jax.Array:
        if self.element == "none":
            return dy
        recipe = POLICIES[f"dgrad_{self.element}_{self.granularity}"].dgrad_dy
        dy_TN = dy.reshape(-1, dy.shape[-1])
        amax_T = magnitude(dy_TN).max(1)
        if self.order == "prescaled":
            # 2^floor(log2 amax) of each token: dividing and multiplying by it is exact.
            power_T1 = from_bits(jnp.clip(amax_T & INFINITY, 1 << 23, 253 << 23))[:, None]
            return (fake_quantize(dy_TN / power_T1, recipe) * power_T1).reshape(dy.shape)
        domain_T = np.arange(dy_TN.shape[0]) // self.length % self.domains
        by_domain = dispatched or self.order == "by_domain"
        if self.order == "by_magnitude":
            sort = jnp.lexsort((amax_T, domain_T)) if dispatched else jnp.argsort(amax_T)
        elif by_domain:
            sort = np.argsort(domain_T, kind="stable")
        else:
            return fake_quantize(dy_TN, recipe).reshape(dy.shape)
        quantised = fake_quantize(dy_TN[sort], recipe)
        return jnp.zeros_like(dy_TN).at[sort].set(quantised).reshape(dy.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def product(equation: str, dgrad: Dgrad, dispatched: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum(equation, x, w), whose gradient of x comes from the quantised dY and that of w from the exact one."""
    return jnp.einsum(equation, x, w)


def _forward(equation, dgrad, dispatched, x, w):
    return jnp.einsum(equation, x, w), (x, w)


def _backward(equation, dgrad, dispatched, saved, dy):
    x, w = saved
    inputs, _, output = equation.replace("->", ",").split(",")
    tokens = sum(letter in inputs for letter in output)
    rounded = dgrad(dy.reshape(*dy.shape[:tokens], -1), dispatched).reshape(dy.shape)
    (dx,) = jax.vjp(lambda x: jnp.einsum(equation, x, w), x)[1](rounded)
    (dw,) = jax.vjp(lambda w: jnp.einsum(equation, x, w), w)[1](dy)
    return dx, dw


product.defvjp(_forward, _backward)


@functools.cache
def quiet_sequences(length: int) -> np.ndarray:
    """x[t+1] = P[x[t]][x[t-1]] from every pair of starting ids, with P 16 fixed permutations: [256, length]."""
    table = np.stack([np.random.default_rng(7 + i).permutation(QUIET) for i in range(QUIET)])
    x = np.empty((QUIET * QUIET, length), np.int32)
    x[:, 0], x[:, 1] = np.divmod(np.arange(QUIET * QUIET), QUIET)
    for t in range(2, length):
        x[:, t] = table[x[:, t - 1], x[:, t - 2]]
    return x + TEXT


class DgradProgram(Program):
    """The decoder of `DgradConfig` as pure functions; see `repro.train.Program` for what the engine asks of it."""

    def __init__(self, config: DgradConfig) -> None:
        self.config = config.structure()

    def init(self, seed: jax.Array) -> TrainState:
        m, E = self.config.model, self.config.domains
        L, D, H, K, F, Z = m.layers, m.width, m.heads, m.head_size, m.ffn, m.vocab_size
        small = (2 * L) ** -0.5
        shapes = {
            "embedding_ZD": ((Z, D), 1.0), "head_DZ": ((D, Z), D**-0.5),
            "q_LDHK": ((L, D, H, K), D**-0.5), "k_LDHK": ((L, D, H, K), D**-0.5), "v_LDHV": ((L, D, H, K), D**-0.5),
            "o_LHVD": ((L, H, K, D), small * D**-0.5), "gate_LEDF": ((L, E, D, F), D**-0.5),
            "up_LEDF": ((L, E, D, F), D**-0.5), "down_LEFD": ((L, E, F, D), small * F**-0.5),
        }  # fmt: skip
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        params = {
            name: jax.random.normal(key, shape) * scale
            for key, (name, (shape, scale)) in zip(keys, shapes.items(), strict=True)
        }
        zero = self.config.numbers_type()(*[0.0] * len(self.config.numeric))
        return TrainState(
            params, self.optimizer(zero, 1.0).init(params), jnp.zeros((), jnp.int32), jnp.asarray(seed, jnp.uint32)
        )

    def optimizer(self, numbers: Any, part: Any):
        return adamw(numbers.learning_rate * part, weight_decay=numbers.weight_decay, eps=self.config.eps)

    def windows(self, window_BT1: jax.Array) -> jax.Array:
        """The batch with its odd rows replaced by quiet sequences, whose start is a function of the text they replace."""
        if self.config.domains == 1:
            return window_BT1
        start_B = (window_BT1 * (2 * np.arange(window_BT1.shape[1]) + 1)).sum(1) % (QUIET * QUIET)
        quiet_BT1 = jnp.asarray(quiet_sequences(window_BT1.shape[1]))[start_B]
        odd_B1 = np.arange(window_BT1.shape[0])[:, None] % 2 == 1
        return jnp.where(odd_B1, quiet_BT1, window_BT1)

    def losses(self, params: Any, window_BT1: jax.Array, probe_LBTD: jax.Array | float, dgrad: Dgrad):
        """Cross entropy per token [B, T] in nats, and the largest attention logit. `probe_LBTD` is added to the output of
        each feed-forward block: at zero, its gradient is the dY of that layer's down-projection."""
        m, E, L = self.config.model, self.config.domains, self.config.model.layers
        tokens_BT, targets_BT = window_BT1[:, :-1], window_BT1[:, 1:]
        B, T = tokens_BT.shape
        mask_TS = np.tril(np.ones((T, T), bool))
        linear = lambda equation, x, w, dispatched=False: product(equation, dgrad, dispatched, x, w)

        def block(x_BTD, layer):
            w, probe_BTD = layer
            n_BTD = rms_norm(x_BTD, 1.0, m.norm_eps)
            q, k, v = (linear("btd,dhk->bthk", n_BTD, w[n]) for n in ("q_LDHK", "k_LDHK", "v_LDHV"))
            logits = jnp.einsum("bthk,bshk->bhts", rope(q, m.rope_theta), rope(k, m.rope_theta)) * m.head_size**-0.5
            logits = jnp.where(mask_TS, logits, jnp.finfo(jnp.float32).min)
            mixed = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(logits, -1), v)
            x_BTD = x_BTD + linear("bthv,hvd->btd", mixed, w["o_LHVD"])
            # Row b belongs to domain b mod E, so the experts' rows are an axis.
            n_AETD = rms_norm(x_BTD, 1.0, m.norm_eps).reshape(B // E, E, T, -1)
            gate, up = (linear("aetd,edf->aetf", n_AETD, w[n], True) for n in ("gate_LEDF", "up_LEDF"))
            after = dgrad.order == "after_dispatch"
            down = linear("aetf,efd->aetd", jax.nn.silu(gate) * up, w["down_LEFD"], after)
            return x_BTD + down.reshape(x_BTD.shape) + probe_BTD, logits.max()

        layers = {n: w for n, w in params.items() if "_L" in n}
        probe = jnp.broadcast_to(probe_LBTD, (L, B, T, m.width))
        unroll = L if unrolled(L) else 1
        x_BTD, top_L = jax.lax.scan(block, params["embedding_ZD"][tokens_BT], (layers, probe), unroll=unroll)
        logits_BTZ = rms_norm(x_BTD, 1.0, m.norm_eps) @ params["head_DZ"]
        own_Z, own_B11 = np.arange(m.vocab_size) >= TEXT, (np.arange(B) % 2 == 1)[:, None, None] & (E == 2)
        logits_BTZ = jnp.where(own_Z == own_B11, logits_BTZ, jnp.finfo(jnp.float32).min)
        chosen_BT = jnp.take_along_axis(logits_BTZ, targets_BT[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits_BTZ, -1) - chosen_BT, top_L.max()

    def parts(self, ce_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean cross entropy of the text and of the quiet domain, whose first target nothing can predict."""
        if self.config.domains == 1:
            return ce_BT.mean(), jnp.zeros(())
        return ce_BT[::2].mean(), ce_BT[1::2, 1:].mean()

    def objective(self, params, probe, window_BT1, quiet_weight, dgrad):
        ce_BT, top = self.losses(params, window_BT1, probe, dgrad)
        quiet_BT = np.zeros(ce_BT.shape, bool)
        unpredictable_BT = np.zeros(ce_BT.shape, bool)
        if self.config.domains == 2:
            quiet_BT[1::2], unpredictable_BT[1::2, 0] = True, True
        weight_BT = jnp.where(unpredictable_BT, 0.0, jnp.where(quiet_BT, quiet_weight, 1.0))
        return (weight_BT * ce_BT).mean(), (ce_BT, top)

    def step(self, state: TrainState, window_BT1: jax.Array, numbers: Any):
        config = self.config
        window_BT1 = self.windows(window_BT1.astype(jnp.int32))
        probe = jnp.zeros((config.model.layers, config.batch_size, config.length, config.model.width))
        (grads, dy_LBTD), (ce_BT, top) = jax.grad(self.objective, (0, 1), has_aux=True)(
            state.params, probe, window_BT1, numbers.quiet_weight, config.dgrad()
        )
        tx = self.optimizer(numbers, fraction(config, state.step))
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        text, quiet = self.parts(ce_BT)
        range_L, spread_L = token_range(dy_LBTD)
        metrics = {
            "loss": text, "quiet_loss": quiet, "max_logit": top, "token_range": range_L.max(),
            "token_range_first": range_L[0], "token_range_last": range_L[-1], "token_spread": spread_L.max(),
        }  # fmt: skip
        return TrainState(params, opt_state, state.step + 1, state.seed), metrics

    def evaluate(self, params: Any, windows_NT1: jax.Array):
        windows_NT1 = self.windows(windows_NT1.astype(jnp.int32))
        exact = dataclasses.replace(self.config.dgrad(), element="none")
        ce_NT, _ = self.losses(params, windows_NT1, 0.0, exact)
        text, quiet = self.parts(ce_NT)
        found = {"loss": text, "quiet_loss": quiet}
        if self.config.gradient_errors:
            found |= self.gradient_errors(params, windows_NT1)
        return found

    def gradient_errors(self, params: Any, windows_NT1: jax.Array) -> dict[str, jax.Array]:
        """Relative error of the gradient of the gate matrices against the exact one, at the first and last layer."""
        gradient = lambda dgrad: jax.grad(self.objective, has_aux=True)(params, 0.0, windows_NT1, 1.0, dgrad)[0][
            "gate_LEDF"
        ]
        base = self.config.dgrad()
        exact = gradient(dataclasses.replace(base, element="none"))
        found = {}
        for element in ("e4m3", "e2m1"):
            for granularity in ("tile", "block"):
                ours = gradient(dataclasses.replace(base, element=element, granularity=granularity, order="token"))
                error_L = jnp.sqrt(((ours - exact) ** 2).sum((1, 2, 3)) / (exact**2).sum((1, 2, 3)))
                found |= {
                    f"error_{element}_{granularity}_{where}": error_L[i] for where, i in (("first", 0), ("last", -1))
                }
        return found

    @staticmethod
    def scalars(result: JobResult, configs: list[TrainConfig]) -> list[dict[str, float]]:
        """loss, quiet_loss: held-out cross entropy at the end; train_loss: text, last tenth of the steps; token_range:
        octaves between the loudest and the quietest token of a group of 128, largest layer, last tenth (largest and, as
        token_spread, median over tokens; a token without a gradient, such as one whose target is not predicted, counts as
        123 octaves below one of amax 1); token_range_start: the same in the first ten steps."""
        curves, end = result.curves, max(1, len(result.curves["loss"]) // 10)
        rows = []
        for lane in range(len(configs)):
            own = {name: values[:, lane].astype(np.float64) for name, values in curves.items()}
            row = {name: float(values[lane]) for name, values in result.final.items()}
            row |= {
                "train_loss": own["loss"][-end:].mean(),
                "token_range": own["token_range"][-end:].mean(),
                "token_range_first": own["token_range_first"][-end:].mean(),
                "token_range_last": own["token_range_last"][-end:].mean(),
                "token_spread": own["token_spread"][-end:].mean(),
                "token_range_start": own["token_range"][:10].mean(),
            }
            rows.append({name: value if np.isfinite(value) else np.inf for name, value in row.items()})
        return rows


def token_range(dy_LBTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Octaves between the largest amax of a token in a group of 128 and those of its tokens: [L] largest and median."""
    amax_LGT = jnp.abs(dy_LBTD).max(-1).reshape(dy_LBTD.shape[0], -1, GROUP)
    octaves_LGT = jnp.log2(amax_LGT.max(-1, keepdims=True)) - jnp.log2(jnp.maximum(amax_LGT, 1e-37))
    return octaves_LGT.max((1, 2)), jnp.median(octaves_LGT.reshape(dy_LBTD.shape[0], -1), 1)
