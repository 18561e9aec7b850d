"""A process that reports line by line while it runs, and that can be ended whatever it does.

Without PyTorch, so that what reports from inside of pytest costs nothing.
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
"""Tells a `Child` the number of its pipe."""
_TOLD_BYTES = 20_000
"""Of what a process wrote before it ended."""
_SECONDS_TO_END = 3.0
"""Of a process, or for the stacks of one that hangs."""


class Child:
    """A process that reports line by line, to a pipe whose number the environment tells it.

    Args:
        command: what it runs.
        stderr: the file that all else that it writes is appended to.
        environment: of the process, beside ours.
        folder: where it runs; ``None``: where we do.
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
                process_group=0,  # not a session of its own, so that whoever ends ours ends it, too
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
        """Write a line to its standard input; where it is gone, what it does not answer says so."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def next_line(self, limit_s: float | None) -> str | None:
        """Return what it reports next, or ``None``: it has ended.

        Raises:
            queue.Empty: nothing came in time.
        """
        return self._lines.get(timeout=limit_s)

    def stop(self, says: bool = False) -> tuple[int | None, str]:
        """End it and what it started; return its exit status and the end of what it wrote.

        One that the driver does not let go is left behind.

        Args:
            says: let it write where its threads are, first.
        """
        process = self._process
        if says and process.poll() is None:
            os.killpg(process.pid, signal.SIGUSR1)
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()  # which a worker that is idle ends at
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
    """Return what a `Child` reports a line with."""
    stream = os.fdopen(int(os.environ[REPORTS_VARIABLE]), "w", encoding="utf-8")

    def report(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    return report
