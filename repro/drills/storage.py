"""Faults of storage and of the machine: kills, damaged checkpoints, a full disk. Each drill returns plain facts.

What must hold: a run that was killed, or whose newest checkpoint was damaged, or whose disk was full, ends with the
bits of a run to which nothing happened. The run is a small one on the CPU.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from repro.data import load_corpus
from repro.drills.small_run import PRESET
from repro.errors import ReproError, Stopped
from repro.report.record import RunFolder
from repro.train import JobResult, Lane, TrainConfig, train

STOP = 20
"""Steps after which the jobs below are stopped; they save themselves every ten."""
CHUNKS = 10
"""Of a job that is killed."""
BOUNDARIES = 2 * CHUNKS
"""Of a run that is killed, in two jobs."""


def kill(n: int, folder: Path, seed: int = 0, on_kill: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """`kill -9` to `n` processes that train, at random moments, each run continued until it ends and then compared with
    one that nobody killed: metrics, scalars, verdict, and the digests of parameters and optimizer state. Writes into
    `folder`, which must be empty. A continued run may be killed again, two times of three.

    A moment is a number of chunk boundaries that are saved, uniform over those that are left, and a delay of up to the
    time that one takes.
    """
    folder, random = _empty(folder), np.random.default_rng(seed)
    reference, started = folder / "whole", time.monotonic()
    gap = _timed(reference, folder)
    moments, kills, runs, locked, differing = collections.Counter(), 0, 0, "", []
    while kills < n:
        path = folder / f"run-{runs}"
        moment: float | None = random.uniform(0, BOUNDARIES + 1)
        while True:
            process = _start(path, folder)
            if moment is not None and _reached(process, path, int(moment)):
                locked = locked or _second(path)
                if _killed(process, moment % 1 * gap):
                    kills += 1
                    moments[_moment(path)] += 1
                    on_kill(kills)
            if process.wait() > 0:
                raise ReproError(_last_words(process, path))
            if (path / "verdict.json").is_file():
                break
            again = kills < n and random.random() < 2 / 3
            moment = random.uniform(_saved(path) + 1, BOUNDARIES + 1) if again else None
        differing += [f"run {runs}: {name}" for name in different(reference, path)]
        shutil.rmtree(path)
        runs += 1
    return {
        "fault": "kill -9", "kills": kills, "runs": runs, "differing": differing, "equal": not differing,
        "moments": dict(moments), "second_process": locked, "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def different(a: Path, b: Path) -> list[str]:
    """What is not the same, to the bit, in two finished run folders that kept their checkpoints."""
    found = [name for name in ("metrics.parquet", "runs.parquet") if (a / name).read_bytes() != (b / name).read_bytes()]
    if _verdict(a) != _verdict(b):
        found.append("verdict.json")
    if _last_states(a) != _last_states(b):
        found.append("parameters or optimizer state")
    return found


def truncated_checkpoint(folder: Path, seed: int = 0, alone: bool = True) -> dict[str, Any]:
    """The largest file of the newest checkpoint is cut in half. `alone`: see also what Orbax makes of it by itself."""

    def damage(path: Path, random: np.random.Generator) -> str:
        size = path.stat().st_size
        os.truncate(path, size // 2)
        return f"cut from {size} to {size // 2} bytes"

    return _damaged("truncated checkpoint", damage, folder, seed, alone)


def flipped_byte(folder: Path, seed: int = 0, alone: bool = True) -> dict[str, Any]:
    """One random bit of the largest file of the newest checkpoint, which holds the arrays, is flipped. `alone`: see
    also what Orbax makes of it by itself."""

    def damage(path: Path, random: np.random.Generator) -> str:
        data = bytearray(path.read_bytes())
        place, bit = int(random.integers(len(data))), int(random.integers(8))
        data[place] ^= 1 << bit
        path.write_bytes(data)
        return f"bit {bit} of byte {place} flipped"

    return _damaged("flipped bit in a checkpoint", damage, folder, seed, alone)


def missing_file(folder: Path, seed: int = 0, alone: bool = True) -> dict[str, Any]:
    """The largest file of the newest checkpoint is gone. `alone`: see also what Orbax makes of it by itself."""

    def damage(path: Path, random: np.random.Generator) -> str:
        path.unlink()
        return "removed"

    return _damaged("missing file in a checkpoint", damage, folder, seed, alone)


def full_disk(folder: Path, seed: int = 0, how: str = "limit") -> dict[str, Any]:
    """The disk is full from the second checkpoint on. `how`: "limit" (no file may grow beyond 2 kB, RLIMIT_FSIZE) or
    "device" (the metrics of that checkpoint go to /dev/full)."""
    if how not in ("limit", "device"):
        raise ReproError(f"a disk is filled by limit or device, not by {how!r}.")
    folder = _empty(folder)
    whole = _train(folder / "other", seed)
    saves = folder / "saves"
    with contextlib.ExitStack() as stack:
        full = _limited if how == "limit" else lambda: _device(saves, folder / "other")

        def on_chunk(progress: Any) -> None:
            if progress.step == STOP:
                while not (saves / str(STOP - 10)).is_dir():  # the one before is still being written
                    time.sleep(0.01)
                stack.enter_context(full())

        try:
            _train(saves, seed, on_chunk=on_chunk)
            message = ""
        except OSError as error:
            message = error.strerror or str(error)
    seen: list[int] = []
    again = _train(saves, seed, on_restore=lambda restored: seen.append(restored.step))
    return {
        "fault": f"full disk ({how})", "done": f"no room from step {STOP} on", "detected": bool(message),
        "by": "the writing thread, raised at the next chunk boundary", "said": message,
        "went_on_from": seen[0] if seen else 0, "equal": _equal(whole, again),
    }  # fmt: skip


# A run that is killed


def _empty(folder: Path) -> Path:
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ReproError(f"{folder} is not empty; a drill needs a folder of its own.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _start(path: Path, folder: Path) -> subprocess.Popen:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }  # fmt: skip
    # Two devices, whatever there is, so that lanes are laid over them.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} | cache
    with open(f"{path}.log", "ab") as log:
        command = [sys.executable, "-m", "repro.drills.small_run", str(path)]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _timed(path: Path, folder: Path) -> float:
    """Seconds from one saved chunk boundary to the next in a whole run, which is left in `path`."""
    process, first = _start(path, folder), 0.0
    while process.poll() is None:
        if not first and _saved(path):
            first = time.monotonic()
        time.sleep(0.005)
    if process.returncode:
        raise ReproError(_last_words(process, path))
    return (time.monotonic() - first) / BOUNDARIES


def _last_words(process: subprocess.Popen, path: Path) -> str:
    said = Path(f"{path}.log").read_text(errors="replace").strip().splitlines()
    return f"{path.name} ended with code {process.returncode}: {said[-1] if said else 'it said nothing'}"


def _reached(process: subprocess.Popen, path: Path, boundaries: int) -> bool:
    """Waits until a process has saved so many chunk boundaries; False if it ended before."""
    while process.poll() is None:
        if _saved(path) >= boundaries and (path / "run.json").is_file():
            return True
        time.sleep(0.002)
    return False


def _killed(process: subprocess.Popen, seconds: float) -> bool:
    """Whether a process was still there to be killed after so many seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return False
    process.kill()
    return process.wait() == -signal.SIGKILL


