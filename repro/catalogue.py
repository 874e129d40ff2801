"""Finding the experiments: beside the package in a checkout, inside it when installed, and the user's own."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path

from repro.claims import Experiment
from repro.errors import ReproError


def shipped() -> Path:
    """Where the experiments that come with the project are."""
    package = Path(__file__).parent
    for place in (package / "experiments", package.parent / "experiments"):
        if place.is_dir():
            return place
    raise ReproError("this installation carries no experiments; install the package again.")


def modules() -> dict[str, Path]:
    """Experiment name -> module, of those shipped and of a folder `experiments` in the working directory."""
    found: dict[str, Path] = {}
    for place in (Path.cwd() / "experiments", shipped()):
        found |= {path.stem.replace("_", "-"): path for path in sorted(place.glob("[a-z]*.py"))}
    return found


def names() -> list[str]:
    """Names of all experiments, spelt with hyphens."""
    return sorted(modules())


def load(name: str) -> Experiment:
    """The experiment of this name; hyphens and underscores are one. Raises `ReproError` for an unknown name."""
    found = modules()
    spelt = name.replace("_", "-")
    if spelt not in found:
        raise ReproError(f"experiment {name!r} is unknown; known are {', '.join(sorted(found))}.")
    return _loaded(found[spelt])


@cache
def _loaded(path: Path) -> Experiment:
    # Not a package on the path: an installed project must not claim the top-level name `experiments`.
    spec = importlib.util.spec_from_file_location(f"repro.experiments.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not isinstance(getattr(module, "EXPERIMENT", None), Experiment):
        raise ReproError(f"{path} defines no EXPERIMENT; it must be a repro.claims.Experiment.")
    return module.EXPERIMENT
