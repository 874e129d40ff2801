"""Pages that follow runs while they go: built again when a file of a run changes, and served to this machine only."""

from __future__ import annotations

import functools
import http.server
import os
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from repro.errors import ReproError
from repro.report.record import write_atomically
from repro.report.site.build import build_site
from repro.report.site.load import run_folders

WATCHED = ("run.json", "verdict.json", "jobs/*.parquet")


def open_browser(address: str) -> None:
    """Open a page in the user's browser, where there is a screen to show one on."""
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args) -> None:
        """Nothing: the terminal shows what is built."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()


def state(paths: Sequence[Path]) -> str:
    """What the watched files of some runs look like now."""
    files = [file for folder in run_folders(paths) for pattern in WATCHED for file in sorted(folder.glob(pattern))]
    seen = []
    for file in files:
        try:
            seen.append(f"{file}:{file.stat().st_mtime_ns}")
        except FileNotFoundError:  # a finished run removes its jobs
            continue
    return "\n".join(seen)


def serve(
    paths: Sequence[Path],
    out: Path | None,
    port: int,
    say: Callable[[str], None],
    *,
    ready: Callable[[str], object] = lambda address: None,
    every: float = 3.0,
    stop: threading.Event | None = None,
) -> None:
    """Serve the pages on localhost until interrupted, or until `stop` is set.

    Args:
        paths: run folders, or folders of them; runs may still be going.
        out: where the pages are written; a temporary folder without one.
        port: 0 for any free one.
        say: told the address, and why a build failed; the pages then stay as they were.
        ready: called with the address once it answers.
        every: seconds between two looks at the runs.

    ReproError if the first build fails or the port cannot be had.
    """
    stop = stop or threading.Event()
    with tempfile.TemporaryDirectory(prefix="repro-pages-") as scratch:
        folder = out or Path(scratch) / "site"
        before = state(paths)
        _build(paths, folder, 0)
        handler = functools.partial(_Quiet, directory=str(folder))
        try:
            server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        except OSError as error:
            raise ReproError(f"port {port} cannot be opened ({error.strerror}); choose another --port.") from error
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/index.html"
        say(f"{address} (interrupt to stop)")
        ready(address)
        try:
            built = 0
            while not stop.wait(every):
                now = state(paths)
                if now == before:
                    continue
                before, built = now, built + 1
                try:
                    _build(paths, folder, built)
                except (ReproError, OSError) as error:  # a file may be half way between two states
                    say(f"not built: {error}")
        except KeyboardInterrupt:
            pass
        finally:
            server.shutdown()
            server.server_close()


def _build(paths: Sequence[Path], folder: Path, number: int) -> None:
    build_site(paths, folder, unfinished=True, live=True)
    write_atomically(folder / "version.txt", f"{number}\n".encode())
