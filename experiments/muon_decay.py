"""Do weights grow without end under Muon, does decay stop it, and what do the spectra look like?

Written before the first run. Two optimizers, with and without decoupled decay of 0.1, at one rate that is held constant
after its warm-up: a falling rate would stop any growth by itself. Muon's update is matched in size to AdamW's (factor 0.2),
so an equal rate is a comparison of directions.

Moonlight reports growth for Muon. Whether it is Muon's own is a question of its own here, with a claim that may be
contradicted: AdamW is beside it. The reported gain in loss from decay came late, in a run on five times the usual number
of tokens; its claim is judged as stated, and a contradiction here is one at a thousandth of that scale.

Spectra are of all matrices of the blocks, heads joined as they multiply: entropy at the end; for queries and keys also, at
every step, how many directions an update has (participation) and which part of it goes into the largest singular value of
the weight (top share). Kimi K2's hypothesis is that Muon's updates have more directions and align with existing ones.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from repro.claims import Arm, AtLeast, AtMost, Cell, Claim, Control, Experiment, Greater, Run, swapped
from repro.optim.geometry import participation, svd_entropy, top_share
from repro.optim.layout import matched, to_matrices
from repro.report import Curve, Effects
from repro.train import JobResult, Program, TrainConfig, TrainState
from repro.train.preset import Sweep

ARMS = (
    Arm("muon", "Muon", {"optimizer": "muon"}),
    Arm("muon_decay", "Muon + decay 0.1", {"optimizer": "muon", "weight_decay": 0.1}),
    Arm("adamw", "AdamW", {"optimizer": "adamw"}),
    Arm("adamw_decay", "AdamW + decay 0.1", {"optimizer": "adamw", "weight_decay": 0.1}),
)
MOONLIGHT, K2 = "Moonlight (arXiv 2502.16982)", "Kimi K2 (arXiv 2507.20534)"


@dataclasses.dataclass(frozen=True)
class SpectrumConfig(TrainConfig):
    """The decoder, with statistics of its matrices and of their updates."""

    @classmethod
    def program_class(cls) -> type[Program]:
        return SpectrumProgram


class SpectrumProgram(Program):
    """The engine's program, which also measures matrices."""

    def matrices(self, params) -> dict[str, jax.Array]:
        """The matrices of the blocks as [layers, rows, columns], by path."""
        found = matched(params, self.layouts)
        return {name: to_matrices(x, layout) for name, x, layout in found if layout.role == "matrix"}

    def step(self, state: TrainState, window_BT1, numbers):
        after, metrics = super().step(state, window_BT1, numbers)
        old, new = self.matrices(state.params), self.matrices(after.params)
        metrics["weight_rms"] = jnp.mean(jnp.stack([jnp.sqrt(jnp.mean(w * w)) for w in new.values()]))
        qk = [name for name in new if name.endswith(("/q_DHK", "/k_DHK"))]
        weights = jnp.concatenate([old[name] for name in qk])
        changes = jnp.concatenate([new[name] - old[name] for name in qk])
        metrics["update_directions"] = jnp.mean(participation(changes)) / min(changes.shape[-2:])
        metrics["top_share"] = jnp.mean(top_share(weights, changes))
        return after, metrics

    @staticmethod
    def scalars(result: JobResult, configs) -> list[dict[str, float]]:
        rows = Program.scalars(result, configs)
        program = SpectrumProgram(configs[0])
        rms = result.curves["weight_rms"].astype(np.float64)
        third = max(1, len(rms) // 3)
        for lane, row in enumerate(rows):
            params = jax.tree.map(lambda x, lane=lane: x[lane], result.params)
            entropies = {name: svd_entropy(np.asarray(w)) for name, w in program.matrices(params).items()}
            row["svd_entropy"] = float(np.mean([e.mean() for e in entropies.values()]))
            for name, entropy in entropies.items():
                for layer, value in enumerate(entropy):
                    row[f"entropy of {name} {layer}"] = float(value)
            row["rms_growth"] = float(rms[-1, lane] / rms[-1 - third, lane])
            row["weight_rms"] = float(rms[-1, lane])
            for name in ("update_directions", "top_share"):
                row[name] = float(result.curves[name][:, lane].mean())
        return rows


def _claims_at(preset: "DecayPreset", size: str) -> list[Claim]:
    at = lambda arm: f"{arm}@fixed/{size}"
    about = (
        f"Size {size}, {preset.train.steps} steps on bytes at a constant rate of {preset.train.learning_rate:g}, float32; "
        "the same for every optimizer."
    )
    grows = lambda arm: AtLeast("rms_growth", at(arm), 1.05, log=True)
    stays = lambda arm: AtMost("rms_growth", at(arm), 1.02, log=True)
    more = Greater("rms_growth", at("muon"), at("adamw"), smallest=1.02)
    helps = Greater("loss", at("muon"), at("muon_decay"), log=False, smallest=0.01)
    entropy = Greater("svd_entropy", at("muon_decay"), at("adamw_decay"), log=False, smallest=0.01)
    share = AtLeast("entropy_share", f"muon_over_adamw@fixed/{size}", 0.9)
    # Without decay, which would itself be a change along the top direction.
    directions = Greater("update_directions", at("muon"), at("adamw"), smallest=1.5)
    aligned = Greater("top_share", at("muon"), at("adamw"), log=False, smallest=0.02)

    def claim(id, variant, family, section, statement, reported, rule, control):
        return Claim(
            id=id, variant=f"{variant}, {size}", family=family, tier="D", source=f"{family}, {section}",
            statement=statement, reported=reported, boundary=about, criterion=rule, control=control,
        )  # fmt: skip

    return [
        claim(
            "ML-1", "weights keep growing", MOONLIGHT, "section 2.2",
            "Under Muon without decay the root mean square of the matrices still grows by at least 5 % over the last third "
            "of training.", "Weights outgrow the fine range of bfloat16; shown in a figure.",
            grows("muon"), Control("with decay 0.1", grows("muon_decay")),
        ),
        claim(
            "ML-1", "decay stops the growth", MOONLIGHT, "section 2.2",
            "With decay 0.1 it grows by at most 2 % over the last third.", "Growth is stopped; shown in a figure.",
            stays("muon_decay"), Control("without decay", stays("muon")),
        ),
        claim(
            "ML-1", "more than under AdamW", MOONLIGHT, "section 2.2",
            "Without decay, weights grow by at least 2 % more under Muon than under AdamW over the last third.",
            "Described for Muon alone.", more, Control("arms exchanged", swapped(more)),
        ),
        claim(
            "ML-1", "decay lowers the loss", MOONLIGHT, "section 2.2",
            "Decay lowers Muon's validation loss by at least 0.01 nats.",
            "Vanilla Muon faster early, worse late: 800M parameters, 100B tokens, five times the usual number.",
            helps, Control("arms exchanged", swapped(helps)),
        ),
        claim(
            "ML-4", "entropy of the spectra", MOONLIGHT, "section 3.4",
            "With decay, matrices trained by Muon have an SVD entropy at least 0.01 above those trained by AdamW.",
            "Higher for all groups of weights; shown in a figure.", entropy, Control("arms exchanged", swapped(entropy)),
        ),
        claim(
            "ML-4", "share of matrices", MOONLIGHT, "section 3.4",
            "With decay, in at least 90 % of the matrices the SVD entropy is higher under Muon than under AdamW.",
            "More than 90 % of the matrices at 1.2T tokens.", share,
            Control("optimizers exchanged", AtLeast("entropy_share", f"adamw_over_muon@fixed/{size}", 0.9)),
        ),
        claim(
            "K2-5", "updates have more directions", K2, "appendix E",
            "The updates of queries and keys have at least 1.5 times as many directions (participation ratio) under Muon as "
            "under AdamW.", "A hypothesis: full effective rank against few.", directions,
            Control("arms exchanged", swapped(directions)),
        ),
        claim(
            "K2-5", "updates align with the top direction", K2, "appendix E",
            "A larger part of an update of queries and keys, by at least 0.02 of its norm, goes into the largest singular "
            "value of the weight under Muon than under AdamW.",
            "A hypothesis: Muon's updates are more likely to add to an existing direction.", aligned,
            Control("arms exchanged", swapped(aligned)),
        ),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DecayPreset(Sweep):
    """The sweep of this experiment: one constant rate."""

    train: SpectrumConfig = SpectrumConfig(
        steps=1500, learning_rate=0.01, warmup=1 / 30, schedule="constant", eval_windows=256
    )
    sizes: tuple[str, ...] = ("w32", "xs")


def claims(preset: DecayPreset) -> tuple[Claim, ...]:
    return tuple(claim for size in preset.sizes for claim in _claims_at(preset, size))


def plan(preset: DecayPreset):
    rate = preset.train.learning_rate
    yield [Cell(arm.name, size, rate, "fixed", "test", preset.test_seeds) for size in preset.sizes for arm in ARMS]


def derive(runs):
    """The share of matrices whose entropy is higher under Muon than under AdamW, per seed, and the other way round."""
    adamw = {(run.size, run.seed): run for run in runs.select("adamw_decay", phase="test")}
    for run in runs.select("muon_decay", phase="test"):
        names = [name for name in run.metrics if name.startswith("entropy of ")]
        other = adamw[run.size, run.seed].metrics
        for arm, one, two in (("muon_over_adamw", run.metrics, other), ("adamw_over_muon", other, run.metrics)):
            share = float(np.mean([one[name] > two[name] for name in names]))
            yield Run(arm, run.seed, {"entropy_share": share}, point="fixed", size=run.size)


FIGURES = (
    Curve("weight_rms", "weight_rms", "Root mean square of the block matrices", "root mean square", log=True),
    Curve("loss", "loss", "Training loss", "loss (nats per byte)", smooth=20, start=100),
    Curve("update_directions", "update_directions", "Directions of an update of queries and keys",
          "participation ratio over the smaller side", smooth=20),
    Curve("top_share", "top_share", "Part of an update along the largest singular value", "share of the norm", smooth=20),
    Effects("effects", "Effects of all claims"),
)  # fmt: skip

_CPU = DecayPreset()
PRESETS = {
    "smoke": _CPU.quick_look(),
    "cpu": _CPU,
    # Four time constants of the decay, 1 / (rate x decay) steps each, where "cpu" has one and a half.
    "cpu-long": dataclasses.replace(_CPU, train=dataclasses.replace(_CPU.train, steps=4000), sizes=("w32",)),
}

EXPERIMENT = Experiment(
    name="muon-decay",
    title="Growth of weights under Muon, and their spectra",
    claims=claims,
    arms=ARMS,
    presets=PRESETS,
    plan=plan,
    derive=derive,
    check_arms=(Arm("muon_over_adamw", "Muon over AdamW"), Arm("adamw_over_muon", "AdamW over Muon")),
    figures=FIGURES,
    words={
        "rms_growth": "weight RMS, end over beginning of the last third",
        "entropy_share": "share of matrices with the higher SVD entropy",
        "svd_entropy": "SVD entropy, mean over matrices",
    },
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
