"""Pages that follow a run while it goes."""

import shutil
import threading
import time
import urllib.request

import pytest

pytest.importorskip("plotly", reason="the pages need repro[pages]")

from repro.errors import ReproError
from repro.report.site.serve import serve
from tests.report.site_cases import make_run


def _get(address):
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()


def test_a_page_is_built_again_when_its_run_ends(tmp_path):
    run = make_run(tmp_path / "run")
    verdict = run / "verdict.json"
    shutil.move(verdict, tmp_path / "verdict.json")
    said, stop = [], threading.Event()
    options = {"every": 0.05, "stop": stop}
    thread = threading.Thread(target=serve, args=([run], tmp_path / "site", 0, said.append), kwargs=options)
    thread.start()
    try:
        until = time.monotonic() + 60
        while not said and time.monotonic() < until:
            time.sleep(0.05)
        root = said[0].split("index.html")[0]
        assert root.startswith("http://127.0.0.1:")
        assert "still going" in _get(f"{root}runs/run.html") and _get(f"{root}version.txt") == "0\n"
        shutil.move(tmp_path / "verdict.json", verdict)
        while _get(f"{root}version.txt") == "0\n" and time.monotonic() < until:
            time.sleep(0.05)
        page = _get(f"{root}runs/run.html")
        assert "still going" not in page and "made up" in page
    finally:
        stop.set()
        thread.join()


def test_a_port_that_is_taken_is_refused(tmp_path):
    import socket

    run = make_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ReproError, match="cannot be opened"):
            serve([run], tmp_path / "site", taken.getsockname()[1], print)
