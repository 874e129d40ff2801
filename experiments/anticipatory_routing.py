"""Does routing by older parameters break a loop between outliers and routing, and does it do harm?

Written before the first run on these seeds (pilots had suggested the toy's numbers, and saw no loop in training).
DeepSeek-V4 routes by indices that parameters of dt steps ago give, with gates of the present ones, and reports that
this ends loss spikes: outliers in experts and routing are said to make each other worse. Lag, trigger and detector are
not published.

*Toy.* x is the size of an outlier, which decays by mu = 0.1 per step; routing feeds it with a lag of d steps. A linear
loop x' = (1 - mu) x + k x_(t-d) grows if k > mu whatever the lag, since z = 1 solves its equation at k = mu: a lag only
slows it. A loop of the other sign, which balances, is destabilised by the lag. A loop that needs a push, x' = (1 - mu)
x + mu x x_(t-d), needs a push that is larger the longer the lag, if no outlier is in the past. So a lag can break a
loop only if it has a threshold and the history is clean, as after a rollback.

*Training.* A small mixture of experts with V4's affinity and the sign rule. "20 steps old" takes the indices of every
step from the parameters and biases of 20 steps before on the present data (at first from the initial ones). Harmful on
purpose: those indices computed for another row of the batch. The hit is an amplifier: at step 120 one hidden unit of
the busiest expert of the last layer becomes 30 times larger; older indices then come from before the hit. Beside them
"frozen" indices, always of the parameters just before the hit. Plain runs, also at four times the best rate, are asked
for the two halves of the loop: given an expert's load now, does a large hidden unit bring it more tokens 20 steps
later, and given the unit, does load make it grow? Both are partial correlations over experts of the last layer and
steps after the first fifth. A null here would mean: not seen at this size.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import (
    All,
    Arm,
    AtLeast,
    Cell,
    Claim,
    Control,
    Experiment,
    Greater,
    NonInferior,
    Run,
    Within,
    swapped,
)
from repro.errors import ReproError
from repro.models import ModelConfig, MoEConfig, Output
from repro.report import Curve, Dose, Effects, Ladder
from repro.train import NUMERIC, JobResult, Program, TrainConfig, TrainState
from repro.train.preset import Preset, tuned

V4 = "DeepSeek-V4 report, section 4.2.3"
MU, LAGS = 0.1, (0, 1, 5, 10, 20, 30, 50)
LAG, PUSH, MARGIN = 20, 0.14, 0.02
"""Steps; growth of the critical impulse per step of lag; nats."""
_LATE = {"lag": LAG}
_HIT = {"hit": 30.0}
ARMS = (
    Arm("sync", "present indices"),
    Arm("lag", "indices 20 steps old", _LATE),
    Arm("mixed", "indices of another row", _LATE | {"mixed": 1.0}),
    Arm("sync_hit", "present indices, hit", _HIT),
    Arm("lag_hit", "indices 20 steps old, hit", _LATE | _HIT),
    Arm("frozen_hit", "frozen indices, hit", _LATE | _HIT | {"frozen": 1.0}),
)
TOYS = (
    Arm("positive", "feeding loop"),
    Arm("negative", "balancing loop"),
    Arm("excitable", "loop with a threshold"),
)


def lag_point(lag: int) -> str:
    return f"d{lag}"


@dataclasses.dataclass(frozen=True)
class RoutingConfig(TrainConfig):
    """A decoder with experts whose indices may come from older parameters."""

    numeric: ClassVar[tuple[str, ...]] = (*NUMERIC, "hit", "since", "frozen", "mixed")

    model: ModelConfig = ModelConfig(
        moe=MoEConfig(experts=8, active=2, ffn=32, shared=2, affinity="sqrt_softplus", balance="sign")
    )
    lag: int = 0
    """Steps that the parameters of the indices are behind; 0 keeps no older ones."""
    hit_step: int = 120
    hit: float = 1.0
    """Factor at `hit_step` on one hidden unit (its linear branch) of the busiest expert of the last layer."""
    since: float = 0.0
    """First step that takes older indices."""
    frozen: float = 0.0
    """1: from `since` on always the indices of the parameters that step `since` began with, before a hit."""
    mixed: float = 0.0
    """1: indices computed for the row of the batch above."""

    def __post_init__(self) -> None:
        super().__post_init__()
        moe = self.model.moe
        if not moe.experts or moe.dense_layers or moe.hash_layers or self.model.pattern:
            raise ReproError("This experiment needs experts that a router chooses in every layer.")
        if self.lag < 0 or self.hit_step < 1 or not 0 < self.hit < math.inf:
            raise ReproError("train.lag must be zero or positive, train.hit_step at least 1 and train.hit positive.")
        if self.frozen not in (0.0, 1.0) or self.mixed not in (0.0, 1.0) or self.since < 0:
            raise ReproError("train.frozen and train.mixed are 0 or 1, and train.since is zero or positive.")
        if not self.lag and (self.since or self.frozen or self.mixed):
            raise ReproError("train.since, frozen and mixed say how older indices are used; set train.lag.")

    @classmethod
    def program_class(cls) -> type[Program]:
        return RoutingProgram

    def ledger_rows(self) -> dict[str, dict[str, str]]:
        if not self.lag:
            return {"N7": {"routing": "indices of the present parameters"}}
        words = "frozen" if self.frozen else f"{self.lag} steps old"
        row = ", of another row of the batch" if self.mixed else ""
        return {"N7": {"routing": f"indices {words} from step {self.since:g} on{row}, present gates"}}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingState(TrainState):
    """The state with what older indices need."""

    history: Any = None
    """Parameters and buffers of the last `lag` steps; step t is in place t mod lag."""
    load_LE: Any = None
    """Load of every expert in the step before."""
    routes: Any = None
    """Older indices, inside a step only."""


class RoutingProgram(Program):
    """The engine's program with older indices and a hit."""

    def init(self, seed: jax.Array) -> RoutingState:
        state, config = super().init(seed), self.config
        history = None
        if config.lag:
            repeat = lambda leaf: jnp.broadcast_to(leaf, (config.lag, *leaf.shape))
            history = jax.tree.map(repeat, (state.params, state.buffers))
        load_LE = jnp.zeros((config.model.layers, config.model.moe.experts))
        return RoutingState(**_fields(state), history=history, load_LE=load_LE)

    def options(self, state: RoutingState, window_BT1: jax.Array) -> dict[str, Any]:
        found = super().options(state, window_BT1)
        return found if state.routes is None else found | {"routes": state.routes}

    def observed(self, output: Output) -> dict[str, jax.Array]:
        return {"expert_load": output.stats.moe.load, "expert_hidden": output.stats.moe.expert_hidden_max}

    def step(self, state: RoutingState, window_BT1: jax.Array, numbers: Any):
        found = {}
        if self.config.lag:
            routes, history = self._older(state, window_BT1[:, :-1].astype(jnp.int32), numbers)
            found = {"routes": routes, "history": history}
        state = dataclasses.replace(state, params=self._hit(state, numbers), **found)
        after, metrics = super().step(state, window_BT1, numbers)
        return dataclasses.replace(after, load_LE=metrics["expert_load"], routes=None), metrics

    def _older(self, state: RoutingState, tokens_BT: jax.Array, numbers: Any) -> tuple[jax.Array, Any]:
        """Indices of older parameters on the present tokens, and the history with the present ones."""
        lag, t = self.config.lag, state.step
        present, frozen = (state.params, state.buffers), numbers.frozen > 0
        at = lambda step: jnp.asarray(step % lag).astype(jnp.int32)
        # While frozen nothing is written after step `since`, whose place is read.
        early = jnp.where(frozen, t <= numbers.since, t < numbers.since)
        place = jnp.where(frozen, at(numbers.since), at(t))
        older = jax.tree.map(lambda now, past: jnp.where(early, now, past[place]), present, state.history)
        rows_BT = jnp.where(numbers.mixed > 0, jnp.roll(tokens_BT, 1, 0), tokens_BT)
        routes = self.apply(older[0], rows_BT, buffers=older[1]).routes
        write = ~frozen | (t <= numbers.since)
        replaced = lambda now, past: past.at[at(t)].set(jnp.where(write, now, past[at(t)]))
        return routes, jax.tree.map(replaced, present, state.history)

    def _hit(self, state: RoutingState, numbers: Any) -> Any:
        """The parameters, at `hit_step` with one hidden unit of the busiest expert of the last layer scaled."""
        factor = jnp.where(state.step == self.config.hit_step, numbers.hit, 1.0)
        ffn = state.params["blocks"]["ffn"]
        up = ffn["up_EDF"].at[-1, state.load_LE[-1].argmax(), :, 0].multiply(factor)
        return state.params | {"blocks": state.params["blocks"] | {"ffn": ffn | {"up_EDF": up}}}

    @staticmethod
    def scalars(result: JobResult, configs: list[TrainConfig]) -> list[dict[str, float]]:
        """Beside the engine's: of the expert that is the busiest before the hit, hit or not, `hit_hidden` (geometric
        mean of its largest hidden unit 20 to 39 steps after), `hit_load` (its load over the mean, 5 to 39 steps after);
        `hit_loss`, training loss over 40 steps from the hit; the two halves of the loop, see `halves`."""
        rows = Program.scalars(result, configs)
        for lane, row in enumerate(rows):
            load, hidden = (
                result.curves[name][:, lane, -1].astype(np.float64) for name in ("expert_load", "expert_hidden")
            )
            row |= halves(load, hidden, LAG, len(load) // 5)
            t = configs[lane].hit_step
            if len(load) >= t + 40:
                expert = load[t - 1].argmax()
                row |= {
                    "hit_hidden": float(np.exp(np.log(np.maximum(hidden[t + 20 : t + 40, expert], 1e-3)).mean())),
                    "hit_load": float(load[t + 5 : t + 40, expert].mean() * load.shape[1]),
                    "hit_loss": float(result.curves["loss"][t : t + 40, lane].mean()),
                }
        return rows


def _fields(state: TrainState) -> dict[str, Any]:
    """The fields that every training state has."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(TrainState)}


def partial_correlation(x: np.ndarray, y: np.ndarray, given: np.ndarray) -> float:
    """Correlation of x and y, after a straight line in `given` is taken from both; NaN where nothing varies."""
    design = np.stack([np.ones_like(given), given], 1)
    rest = [v - design @ np.linalg.lstsq(design, v, rcond=None)[0] for v in (x, y)]
    norms = [np.linalg.norm(r) for r in rest]
    varies = all(n > 1e-9 * np.linalg.norm(v) for n, v in zip(norms, (x, y), strict=True))
    return float(rest[0] @ rest[1] / (norms[0] * norms[1])) if varies else math.nan


def halves(load_SE: np.ndarray, hidden_SE: np.ndarray, lag: int, start: int) -> dict[str, float]:
    """The two halves of a loop between the loads of experts and their largest hidden units, at every step.

    outlier_then_load: log of the unit now with the load `lag` steps later, given the load now; load_then_outlier: the
    load now with the log of the unit later, given that now. outlier_then_other: the first, with the load of the next
    expert. Pairs are all experts and all steps from `start` on; empty for a run that is too short.
    """
    if len(load_SE) <= start + lag + 1:
        return {}
    log_SE = np.log(np.maximum(hidden_SE, 1e-3))
    now, later = slice(start, len(load_SE) - lag), slice(start + lag, None)
    flat = lambda values: values.reshape(-1)
    load, unit = flat(load_SE[now]), flat(log_SE[now])
    return {
        "outlier_then_load": partial_correlation(unit, flat(load_SE[later]), load),
        "load_then_outlier": partial_correlation(load, flat(log_SE[later]), unit),
        "outlier_then_other": partial_correlation(unit, flat(np.roll(load_SE[later], 1, 1)), load),
    }


@dataclasses.dataclass(frozen=True)
class RoutingPreset(Preset):
    """The sweep of this experiment, at one size."""

    train: RoutingConfig = RoutingConfig()
    complete: bool = True
    """Whether everything runs, or only present against older indices at one rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) != 1:
            raise ReproError(f"sizes is {self.sizes}; this experiment takes one size.")


