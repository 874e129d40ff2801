"""Checkpoints of a job: its training state and the metrics so far, so that a resumed job knows its past."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from repro.errors import ReproError


class Checkpoints:
    """Orbax checkpoints under `folder`, newest kept. Only this module touches them.

    A checkpoint becomes visible by a rename after it is complete, so an interrupted save leaves the previous one.
    """

    def __init__(self, folder: Path) -> None:
        for name in ("absl", "asyncio"):  # Orbax raises what it logs, and would add a traceback for each of its tasks
            logging.getLogger(name).setLevel(logging.CRITICAL)
        import orbax.checkpoint as ocp  # slow to import, and not every run saves

        self.folder = Path(folder).resolve()
        self._ocp = ocp
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=1, create=True, enable_async_checkpointing=False),
        )

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, identity: str, state: Any, metrics: dict[str, np.ndarray]) -> None:
        """Writes `state` (a tree of arrays) and the metrics so far (step axis first). Raises OSError if the disk is
        full; the previous checkpoint then stands."""
        leaves = {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        items = self._ocp.args.Composite(
            state=self._ocp.args.StandardSave(leaves),
            curves=self._ocp.args.StandardSave(metrics),
            identity=self._ocp.args.JsonSave({"identity": identity}),
        )
        try:
            self._manager.save(step, args=items)
        except Exception as error:
            # TensorStore raises ValueError for a full disk, with the system's number in its text.
            number = re.search(r"os_error_code='(\d+)'", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(self.folder)) from error

    def restore(self, step: int, identity: str, like: Any, metrics_like: Any) -> tuple[Any, dict[str, np.ndarray]]:
        """The state (with the structure and sharding of `like`) and metrics of `step`.

        Raises `ReproError` if the checkpoint was written by another configuration, or is damaged.
        """
        args = self._ocp.args
        found = self._read(step, identity=args.JsonRestore())
        if found["identity"]["identity"] != identity:
            raise ReproError(
                f"the checkpoint in {self.folder} belongs to another configuration; resume the run that wrote it, "
                "or remove that folder to start this job at step 0."
            )
        leaves, treedef = jax.tree.flatten(like)
        names = [f"{i:04d}" for i in range(len(leaves))]
        restored = self._read(
            step,
            state=args.StandardRestore(dict(zip(names, leaves, strict=True))),
            curves=args.StandardRestore(metrics_like),
        )
        state = jax.tree.unflatten(treedef, [restored["state"][name] for name in names])
        return state, {name: np.asarray(value) for name, value in restored["curves"].items()}

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=self._ocp.args.Composite(**items))
        except Exception as error:  # whatever Orbax meets first in a damaged file: there is no common class
            raise ReproError(
                f"the checkpoint in {self.folder} cannot be read; remove that folder to start this job at step 0."
            ) from error

    def close(self) -> None:
        self._manager.close()

    def remove(self) -> None:
        """Deletes all checkpoints of this job."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
