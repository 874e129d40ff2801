"""SIGINT and SIGTERM as a request to stop: training finishes its chunk, saves itself and says how to go on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class Interrupted(KeyboardInterrupt):
    """A command was interrupted; the message is one sentence, `code` the exit code that a shell expects."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.code = 128 + number


class Signals:
    """While entered, a first SIGINT or SIGTERM raises `Interrupted`, or inside `patient()` is only noted in `received`.
    A second one ends the process at once, also where Python waits for a device. At the end the handlers before return.

    Off the main thread, and before it is entered, nothing is installed and nothing is ever received.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._patient = False
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.received is not None

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """A part that asks by itself, at moments of its choice, whether to stop."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._before = {number: signal.signal(number, self._handle) for number in NUMBERS}
        # A handler in Python waits until Python gets to run, so a thread hears of each signal from the system itself.
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        self._told.close()  # ends the listener
        self._listener.join()
        self._heard.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if not self._patient:
            raise Interrupted(f"interrupted by {signal.Signals(number).name}", number)

    def _listen(self) -> None:
        count = 0
        while data := self._heard.recv(16):
            for number in data:
                if number not in NUMBERS:
                    continue
                count += 1
                if count > 1:
                    if sys.stdout.isatty():  # a progress bar has hidden it
                        os.write(1, _SHOW_CURSOR.encode())
                    os._exit(128 + number)
                if self._patient:
                    os.write(2, b"repro: finishing the chunk and saving; a second signal stops at once.\n")
