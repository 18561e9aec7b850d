"""Rows that go wrong, each in its way; as a script, the worker of `benchmarks.gpu_day` that knows them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

if __name__ == "__main__":
    serve("cpu", (*ROWS, *ODD_ROWS))
