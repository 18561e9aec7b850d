"""What differs for tests that run on the rehearsal's device (`hf_actswap.rehearsal`) and not on a GPU."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

from hf_actswap.rehearsal.launch import SETTINGS

Size = TypeVar("Size")

REHEARSED = SETTINGS in os.environ
"""Whether this process is in a rehearsal."""
COMPUTED = "level=2" in os.environ.get(SETTINGS, "").split(";")
"""Whether this process is in a rehearsal in which the CPU computes all values (``--arithmetic all``)."""


def skip_times() -> None:
    """Skip the running test in a rehearsal without a clock: it asks how long a GPU takes."""
    if REHEARSED and "clock=" not in os.environ[SETTINGS]:
        pytest.skip("a rehearsal without a clock knows no times of a GPU")


def skip_compiled() -> None:
    """Skip the running test in a rehearsal: it needs compiled kernels."""
    if REHEARSED:
        pytest.skip("a rehearsal runs no compiled kernels")


def skip_too_large() -> None:
    """Skip the running test in a rehearsal that computes all values: it needs steps that fill memory."""
    if COMPUTED:
        pytest.skip("too large to compute: rehearsed with --arithmetic small")


def on_gpu(size: Size, in_rehearsal: Size) -> Size:
    """Return the size for a GPU, or a smaller one for a rehearsal: it asks the same in less time."""
    return in_rehearsal if REHEARSED else size