def _toy() -> list[Claim]:
    every = lambda metric, arm, low, high: All(tuple(Within(metric, f"{arm}@{lag_point(d)}", low, high) for d in LAGS))
    stays = lambda arm: every("threshold", arm, MU - 1e-6, MU + 1e-6)
    falls = lambda arm: Within("threshold_over_prompt", f"{arm}@{lag_point(LAG)}", 0.0, 0.1)
    shared = dict(id="V4-5", tier="M", source="derived here")
    about = f"A difference equation with a decay of {MU:g} per step. Nothing is known of the report's loop."
    return [
        Claim(
            variant="toy: feeding loop", **shared, boundary=about,
            statement=f"A lag of up to {LAGS[-1]} steps does not move the threshold k = mu of a linear loop that feeds "
            "itself.",
            reported="Older indices break the loop; no theory.",
            criterion=stays("positive"), control=Control("the loop that balances", stays("negative")),
        ),
        Claim(
            variant="toy: balancing loop", **shared, boundary=about,
            statement=f"A lag of {LAG} steps lowers the threshold of a linear loop that balances to less than a tenth.",
            reported="Not discussed; balancing by a bias is such a loop.",
            criterion=falls("negative"), control=Control("the loop that feeds itself", falls("positive")),
        ),
        Claim(
            variant="toy: loop with a threshold", **shared, boundary=f"{about} One impulse on a clean history.",
            statement="The smallest impulse that a loop with a threshold does not recover from grows about linearly "
            f"with the lag: it is 1 + {PUSH:g} d within 15 %.",
            reported="Used for a while after a rollback.",
            criterion=every("impulse_over_line", "excitable", 0.85, 1.15),
            control=Control("a power, (1 - mu)^-d", every("impulse_over_power", "excitable", 0.85, 1.15)),
        ),
    ]  # fmt: skip


