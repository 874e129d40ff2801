"""Faults that are put into a training run by hand, at one step, inside its compiled program.

Which fault, and how strong, are numbers of a run: one program serves every fault and the run without one. A run that
guards sent back meets a bad batch again unless it was quarantined, since data are a function of the step; all other
faults are transient, as those of hardware are, and do not come again.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from repro.errors import ReproError
from repro.train import NUMERIC, Program, TrainConfig, TrainState

_TOKENS = 0x746F6B65
"""Purpose of the key of random tokens."""


@dataclasses.dataclass(frozen=True)
class FaultConfig(TrainConfig):
    """A run with a fault. Raises `ReproError` for strengths that mean nothing."""

    numeric: ClassVar[tuple[str, ...]] = (
        *NUMERIC, "fault_step", "random_tokens", "repeated_token", "nan_gradient", "flipped_bit", "outlier",
    )  # fmt: skip

    fault_step: float = -1.0
    """The step, from 0; below 0 none."""
    random_tokens: float = 0.0
    """Share of the batch's windows that hold uniformly random tokens, targets included."""
    repeated_token: float = 0.0
    """Share of its windows that hold one token all along, the first of the batch."""
    nan_gradient: float = 0.0
    """1: one number of `target`'s gradient is NaN; the loss is not touched."""
    flipped_bit: float = -1.0
    """Bit of one stored number of `target` that flips before the step, 0 the lowest of the mantissa, 23 to 30 the
    exponent, 31 the sign; it stays flipped. Below 0 none."""
    outlier: float = 1.0
    """Factor on the linear branch of one hidden unit of the last layer, in the forward pass of the step."""
    target: str = "blocks.ffn.up_DF"
    """The parameter that a bit or a gradient belongs to."""
    coordinate: int = 0
    """Which of its numbers, row by row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("random_tokens", "repeated_token"):
            if not 0 <= getattr(self, name) <= 1:
                raise ReproError(f"train.{name} is {getattr(self, name)}; it is a share of the windows, from 0 to 1.")
        if self.nan_gradient not in (0.0, 1.0):
            raise ReproError(f"train.nan_gradient is {self.nan_gradient}; it is 0 or 1.")
        if self.flipped_bit > 31 or self.flipped_bit % 1:
            raise ReproError(f"train.flipped_bit is {self.flipped_bit}; it is a bit from 0 to 31, or -1 for none.")
        if self.model.moe.experts or self.model.pattern:
            raise ReproError("a fault needs dense layers of one kind; leave train.model.moe and pattern as they are.")

    @classmethod
    def program_class(cls) -> type[Program]:
        return FaultProgram


class Fault(NamedTuple):
    """What is wrong in the forward and backward pass of a step: `now []`, whether anything is, `poison []`, whether a
    gradient is NaN, and `outlier []`, the factor on a hidden unit."""

    now: jax.Array
    poison: jax.Array
    outlier: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Faulty(TrainState):
    """A state inside a step."""

    fault: Any = None


@jax.custom_vjp
def poisoned(x: jax.Array, place: jax.Array) -> jax.Array:
    """x; its gradient is NaN where `place`, a mask of the shape of x, is true."""
    return x


def _forward(x: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, place


def _backward(place: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, np.ndarray]:
    return jnp.where(place, jnp.nan, cotangent), np.zeros(place.shape, jax.dtypes.float0)


poisoned.defvjp(_forward, _backward)


def flipped(x: jax.Array, coordinate: int, bit: jax.Array) -> jax.Array:
    """x float32 with one bit of one number flipped; `coordinate` counts row by row."""
    flat = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
    mask = jnp.uint32(1) << jnp.asarray(bit).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(flat.at[coordinate].set(flat[coordinate] ^ mask).reshape(x.shape), jnp.float32)


class FaultProgram(Program):
    """The engine's program with a fault. Raises `ReproError` for a target that the model does not have."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        like = jax.eval_shape(self._init_params, jax.random.key(0))
        try:
            size = self._of(like).size
        except (KeyError, TypeError, AttributeError):
            raise ReproError(f"train.target {config.target!r} is no parameter of this model.") from None
        if not 0 <= config.coordinate < size:
            raise ReproError(f"train.coordinate is {config.coordinate}; {config.target} holds {size} numbers.")

    def _of(self, params: Any) -> Any:
        for name in self.config.target.split("."):
            params = params[name]
        return params

    def _replaced(self, params: Any, change: Any) -> Any:
        """The parameters with `change` applied to the target."""

        def at(tree: Any, names: list[str]) -> Any:
            return tree | {names[0]: at(tree[names[0]], names[1:])} if names else change(tree)

        return at(params, self.config.target.split("."))

    def step(self, state: TrainState, window_BT1: jax.Array, numbers: Any, *rest: Any):
        # Each change stands in a branch of its own: what is compiled beside it is then as it would be without it.
        data, transient = self._now(state, numbers)
        window_BT1 = jax.lax.cond(
            data,
            lambda window: self._bad_batch(window, state, numbers),
            lambda window: window,
            window_BT1.astype(jnp.int32),
        )
        flip = lambda x: flipped(x, self.config.coordinate, numbers.flipped_bit)
        params = jax.lax.cond(
            transient & (numbers.flipped_bit >= 0),
            lambda tree: self._replaced(tree, flip),
            lambda tree: tree,
            state.params,
        )
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(TrainState)}
        fault = Fault(transient, numbers.nan_gradient > 0, numbers.outlier)
        inside = _Faulty(**fields | {"params": params}, fault=fault)
        after, metrics = super().step(inside, window_BT1, numbers, *rest)
        return TrainState(**{name: getattr(after, name) for name in fields}), metrics

    def _now(self, state: TrainState, numbers: Any) -> tuple[jax.Array, jax.Array]:
        """Whether a fault of the data, and a transient one, is in this step."""
        here = (state.step == numbers.fault_step) & (numbers.fault_step >= 0)
        data = transient = here
        for r, rule in enumerate(self._rules):
            if rule.back:  # such a rule is silent up to a step beyond the present one only in a run that went back
                until = state.guards["until"][r]
                transient &= until <= state.step
                if rule.action == "quarantine":
                    data &= ~((until - rule.steps <= state.step) & (state.step < until))
        return data, transient

    def _bad_batch(self, window_BT1: jax.Array, state: TrainState, numbers: Any) -> jax.Array:
        rows_B1 = (jnp.arange(window_BT1.shape[0]) / window_BT1.shape[0])[:, None]
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(state.seed), _TOKENS), state.step)
        random_BT1 = jax.random.randint(key, window_BT1.shape, 0, self.config.model.vocab_size)
        window_BT1 = jnp.where(rows_B1 < numbers.random_tokens, random_BT1, window_BT1)
        return jnp.where(rows_B1 < numbers.repeated_token, window_BT1[:1, :1], window_BT1)

    def options(self, state: TrainState, window_BT1: jax.Array) -> dict[str, Any]:
        return super().options(state, window_BT1) | {"fault": state.fault}

    def loss(
        self,
        params: Any,
        window_BT1: jax.Array,
        z_loss: Any,
        key: Any = None,
        fault: Fault | None = None,
        **options: Any,
    ):
        if fault is not None:
            params = jax.lax.cond(fault.now, lambda tree: self._hit(tree, fault), lambda tree: tree, params)
        return super().loss(params, window_BT1, z_loss, key, **options)

    def _hit(self, params: Any, fault: Fault) -> Any:
        """The parameters as the model sees them in the step of the fault."""

        def poison(x: jax.Array) -> jax.Array:
            here = (jnp.arange(x.size) == self.config.coordinate).reshape(x.shape)
            return poisoned(x, here & fault.poison)

        params = self._replaced(params, poison)
        ffn = params["blocks"]["ffn"]
        up = ffn["up_DF"].at[-1, :, 0].multiply(fault.outlier)
        return params | {"blocks": params["blocks"] | {"ffn": ffn | {"up_DF": up}}}
