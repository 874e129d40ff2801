"""A tiny random DeepSeek-V3 with what `transformers` computes from it."""

import json
from pathlib import Path

import numpy as np
import pytest


class Golden:
    def __init__(self) -> None:
        with np.load(Path(__file__).parents[1] / "data" / "deepseek_v3_tiny.npz") as stored:
            self.config = json.loads(str(stored["config"])) | {"rope_interleave": bool(stored["rope_interleave"])}
            self.weights = {name[2:]: stored[name] for name in stored if name.startswith("w/")}
            self.tokens = stored["input_ids"].astype(np.int32)
            self.logits = stored["logits"]
            self.hidden = np.stack([stored[f"hidden/{i}"] for i in range(4)])


@pytest.fixture(scope="session")
def golden():
    return Golden()
