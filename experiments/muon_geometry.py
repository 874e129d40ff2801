"""What an orthogonalised update is: its singular values, its size, its share for every head, its directions.

Written before the first run: the claims, their rules and controls below. Nothing is trained. Gradients are random
matrices of known spectrum, so every statement has a closed form.

- *Singular values.* Newton–Schulz acts on each singular value alone, by an odd polynomial p. A matrix of Frobenius norm
  1 in random bases, with s among its singular values, thus shows p(s).
- *Size.* An orthogonal A x B matrix has min(A, B) singular values of 1 and thus a root mean square (RMS) of
  1 / sqrt(max(A, B)); one of rank r has sqrt(r / (A B)).
- *Heads.* The columns of a D x H K matrix with H K <= D become orthonormal, so all heads have the same RMS, however
  unequal their gradients are: there is nothing left for Per-Head Muon to do. With H K > D the rows do, D directions are
  shared by H K columns, and a head whose gradient is far louder takes K of them. The others are left D - K, so the loud
  head has sqrt(K (H - 1) / (D - K)) times their RMS.
- *Directions.* Kimi K2 offers as a hypothesis that a full-rank update is more likely to have a component along an
  existing singular direction u v^T of the weight. At equal RMS the mean square of u^T O v over random directions is
  RMS^2 for every update of any rank, so "more likely" can only mean a different distribution: a low-rank update has
  most components near zero and few large ones. And along a direction that the gradient itself has put there, a
  sign-like update of rank 1 adds more: n (2 / pi) RMS for a Gaussian direction against sqrt(n) RMS.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from repro.claims import All, Arm, Claim, Control, Experiment, Run, Within
from repro.errors import ReproError
from repro.optim import NS_SCHEDULES, Layout, newton_schulz, orthogonalise, per_head, update_factor
from repro.optim.geometry import svd_entropy
from repro.report import Dose, Heatmap, Reference

MAPS = {
    "muon5": ("muon5", jnp.float32),
    "hybrid10": ("hybrid10", jnp.float32),
    "two_first": (NS_SCHEDULES["hybrid10"][8:] + NS_SCHEDULES["hybrid10"][:8], jnp.float32),
    "hybrid10_bf16": ("hybrid10", jnp.bfloat16),
}
SHAPES = ((64, 64), (32, 64), (64, 32), (32, 128), (128, 32), (64, 256), (256, 64))
RANKS = (1, 4, 16)
HEADS = {"square": (64, 4, 16), "latent": (64, 8, 32), "wide": (32, 4, 32)}  # D, H, K
HEAD_ARMS = ("exact_whole", "muon5_whole", "hybrid10_whole", "muon5_heads", "hybrid10_heads")
UPDATES = ("adam_update", "muon5_update", "hybrid10_update")
LOUD, LOUDEST = 100.0, 1000.0  # factors that claims name
N, DOMINATED, STEPS = 64, 8.0, 20  # size of a weight, strength of its gradient's direction, steps of momentum
ARMS = (
    Arm("muon5", "five steps"),
    Arm("hybrid10", "8 + 2 steps"),
    Arm("two_first", "2 + 8 steps"),
    Arm("hybrid10_bf16", "8 + 2 steps, bfloat16 products"),
    Arm("v4", "0.18 sqrt(max), 8 + 2 steps"),
    Arm("moonlight", "0.2 sqrt(max), five steps"),
    Arm("jordan", "Jordan's factor, 8 + 2 steps"),
    Arm("exact_whole", "exact, whole matrix"),
    Arm("muon5_whole", "five steps, whole matrix"),
    Arm("hybrid10_whole", "8 + 2 steps, whole matrix"),
    Arm("muon5_heads", "five steps, per head"),
    Arm("hybrid10_heads", "8 + 2 steps, per head"),
    Arm("adam_update", "Adam"),
    Arm("muon5_update", "Muon, five steps"),
    Arm("hybrid10_update", "Muon, 8 + 2 steps"),
)

V4, MOONLIGHT = "DeepSeek-V4 report, section 2.4", "Moonlight (arXiv 2502.16982), section 2.2"
K2, K3 = "Kimi K2 (arXiv 2507.20534), appendix E", "Kimi K3 report (arXiv 2607.24653), section 2.5"
SHAMPOO = "Shampoo (arXiv 1802.09568)"
_SPECTRA = "Matrices of known spectra in random bases; no trained gradient."
_GAUSSIAN = "Seven shapes from 32 to 256, normal entries, one orthogonalisation without momentum."
_HEADS = "Normal gradients, head 0 times a factor that was put there; D, H, K of 64, 4, 16; 64, 8, 32; and 32, 4, 32."
_RANDOM = (
    f"{N} x {N}, a gradient of one fixed direction plus fresh noise, {STEPS} steps of momentum; updates, no training."
)


def at(value: float) -> str:
    """The point of a dose."""
    return f"x{value:g}"


def _singular(arm: str, since: str, low: float, high: float) -> Within:
    return Within(f"distance_from_{since}", arm, low, high)


CLAIMS_VALUES = (
    Claim(
        id="V4-1", variant="from 2e-3", tier="M", source=V4,
        statement="After 8 + 2 steps every singular value from 2e-3 of the Frobenius norm up is within 1e-3 of 1.",
        reported="The ten steps are said to bring singular values to 1; no range is given.", boundary=_SPECTRA,
        criterion=_singular("hybrid10", "2e-3", 0.0, 1e-3),
        control=Control("the rows in the other order, 2 + 8", _singular("two_first", "2e-3", 0.0, 1e-3)),
    ),
    Claim(
        id="V4-1", variant="from 1e-3", tier="M", source=V4,
        statement="The same from 1e-3 of the Frobenius norm up.",
        reported="No range is given.", boundary=_SPECTRA,
        criterion=_singular("hybrid10", "1e-3", 0.0, 1e-3),
        control=Control("five steps", _singular("muon5", "1e-3", 0.0, 1e-3)),
    ),
    Claim(
        id="V4-1", variant="five steps do not", tier="M", source=V4,
        statement="Five steps leave singular values from 2e-3 up more than 0.1 away from 1.",
        reported="Given as the reason for the ten.", boundary=_SPECTRA,
        criterion=_singular("muon5", "2e-3", 0.1, np.inf),
        control=Control("8 + 2 steps", _singular("hybrid10", "2e-3", 0.1, np.inf)),
    ),
    Claim(
        id="V4-1", variant="where five steps lead", tier="M",
        source="derived here from the coefficients of Jordan et al. (2024)",
        statement="Five steps bring every singular value from 1e-2 of the Frobenius norm up to between 0.65 and 1.15.",
        reported="Often described as about uniform between 0.5 and 1.5.", boundary=_SPECTRA,
        criterion=All((
            Within("lowest_from_1e-2", "muon5", 0.65, 1.15), Within("highest_from_1e-2", "muon5", 0.65, 1.15)
        )),
        control=Control("from 1e-3 up", Within("lowest_from_1e-3", "muon5", 0.65, 1.15)),
    ),
    Claim(
        id="V4-1", variant="bfloat16 products", tier="M", source=V4,
        statement="With bfloat16 operands 8 + 2 steps still end within 2 % of 1 from 2e-3 up.",
        reported="Matrix products in BF16 are said to be stable; no number.",
        boundary=f"{_SPECTRA} Operands in bfloat16, sums in float32.",
        criterion=_singular("hybrid10_bf16", "2e-3", 0.0, 0.02),
        control=Control("five steps", _singular("muon5", "2e-3", 0.0, 0.02)),
    ),
    Claim(
        id="O-3", tier="M", source=SHAMPOO,
        statement="With the statistics of one gradient, L^(-1/4) G R^(-1/4) is U V^T to 1e-5, element by element.",
        reported="An identity, with L = G G^T and R = G^T G.",
        boundary="float64, powers on the range of L and R, no damping; shapes up to 128.",
        criterion=Within("shampoo_off", "shampoo", 0.0, 1e-5),
        control=Control("statistics summed over two gradients", Within("shampoo_two_off", "shampoo", 0.0, 1e-5)),
    ),
    Claim(
        id="O-3", variant="by Newton–Schulz", tier="M", source=f"{SHAMPOO}; {V4}",
        statement="8 + 2 steps in float32 give the same as one-step Shampoo to 2 %, relative to its Frobenius norm.",
        reported="Not reported in this form.",
        boundary="The same shapes but the square one, whose smallest singular values may lie below 2e-3.",
        criterion=Within("v4_from_shampoo", "shampoo", 0.0, 0.02),
        control=Control("five steps", Within("moonlight_from_shampoo", "shampoo", 0.0, 0.02)),
    ),
)  # fmt: skip


def _rms(arm: str, low: float, high: float, shapes: str = "") -> All:
    return All((Within(f"least_rms{shapes}", arm, low, high), Within(f"largest_rms{shapes}", arm, low, high)))


CLAIMS_SIZE = (
    Claim(
        id="V4-10", tier="M", source=V4,
        statement="With the factor 0.18 sqrt(max) after 8 + 2 steps the update has an RMS of 0.18, to 1 %, at every "
        "shape.",
        reported="The factor is given; what it yields follows.", boundary=_GAUSSIAN,
        criterion=_rms("v4", 0.1782, 0.1818),
        control=Control("0.18 sqrt(rows)", _rms("v4", 0.1782, 0.1818, "_by_rows")),
    ),
    Claim(
        id="ML-2", variant="lemma", tier="M", source=MOONLIGHT,
        statement="An exactly orthogonalised matrix of full rank has an RMS of 1 / sqrt(max(A, B)), to 1e-6.",
        reported="Lemma.", boundary=f"{_GAUSSIAN} Singular value decomposition in float64.",
        criterion=Within("lemma_off", "exact", 0.0, 1e-6),
        control=Control("min in place of max", Within("lemma_off_min", "exact", 0.0, 1e-6)),
    ),
    Claim(
        id="ML-2", variant="rank", tier="M", source=MOONLIGHT,
        statement="After 8 + 2 steps a matrix of rank 1, 4 or 16 has an RMS of sqrt(rank / (A B)), to 1 %.",
        reported="In the lemma's proof.", boundary=_GAUSSIAN,
        criterion=Within("rank_off", "ranks", 0.0, 0.01),
        control=Control("1 / sqrt(max), the formula of full rank", Within("rank_off_full", "ranks", 0.0, 0.01)),
    ),
    Claim(
        id="ML-2", variant="one size for all shapes", tier="M", source=MOONLIGHT,
        statement="With a factor in sqrt(max), the RMS after 8 + 2 steps is the same for all shapes to 2 %.",
        reported="Given as the reason for the factor.", boundary=_GAUSSIAN,
        criterion=Within("rms_spread", "v4", 1.0, 1.02),
        control=Control("Jordan's factor sqrt(max(1, columns / rows))", Within("rms_spread", "jordan", 1.0, 1.02)),
    ),
    Claim(
        id="ML-2", variant="as trained, five steps", tier="M", source=MOONLIGHT,
        statement="With Moonlight's own five steps and 0.2 sqrt(max) the RMS is 0.2 to 2 % at every shape.",
        reported="0.2 for every shape, from the lemma for exact orthogonalisation.", boundary=_GAUSSIAN,
        criterion=_rms("moonlight", 0.196, 0.204),
        control=Control("Jordan's factor", Within("rms_spread", "jordan", 1.0, 1.02)),
    ),
    Claim(
        id="ML-2", variant="what five steps give", tier="M", source="derived here from the map of five steps",
        statement="With five steps and 0.2 sqrt(max) the RMS lies between 0.15 and 0.21 at every shape.",
        reported="Not reported.", boundary=_GAUSSIAN,
        criterion=_rms("moonlight", 0.15, 0.21),
        control=Control("0.2 sqrt(rows)", _rms("moonlight", 0.15, 0.21, "_by_rows")),
    ),
)  # fmt: skip


def _spread(arm: str, where: str, low: float, high: float) -> Within:
    return Within("head_spread" if "@" in where else "worst_head_spread", f"{arm}{where}", low, high)


_NEAR_VACUOUS = "Kimi K3 gives no number; the case H K <= D is not discussed."
CLAIMS_HEADS = (
    Claim(
        id="K3-1", variant="H K <= D: nothing to equalise", tier="M", source="derived here from orthonormal columns",
        statement="Where H K <= D, exact whole-matrix orthogonalisation gives all heads the same RMS to 1e-6, whatever "
        "the imbalance up to 1000.",
        reported=_NEAR_VACUOUS, boundary=f"{_HEADS} Exact: by singular value decomposition.",
        criterion=_spread("exact_whole", "/square", 1.0, 1 + 1e-6),
        control=Control("H K = 4 D", _spread("exact_whole", "/latent", 1.0, 1 + 1e-6)),
    ),
    Claim(
        id="K3-1", variant="H K <= D: five steps starve all the same", tier="M", source=K3,
        statement="Where H K <= D, five steps on the whole matrix leave heads at least 2 apart in RMS at x1000.",
        reported="Heads of small gradients are said to be under-normalised.", boundary=_HEADS,
        criterion=_spread("muon5_whole", f"@{at(LOUDEST)}/square", 2.0, np.inf),
        control=Control("8 + 2 steps", _spread("hybrid10_whole", f"@{at(LOUDEST)}/square", 2.0, np.inf)),
    ),
    Claim(
        id="K3-1", variant="H K > D: starves", tier="M", source=K3,
        statement="Where H K = 4 D and K = D, even exact whole-matrix orthogonalisation leaves heads at least 5 apart "
        "at x100.",
        reported="Heads of large gradients are said to dominate.", boundary=_HEADS,
        criterion=_spread("exact_whole", f"@{at(LOUD)}/wide", 5.0, np.inf),
        control=Control("H K <= D", _spread("exact_whole", f"@{at(LOUD)}/square", 5.0, np.inf)),
    ),
    Claim(
        id="K3-1", variant="H K > D: how far", tier="M", source="derived here",
        statement="Where K < D < H K, the loud head ends with sqrt(K (H - 1) / (D - K)) times the RMS of the others, "
        "to 1 % at x1000.",
        reported="Not reported.", boundary=_HEADS,
        criterion=Within("loud_over_limit", f"exact_whole@{at(LOUDEST)}/latent", 0.99, 1.01),
        control=Control("sqrt(H K / D), the ratio of columns to directions",
                        Within("loud_over_columns", f"exact_whole@{at(LOUDEST)}/latent", 0.99, 1.01)),
    ),
    Claim(
        id="K3-1", variant="per head: equal", tier="M", source=K3,
        statement="Orthogonalised head by head with 8 + 2 steps, all heads have the same RMS to 3 %, whatever the "
        "imbalance and the shape.",
        reported="Per-head updates are said to be balanced; no number.", boundary=_HEADS,
        criterion=All(tuple(_spread("hybrid10_heads", f"/{size}", 1.0, 1.03) for size in HEADS)),
        control=Control("the whole matrix", _spread("hybrid10_whole", "/wide", 1.0, 1.03)),
    ),
    Claim(
        id="K3-1", variant="per head: five steps", tier="M", source=K3,
        statement="With five steps head by head, heads are at most 15 % apart, whatever the imbalance and the shape.",
        reported="No number.", boundary=_HEADS,
        criterion=All(tuple(_spread("muon5_heads", f"/{size}", 1.0, 1.15) for size in HEADS)),
        control=Control("the whole matrix", _spread("muon5_whole", "/wide", 1.0, 1.15)),
    ),
    Claim(
        id="K3-1", variant="per head: blind to scale", tier="M", source=K3,
        statement="The per-head update does not depend on the imbalance, to 1e-5 of its RMS.",
        reported="Follows from normalising every head.", boundary=_HEADS,
        criterion=Within("moved_by_imbalance", "hybrid10_heads", 0.0, 1e-5),
        control=Control("the whole matrix", Within("moved_by_imbalance", "hybrid10_whole", 0.0, 1e-5)),
    ),
    Claim(
        id="K3-1", variant="factor of the block", tier="M", source=f"{MOONLIGHT}; for heads derived here",
        statement="Per head the factor has to come from the head's own shape: 0.2 sqrt(max(D, K)) gives an RMS of 0.2, "
        "to 2 %.",
        reported="Moonlight warns of large updates where heads are orthogonalised apart; K3 gives no factor.",
        boundary=_HEADS,
        criterion=_rms("hybrid10_heads", 0.196, 0.204),
        control=Control("the factor of the whole matrix", _rms("hybrid10_heads", 0.196, 0.204, "_whole_factor")),
    ),
)  # fmt: skip

CLAIMS_DIRECTIONS = (
    Claim(
        id="K2-5", variant="effective rank", tier="M", source=K2,
        statement="Where one direction dominates the gradient, the effective rank of Muon's update (five steps) is at "
        "least 0.8 of the full rank and at least twice that of Adam's.",
        reported="A hypothesis: Muon's updates have full, Adam's low effective rank; no number.",
        boundary=f"{_RANDOM} Effective rank: exponential of the entropy of squared singular values.",
        criterion=All((
            Within("effective_rank_share", f"muon5_update@{at(DOMINATED)}", 0.8, 1.0),
            Within("effective_rank_over_adam", f"muon5_update@{at(DOMINATED)}", 2.0, np.inf),
        )),
        control=Control("gradients of noise alone",
                        Within("effective_rank_over_adam", f"muon5_update@{at(0)}", 2.0, np.inf)),
    ),
    Claim(
        id="K2-5", variant="no larger in the mean square", tier="M", source="derived here",
        statement="At equal RMS the mean square of the component along directions that have nothing to do with the "
        "gradient is RMS^2, to 10 %, for Muon and for Adam alike.",
        reported="Not reported; it limits what the hypothesis can mean.", boundary=_RANDOM,
        criterion=All((
            Within("mean_square_elsewhere", f"muon5_update@{at(DOMINATED)}", 0.9, 1.1),
            Within("mean_square_elsewhere", f"adam_update@{at(DOMINATED)}", 0.9, 1.1),
        )),
        control=Control("along the gradient's own direction",
                        Within("mean_square_own", f"adam_update@{at(DOMINATED)}", 0.9, 1.1)),
    ),
    Claim(
        id="K2-5", variant="more likely", tier="M", source=K2,
        statement="At equal RMS the median size of that component is at least 1.2 times larger for Muon than for Adam.",
        reported="Said to be more likely to align with an existing direction; no number.", boundary=_RANDOM,
        criterion=Within("median_over_adam", f"muon5_update@{at(DOMINATED)}", 1.2, np.inf),
        control=Control("gradients of noise alone", Within("median_over_adam", f"muon5_update@{at(0)}", 1.2, np.inf)),
    ),
    Claim(
        id="K2-5", variant="its own direction", tier="M", source=K2,
        statement="At equal RMS Muon adds more than Adam (1.1 times) to a weight's largest singular value where the "
        "gradient itself has put that direction there.",
        reported="Growth of the largest singular values is laid to Muon.", boundary=_RANDOM,
        criterion=Within("growth_over_adam_own", f"muon5_update@{at(DOMINATED)}", 1.1, np.inf),
        control=Control("directions that have nothing to do with the gradient, in the root mean square",
                        Within("growth_over_adam_elsewhere", f"muon5_update@{at(DOMINATED)}", 1.1, np.inf)),
    ),
    Claim(
        id="K2-5", variant="its own direction, how much", tier="M", source="derived here",
        statement="There an exact update would add pi / (2 sqrt(n)) times what Adam adds; with 8 + 2 steps it does, to "
        "15 %.",
        reported="Not reported.", boundary=f"{_RANDOM} For a Gaussian direction of rank 1 and a sign-like Adam.",
        criterion=Within("growth_over_formula", f"hybrid10_update@{at(DOMINATED)}", 0.85, 1.15),
        control=Control("gradients of noise alone",
                        Within("growth_over_formula", f"hybrid10_update@{at(0)}", 0.85, 1.15)),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much is drawn and scanned."""

    draws: int = 8
    """Independent matrices; a claim has to hold on every one."""
    grid: int = 2000
    """Singular values from 1e-5 to 1, equally spaced in the logarithm, whose images are taken."""
    imbalances: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
    """Factors on the gradient of head 0, among them 1, 100 and 1000."""
    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    """RMS of the gradient's fixed direction over that of its noise, among them 0 and 8."""
    directions: int = 256
    """Pairs of random bases along which components are taken, each of 64 pairs of directions."""
    evidence: bool = True
    """Whether verdicts count as evidence; false for a quick look and for a preset changed by hand."""

    def __post_init__(self) -> None:
        if not {1.0, LOUD, LOUDEST} <= set(self.imbalances) or min(self.imbalances) < 1:
            raise ReproError(f"imbalances {self.imbalances} must hold 1, 100 and 1000, and be at least 1.")
        if not {0.0, DOMINATED} <= set(self.strengths) or min(self.strengths) < 0:
            raise ReproError(f"strengths {self.strengths} must hold 0 and 8, and not be negative.")
        if self.draws < 1 or self.directions < 1 or self.grid < 50:
            raise ReproError("draws and directions are at least 1, grid at least 50.")


