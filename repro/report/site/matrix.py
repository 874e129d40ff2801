"""The claims of four systems by subject: the rows of the matrix on the overview."""

from collections.abc import Iterable

COLUMNS = {"K2": "Kimi K2", "K3": "Kimi K3", "V3": "DeepSeek-V3", "V4": "DeepSeek-V4"}

SUBJECTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Products and formats", ("V3-1", "V3-2", "V3-3", "V3-4", "V3-6", "V4-6", "V4-7", "K3-5", "K3-6")),
    ("Optimizer state and communication", ("V3-5", "V3-7", "V4-8")),
    ("Matrix optimizers", ("K2-5", "K3-1", "V4-1", "V4-2", "V4-10")),
    ("Attention logits", ("K2-1", "K2-2", "K2-3", "K2-4", "V4-3")),
    ("Feed-forward units", ("K3-2", "V4-4")),
    ("Experts and routing", ("K3-3", "K3-4", "V3-8", "V4-5")),
    ("Residual stream", ("K3-7", "V4-9")),
)


def rows() -> list[tuple[str, list[list[str]]]]:
    """(subject, the ids of each column) for every row."""
    return [(subject, [[id for id in ids if _column(id) == column] for column in COLUMNS]) for subject, ids in SUBJECTS]


def outside(ids: Iterable[str]) -> list[str]:
    """The claims that are in none of the rows."""
    inside = {id for _, row in SUBJECTS for id in row}
    return [id for id in ids if id not in inside]


def _column(id: str) -> str:
    return id.split("-")[0]
