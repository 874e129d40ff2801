"""Guards: declared rules `when SIGNAL ... then ACTION ... for N`, judged for every run by itself inside its program.

    when loss > ema + 0.5 then skip
    when grad_norm > 4 ema then clip_gradient 1 for 10
    when max_logit > 100 then qk_clip 100 for 50
    when grad_norm nonfinite then quarantine 20

A signal is any scalar metric of a step. It trips a rule when it lies above or below a number, above its own running mean
by an amount or a factor, or is not finite; a value that is not a number trips every rule on it. A rule that acts for N
steps is not judged again in the meantime. See `ACTIONS` for what can be done.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from repro.errors import ReproError
from repro.optim.loss_scale import LossScale
from repro.quant.precision import precision_of
from repro.train.monitors import DEAR

WARM = 20
"""Values that a running mean must have seen before a rule may lean on it."""
EMA_DECAY = 0.95
"""Of the running mean of a signal: a memory of 20 values."""
FOREVER = 2**31 - 1
"""A step that no run reaches."""

Test = Literal["above", "below", "over_mean", "times_mean", "nonfinite"]


@dataclasses.dataclass(frozen=True)
class Action:
    """What a rule may do. `amount` says what the number or name after it is (empty: none), `lasts` whether `for N` has a
    meaning ("always" where it must be given). A structural action is taken between chunks, in a program of the run's
    own; the others are taken inside the step."""

    amount: str
    lasts: Literal["", "optional", "always"]
    structural: bool
    does: str


ACTIONS: Mapping[str, Action] = {
    "skip": Action("", "optional", False, "parameters, optimizer state and buffers stay as they were, to the bit"),
    "scale_loss": Action(
        "initial scale", "optional", False,
        "dynamic loss scaling: the step is skipped and the scale halved; doubled after N clean steps (2000)",
    ),
    "clip_gradient": Action("largest norm", "optional", False, "the whole gradient is scaled to a norm of at most this"),
    "clip_update": Action("largest norm", "optional", False, "the whole update is scaled to a norm of at most this"),
    "qk_clip": Action("tau", "optional", False, "QK-Clip with at most this threshold"),
    "lower_rate": Action("factor", "optional", False, "the rate times this factor"),
    "rewarm": Action("", "always", False, "the rate rises linearly from 0 to its schedule over N steps"),
    "clamp": Action("limit", "optional", True, "the GLU's branches are clamped at this limit (DeepSeek-V4)"),
    "precision": Action("name", "optional", True, "linear layers in other formats or with another accumulator"),
    "rollback": Action("steps", "", True, "back to a state at least so many steps before, and the same batches again"),
    "quarantine": Action("steps", "optional", True, "a rollback; the batches of this and N - 1 more steps are replaced"),
    "decouple": Action(
        "lag", "always", True,
        "a rollback of as many steps as the lag; experts by the parameters of so many steps ago (Anticipatory Routing)",
    ),
}  # fmt: skip

_LASTING = ("qk_clip", "lower_rate", "clamp", "precision")
"""Actions that last to the end of the run unless `for N` is given; the others last for one step."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?inf|nan"
_RULE = re.compile(
    rf"when (?P<signal>\w+) (?:nonfinite|(?P<sign>[<>]) (?:(?P<plus>ema \+ )?(?P<value>{_NUMBER})(?P<times> ema)?))"
    r" then (?P<action>\w+)(?: (?P<amount>(?!for\b)\S+))?(?: for (?P<steps>\d+))?"
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One guard. `steps` is how long it acts."""

    text: str
    signal: str
    test: Test
    value: float
    action: str
    amount: Any
    steps: int

    @property
    def structural(self) -> bool:
        return ACTIONS[self.action].structural

    @property
    def back(self) -> int:
        """Steps that a run goes back when the rule trips."""
        return self.amount if self.action in ("rollback", "quarantine", "decouple") else 0

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the program that a structural action puts in place."""
        match self.action:
            case "clamp":
                return {"model.glu": "clamped", "model.glu_limit": self.amount}
            case "precision":
                return {"model.precision": self.amount}
            case "decouple":
                return {"routing_lag": self.amount}
        return {}


def parse(text: str) -> Rule:
    """A rule from its text. Raises `ReproError` saying what was wrong and what would be right."""
    words = " ".join(text.split())
    found = _RULE.fullmatch(words)
    if found is None:
        raise ReproError(
            f"guard {text!r} is not a rule; write `when SIGNAL > VALUE then ACTION`, with `< VALUE`, `> ema + VALUE`, "
            "`> VALUE ema` or `nonfinite` as the test, and `for STEPS` behind the action."
        )
    name = found["action"]
    if name not in ACTIONS:
        raise ReproError(f"guard {text!r} names the action {name!r}; known are {', '.join(ACTIONS)}.")
    if found["sign"] is None:
        test: Test = "nonfinite"
    elif found["plus"] or found["times"]:
        test = "over_mean" if found["plus"] else "times_mean"
        if (found["plus"] and found["times"]) or found["sign"] == "<":
            raise ReproError(
                f"guard {text!r} is not a rule; a running mean is used as `> ema + VALUE` or `> VALUE ema`."
            )
    else:
        test = "above" if found["sign"] == ">" else "below"
    value = float(found["value"]) if found["value"] else 0.0
    if not math.isfinite(value):
        raise ReproError(f"guard {text!r} can never fire: its threshold must be finite.")
    if (test == "over_mean" and value <= 0) or (test == "times_mean" and value <= 1):
        raise ReproError(
            f"guard {text!r} would trip at values like those before; add more than 0, or use more than 1 ema."
        )
    return Rule(words, found["signal"], test, value, name, _amount(text, name, found["amount"]), _steps(text, found))


def _steps(text: str, found: re.Match[str]) -> int:
    action, name = ACTIONS[found["action"]], found["action"]
    if found["steps"] is None:
        if action.lasts == "always":
            raise ReproError(f"guard {text!r} must say for how long, such as `then {name} ... for 50`.")
        return LossScale().interval if name == "scale_loss" else FOREVER if name in _LASTING else 1
    if not action.lasts or not int(found["steps"]):
        raise ReproError(f"guard {text!r}: {name} takes no `for {found['steps']}`; leave it out.")
    return int(found["steps"])


def _amount(text: str, name: str, given: str | None) -> Any:
    wanted = ACTIONS[name].amount
    if (given is None) != (not wanted):
        right = f"{name} takes a {wanted}, such as `{name} {_EXAMPLES[name]}`" if wanted else f"{name} takes no value"
        raise ReproError(f"guard {text!r}: {right}.")
    if wanted in ("", "name"):
        return given
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    whole = wanted in ("steps", "lag")
    top = 1.0 if wanted == "factor" else math.inf
    if not 0 < number < top or (whole and number != int(number)):
        kind = "a whole number above 0" if whole else "a number between 0 and 1" if wanted == "factor" else "positive"
        raise ReproError(f"guard {text!r}: the {wanted} of {name} must be {kind}, not {given}.")
    return int(number) if whole else number


_EXAMPLES = {
    "scale_loss": 65536, "clip_gradient": 1, "clip_update": 1, "qk_clip": 100, "lower_rate": 0.5, "clamp": 10,
    "precision": "bf16", "rollback": 20, "quarantine": 20, "decouple": 20,
}  # fmt: skip

_NOT_NEGATIVE = (
    "loss", "max_abs_logit", "max_capped_logit", "entropy_mean", "entropy_min", "clipped_share", "activation_max",
    "activation_rms", "hidden_max", "hidden_rms", "log_z_rms", "grad_norm", "update_norm", "max_violation", "least_load",
    "router_logit_max", "router_log_z", "expert_hidden_max", "sum_rms", "routed_rms",
)  # fmt: skip


def check_rules(rules: tuple[Rule, ...], config: Any) -> None:
    """Raises `ReproError` for a rule that can never fire or never do anything in a run of `config` (a `TrainConfig`)."""
    model = config.model
    highest = {"clipped_share": 1.0, "entropy_mean": math.log(config.length), "entropy_min": math.log(config.length)}
    for rule in rules:
        said = f"guard {rule.text!r}"
        if rule.test == "below" and rule.signal in _NOT_NEGATIVE and rule.value <= 0:
            raise ReproError(f"{said} can never fire: {rule.signal} is never below 0.")
        if rule.test == "above" and rule.value >= highest.get(rule.signal, math.inf):
            raise ReproError(f"{said} can never fire: {rule.signal} is at most {highest[rule.signal]:.4g}.")
        if rule.test in ("over_mean", "times_mean") and config.steps <= WARM * _every(rule, config):
            raise ReproError(
                f"{said} can never fire: a running mean needs {WARM} values, and {rule.signal} has no more in "
                f"{config.steps} steps; use a fixed threshold, or more steps."
            )
        if rule.action == "scale_loss" and rule.test != "nonfinite":
            raise ReproError(
                f"{said}: a loss scale answers overflow; write `when grad_norm nonfinite then scale_loss ...`."
            )
        if rule.action == "qk_clip" and not config.clips:
            raise ReproError(f"{said} can never act: QK norm, sigma-reparametrisation or a soft-cap rule QK-Clip out.")
        if rule.action == "clamp" and model.glu not in ("swiglu", "smooth", "clamped"):
            raise ReproError(f"{said} can never act: a clamp is for SwiGLU, and model.glu is {model.glu}.")
        if rule.action == "clamp" and model.glu == "clamped" and model.glu_limit < rule.amount:
            raise ReproError(f"{said} can never act: the model clamps at {model.glu_limit:g} already.")
        if rule.action == "decouple" and not model.moe.experts:
            raise ReproError(f"{said} can never act: the model has no experts; set model.moe.experts.")
        if rule.back > config.steps:
            raise ReproError(f"{said} goes back {rule.back} steps in a run of {config.steps}; name fewer.")
        if rule.action == "precision":
            precision_of(rule.amount)
    if sum(rule.action == "scale_loss" for rule in rules) > 1:
        raise ReproError("two guards ask for scale_loss; a run has one loss scale.")


def check_signals(rules: tuple[Rule, ...], signals: Mapping[str, Any]) -> None:
    """Raises `ReproError` for a rule on a signal that is not among `signals`: arrays of a step, by name."""
    known = [name for name, value in signals.items() if value.ndim == 0]
    for rule in rules:
        if rule.signal not in known:
            raise ReproError(
                f"guard {rule.text!r} watches {rule.signal!r}, which is no scalar signal of this run; there is "
                f"{', '.join(known)}. Further ones come with monitors."
            )


def _every(rule: Rule, config: Any) -> int:
    """Steps from one value of the rule's signal to the next."""
    return config.monitors.interval if rule.signal in DEAR else 1
