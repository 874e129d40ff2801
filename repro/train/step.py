"""One training step of one run, and its evaluation, as pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from repro.errors import ReproError
from repro.models import Output, Stats, abstract, by_group, declarations, init_and_apply, initial_buffers
from repro.optim import from_declarations, qk_clip
from repro.quant import round_to
from repro.train import monitors, watch
from repro.train.config import Numbers, TrainConfig
from repro.train.optimizer import build
from repro.train.schedule import fraction
from repro.train.summary import summarise

if TYPE_CHECKING:
    from repro.train.loop import JobResult

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from step to step."""

    params: Any
    opt_state: Any
    step: jax.Array
    seed: jax.Array
    buffers: Any = dataclasses.field(default_factory=dict)
    """What the model carries beside its parameters (`repro.models.Output.buffers`); no optimizer sees it."""
    guards: Any = dataclasses.field(default_factory=dict)
    """What guards remember (`repro.train.watch.Memory`)."""
    monitors: Any = dataclasses.field(default_factory=dict)
    """What monitors remember."""
    older: Any = dataclasses.field(default_factory=dict)
    """Parameters and buffers of the last `routing_lag` steps, step t in place t mod lag."""


class Periodic(NamedTuple):
    """What dear monitors need in a step: whether it is theirs, the same for all runs, and windows of validation text."""

    due: jax.Array
    validation_NT1: jax.Array


def cross_entropy(logits_BTZ: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross entropy in nats, and mean squared log Z of the output logits (the z-loss without its coefficient;
    Wortsman et al., arXiv 2309.14322, section 3.1.2)."""
    log_z_BT = jax.nn.logsumexp(logits_BTZ, -1)
    chosen_BT = jnp.take_along_axis(logits_BTZ, targets_BT[..., None], -1)[..., 0]
    return jnp.mean(log_z_BT - chosen_BT), jnp.mean(log_z_BT**2)


_DOTS, _WEIGHTS = 0x6E6F6973, 0x77656967
"""Purposes of keys: noise of quantised products, and of stored weights. Initialisation uses the seed's own key."""


def _noise(state: TrainState, purpose: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(state.seed), purpose), state.step)


def _expert_metrics(stats: Stats) -> Metrics:
    """What experts did, worst layer; nothing without experts."""
    if stats.moe is None:
        return {}
    moe = stats.moe
    return {
        "max_violation": moe.max_violation.max(),
        "least_load": moe.load.min() * moe.load.shape[-1],
        "router_logit_max": moe.router_logit_max.max(),
        "router_log_z": moe.router_log_z.max(),
        "expert_hidden_max": moe.expert_hidden_max.max(),
        "sum_rms": moe.sum_rms.max(),
        "routed_rms": moe.routed_rms.max(),
    }


def _stream_metrics(stats: Stats) -> Metrics:
    """What happened between residual streams; nothing with one."""
    if stats.residual is None:
        return {}
    gains = ("forward_max", "forward_min", "backward_max", "backward_min")
    return {f"gain_{name}": getattr(stats.residual, name) for name in gains} | {
        "stream_spread": stats.residual.spread[-1]
    }


