"""How sublayers read from the residual stream and write into it."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from repro.errors import ReproError

Kind = Literal["pre_norm", "post_norm", "deep_norm", "gain", "hyper", "manifold", "manifold_lite", "block_attention"]
STREAMS: tuple[str, ...] = ("hyper", "manifold", "manifold_lite")
"""Kinds with several residual streams."""
_BELONGS: dict[str, tuple[str, ...]] = {
    "streams": STREAMS,
    "alpha": STREAMS,
    "readout": STREAMS,
    "form": ("manifold",),
    "iterations": ("manifold",),
    "start": ("manifold", "manifold_lite"),
    "identity": ("manifold", "manifold_lite"),
    "block_layers": ("block_attention",),
    "query_std": ("block_attention",),
}
"""Settings and the kinds that read them."""


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """The residual scheme; the default is x + f(norm(x)).

    Kinds: `pre_norm`; `post_norm` norm(x + f(x)); `deep_norm` norm(alpha x + f(x)) with DeepNet's alpha and initial
    gains; `gain` x + g f(norm(x)) with a learned g per sublayer, the control for the streams; `hyper`
    Hyper-Connections; `manifold` mHC; `manifold_lite` mHC-lite; `block_attention` Block AttnRes.
    Raises `ReproError` for values that do not fit together.
    """

    kind: Kind = "pre_norm"
    streams: int = 4
    """Residual streams N."""
    alpha: float = 0.01
    """Initial factor on the dynamic part of the coefficients (mHC, arXiv 2512.24880, table 5)."""
    form: Literal["paper", "released"] = "paper"
    """mHC: the paper's map, or that of the released code with its epsilons."""
    iterations: int = 20
    """mHC: Sinkhorn iterations."""
    eps: float = 1e-6
    """mHC, released form: what is added to the coefficients and to the sums."""
    start: Literal["one_hot", "zero", "symmetric"] = "one_hot"
    """Initial coefficients, which no paper states for mHC. one_hot: sublayer k reads stream k mod N and streams mix as
    little as `identity` says; zero: all biases 0, so that streams mix evenly; symmetric: zero, and the dynamic part
    too, so that equal streams stay equal for ever."""
    identity: float = 6.0
    """one_hot: logit of the diagonal of mHC's mixing matrix, where 6 keeps 0.993 of a stream, or of mHC-lite's identity
    permutation, whose weight is then 0.946 among 24."""
    readout: Literal["sum", "learned", "last"] = "sum"
    """How streams become the input of the final norm: their sum (Hyper-Connections), a learned combination
    (DeepSeek-V4), or the reading weights of the last sublayer (V4.1, mHC alone)."""
    block_layers: int = 1
    """Block AttnRes: layers per block."""
    query_std: float = 0.0
    """Block AttnRes: standard deviation of a random initial score, from queries N(0, query_std^2 / D); 0 is a query of
    zero, which the paper calls crucial."""

    def __post_init__(self) -> None:
        for name, known in (
            ("kind", Kind.__args__),
            ("form", ("paper", "released")),
            ("start", ("one_hot", "zero", "symmetric")),
            ("readout", ("sum", "learned", "last")),
        ):
            if getattr(self, name) not in known:
                raise ReproError(f"model.residual.{name} is {getattr(self, name)!r}; known are {', '.join(known)}.")
        for name in ("streams", "iterations", "block_layers"):
            if getattr(self, name) < 1:
                raise ReproError(f"model.residual.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("alpha", "eps", "identity", "query_std"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ReproError(
                    f"model.residual.{name} is {getattr(self, name)}; it must be zero or positive, and finite."
                )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        unused = [n for n, kinds in _BELONGS.items() if self.kind not in kinds and getattr(self, n) != defaults[n]]
        for name in unused[:1]:
            raise ReproError(
                f"model.residual.{name} belongs to {', '.join(_BELONGS[name])}; with {self.kind} it must stay "
                f"{defaults[name]}."
            )
        if self.eps != defaults["eps"] and self.form != "released":
            raise ReproError("model.residual.eps belongs to model.residual.form released; the paper's form has none.")
        if self.identity != defaults["identity"] and self.start != "one_hot":
            raise ReproError(f"model.residual.identity belongs to start one_hot; {self.start} mixes evenly.")
        if self.kind == "manifold_lite" and self.streams > 4:
            raise ReproError(
                f"model.residual.streams is {self.streams}; mHC-lite weighs all permutations of them, so at most 4."
            )
        if self.readout == "last" and self.kind == "hyper":
            raise ReproError("model.residual.readout last belongs to mHC; Hyper-Connections sum their streams.")
