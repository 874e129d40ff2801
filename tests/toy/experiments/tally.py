"""The smallest experiment that only computes: sums of 1..n by Gauss's rule, and by a wrong one."""

from dataclasses import dataclass

import numpy as np

from repro.claims import Arm, Claim, Control, Exact, Experiment, Run
from repro.errors import ReproError
from repro.report import Curve, Dose, Heatmap, Reference

CLAIM = Claim("FP-10", "made up", "The rule is right.", "", "", "M", Exact("error", "gauss", 0.0),
              Control("n where n + 1 belongs", Exact("error", "off_by_one", 0.0)))  # fmt: skip


@dataclass(frozen=True)
class Preset:
    counts: tuple[int, ...] = (1, 10, 100)
    evidence: bool = True

    def __post_init__(self):
        if not self.counts or min(self.counts) < 1:
            raise ReproError(f"counts is {self.counts}; give numbers of at least 1.")


def checks(preset):
    for name, rule in (("gauss", lambda n: n * (n + 1) // 2), ("off_by_one", lambda n: n * n // 2)):
        errors = {n: abs(rule(n) - sum(range(n + 1))) for n in preset.counts}
        yield Run(name, 0, {"error": max(errors.values())})
        yield from (Run(name, 0, {"error_at": error}, point=f"n{n}") for n, error in errors.items())


EXPERIMENT = Experiment(
    name="tally",
    title="A tally",
    claims=(CLAIM,),
    arms=(Arm("gauss", "n (n + 1) / 2"), Arm("off_by_one", "n n / 2")),
    presets={"smoke": Preset((1, 2), evidence=False), "cpu": Preset()},
    checks=checks,
    figures=(
        Curve("loss", "loss", "Training loss", "loss"),
        Dose("errors", "error_at", "Error of the sum", "n", "error", tuple((f"n{n}", n) for n in (1, 2, 10, 100)),
             log_x=10, log_y=True, lines=(Reference("one", y=1.0),)),
        Heatmap("table", "Sums", lambda: {"sums": np.add.outer(np.arange(4.0), np.arange(5.0))}, "sum", log=True),
    ),
)  # fmt: skip