def _saved(path: Path) -> int:
    """Chunk boundaries of a run that are saved, those of finished jobs among them."""
    done = {p.name.removesuffix(".runs.parquet") for p in (path / "jobs").glob("*.runs.parquet")}
    steps = [int(p.name) for p in (path / "checkpoints").glob("*/*") if p.name.isdigit() and p.parent.name not in done]
    return len(done) * CHUNKS + max(steps, default=0) // (PRESET.train.steps // CHUNKS)


def _moment(path: Path) -> str:
    """What a run was doing when it was killed, as its folder tells."""
    if (path / "metrics.parquet").is_file():
        return "after training"
    if any(p.is_dir() and p.name.startswith(".") for p in (path / "checkpoints").glob("*/*")):
        return "while a checkpoint was written"
    if any(p.name.isdigit() for p in (path / "checkpoints").glob("*/*")):
        return "after a checkpoint"
    return "before the first checkpoint"


def _second(path: Path) -> str:
    """What a second process is told that wants the folder of a running one."""
    try:
        with RunFolder(path).locked():
            return ""
    except ReproError as error:
        return str(error).replace(str(path), "DIR")


def _verdict(path: Path) -> dict[str, Any]:
    verdict = json.loads((path / "verdict.json").read_text())
    del verdict["files"]["run.json"]  # it holds the seconds that the run took
    return verdict


