"""What a person sees while an experiment runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from repro.runner import Job, Watcher
from repro.train import Progress


def job_title(job: Job) -> str:
    """Size and arms of a job."""
    arms = list(dict.fromkeys(cell.arm for cell, _, _ in job.lanes))
    phase = job.lanes[0][0].phase
    return f"{job.lanes[0][0].size} {phase}: {', '.join(arms)}"


class ConsoleWatcher(Watcher):
    """Shows loss, largest logit, tokens per second and the time left in the current job."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Any = None
        self._task: Any = None
        self._said = 0.0
        self._started = 0.0

    def __enter__(self) -> ConsoleWatcher:
        if self.console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn(),
                console=self.console, transient=True,
            )  # fmt: skip
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def computing(self) -> None:
        self.console.print("computing; nothing is trained")

    def compiling(self, programs: int) -> None:
        self.console.print(f"compiling {programs} program{'s' if programs > 1 else ''}")

    def job(self, job: Job, number: int) -> None:
        self._started = self._said = time.monotonic()
        title = f"{number}. {job_title(job)} ({len(job.lanes)} runs)"
        if self._bar is None:
            self.console.print(title)
        else:
            self._task = self._bar.add_task(title, total=job.config.steps, text="")

    def note(self, line: str) -> None:
        self.console.print(f"   {line}", soft_wrap=True)

    def progress(self, progress: Progress) -> None:
        loss = float(np.median(progress.metrics["loss"][-1]))
        text = (
            f"loss {loss:.3f}, max logit {float(np.median(progress.metrics['max_logit'][-1])):.1f}, "
            f"{progress.tokens_per_second:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.step, text=text)
            return
        now = time.monotonic()
        if now - self._said >= 10 or progress.step == progress.steps:
            self._said = now
            left = (now - self._started) / progress.step * (progress.steps - progress.step)
            self.console.print(f"   step {progress.step}/{progress.steps}, {text}, {left:.0f} s left")

    def job_done(self, job: Job, resumed: bool) -> None:
        if self._bar is not None and self._task is not None and not resumed:
            self._bar.remove_task(self._task)
        if resumed:
            self.console.print(f"   {job_title(job)}: done before")
        elif self._bar is not None:
            self.console.print(f"{job_title(job)}: {len(job.lanes)} runs in {time.monotonic() - self._started:.0f} s")
