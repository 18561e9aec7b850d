"""Runs the program that a command was given, as a shell would: its output, its signals, its exit code."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_OF_SIGNAL = 128


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the program to its end and return its exit code as a shell has it."""
    process = subprocess.Popen(command, env=environment)
    with _signals_passed_on(process):
        code = process.wait()
    return code if code >= 0 else _OF_SIGNAL - code


@contextmanager
def _signals_passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within the block signals go to the program, so that what is to be said at its end is still said."""

    def passed_on(number: int, _: Any) -> None:
        if process.poll() is None:
            process.send_signal(number)

    # A terminal sends Ctrl-C to the program too.
    own: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: passed_on, signal.SIGHUP: passed_on}
    before = {number: signal.signal(number, what) for number, what in own.items()}
    try:
        yield
    finally:
        for number, what in before.items():
            signal.signal(number, what)
