"""Finding the experiments: beside the package in a checkout, inside it when installed."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path

from repro.claims import Experiment
from repro.errors import ReproError


def folder() -> Path:
    """Where the experiment modules are."""
    package = Path(__file__).parent
    for place in (package / "experiments", package.parent / "experiments"):
        if place.is_dir():
            return place
    raise ReproError("this installation carries no experiments; install the package again.")


def names() -> list[str]:
    """Names of all experiments, spelt with hyphens."""
    return sorted(path.stem.replace("_", "-") for path in folder().glob("[a-z]*.py"))


@cache
def load(name: str) -> Experiment:
    """The experiment of this name; hyphens and underscores are one. Raises `ReproError` for an unknown name."""
    stem = name.replace("-", "_")
    path = folder() / f"{stem}.py"
    if stem.replace("_", "-") not in names():
        raise ReproError(f"experiment {name!r} is unknown; known are {', '.join(names())}.")
    # Not a package on the path: an installed project must not claim the top-level name `experiments`.
    spec = importlib.util.spec_from_file_location(f"repro.experiments.{stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.EXPERIMENT
