"""How many bytes does the state of a training run take: on paper, and in the arrays of one?

Written before the first run: the claims, their rules and controls below. The arithmetic is that of
`repro.quant.ledger`. The measurement takes one real AdamW step of a model of this project and counts the bytes of what
is then held: weights, gradients and both moments; step counters are counted apart. In the state in V3's formats, both
moments are stored in bfloat16 between steps and widened for the update.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax

from repro.claims import All, Arm, Claim, Control, Exact, Experiment, Run
from repro.errors import ReproError
from repro.models import SIZES
from repro.quant import state_ledger
from repro.train import TrainConfig
from repro.train.config import at_size
from repro.train.step import Program

PUBLISHED = 27_781_427_952
"""Parameters of the published example."""

ARMS = (
    Arm("fp32_adam", "float32 Adam, 4 + 4 + 4 + 4"),
    Arm("v3", "DeepSeek-V3's formats, 4 + 4 + 2 + 2"),
    Arm("one_moment", "wrong: a ledger that forgets the second moment"),
    Arm("binary_units", "wrong: units of 2^30 bytes called GB"),
    Arm("first_moment_only", "wrong: bfloat16 for the first moment alone"),
)

V3 = "DeepSeek-V3 (arXiv 2412.19437)"


def _sizes_rule(fp32: str, v3: str) -> All:
    return All((Exact("bytes_per_parameter", fp32, 16.0), Exact("bytes_per_parameter", v3, 12.0)))


CLAIMS = (
    Claim(
        id="V3-7", variant="bytes per parameter", tier="M", source=f"{V3}, section 3.3.3",
        statement="Weights, gradients and both Adam moments take 16 bytes per parameter in float32, and 12 with the "
        "moments in bfloat16.",
        reported="The formats of the roles; the sum 4 + 4 + 2 + 2 = 12 follows from them.",
        boundary="Without activations, the FP8 copies that products read, the running mean of the weights, buffers and "
        "what an allocator adds; before any sharding.",
        criterion=_sizes_rule("fp32_adam", "v3"),
        control=Control("a ledger that forgets the second moment", _sizes_rule("one_moment", "v3")),
    ),
    Claim(
        id="V3-7", variant="published total", tier="M", source="A published ledger of 27,781,427,952 parameters",
        statement="At 16 bytes per parameter 27,781,427,952 parameters take 444.5 GB.",
        reported="444.5 GB, with 1 GB = 10^9 bytes.",
        boundary="Arithmetic; the model itself is not built here.",
        criterion=Exact("gigabytes", "fp32_adam", 444.5, tolerance=0.05),
        control=Control("units of 2^30 bytes called GB", Exact("gigabytes", "binary_units", 444.5, tolerance=0.05)),
    ),
    Claim(
        id="V3-7", variant="a real training state", tier="M", source=f"{V3}, section 3.3.3",
        statement="After a real AdamW step the arrays of every role take the bytes that the ledger says, in float32 "
        "and in V3's formats.",
        reported="Nothing is measured there.",
        boundary="Models of this project on one device, sizes in the preset; step counters are counted apart. Live "
        "buffers of the step itself are not counted.",
        criterion=All((Exact("off_by_bytes", "fp32_adam", 0.0), Exact("off_by_bytes", "v3", 0.0))),
        control=Control("bfloat16 for the first moment alone", Exact("off_by_bytes", "first_moment_only", 0.0)),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """Where the state is measured."""

    sizes: tuple[str, ...] = ("w32", "xs", "w128", "s", "m")
    """Model sizes of `repro.models.SIZES`."""
    evidence: bool = True
    """Whether verdicts count as evidence."""

    def __post_init__(self) -> None:
        unknown = [size for size in self.sizes if size not in SIZES]
        if not self.sizes or unknown:
            raise ReproError(f"sizes is {self.sizes}; give one or more of {', '.join(SIZES)}.")


def stored_in(tx: optax.GradientTransformation, first: jnp.dtype, second: jnp.dtype) -> optax.GradientTransformation:
    """AdamW whose moments are kept in these types between steps and widened to float32 for the update."""
    types = {"mu": first, "nu": second}

    def cast(state, widen: bool):
        for name, kind in types.items():
            to = jnp.float32 if widen else kind
            kept = jax.tree.map(lambda x, to=to: x.astype(to), optax.tree_utils.tree_get(state, name))
            state = optax.tree_utils.tree_set(state, **{name: kept})
        return state

    def update(grads, state, params):
        updates, state = tx.update(grads, cast(state, widen=True), params)
        return updates, cast(state, widen=False)

    return optax.GradientTransformation(lambda params: cast(tx.init(params), widen=False), update)


def held_bytes(size: str, moments: dict[str, tuple]) -> dict[str, dict[str, int]]:
    """Bytes by role of the arrays that one AdamW step at a size leaves, for each named pair of types of its moments.

    Beside the roles: `counters`, all the rest of the state, and `values`, the number of parameters.
    """
    config = at_size(TrainConfig(optimizer="adamw", batch_size=1), size)
    program = Program(config)
    adamw = program.optimizer(config.numbers(), 1.0)
    window_BT1 = jnp.zeros((1, config.length + 1), jnp.int32)

    def gradient(params):
        return jax.grad(lambda p: program.loss(p, window_BT1, 0.0)[0])(params)

    def step(start, grads):
        after = {}
        for name, types in moments.items():
            tx = stored_in(adamw, *types)
            updates, opt_state = tx.update(grads, tx.init(start.params), start.params)
            params = optax.apply_updates(start.params, updates)
            after[name] = replace(start, params=params, opt_state=opt_state, step=start.step + 1)
        return after

    start = _once(program.init)(jnp.zeros((), jnp.int32))
    grads = _once(gradient)(start.params)
    found = {}
    for name, state in _once(step)(start, grads).items():
        first, second = (_bytes(optax.tree_utils.tree_get(state.opt_state, moment)) for moment in ("mu", "nu"))
        weights = _bytes(state.params)
        found[name] = {
            "weights": weights, "gradient": _bytes(grads), "first_moment": first, "second_moment": second,
            "counters": _bytes(state) - weights - first - second,
            "values": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        }  # fmt: skip
    return found


def _once(function):
    # A program that runs once is not worth optimising.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def _bytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def ledger_bytes(parameters: int, policy: str) -> dict[str, int]:
    """The same roles by the ledger; the master copy and the parameters are the weights."""
    rows = {row.role: row.bytes for row in state_ledger(parameters, policy).rows}
    weights = rows.pop("parameters", 0) + rows.pop("master", 0)
    return {"weights": weights} | rows


def checks(preset: Preset) -> list[Run]:
    """The ledger's numbers, wrong ones, and the difference from what a training state holds."""
    fp32, v3 = state_ledger(PUBLISHED, "fp32_adam"), state_ledger(PUBLISHED, "v3")
    forgotten = sum(row.bits_per_value for row in fp32.rows if row.role != "second_moment") / 8
    found = {
        "fp32_adam": {"bytes_per_parameter": float(fp32.bytes_per_parameter), "gigabytes": fp32.bytes / 1e9},
        "v3": {"bytes_per_parameter": float(v3.bytes_per_parameter), "gigabytes": v3.bytes / 1e9},
        "one_moment": {"bytes_per_parameter": float(forgotten)},
        "binary_units": {"gigabytes": fp32.bytes / 2**30},
    }
    narrow, wide = jnp.bfloat16, jnp.float32
    moments = {"fp32_adam": (wide, wide), "v3": (narrow, narrow), "first_moment_only": (narrow, wide)}
    off, counters = dict.fromkeys(moments, 0), dict.fromkeys(moments, 0)
    for size in preset.sizes:
        for arm, held in held_bytes(size, moments).items():
            wanted = ledger_bytes(held["values"], "fp32_adam" if arm == "fp32_adam" else "v3")
            off[arm] = max(off[arm], *(abs(held[role] - wanted[role]) for role in wanted))
            counters[arm] = max(counters[arm], held["counters"])
    for arm in moments:
        found.setdefault(arm, {}).update(off_by_bytes=off[arm], counter_bytes=counters[arm])
    return [Run(arm, 0, metrics) for arm, metrics in found.items()]


EXPERIMENT = Experiment(
    name="state-ledger",
    title="Bytes of a training state, on paper and in arrays",
    claims=CLAIMS,
    arms=ARMS,
    presets={"smoke": Preset(sizes=("w32",), evidence=False), "cpu": Preset()},
    checks=checks,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