def claims(preset: RoutingPreset) -> tuple[Claim, ...]:
    train = preset.train
    about = (
        f"{train.model.layers} layers of width {train.model.width}, {train.model.moe.experts} experts, "
        f"{train.model.moe.active} per token, {train.steps} steps, AdamW without decay, float32, sign rule at "
        f"{train.model.moe.balance_rate:g}. The report: 284 billion parameters and more, lag and trigger unpublished."
    )

    def claim(variant, statement, reported, rule, control, note=""):
        return Claim(
            id="V4-5", variant=variant, family=V4, tier="D", source=V4, statement=statement, reported=reported,
            boundary=about + note, criterion=rule, control=control,
        )  # fmt: skip

    harmless = lambda arm: NonInferior("loss", f"{arm}@best", "sync@best", margin=MARGIN)
    found = [
        *_toy(),
        claim("no harm", f"Indices {LAG} steps old in every step cost less than {MARGIN:g} nats of validation loss "
              "(which takes present ones).", "No loss of quality; used for a while only.", harmless("lag"),
              Control("indices of another row of the batch", harmless("mixed"))),
    ]  # fmt: skip
    if not preset.complete:
        return tuple(found)
    loop = lambda point, first: All((
        AtLeast(first, f"sync@{point}", 0.1), AtLeast("load_then_outlier", f"sync@{point}", 0.1),
    ))  # fmt: skip
    feeds = lambda point: (
        loop(point, "outlier_then_load"),
        Control("the load of the next expert", loop(point, "outlier_then_other")),
    )
    gains = Greater("hit_load", "sync_hit@best", "sync@best", smallest=1.1)
    shrinks = Greater("hit_hidden", "sync_hit@best", "lag_hit@best", smallest=1.2)
    repairs = Greater("hit_loss", "sync_hit@best", "lag_hit@best", log=False, smallest=0.01)
    helps = Greater("loss", "sync@hot", "lag@hot", log=False, smallest=MARGIN)
    exchanged = lambda rule: Control("arms exchanged", swapped(rule))
    together = "Spikes coincide with outliers in experts, and routing makes them worse."
    amplified = " Amplified: one hidden unit made 30 times larger by hand."
    return (
        *found,
        claim("a loop, best rate", "Without a hit outliers and load feed each other: both partial correlations are "
              "above 0.1.", together, *feeds("best")),
        claim("a loop, hot", "The same at four times the best rate.", together, *feeds("hot"), " Amplified: the rate."),
        claim("older indices help, hot", "At four times the best rate older indices lower the loss by at least "
              f"{MARGIN:g} nats.", "Training is stable with them.", helps, exchanged(helps), " Amplified: the rate."),
        claim("a hit expert gains load", "A hit raises its expert's load by at least a tenth over the next 40 steps.",
              together, gains, exchanged(gains), amplified),
        claim("older indices shrink the outlier", "20 to 39 steps after a hit its outlier is at least 1.2 times larger "
              "with present than with older indices.", "Older indices break the loop.", shrinks, exchanged(shrinks),
              amplified),
        claim("older indices spare the loss", "Over 40 steps after a hit older indices lower the training loss by at "
              "least 0.01 nats.", "Loss spikes end.", repairs, exchanged(repairs), amplified),
    )  # fmt: skip


