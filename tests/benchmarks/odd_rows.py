"""Rows that go wrong, each in its way, and processes in place of a worker that know them."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.methods import nothing
from benchmarks.rows import ROWS, Row
from benchmarks.runner import serve
from benchmarks.workloads import TrainingStep


@contextmanager
def raises(_step: TrainingStep, _config: Any) -> Iterator[None]:
    raise ValueError("no such thing")
    yield


@contextmanager
def hangs(_step: TrainingStep, _config: Any) -> Iterator[None]:
    time.sleep(600)
    yield


@contextmanager
def dies(_step: TrainingStep, _config: Any) -> Iterator[None]:
    sys.stderr.write("the last words\n")
    os._exit(9)
    yield


ODD_ROWS = (Row("raises", raises), Row("hangs", hangs), Row("dies", dies), Row("goes on", nothing))


def serve_odd(requests: Connection, output: Path, device: str) -> None:
    """Serve all rows, these among them."""
    serve(requests, output, device, (*ROWS, *ODD_ROWS))


def hang_in_here() -> None:
    time.sleep(600)


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
            if kind == "hang":
                hang_in_here()
            if kind == "die":
                os.write(2, b"the last words\n")
                os._exit(9)
            requests.send({"pid": os.getpid(), "ends": kind == "bad"})
