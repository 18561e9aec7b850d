"""Rows that go wrong, each in its way, and processes in place of a worker that know them."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.methods import nothing
from benchmarks.rows import ROWS, Row
from benchmarks.runner import serve
from benchmarks.workloads import TrainingStep


def raises() -> None:
    raise ValueError("no such thing")


def hangs() -> None:
    time.sleep(600)


def dies() -> None:
    sys.stderr.write("the last words\n")
    os._exit(9)


def _row(goes_wrong: Callable[[], None]) -> Row:
    @contextmanager
    def setup(_step: TrainingStep, _config: Any) -> Iterator[None]:
        goes_wrong()
        yield

    return Row(goes_wrong.__name__, setup)


ODD_ROWS = (*map(_row, (raises, hangs, dies)), Row("goes on", nothing))


def serve_odd(requests: Connection, output: Path, device: str) -> None:
    """Serve all rows, these among them."""
    serve(requests, output, device, (*ROWS, *ODD_ROWS))


def answer_oddly(requests: Connection, output: Path, _device: str) -> None:
    """Answer with the process's number, or not at all."""
    os.setpgid(0, 0)
    file = output.open("a")
    os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    requests.send("ready")
    with suppress(EOFError):
        while True:
            kind = requests.recv()["kind"]
            {"hang": hangs, "die": dies}.get(kind, lambda: None)()
            requests.send({"pid": os.getpid(), "ends": kind == "bad"})
