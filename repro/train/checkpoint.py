"""Checkpoints of a job: its state and the metrics so far, so that a resumed job knows its past.

    checkpoints/JOB/
      40/state/            the state, as Orbax writes it
      40/manifest.json     origin, loss, digests of the state, SHA-256 of every file
      40/manifest.sha256   that of the manifest, for `sha256sum -c`; written last
      curves/0-40-HASH.npz metrics of steps 0 to 39, [step, run, ...]; each checkpoint adds the steps since the last

A checkpoint is written under another name and renamed when it is whole. Its hashes are compared before it is restored,
since Orbax reads a file with a flipped bit without complaint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from repro.errors import ReproError
from repro.files import sha256, sync_folder, write_atomically
from repro.train.origin import differences

Curves = dict[str, np.ndarray]


class Damaged(Exception):
    """A checkpoint is not what was written. The message names the file and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """The state of a job after `step` steps, its metrics until then, and what differs from the job that wrote it."""

    step: int
    state: Any
    curves: Curves
    digests: tuple[str, ...]
    """SHA-256 of each run's state."""
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What was saved beside it, in plain JSON."""
    differences: tuple[str, ...] = ()


def digests(state: Any) -> tuple[str, ...]:
    """SHA-256 over the bits of each run's part of `state`, whose arrays on the host are [run, ...]."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(state)]

    def digest(run: int) -> str:
        sums = hashlib.sha256()
        for leaf in leaves:
            sums.update(leaf[run].tobytes())
        return sums.hexdigest()

    return tuple(digest(run) for run in range(len(leaves[0])))


def mean_loss(curves: Mapping[str, np.ndarray]) -> float:
    """Mean training loss over the steps and runs of a chunk; infinite if it is not finite."""
    loss = float(np.mean(curves["loss"], dtype=np.float64))
    return loss if math.isfinite(loss) else math.inf


