"""SIGINT and SIGTERM: noted or raised, a second one at once, and everything as before afterwards."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from repro.signals import Interrupted, Signals

CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(("number", "code"), CODES)
def test_noted_inside_patience_and_raised_outside(number, code, capfd):
    before = handlers()
    with Signals() as signals:
        assert handlers() != before and not signals()
        with signals.patient():
            os.kill(os.getpid(), number)
            time.sleep(0.05)
            assert signals() and signals.received == number
        assert "finishing the chunk" in capfd.readouterr().err
    with pytest.raises(Interrupted, match=f"interrupted by {signal.Signals(number).name}") as raised, Signals():
        os.kill(os.getpid(), number)
        time.sleep(1)
    assert raised.value.code == code and isinstance(raised.value, KeyboardInterrupt)
    assert handlers() == before and "signals" not in [thread.name for thread in threading.enumerate()]


def test_nothing_is_installed_off_the_main_thread():
    before, seen = handlers(), []

    def work():
        with Signals() as signals:
            seen.append((handlers() == before, signals()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, False)]


TWICE = """
import hashlib, os, signal, sys, threading, time
from repro.signals import Signals
number = int(sys.argv[1])
with Signals() as signals, signals.patient():
    def again():
        for _ in range(2):
            os.kill(os.getpid(), number)
            time.sleep(0.2)
    threading.Thread(target=again, daemon=True).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as while a device is waited for, no handler in Python runs
"""


@pytest.mark.parametrize(("number", "code"), CODES)
def test_a_second_one_ends_the_process_even_where_python_is_waiting(number, code):
    found = subprocess.run([sys.executable, "-c", TWICE, str(int(number))], capture_output=True, text=True, timeout=60)
    assert found.returncode == code and "a second signal stops at once" in found.stderr
