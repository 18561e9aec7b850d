"""A progress bar for the minutes in which host memory is page-locked."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

logger = logging.getLogger(__name__)

_GIB = 2**30


class PinningBar:
    """A ``progress`` callback of the host pool: give it to one rank only.

    On a terminal a bar on stderr, which goes when all is done; elsewhere nothing. One log line at the end in
    either case.

    Args:
        console: by default stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._started: float | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far it is; the two equal: the end."""
        if self._started is None:
            self._started = time.monotonic()
        if self._console.is_terminal:
            self._show(done_bytes, total_bytes)
        if done_bytes >= total_bytes:
            self._end(total_bytes, time.monotonic() - self._started)

    def _show(self, done_bytes: int, total_bytes: int) -> None:
        if self._progress is None:
            # Refreshed by each slab: a thread that redraws would fight with the trainer's own bar.
            self._progress = Progress(
                TextColumn("pinning host memory"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._task = self._progress.add_task("", total=total_bytes)
            self._progress.start()
        self._progress.update(self._task, completed=done_bytes, total=total_bytes, refresh=True)

    def _end(self, total_bytes: int, seconds: float) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._started = None
        logger.info("%.1f GiB of host memory ready after %.1f s.", total_bytes / _GIB, seconds)