def plan(preset: RoutingPreset):
    size, rate = preset.sizes[0], preset.rates[0]
    cell = lambda arm, rate, point, **settings: Cell(arm, size, rate, point, "test", preset.test_seeds, settings)
    if not preset.complete:
        yield [cell(arm, rate, "best") for arm in ("sync", "lag", "mixed")]
        return
    _, best = yield from tuned(preset, [("sync", size)], factor=2.0)
    rate, since = best["sync", size], {"since": float(preset.train.hit_step)}
    yield [
        *(cell(arm, rate, "best") for arm in ("sync", "lag", "mixed", "sync_hit")),
        *(cell(arm, rate, "best", **since) for arm in ("lag_hit", "frozen_hit")),
        *(cell(arm, 4 * rate, "hot") for arm in ("sync", "lag")),
    ]


def growth(k: float, lag: int) -> float:
    """Largest |z| with z^(lag + 1) = (1 - mu) z^lag + k: the growth per step of x' = (1 - mu) x + k x_(t - lag)."""
    equation = np.zeros(lag + 2)
    equation[0] = 1.0
    equation[1] -= 1 - MU
    equation[-1] -= k
    return float(np.abs(np.roots(equation)).max())


def bisected(beyond: Any, low: float, high: float) -> float:
    """Where `beyond` turns from false, at `low`, to true, at `high`."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return high


def runs_away(impulse: float, lag: int) -> bool:
    """Whether x' = (1 - mu) x + mu x x_(t - lag) grows from one impulse on a history of zeros."""
    past, x = [0.0] * lag, impulse
    for _ in range(100_000):
        past.append(x)
        x = (1 - MU) * x + MU * x * past.pop(0)
        if not 1e-6 < max([x, *past]) < 1e6:
            return x > 1
    return x > 1


