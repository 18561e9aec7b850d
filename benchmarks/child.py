"""Starts a process that reports line by line while it runs, and ends it whatever it does.

This module does not import PyTorch, so that reporting from inside pytest costs nothing.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

REPORTS_VARIABLE = "HF_ACTSWAP_REPORTS"
"""Environment variable with the file descriptor of the pipe to which a child's process reports."""
_TOLD_BYTES = 20_000
"""The most bytes that `Child.stop` returns of a process's output: the end of it."""
_SECONDS_TO_END = 3.0
"""Time that a process gets to end by itself or to write the stacks of its threads."""


class ReportingProcess:
    """A process that reports line by line to a pipe, whose number it reads from ``REPORTS_VARIABLE``.

    Args:
        command: program and arguments of the process.
        stderr: file to which its standard output and error are appended.
        environment: environment variables, added to those of this process.
        folder: its working folder; ``None``: that of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        stderr: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        self._stderr = stderr
        stderr.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        with stderr.open("ab") as output:
            self._told_from = output.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, **environment, REPORTS_VARIABLE: str(writing)},
                text=True,
                pass_fds=(writing,),
                process_group=0,  # not a session of its own, so that it ends with the session of this process
            )
        os.close(writing)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._pass_on, args=(reading,), daemon=True).start()

    def _pass_on(self, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8") as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, line: str) -> None:
        """Write a line to its standard input; if the process is gone, only `next_line` shows it."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def next_line(self, limit_s: float | None) -> str | None:
        """Return the next line that the process reports, or ``None`` if it has ended.

        Raises:
            queue.Empty: no line came within ``limit_s`` seconds.
        """
        return self._lines.get(timeout=limit_s)

    def stop(self, says: bool = False) -> tuple[int | None, str]:
        """End the process and its children; return its exit status and the end of its output.

        A process that hangs in the driver and cannot be killed is left behind.

        Args:
            says: whether to let it first write the stacks of its threads.
        """
        process = self._process
        if says and process.poll() is None:
            os.killpg(process.pid, signal.SIGUSR1)
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()  # an idle worker ends then
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10 * _SECONDS_TO_END)
        with self._stderr.open("rb") as written:
            written.seek(self._told_from)
            told = written.read()[-_TOLD_BYTES:].decode("utf-8", "replace")
        return process.returncode, told


def reports_to() -> Callable[[str], None]:
    """Return the function by which the process of a `ReportingProcess` reports a line."""
    stream = os.fdopen(int(os.environ[REPORTS_VARIABLE]), "w", encoding="utf-8")

    def report(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    return report
