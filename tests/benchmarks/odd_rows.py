"""Rows that go wrong, each in its way, and processes in place of a worker that know them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.measure import empty_result
from benchmarks.methods import nothing
from benchmarks.records import Result
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


def answer_number(requests: Connection, output: Path, _device: str) -> None:
    """Answer with the process's number, which the request ``bad`` is the last to get."""
    os.setpgid(0, 0)
    output.touch()
    requests.send("ready")
    with suppress(EOFError):
        while True:
            is_last = requests.recv() == "bad"
            requests.send((os.getpid(), is_last))


def measured(request: Any, **values: Any) -> Result:
    """Return a request's row with these values, without measuring it."""
    name, workload = request.keywords["name"], request.keywords["workload"]
    row = next((row for row in ROWS if row.name == name), Row(name, nothing))
    return replace(empty_result(row, workload), **values)