class Checkpoints:
    """Checkpoints under `folder`: the newest `keep`, and beside them the one with the least loss. Only this class
    touches them.

    `save` returns at once and one thread writes; what goes wrong there is raised by the next `save`, `check` or
    `close` as OSError, and the checkpoints before it stand. `origin` says what the job's bits depend on (see
    `repro.train.origin`); it is called at the first save or restore. `on_note` hears of damage, in one line.
    """

    def __init__(
        self,
        folder: Path,
        origin: Callable[[], Mapping[str, Any]],
        *,
        keep: int = 2,
        on_note: Callable[[str], None] = lambda line: None,
    ) -> None:
        if keep < 1:
            raise ReproError(f"{keep} checkpoints cannot be kept; at least 1.")
        self.folder, self._keep, self._on_note = Path(folder).resolve(), keep, on_note
        self._origin = functools.cache(origin)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._curves: list[dict[str, Any]] = []  # the files that hold the metrics so far, as in a manifest

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # what the block raised says more
            with contextlib.suppress(Exception):
                self.close()

    def steps(self) -> list[int]:
        """Steps of all checkpoints, newest first, intact or not."""
        if not self.folder.is_dir():
            return []
        return sorted((int(p.name) for p in self.folder.iterdir() if p.name.isdigit()), reverse=True)

    # Saving

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._writing is not None and not self._writing.done()

    def check(self) -> None:
        """Raises what went wrong while writing: OSError, where the disk is full."""
        if self._writing is not None and self._writing.done():
            done, self._writing = self._writing, None
            done.result()

    def save(
        self,
        step: int,
        state: Any,
        curves: Sequence[Curves],
        loss: float,
        *,
        notes: Mapping[str, Any] | None = None,
        rewritten: bool = False,
    ) -> None:
        """Begins to write `state` (a tree of arrays on the host, [run, ...], which nobody changes any more), `notes` in
        plain JSON, and the metrics of the steps since the last save, or of all steps where they were `rewritten`.
        `loss` decides which checkpoint is best. Waits for the save before."""
        self.wait()
        if rewritten:
            self._curves = []
        about = {"origin": dict(self._origin()), "notes": dict(notes or {})}
        self._writing = self._writer.submit(self._write, step, state, [*curves], loss, about)

    def wait(self) -> None:
        """Waits until all is written. Raises as `check`."""
        if self._writing is not None:
            self._writing.exception()
        self.check()

    def _write(self, step: int, state: Any, curves: list[Curves], loss: float, about: dict[str, Any]) -> None:
        partial = self.folder / f".{step}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            segments = [*self._curves, self._write_curves(step, curves)] if curves else [*self._curves]
            leaves = jax.tree.leaves(state)
            shapes = [[str(leaf.dtype), list(np.shape(leaf))] for leaf in leaves]
            _reserve(partial / "room", sum(leaf.nbytes for leaf in leaves))
            with _raises_os_errors(self.folder):
                _orbax().save(partial / "state", args=_arguments().StandardSave(_named(leaves)))
            files = {str(p.relative_to(partial)): _entry(p) for p in sorted(partial.rglob("*")) if p.is_file()}
            manifest = {
                "step": step, "loss": loss if math.isfinite(loss) else None, **about,
                "digests": digests(state), "leaves": shapes, "files": files, "curves": segments,
            }  # fmt: skip
            text = (json.dumps(manifest, indent=1) + "\n").encode()
            write_atomically(partial / "manifest.json", text)
            write_atomically(
                partial / "manifest.sha256", f"{hashlib.sha256(text).hexdigest()}  manifest.json\n".encode()
            )
            shutil.rmtree(self.folder / str(step), ignore_errors=True)
            os.rename(partial, self.folder / str(step))
            sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._curves = segments
        self._prune()

    def _write_curves(self, step: int, curves: list[Curves]) -> dict[str, Any]:
        joined = {name: np.concatenate([part[name] for part in curves]) for name in curves[0]}
        buffer = io.BytesIO()
        np.savez(buffer, **joined)
        # Named by what it holds, so that no file of another checkpoint is ever written over.
        name = f"{step - len(joined['loss'])}-{step}-{hashlib.sha256(buffer.getvalue()).hexdigest()[:8]}.npz"
        path = self.folder / "curves" / name
        write_atomically(path, buffer.getvalue())
        return {"file": path.name} | _entry(path)

    def _prune(self) -> None:
        """Removes all checkpoints but the newest and the best."""
        losses = {step: self._loss(step) for step in self.steps()}
        best = min(losses, key=lambda step: (losses[step], -step), default=None)
        for step in [*losses][self._keep :]:
            if step != best:
                shutil.rmtree(self.folder / str(step), ignore_errors=True)
        self._sweep()

    def _sweep(self) -> None:
        """Removes metrics that no checkpoint names."""
        named = set()
        for step in self.steps():
            with contextlib.suppress(Damaged):
                named |= {entry["file"] for entry in self._manifest(step)["curves"]}
        for path in [*(self.folder / "curves").glob("*.npz")]:
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _loss(self, step: int) -> float:
        try:
            loss = self._manifest(step).get("loss")
        except Damaged:
            return math.inf
        return math.inf if loss is None else loss

    def best(self) -> int | None:
        """The step of the checkpoint with the least loss, the newest such, or None if there is none."""
        losses = {step: self._loss(step) for step in self.steps()}
        return min(losses, key=lambda step: (losses[step], -step), default=None)

    # Restoring

    def restore(
        self, like: Any, *, at_most: int | None = None, accept_differences: bool = False, keep_later: bool = False
    ) -> Restored | None:
        """The newest intact checkpoint (of at most so many steps), with the structure of `like` (a tree, or a function
        of the notes that gives one), or None. Damaged ones are passed over with a note, and removed with all that is
        newer than what is restored unless `keep_later`.

        Raises `ReproError` naming the differences to the job that wrote it, unless they are accepted.
        """
        damaged: list[str] = []
        found = None
        for step in self.steps():
            if at_most is not None and step > at_most:
                continue
            try:
                manifest = self._manifest(step)
                self._verify(step, manifest)
                found = self._load(step, manifest, like, accept_differences)
                break
            except Damaged as error:
                damaged.append(f"the checkpoint of step {step} is damaged ({error})")
        if damaged:
            onwards = "starting at step 0" if found is None else f"going on from step {found.step}"
            self._on_note(f"{'; '.join(damaged)}; {onwards}")
        if not keep_later:
            self._curves = [] if found is None else self._manifest(found.step)["curves"]
            self._remove_after(0 if found is None else found.step)
        return found

    def _remove_after(self, last: int) -> None:
        """What is newer than a step, and what a killed process left half written."""
        if not self.folder.is_dir():
            return
        for path in [*self.folder.iterdir()]:
            if path.name.startswith(".") or path.name.isdigit() and int(path.name) > last:
                shutil.rmtree(path, ignore_errors=True)
        for path in [*(self.folder / "curves").glob("*.partial")]:
            path.unlink(missing_ok=True)
        self._sweep()

    def _manifest(self, step: int) -> dict[str, Any]:
        place = self.folder / str(step)
        try:
            text, own = (place / "manifest.json").read_bytes(), (place / "manifest.sha256").read_bytes()
        except FileNotFoundError as error:
            raise Damaged(f"{Path(error.filename).name} is missing") from error
        if own != f"{hashlib.sha256(text).hexdigest()}  manifest.json\n".encode():
            raise Damaged("manifest.json and manifest.sha256 do not agree")
        manifest = json.loads(text)
        if manifest["step"] != step:
            raise Damaged(f"it is the one of step {manifest['step']}")
        return manifest

    def _verify(self, step: int, manifest: dict[str, Any]) -> None:
        """Compares every file with its hash. Raises `Damaged` at the first that is another."""
        place = self.folder / str(step)
        named = [(place / name, entry) for name, entry in manifest["files"].items()]
        named += [(self.folder / "curves" / entry["file"], entry) for entry in manifest["curves"]]
        for path, entry in named:
            name = path.relative_to(self.folder if path.parent.name == "curves" else place)
            if not path.is_file():
                raise Damaged(f"{name} is missing")
            if (size := path.stat().st_size) != entry["bytes"]:
                raise Damaged(f"{name} has {size} bytes of {entry['bytes']}")
            if sha256(path) != entry["sha256"]:
                raise Damaged(f"the SHA-256 of {name} is not that of the manifest")

    def _load(self, step: int, manifest: dict[str, Any], like: Any, accept: bool) -> Restored:
        found = differences(manifest["origin"], self._origin())
        if found and not accept:
            raise ReproError(
                f"the checkpoint of step {step} in {self.folder} was written with {', '.join(found)}; resume where it "
                "was written, go on with --accept-differences, or remove that folder to start at step 0."
            )
        notes = manifest.get("notes", {})
        leaves, tree = jax.tree.flatten(like(notes) if callable(like) else like)
        wanted = [[str(leaf.dtype), list(np.shape(leaf))] for leaf in leaves]
        if wanted != manifest["leaves"]:
            raise ReproError(
                f"the checkpoint of step {step} in {self.folder} holds {_arrays(manifest['leaves'])}, and the state of "
                f"this job {_arrays(wanted)}; remove that folder to start at step 0."
            )
        empty = [np.zeros(np.shape(leaf), leaf.dtype) for leaf in leaves]
        arguments = _arguments().StandardRestore(_named(empty))
        try:
            read = _orbax().restore(self.folder / str(step) / "state", args=arguments)
        except Exception as error:  # whatever Orbax meets first: there is no common class
            raise Damaged(f"Orbax cannot read it: {type(error).__name__}") from error
        state = jax.tree.unflatten(tree, [np.asarray(read.get(f"{i:04d}", e)) for i, e in enumerate(empty)])
        if digests(state) != tuple(manifest["digests"]):
            raise Damaged("the state does not have the digests of the manifest")
        curves, own = self._read_curves(manifest), tuple(manifest["digests"])
        return Restored(step, state, curves, own, notes, tuple(found))

    def _read_curves(self, manifest: dict[str, Any]) -> Curves:
        parts = []
        for entry in manifest["curves"]:
            with np.load(self.folder / "curves" / entry["file"]) as file:
                parts.append({name: file[name] for name in file.files})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def digests_of(self, step: int) -> tuple[str, ...] | None:
        """The digests of the state in the checkpoint of a step, if there is one and its manifest can be read."""
        try:
            return tuple(self._manifest(step)["digests"])
        except Damaged:
            return None

    def recorded(self) -> Curves:
        """The metrics in the newest intact checkpoint, whatever wrote it; empty without one."""
        for step in self.steps():
            with contextlib.suppress(Damaged):
                manifest = self._manifest(step)
                self._verify(step, manifest)
                return self._read_curves(manifest)
        return {}

    # The end

    def close(self) -> None:
        """Waits for what is being written. Raises as `check`."""
        self._writer.shutdown(wait=True)
        self.wait()

    def remove(self) -> None:
        """Deletes all checkpoints of this job."""
        with contextlib.suppress(OSError):
            self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _named(leaves: Sequence[Any]) -> dict[str, Any]:
    """By number. Orbax does not keep arrays without values."""
    return {f"{i:04d}": leaf for i, leaf in enumerate(leaves) if np.size(leaf)}


def _arrays(leaves: Sequence[Any]) -> str:
    return f"{len(leaves)} arrays of {sum(math.prod(shape) for _, shape in leaves)} values"


def _reserve(path: Path, size: int) -> None:
    """Raises OSError if there is no room for so many bytes. TensorStore would say so too, but its threads then speak to
    an event loop that Orbax has closed, which fills the screen."""
    if hasattr(os, "posix_fallocate"):  # not everywhere
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 2**16))
        path.unlink()


def _arguments() -> Any:
    import orbax.checkpoint as ocp  # slow to import, and not every run saves

    return ocp.args


def _orbax() -> Any:
    for name in ("absl", "asyncio"):  # Orbax raises what it logs, and would add a traceback for each of its tasks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


@contextlib.contextmanager
def _raises_os_errors(folder: Path) -> Iterator[None]:
    """TensorStore raises ValueError for a full disk, with the system's number in its text."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = re.search(r"os_error_code='(\d+)'", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
