"""Checkpoint folders: `config.json` beside safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from repro.errors import ReproError
from repro.models.hugging_face.convert import from_hf, to_hf
from repro.models.transformer import Transformer

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def load_hf(folder: str | Path) -> Transformer:
    """The model of a checkpoint folder: `config.json` with `model.safetensors`, or with several files and their index.

    Float tensors of 16 to 64 bits are read as float32. Raises `ReproError` for what is missing or cannot be read, and
    as `from_hf` does.
    """
    folder = Path(folder)
    return from_hf(read_json(folder / "config.json"), _tensors(folder))


def save_hf(transformer: Transformer, folder: str | Path) -> None:
    """Writes `config.json` and `model.safetensors`, float32, into a folder that has neither.

    Raises `ReproError` where there is a checkpoint already, and as `to_hf` does.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    config, weights = to_hf(transformer)
    for name in ("config.json", _ONE):
        if (folder / name).exists():
            raise ReproError(f"{folder / name} exists; give an empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    # The weights first: a folder with a config.json is whole.
    save_file(weights, folder / _ONE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> dict[str, Any]:
    """One JSON file that holds a table. Raises `ReproError` where it cannot be read."""
    path = Path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReproError(f"{path} cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise ReproError(f"{path} is not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ReproError(f"{path} must hold one table of fields.")
    return found


def _tensors(folder: Path) -> Mapping[str, np.ndarray]:
    if not (folder / _INDEX).exists():
        return _file(folder / _ONE)
    names = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(names, dict):
        raise ReproError(f"{folder / _INDEX} has no weight_map.")
    found: dict[str, np.ndarray] = {}
    for name in sorted(set(names.values())):
        found |= _file(folder / name)
    return found


def _file(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, deserialize

    try:
        stored = deserialize(path.read_bytes())
    except OSError as error:
        raise ReproError(f"{path} cannot be read ({error.strerror or error}).") from error
    except SafetensorError as error:
        raise ReproError(f"{path} is not a safetensors file ({error}).") from error
    found = {}
    for name, tensor in stored:
        if tensor["dtype"] not in _TYPES:
            raise ReproError(f"{path}: {name} is stored as {tensor['dtype']}; store it as one of {', '.join(_TYPES)}.")
        found[name] = np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"]).astype(np.float32)
    return found