def _last_states(path: Path) -> dict[str, Any]:
    found = {}
    for job in sorted((path / "checkpoints").iterdir()):
        last = max((p for p in job.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
        found[job.name, last.name] = json.loads((last / "manifest.json").read_text())["digests"]
    return found


# A job in this process, stopped and continued


def _train(saves: Path, seed: int, **options: Any) -> JobResult:
    config: TrainConfig = dataclasses.replace(PRESET.train, steps=30)
    lanes = [Lane(config.numbers(), seed), Lane(config.numbers(), seed + 1)]
    return train(config, lanes, load_corpus(PRESET.data), checkpoints=saves, checkpoint_seconds=0.0, **options)


def _damaged(
    fault: str, damage: Callable[[Path, np.random.Generator], str], folder: Path, seed: int, alone: bool
) -> dict[str, Any]:
    folder = _empty(folder)
    whole = _train(folder / "other", seed)
    saves, steps = folder / "saves", iter(range(0, 1000, 10))
    with contextlib.suppress(Stopped):
        _train(saves, seed, stop=lambda: next(steps) >= STOP)
    path = max((p for p in (saves / str(STOP) / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    done = damage(path, np.random.default_rng(seed))
    orbax = {"orbax_alone": _orbax_alone(saves / str(STOP) / "state")} if alone else {}
    said: list[str] = []
    seen: list[int] = []
    options = {"on_note": said.append, "on_restore": lambda restored: seen.append(restored.step)}
    again = _train(saves, seed, **options)
    return {
        "fault": fault, "done": f"the largest file of the checkpoint of step {STOP} {done}", "detected": bool(said),
        "by": "the SHA-256 manifest" if said else "", **orbax, "said": " ".join(said),
        "went_on_from": seen[0] if seen else 0, "equal": _equal(whole, again),
    }  # fmt: skip


def _orbax_alone(path: Path) -> str:
    """What Orbax makes of a checkpoint without the manifest; in a process of its own, since its threads talk."""
    script = (
        "import sys, orbax.checkpoint as ocp\nocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(sys.argv[1])"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = subprocess.run([sys.executable, "-c", script, str(path)], env=environment, capture_output=True)
    return "refuses it" if found.returncode else "restores it"


def _equal(a: JobResult, b: JobResult) -> bool:
    trees = [(x.curves, x.final, x.params, x.buffers) for x in (a, b)]
    pairs = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def _device(saves: Path, other: Path) -> Iterator[None]:
    """What will be written at the next save is known from another run: its name leads to /dev/full."""
    names = [p.name for p in (other / "curves").glob(f"{STOP - 10}-{STOP}-*.npz")]
    links = [saves / "curves" / f".{name}.partial" for name in names]
    for link in links:
        link.symlink_to("/dev/full")
    try:
        yield
    finally:
        for link in links:
            link.unlink(missing_ok=True)
