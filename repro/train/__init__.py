"""One training engine: many runs of one structure as one compiled program; see README.md."""

from repro.train.compiled import prepare
from repro.train.config import NUMERIC, SHAPE_FIELDS, Numbers, TrainConfig, at_size, with_settings
from repro.train.job import Lane, check_corpus
from repro.train.loop import JobResult, Progress, train
from repro.train.mesh import lane_mesh
from repro.train.step import Program, TrainState
from repro.train.summary import summarise

__all__ = [
    "JobResult", "Lane", "NUMERIC", "Numbers", "Program", "Progress", "SHAPE_FIELDS", "TrainConfig", "TrainState", "at_size",
    "check_corpus", "lane_mesh", "prepare", "summarise", "train", "with_settings",
]  # fmt: skip