def polar(x: np.ndarray) -> np.ndarray:
    """U V^T of x = U S V^T on the last two axes, in float64: the matrix that Newton–Schulz approaches."""
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u @ vt


def root_mean_square(x: np.ndarray, axis: tuple[int, ...] | None = None) -> np.ndarray:
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis))


def basis(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random orthonormal columns, `[..., rows, columns]`."""
    return np.linalg.qr(rng.normal(size=shape))[0]


@functools.partial(jax.jit, static_argnames="arm")
def _iterate(x: jax.Array, arm: str) -> jax.Array:
    schedule, dtype = MAPS[arm]
    return newton_schulz(x, schedule, dtype=dtype)


def images(s: np.ndarray, arm: str, draw: int) -> np.ndarray:
    """What an arm makes of the singular values s `[S]`, each of a 4 x 8 matrix of Frobenius norm 1 in random bases."""
    rng = np.random.default_rng([draw, 1])
    u, v = basis(rng, len(s), 4, 4), basis(rng, len(s), 8, 4)
    values = np.stack([s, *[np.sqrt((1 - s**2) / 3)] * 3], axis=1)
    x = np.einsum("nis,ns,njs->nij", u, values, v)
    out = np.asarray(_iterate(x.astype(np.float32), arm), np.float64)
    return np.einsum("ni,nij,nj->n", u[:, :, 0], out, v[:, :, 0])


def value_runs(preset: Preset) -> Iterator[Run]:
    """Images of singular values: the worst of a grid, in bases drawn anew for each, and the curves of a figure."""
    grid = np.geomspace(1e-5, 1.0, preset.grid)
    for arm in MAPS:
        for draw in range(preset.draws):
            image, shown = np.split(images(np.append(grid, [s for _, s in _CURVE]), arm, draw), [preset.grid])
            metrics = {"highest_from_1e-2": image[grid >= 1e-2].max()}
            for name, least in (("2e-3", 2e-3), ("1e-3", 1e-3), ("1e-2", 1e-2)):
                metrics[f"distance_from_{name}"] = np.abs(image[grid >= least] - 1).max()
                metrics[f"lowest_from_{name}"] = image[grid >= least].min()
            beyond = grid[np.abs(image - 1) > 1e-3]
            yield Run(arm, draw, metrics | {"reach": beyond.max() if len(beyond) else grid[0]})
            if draw == 0:
                for (name, _), p in zip(_CURVE, shown, strict=True):
                    yield Run(arm, 0, {"image": p}, point=name)


def power(x: np.ndarray, exponent: float) -> np.ndarray:
    """A power of a symmetric matrix on its range: eigenvalues below 1e-12 of the largest stay zero."""
    values, vectors = np.linalg.eigh(x)
    kept = values > 1e-12 * values.max()
    return (vectors * np.where(kept, np.where(kept, values, 1.0) ** exponent, 0.0)) @ vectors.T


def shampoo(gradient: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """L^(-1/4) G R^(-1/4) with L and R summed over the gradient `[A, B]` and others before it."""
    left = sum(g @ g.T for g in (gradient, *others))
    right = sum(g.T @ g for g in (gradient, *others))
    return power(left, -0.25) @ gradient @ power(right, -0.25)


def gaussians(draw: int) -> dict[str, np.ndarray]:
    """Per shape `[1 + ranks, A, B]`: a normal matrix, and products of two of each rank."""
    rng = np.random.default_rng([draw, 2])
    found = {}
    for a, b in SHAPES:
        low = [rng.normal(size=(a, rank)) @ rng.normal(size=(rank, b)) for rank in RANKS]
        found[f"{a}x{b}"] = np.stack([rng.normal(size=(a, b)), *low])
    return found


def head_gradients(draw: int, imbalances: tuple[float, ...]) -> dict[str, np.ndarray]:
    """Normal gradients `[imbalances, D, H, K]` of every size, head 0 times each factor in turn."""
    found = {}
    for number, (size, shape) in enumerate(HEADS.items()):
        x_NDHK = np.repeat(np.random.default_rng([draw, 3, number]).normal(size=(1, *shape)), len(imbalances), axis=0)
        x_NDHK[:, :, 0] *= np.array(imbalances)[:, None, None]
        found[size] = x_NDHK
    return found


def own_direction(draw: int) -> tuple[np.ndarray, np.ndarray]:
    """u `[N]` and v `[N]`, normal, of an outer product of RMS 1."""
    u, v = np.random.default_rng([draw, 4]).normal(size=(2, N))
    return u / root_mean_square(u), v / root_mean_square(v)


@jax.jit
def momentum(u: jax.Array, v: jax.Array, strength: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """After some steps on gradients strength * u v^T + noise, fresh at every step: what Muon orthogonalises, and Adam's
    update, both `[N, N]`."""
    muon, adam = optax.trace(0.95, nesterov=True), optax.scale_by_adam(b1=0.9, b2=0.95)

    def step(states, i):
        g = strength * jnp.outer(u, v) + jax.random.normal(jax.random.fold_in(key, i), (N, N))
        summed, muon_state = muon.update(g, states[0])
        scaled, adam_state = adam.update(g, states[1])
        return (muon_state, adam_state), (summed, scaled)

    states = muon.init(jnp.zeros((N, N))), adam.init(jnp.zeros((N, N)))
    return jax.tree.map(lambda x: x[-1], jax.lax.scan(step, states, jnp.arange(STEPS))[1])


@functools.partial(jax.jit, static_argnames="schedule")
def orthogonalised(tree: dict[str, dict[str, jax.Array]], *, schedule: str) -> dict[str, dict[str, jax.Array]]:
    """Updates of an RMS of 1 where they are orthogonal: `shapes` [..., A, B], `whole` and `heads` [..., D, H, K]."""
    whole = Layout("matrix", inputs=(2,), outputs=(3, 4), head=3)
    of = {"shapes": Layout("matrix", inputs=(2,), outputs=(3,)), "whole": whole, "heads": per_head(whole)}
    layouts = {kind: dict.fromkeys(leaves, of[kind]) for kind, leaves in tree.items()}
    return orthogonalise(tree, layouts, schedule=schedule, rms=1.0, dtype=jnp.float32)


def everything(preset: Preset) -> tuple[dict, dict, np.ndarray]:
    """(gradients, their updates by schedule, Adam's updates `[draws, strengths, N, N]`), all with leading axes of draws
    and of ranks, imbalances or strengths; in two programs."""
    draws = range(preset.draws)
    pairs = [
        momentum(*own_direction(draw), jnp.float32(strength), jax.random.key(draw))
        for draw in draws
        for strength in preset.strengths
    ]
    summed, adam = (np.stack([np.asarray(pair[i]) for pair in pairs]).reshape(preset.draws, -1, N, N) for i in range(2))
    shapes = [gaussians(draw) for draw in draws]
    heads = [head_gradients(draw, preset.imbalances) for draw in draws]
    heads = {size: np.stack([h[size] for h in heads]).astype(np.float32) for size in HEADS}
    tree = {
        "shapes": {k: np.stack([x[k] for x in shapes]).astype(np.float32) for k in shapes[0]} | {"momentum": summed},
        "whole": heads,
        "heads": heads,
    }
    done = {schedule: jax.device_get(orthogonalised(tree, schedule=schedule)) for schedule in ("hybrid10", "muon5")}
    return tree, done, adam


def size_runs(preset: Preset, tree: dict, done: dict) -> Iterator[Run]:
    """RMS of updates by shape and by rank, and one-step Shampoo beside them."""
    names = {f"{a}x{b}": (a, b) for a, b in SHAPES}
    for draw in range(preset.draws):
        gradient = {name: tree["shapes"][name][draw, 0].astype(np.float64) for name in names}
        exact = {name: polar(x) for name, x in gradient.items()}
        off = [[root_mean_square(exact[n]) * np.sqrt(f(names[n])) - 1 for n in names] for f in (max, min)]
        yield Run("exact", draw, {"lemma_off": np.abs(off[0]).max(), "lemma_off_min": np.abs(off[1]).max()})
        unit = {arm: {n: done[schedule]["shapes"][n][draw] for n in names} for arm, schedule in SCHEDULE_OF.items()}
        for arm, rms_of in (("v4", lambda a, b: 0.18), ("moonlight", lambda a, b: 0.2), ("jordan", jordan)):
            rms = {n: float(root_mean_square(unit[arm][n][0])) * rms_of(*names[n]) for n in names}
            by_rows = [rms[n] * np.sqrt(a / max(a, b)) for n, (a, b) in names.items()]
            metrics = _ends(rms.values()) | _ends(by_rows, "_by_rows")
            metrics["rms_spread"] = max(rms.values()) / min(rms.values())
            yield Run(arm, draw, metrics)
            yield from (Run(arm, draw, {"update_rms": value}, point=n) for n, value in rms.items())
        by_rank = [
            (root_mean_square(unit["v4"][n][1 + i]) / np.sqrt(max(shape)), rank, shape)
            for n, shape in names.items()
            for i, rank in enumerate(RANKS)
        ]
        yield Run("ranks", draw, {
            "rank_off": max(abs(rms / np.sqrt(rank / (a * b)) - 1) for rms, rank, (a, b) in by_rank),
            "rank_off_full": max(abs(rms * np.sqrt(max(shape)) - 1) for rms, _, shape in by_rank),
        })  # fmt: skip
        small = {n: x for n, x in gradient.items() if max(x.shape) <= 128}
        one = {n: shampoo(x) for n, x in small.items()}
        # The matrix of the largest rank, which is the last one, as a gradient before.
        two = {n: shampoo(x, tree["shapes"][n][draw, -1].astype(np.float64)) for n, x in small.items()}
        metrics = {
            "shampoo_off": max(np.abs(one[n] - exact[n]).max() for n in small),
            "shampoo_two_off": max(np.abs(two[n] - exact[n]).max() for n in small),
        }
        for arm in ("v4", "moonlight"):
            metrics[f"{arm}_from_shampoo"] = max(
                np.linalg.norm(unit[arm][n][0] / np.sqrt(max(a, b)) - one[n]) / np.linalg.norm(one[n])
                for n, (a, b) in names.items()
                if n in small and a != b
            )
        yield Run("shampoo", draw, metrics)


SCHEDULE_OF = {"v4": "hybrid10", "moonlight": "muon5", "jordan": "hybrid10"}


def jordan(rows: int, columns: int) -> float:
    """The RMS that Jordan's factor gives to an orthogonal matrix."""
    return update_factor("jordan", rows, columns) / update_factor(1.0, rows, columns)


def _ends(values, suffix: str = "") -> dict[str, float]:
    values = list(values)
    return {f"least_rms{suffix}": min(values), f"largest_rms{suffix}": max(values)}


def exact_heads(x_NDHK: np.ndarray, *, apart: bool) -> np.ndarray:
    """The exact update of RMS 1 for gradients [..., D, H, K], of whole matrices or of every head apart."""
    *n, d, h, k = x_NDHK.shape
    if apart:
        return np.sqrt(max(d, k)) * np.moveaxis(polar(np.moveaxis(x_NDHK, -2, -3)), -3, -2)
    return np.sqrt(max(d, h * k)) * polar(x_NDHK.reshape(*n, d, h * k)).reshape(x_NDHK.shape)


def head_runs(preset: Preset, tree: dict, done: dict) -> Iterator[Run]:
    """RMS of every head's update, by arm, size and imbalance."""
    plain = preset.imbalances.index(1.0)
    for arm in HEAD_ARMS:
        schedule, kind = arm.split("_")
        for draw in range(preset.draws):
            moved, right, wrong = 0.0, [], []
            for size, (d, h, k) in HEADS.items():
                if schedule == "exact":
                    x_NDHK = 0.2 * exact_heads(tree[kind][size][draw], apart=False)
                else:
                    x_NDHK = 0.2 * done[schedule][kind][size][draw]
                rms_NH = root_mean_square(x_NDHK, (1, 3))
                spread_N = rms_NH.max(1) / rms_NH.min(1)
                moved = max(moved, float(np.abs(x_NDHK - x_NDHK[plain]).max()) / 0.2)
                right.append(rms_NH.ravel())
                wrong.append(rms_NH.ravel() * np.sqrt(max(d, h * k) / max(d, k)))
                for i, factor in enumerate(preset.imbalances):
                    metrics = {"head_spread": spread_N[i]}
                    if size == "latent":
                        loud = rms_NH[i, 0] / root_mean_square(rms_NH[i, 1:])
                        limit = np.sqrt(k * (h - 1) / (d - k))
                        metrics |= {"loud_over_limit": loud / limit, "loud_over_columns": loud / np.sqrt(h * k / d)}
                    yield Run(arm, draw, metrics, point=at(factor), size=size)
                yield Run(arm, draw, {"worst_head_spread": spread_N.max()}, size=size)
            metrics = {"moved_by_imbalance": moved}
            if kind == "heads":
                metrics |= _ends(np.concatenate(right)) | _ends(np.concatenate(wrong), "_whole_factor")
            yield Run(arm, draw, metrics)


def effective_rank(x: np.ndarray) -> float:
    """n to the power of the SVD entropy, which is exp(-sum p ln p) with p = squared singular values over their sum; n for n
    equal ones."""
    return float(min(x.shape) ** svd_entropy(x))


def direction_runs(preset: Preset, done: dict, adam: np.ndarray) -> Iterator[Run]:
    """Effective ranks of updates at equal RMS, and their components along given and along random directions."""
    raw = {"adam_update": adam}
    raw |= {f"{schedule}_update": found["shapes"]["momentum"] for schedule, found in done.items()}
    for draw in range(preset.draws):
        rng = np.random.default_rng([draw, 5])
        u_own, v_own = (x / np.linalg.norm(x) for x in own_direction(draw))
        u_WNN, v_WNN = basis(rng, preset.directions, N, N), basis(rng, preset.directions, N, N)
        for i, strength in enumerate(preset.strengths):
            found = {}
            for arm in UPDATES:
                x = raw[arm][draw, i].astype(np.float64)
                x = x / root_mean_square(x)
                elsewhere = np.einsum("wij,wij->wj", u_WNN, x @ v_WNN)
                own = float(u_own @ x @ v_own)
                found[arm] = {
                    "effective_rank_share": effective_rank(x) / N,
                    "median_component": np.median(np.abs(elsewhere)),
                    "mean_square_elsewhere": np.mean(elsewhere**2),
                    "mean_square_own": own**2,
                    "growth_own": own,
                }
            for arm, metrics in found.items():
                over = {name: metrics[name] / found["adam_update"][name] for name in metrics}
                yield Run(arm, draw, metrics | {
                    "effective_rank_over_adam": over["effective_rank_share"],
                    "median_over_adam": over["median_component"],
                    "growth_over_adam_own": over["growth_own"],
                    "growth_over_adam_elsewhere": np.sqrt(over["mean_square_elsewhere"]),
                    "growth_over_formula": over["growth_own"] / (np.pi / (2 * np.sqrt(N))),
                }, point=at(strength))  # fmt: skip


def checks(preset: Preset) -> list[Run]:
    """All of the above."""
    tree, done, adam = everything(preset)
    return [
        *value_runs(preset),
        *size_runs(preset, tree, done),
        *head_runs(preset, tree, done),
        *direction_runs(preset, done, adam),
    ]


def heat() -> dict[str, np.ndarray]:
    """RMS of every head's exact update by imbalance, `[7, 8]`, at H K = 4 D."""
    x_NDHK = head_gradients(0, _CPU.imbalances)["latent"]
    titles = {"whole matrix": False, "head by head": True}
    return {t: 0.2 * root_mean_square(exact_heads(x_NDHK, apart=apart), (1, 3)) for t, apart in titles.items()}


_CPU = Preset()
_CURVE = tuple((f"s{s:.2g}", float(f"{s:.2g}")) for s in np.geomspace(1e-5, 1.0, 51))
_SIDES = tuple((f"{a}x{b}", a / b) for a, b in SHAPES if (a, b) not in ((64, 256), (256, 64)))
_IMBALANCES = tuple((at(f), f) for f in _CPU.imbalances)
_STRENGTHS = tuple((at(s), s) for s in _CPU.strengths)
FIGURES = (
    Dose("values", "image", "What Newton–Schulz makes of a singular value", "singular value / Frobenius norm",
         "singular value of the result", _CURVE, ("muon5", "hybrid10", "hybrid10_bf16"), log_x=10,
         lines=(Reference("1", y=1.0), Reference("2e-3", x=2e-3))),
    Dose("rms", "update_rms", "Size of an update against the shape of its matrix", "rows / columns",
         "RMS of the update", _SIDES, ("v4", "moonlight", "jordan"), log_x=2, log_y=True,
         lines=(Reference("0.18", y=0.18),)),
    Dose("heads", "head_spread", "Spread of update sizes over heads", "gradient of head 0 times",
         "largest over smallest RMS of a head", _IMBALANCES, HEAD_ARMS, log_x=10, log_y=True),
    Heatmap("head_rms", "RMS of every head's update, D = 64, 8 heads of 32", heat, "RMS of the update",
            xlabel="head", ylabel="imbalance: 1, 3, 10, ... 1000"),
    Dose("effective_rank", "effective_rank_share", "Effective rank of an update",
         "RMS of the direction / RMS of the noise", "effective rank / n", _STRENGTHS, UPDATES),
    Dose("own", "growth_own", "What an update of RMS 1 adds along the gradient's own direction",
         "RMS of the direction / RMS of the noise", "u^T O v", _STRENGTHS, UPDATES,
         lines=(Reference("sqrt(n)", y=float(np.sqrt(N))), Reference("2 n / pi", y=2 * N / np.pi))),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="muon-geometry",
    title="The geometry of orthogonalised updates",
    claims=CLAIMS_VALUES + CLAIMS_SIZE + CLAIMS_HEADS + CLAIMS_DIRECTIONS,
    arms=ARMS,
    presets={
        "smoke": Preset(
            draws=2,
            grid=400,
            directions=64,
            imbalances=(1.0, LOUD, LOUDEST),
            strengths=(0.0, DOMINATED),
            evidence=False,
        ),
        "cpu": _CPU,
    },
    checks=checks,
    check_arms=("exact", "ranks", "shampoo"),
    figures=FIGURES,
)

if __name__ == "__main__":
    from repro.cli import run_script

    run_script(EXPERIMENT)