class Program:
    """The functions of one structure: `init(seed)`, `step(state, window_BT1, numbers)`, `evaluate(params, windows)`.

    All are pure and written for a single run; the engine maps them over runs. A task of its own is a subclass with
    these three and `scalars`; its metrics hold at least `loss` and `max_logit`.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config.structure()
        self._init_params, self.apply = init_and_apply(config.model)
        self.layouts = from_declarations(declarations(abstract(config.model)))
        self._rules = config.rules

    def optimizer(
        self, numbers: Numbers, part: jax.Array | float, seed: jax.Array | int = 0
    ) -> optax.GradientTransformation:
        """The optimizer at the fraction `part` of its schedule. Its state does not depend on the arguments."""
        decay = numbers.weight_decay * part if self.config.decay == "independent" else numbers.weight_decay
        config = self.config
        rate = numbers.learning_rate * part
        return build(config.optimizer, config.optim, self.layouts, rate, decay, config.decay, seed)

    def init(self, seed: jax.Array) -> TrainState:
        params = self._init_params(jax.random.key(seed))
        if self.config.weights != "fp32":
            params = jax.tree.map(lambda w: round_to(w, "bf16"), params)
        opt_state = self.optimizer(Numbers(1.0, 0.0, jnp.inf, 0.0), 1.0).init(params)
        state = TrainState(
            params, opt_state, jnp.zeros((), jnp.int32), jnp.asarray(seed, jnp.uint32),
            initial_buffers(self.config.model, params), watch.initial_memory(self._rules),
            monitors.initial_memory(self.config.monitors),
        )  # fmt: skip
        return self.fitted(state)

    def fitted(self, state: TrainState) -> TrainState:
        """A state of a program that differs in `routing_lag` alone, as this one carries it: without older parameters, or
        with the present ones in all their places, so that the lag grows from 0 to its full length."""
        lag = self.config.routing_lag
        if not lag or state.older:
            return state if lag else dataclasses.replace(state, older={})
        repeat = lambda leaf: jnp.broadcast_to(leaf, (lag, *jnp.shape(leaf)))
        return dataclasses.replace(
            state, older=jax.tree.map(repeat, {"params": state.params, "buffers": state.buffers})
        )

    def loss(
        self, params: Any, window_BT1: jax.Array, z_loss: jax.Array, key: jax.Array | None = None, **options: Any
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Output]]:
        """The training loss; beside it the plain cross entropy, mean (log Z)^2 and the model's output. `key` is for
        noise, `options` are those of a call of the model."""
        output = self.apply(params, window_BT1[:, :-1], key=key, **options)
        ce, log_z_squared = cross_entropy(output.logits, window_BT1[:, 1:])
        return ce + z_loss * log_z_squared + output.aux_loss, (ce, log_z_squared, output)

    def gradients(self, grads: Any, numbers: Numbers) -> Any:
        """What the optimizer gets of the gradients: here all of it."""
        return grads

    def options(self, state: TrainState, window_BT1: jax.Array) -> dict[str, Any]:
        """Options of the model's call in a step: here what it carries beside its parameters, if anything, and the
        experts that older parameters choose, if they do."""
        found = {"buffers": state.buffers} if state.buffers else {}
        if self.config.routing_lag:
            older = jax.tree.map(lambda leaf: leaf[state.step % self.config.routing_lag], state.older)
            found["routes"] = self.apply(older["params"], window_BT1[:, :-1], buffers=older["buffers"]).routes
        return found

    def observed(self, output: Output) -> Metrics:
        """Further metrics of a step from the model's output: here none."""
        return {}

    def step(
        self, state: TrainState, window_BT1: jax.Array, numbers: Numbers, periodic: Periodic | None = None
    ) -> tuple[TrainState, Metrics]:
        """One step: forward, backward, optimizer, and after it QK-Clip with the logits of that forward pass; guards act
        in between. `periodic` is for dear monitors."""
        window_BT1 = window_BT1.astype(jnp.int32)
        guards = watch.Watch(self._rules, state.guards, state.step, True if periodic is None else periodic.due)
        key = _noise(state, _DOTS) if self.config.model.dots.stochastic else None
        options = self.options(state, window_BT1)

        def objective(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Output]]:
            loss, found = self.loss(params, window_BT1, numbers.z_loss, key, **options)
            return guards.scaled(loss), found

        grads, (ce, log_z_squared, output) = jax.grad(objective, has_aux=True)(state.params)
        grads = self.gradients(guards.unscaled(grads), numbers)
        stats = output.stats
        metrics = {
            "loss": ce,
            "max_logit": stats.max_logit.max(),
            "max_abs_logit": stats.max_abs_logit.max(),
            "max_capped_logit": stats.max_capped_logit.max(),
            "entropy_mean": stats.entropy.mean(),
            "entropy_min": stats.entropy.min(),
            "clipped_share": jnp.mean(stats.max_logit > numbers.tau),
            "activation_max": stats.activation_max.max(),
            "activation_rms": stats.activation_rms[-1],
            "hidden_max": stats.hidden_max.max(),
            "hidden_rms": stats.hidden_rms.max(),
            "log_z_rms": jnp.sqrt(log_z_squared),
            "grad_norm": optax.tree.norm(grads),
            "head_logits": stats.max_logit,
            **_expert_metrics(stats),
            **_stream_metrics(stats),
            **self.observed(output),
        }
        guards.look(metrics)
        used = guards.gradients(grads, metrics["grad_norm"])
        numbers = numbers._replace(learning_rate=guards.rate(numbers.learning_rate))
        tx = self.optimizer(numbers, fraction(self.config, state.step), state.seed)
        updates, opt_state = tx.update(used, state.opt_state, state.params)
        late = {"update_norm": optax.tree.norm(updates)}
        guards.look(late)
        updates = guards.updates(updates, late["update_norm"])
        params = optax.apply_updates(state.params, updates)
        if self.config.clips:
            max_logit = by_group(self.config.model, stats.max_logit)
            params = qk_clip(params, max_logit, tau=guards.tau(numbers.tau), layouts=self.layouts)
        if self.config.weights != "fp32":
            params = self._stored(params, state)
            moved = optax.tree.norm(jax.tree.map(jnp.subtract, params, state.params))
            late["retained"] = moved / late["update_norm"]
            guards.look({"retained": late["retained"]})
        remembered = state.monitors
        if self.config.monitors.names:
            seen = monitors.Observation(
                self.config, self.apply, self.layouts, numbers, state.step, state.params, params, used, updates,
                opt_state, output, ce, window_BT1, None if periodic is None else periodic.validation_NT1, options,
                state.monitors,
            )  # fmt: skip
            found, remembered = self._monitored(seen, periodic)
            guards.look(found)
            late |= found
        old = state.params, state.opt_state, state.buffers
        params, opt_state, buffers = guards.kept(old, (params, opt_state, output.buffers))
        after = dataclasses.replace(
            state, params=params, opt_state=opt_state, step=state.step + 1, buffers=buffers, guards=guards.memory(),
            monitors=remembered, older=self._aged(state),
        )  # fmt: skip
        return after, metrics | late | guards.metrics()

    def _aged(self, state: TrainState) -> Any:
        """The older parameters after this step."""
        if not self.config.routing_lag:
            return state.older
        place, present = state.step % self.config.routing_lag, {"params": state.params, "buffers": state.buffers}
        return jax.tree.map(lambda past, now: past.at[place].set(now), state.older, present)

    def _monitored(self, seen: monitors.Observation, periodic: Periodic | None) -> tuple[Metrics, dict[str, jax.Array]]:
        """The metrics of the chosen monitors, and their memory."""
        config = self.config.monitors
        found, remembered = monitors.every_step(config, seen)
        if config.chosen(dear=True):
            if periodic is None:
                raise ReproError("dear monitors need to know their steps and windows; pass periodic to the step.")
            found |= jax.lax.cond(
                periodic.due, lambda: monitors.at_times(config, seen), lambda: monitors.in_between(config, seen)
            )
        return found, remembered

    def _stored(self, params: Any, state: TrainState) -> Any:
        """Weights as they are kept until the next step (stochastic: Gupta et al., arXiv 1502.02551, section 3.1)."""
        if self.config.weights == "bf16":
            return jax.tree.map(lambda w: round_to(w, "bf16"), params)
        leaves, tree = jax.tree.flatten(params)
        key = _noise(state, _WEIGHTS)
        keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
        return jax.tree.unflatten(
            tree, [round_to(w, "bf16", rounding="stochastic", key=k) for w, k in zip(leaves, keys, strict=True)]
        )

    def evaluate(self, params: Any, windows_NT1: jax.Array, **options: Any) -> Metrics:
        """Cross entropy and largest logit over fixed windows. `options` holds `buffers` where the model has some."""
        # Where a forward pass has noise, the same for every run: a comparison of runs should not contain it.
        _, (ce, _, output) = self.loss(params, windows_NT1.astype(jnp.int32), 0.0, jax.random.key(0), **options)
        return {"loss": ce, "eval_max_logit": output.stats.max_logit.max()}

    @staticmethod
    def scalars(result: JobResult, configs: Sequence[TrainConfig]) -> list[dict[str, float]]:
        """One dict of scalars per lane, which criteria read; see `summarise`."""
        return summarise(result, np.array([config.tau for config in configs]))