def checks(preset: RoutingPreset) -> Iterator[Run]:
    """The toy: thresholds of linear loops by the roots of their equations, critical impulses by running the loop."""
    for lag in LAGS:
        for arm, sign in (("positive", 1.0), ("negative", -1.0)):
            threshold, prompt = (bisected(lambda k, d=d, s=sign: growth(s * k, d) > 1, 0.0, 4.0) for d in (lag, 0))
            row = {"threshold": threshold, "threshold_over_prompt": threshold / prompt}
            yield Run(arm, 0, row | {"growth": growth(sign * 2 * MU, lag) - 1}, point=lag_point(lag))
        impulse = bisected(lambda x, d=lag: runs_away(x, d), 0.0, 2.0 + LAGS[-1])
        over = {"impulse_over_line": impulse / (1 + PUSH * lag), "impulse_over_power": impulse * (1 - MU) ** lag}
        yield Run("excitable", 0, {"impulse": impulse} | over, point=lag_point(lag))


_LAGS = tuple((lag_point(lag), float(lag)) for lag in LAGS)
FIGURES = (
    Dose("thresholds", "threshold", "Toy: threshold of a linear loop", "lag (steps)", "threshold |k|", points=_LAGS,
         arms=("positive", "negative"), log_y=True),
    Dose("impulses", "impulse", "Toy: smallest impulse without recovery", "lag (steps)", "impulse", points=_LAGS,
         arms=("excitable",)),
    Curve("hidden", "expert_hidden_max", "Largest hidden unit of an expert at the best rate", "largest |unit|",
          point="best", arms=("sync", "sync_hit", "lag_hit", "frozen_hit"), log=True, start=100),
    Curve("loss", "loss", "Training loss at the best rate", "loss (nats per byte)", point="best", smooth=10, start=30),
    Curve("hot", "loss", "Training loss at four times the best rate", "loss (nats per byte)", point="hot",
          arms=("sync", "lag"), smooth=10, start=30),
    Ladder("rates", "loss", "Validation loss against the rate", "loss (nats per byte)", arms=("sync",), log=False),
    Effects("effects", "Effects of all claims about training"),
)  # fmt: skip

_CPU = RoutingPreset(
    train=RoutingConfig(
        length=64, batch_size=8, optimizer="adamw", steps=240, warmup=0.2, schedule="constant", eval_windows=128
    ),
    sizes=("custom",), rates=(0.01,), tuning_rates=(0.0025, 0.005, 0.01), tuning_limit=5,
)  # fmt: skip
PRESETS = {"smoke": dataclasses.replace(_CPU.quick_look(), complete=False), "cpu": _CPU}

EXPERIMENT = Experiment(
    name="anticipatory-routing",
    title="Expert indices of older parameters: a toy loop, and a small mixture of experts",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    checks=checks,
    check_arms=TOYS,
    figures=FIGURES,
    words={
        "load_then_outlier": "partial correlation, load now with outlier later",
        "hit_loss": "training loss, 40 steps from the hit (nats per token)",
        "outlier_then_load": "partial correlation, outlier now with load later",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
