"""Guards inside a step: each rule judged on the signals of one run, and its action taken by `where`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from repro.optim.loss_scale import LossScale
from repro.train.guards import EMA_DECAY, FOREVER, WARM, Rule
from repro.train.monitors import DEAR

Memory = dict[str, Any]
"""`mean [R]`, the running mean of each rule's signal, `seen [R]`, the values in it, `until [R]`, the step before which
the rule acts, and `scale` where there is a loss scale."""


def loss_scale_of(rules: Sequence[Rule]) -> LossScale | None:
    """The rule of the loss scale that a guard asks for."""
    for rule in rules:
        if rule.action == "scale_loss":
            return LossScale(initial=rule.amount, largest=max(2.0**24, rule.amount), interval=rule.steps)
    return None


def initial_memory(rules: Sequence[Rule]) -> Memory:
    """What guards remember before the first step; empty without rules."""
    if not rules:
        return {}
    count = (len(rules),)
    memory: Memory = {
        "mean": jnp.zeros(count),
        "seen": jnp.zeros(count, jnp.int32),
        "until": jnp.zeros(count, jnp.int32),
    }
    scale = loss_scale_of(rules)
    return memory | ({} if scale is None else {"scale": scale.init()})


class Watch:
    """The guards of one step, while it is traced. Signals are shown with `look` as they become known; an action on what
    comes before its signal is taken from the next step on. Without rules every method returns what it was given.
    """

    def __init__(self, rules: Sequence[Rule], memory: Memory, step: jax.Array, due: jax.Array | bool = True) -> None:
        self._rules, self._step, self._due = rules, step, due
        self._scale_rule, self._scale = loss_scale_of(rules), memory.get("scale")
        unpack = lambda name: [memory[name][r] for r in range(len(rules))]
        self._mean, self._seen, self._until = (unpack(name) if rules else [] for name in ("mean", "seen", "until"))
        self._fired = [jnp.zeros((), bool)] * len(rules)

    def look(self, signals: Mapping[str, jax.Array]) -> None:
        """Judges the rules on `signals`, each once in a step."""
        for r, rule in enumerate(self._rules):
            if rule.signal in signals and signals[rule.signal].ndim == 0:
                self._judge(r, rule, signals[rule.signal].astype(jnp.float32))

    def _judge(self, r: int, rule: Rule, value: jax.Array) -> None:
        measured = self._due if rule.signal in DEAR else True
        mean, enough = self._mean[r], self._seen[r] >= WARM
        if rule.test == "nonfinite":
            trips = ~jnp.isfinite(value)
        elif rule.test == "below":
            trips = ~(value >= rule.value)
        else:
            bound = {"above": rule.value, "over_mean": mean + rule.value, "times_mean": mean * rule.value}[rule.test]
            trips = ~(value <= bound)
            if rule.test != "above":
                trips &= enough
                # A value beyond the bound counts as the bound: the mean learns of a new level, but slowly.
                kept = jnp.where(enough, jnp.minimum(value, bound), value)
                counts = jnp.isfinite(value) & measured
                mixed = jnp.where(self._seen[r] == 0, kept, EMA_DECAY * mean + (1 - EMA_DECAY) * kept)
                self._mean[r] = jnp.where(counts, mixed, mean)
                self._seen[r] = self._seen[r] + jnp.where(counts, 1, 0)
        fired = trips & measured & (self._step >= self._until[r])
        # One that is structural stays silent until its action is over; it is taken after the chunk.
        end = FOREVER if rule.steps == FOREVER else self._step + rule.steps
        if rule.action == "scale_loss":  # acts in the one step; `steps` is the interval of growth
            end = self._step + 1
        self._fired[r] = fired
        self._until[r] = jnp.where(fired, end, self._until[r])

    def _acting(self, action: str) -> list[tuple[Rule, jax.Array, jax.Array]]:
        """The rules of an action, whether each acts now, and the step before which it does."""
        return [
            (rule, self._step < self._until[r], self._until[r])
            for r, rule in enumerate(self._rules)
            if rule.action == action
        ]

    def scaled(self, loss: jax.Array) -> jax.Array:
        """The loss times the loss scale."""
        return loss if self._scale is None else loss * self._scale.scale

    def unscaled(self, grads: Any) -> Any:
        """The gradients of a scaled loss over the scale."""
        return grads if self._scale is None else jax.tree.map(lambda g: g / self._scale.scale, grads)

    def gradients(self, grads: Any, norm: jax.Array) -> Any:
        """The gradients after clips to a largest norm."""
        return self._clipped("clip_gradient", grads, norm)

    def updates(self, updates: Any, norm: jax.Array) -> Any:
        """The updates after clips to a largest norm."""
        return self._clipped("clip_update", updates, norm)

    def _clipped(self, action: str, tree: Any, norm: jax.Array) -> Any:
        for rule, acts, _ in self._acting(action):
            over = acts & (norm > rule.amount)
            factor = jnp.where(over, rule.amount / jnp.where(over, norm, 1.0), 1.0)
            tree = jax.tree.map(lambda x, factor=factor: x * factor.astype(x.dtype), tree)
        return tree

    def rate(self, rate: jax.Array) -> jax.Array:
        """The learning rate, lowered or on its way up again."""
        for rule, acts, _ in self._acting("lower_rate"):
            rate = jnp.where(acts, rate * rule.amount, rate)
        for rule, acts, until in self._acting("rewarm"):
            rate = jnp.where(acts, rate * ((self._step + rule.steps - until) / rule.steps), rate)
        return rate

    def tau(self, tau: jax.Array) -> jax.Array:
        """The threshold of QK-Clip, with the rules that act."""
        for rule, acts, _ in self._acting("qk_clip"):
            tau = jnp.where(acts, jnp.minimum(tau, rule.amount), tau)
        return tau

    def kept(self, old: Any, new: Any) -> Any:
        """`new`, or `old` to the bit where a rule skips the step."""
        skips = [acts for action in ("skip", "scale_loss") for _, acts, _ in self._acting(action)]
        if not skips:
            return new
        skip = jnp.any(jnp.stack(skips))
        return jax.tree.map(lambda o, n: jnp.where(skip, o, n), old, new)

    def metrics(self) -> dict[str, jax.Array]:
        """`guard_fired` and `guard_active` [R], and the loss scale."""
        if not self._rules:
            return {}
        found = {
            "guard_fired": jnp.stack(self._fired),
            "guard_active": jnp.stack([self._step < until for until in self._until]),
        }
        return found | ({} if self._scale is None else {"loss_scale": self._scale.scale})

    def memory(self) -> Memory:
        """What is remembered after this step."""
        if not self._rules:
            return {}
        found: Memory = {
            "mean": jnp.stack(self._mean),
            "seen": jnp.stack(self._seen),
            "until": jnp.stack([jnp.asarray(until, jnp.int32) for until in self._until]),
        }
        if self._scale is None:
            return found
        overflow = next(
            fired for rule, fired in zip(self._rules, self._fired, strict=True) if rule.action == "scale_loss"
        )
        return found | {"scale": self._scale_rule.after(self._scale, ~overflow)}
