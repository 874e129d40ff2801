"""The scalars of a finished run that criteria read, from its curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from repro.train.loop import JobResult


_SIZES = (
    "hidden_max", "hidden_rms", "log_z_rms", "router_log_z", "router_logit_max", "expert_hidden_max", "sum_rms",
    "routed_rms", "gain_forward_max", "gain_forward_min", "gain_backward_max", "gain_backward_min",
)  # fmt: skip
"""Curves of positive values that may grow by factors."""


def tail(steps: int) -> int:
    """The last tenth of a run, at least one step."""
    return max(1, steps // 10)


def summarise(result: JobResult, taus: np.ndarray) -> list[dict[str, float]]:
    """One dict of scalars per lane. `taus` are the clip thresholds [lanes].

    loss: validation cross entropy at the end, nats; eval_max_logit: the largest logit there.
    train_loss: mean over the last tenth of the steps; initial_loss: at step 0.
    max_logit: geometric mean over the last tenth of each step's largest logit (floored at 1e-3, for a logarithm), and
    so max_abs_logit; max_capped_logit: largest over all steps; peak_max_logit: largest over all steps.
    early_max_logit: geometric mean over the first ten steps, before the rate is large.
    clipped_share_last, clipped_share_peak: share of (head, step) pairs above tau in the last tenth, and in the tenth
    where it was largest; clipped_heads_ever: share of heads that were above tau at least once.
    entropy_min: least attention entropy of a head in the last tenth, nats. activation_max: largest over all steps.
    hidden_max, log_z_rms and, with experts or several residual streams, the rows of `_SIZES`: geometric mean over the last
    tenth; with `early_` over the first ten steps, with `peak_` the largest over all steps, with `least_` the smallest.
    max_violation, least_load, stream_spread: mean over the last tenth; early_violation: mean of max_violation over steps
    5 to 24; worst_violation: its largest value after the first tenth.
    retained, where weights are stored in bfloat16: norm of what they moved by over the norm of the update, mean of all
    steps. A run whose loss is not finite reports inf as its loss.
    """
    curves, final = result.curves, result.final
    steps, lanes = curves["loss"].shape
    end = tail(steps)
    rows = []
    for lane in range(lanes):
        own = {name: values[:, lane].astype(np.float64) for name, values in curves.items()}
        clipped = own["clipped_share"]
        tenths = [part.mean() for part in np.array_split(clipped, min(10, steps))]
        heads = own["head_logits"].reshape(steps, -1)
        loss = float(final["loss"][lane])
        rows.append(
            {
                "loss": loss if np.isfinite(loss) else np.inf,
                "eval_max_logit": float(final["eval_max_logit"][lane]),
                "train_loss": float(own["loss"][-end:].mean()),
                "initial_loss": float(own["loss"][0]),
                "max_logit": _geometric(own["max_logit"][-end:]),
                "max_abs_logit": _geometric(own["max_abs_logit"][-end:]),
                "max_capped_logit": float(own["max_capped_logit"].max()),
                "peak_max_logit": float(own["max_logit"].max()),
                "early_max_logit": _geometric(own["max_logit"][:10]),
                "clipped_share_last": float(tenths[-1]),
                "clipped_share_peak": float(max(tenths)),
                "clipped_heads_ever": float((heads > taus[lane]).any(0).mean()),
                "entropy_min": float(own["entropy_min"][-end:].mean()),
                "activation_max": float(own["activation_max"].max()),
            }
        )
        for name in _SIZES:
            if name in own:
                rows[-1] |= {
                    name: _geometric(own[name][-end:]),
                    f"early_{name}": _geometric(own[name][:10]),
                    f"peak_{name}": float(own[name].max()),
                    f"least_{name}": float(own[name].min()),
                }
        for name in ("max_violation", "least_load", "stream_spread"):
            if name in own:
                rows[-1][name] = float(own[name][-end:].mean())
        if "max_violation" in own:
            rows[-1]["early_violation"] = float(own["max_violation"][min(5, steps - 1) : 25].mean())
            rows[-1]["worst_violation"] = float(own["max_violation"][min(end, steps - 1) :].max())
        if "retained" in own:
            rows[-1]["retained"] = float(own["retained"].mean())
    return rows


def _geometric(values: np.ndarray) -> float:
    return float(np.exp(np.log(np.maximum(values, 1e-3)).mean()))
