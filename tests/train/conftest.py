import pytest

from repro.data import load_corpus
from repro.models import ModelConfig
from repro.train import TrainConfig


@pytest.fixture(scope="session")
def kjv():
    return load_corpus("kjv")


@pytest.fixture(scope="session")
def tiny():
    """Muon in its smallest form: one layer of two heads, three chunks of ten steps."""
    return TrainConfig(
        model=ModelConfig(layers=1, width=16, heads=2, ffn=16), length=8, batch_size=2, steps=30, eval_windows=4
    )
