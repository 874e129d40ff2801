"""Finding the experiments: beside the package in a checkout, inside it when installed, and the user's own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

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


def stored_preset(experiment: Experiment, record: Mapping[str, Any], where: Path) -> Any:
    """The preset that run.json of the folder `where` holds. Raises `ReproError` if it is of another version."""
    import pydantic

    # All presets of an experiment are of one class, its own or that of `repro.train`, and so are their settings of a
    # run, which may be of a class with more fields than the preset's declaration knows.
    own = next(iter(experiment.presets.values()))

    def as_own(value: Any, like: Any) -> Any:
        return pydantic.TypeAdapter(type(like)).validate_python(value)

    try:
        fields = dict(record["preset"])
        if hasattr(own, "train"):
            fields["train"] = as_own(fields["train"], own.train)
        return as_own(fields, own)
    except (KeyError, TypeError, ValueError) as error:  # also what pydantic refuses
        raise ReproError(
            f"{where}/run.json does not hold a preset of this version; it was edited or is of another version."
        ) from error


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
