"""What a console shows while a program runs: progress bars for slow work, and log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn

from ..engine.stats import gib

logger = logging.getLogger(__name__)

STABLE = "stable"


def shows_bars(console: Console) -> bool:
    """Whether a bar is drawn: on a terminal, unless bars are switched off.

    They are switched off by ``disable_progress_bar()`` of transformers' logging, ``disable_progress_bars()``
    of huggingface_hub, or ``HF_HUB_DISABLE_PROGRESS_BARS=1``.
    """
    return console.is_terminal and not are_progress_bars_disabled()


class Bar:
    """A line on stderr on a terminal, which disappears at the end; elsewhere nothing is shown.

    It is drawn at each call, not by a thread, so it does not disturb the trainer's own bar.

    Args:
        console: ``None``: stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None

    def close(self) -> None:
        """Remove the line, also before the work is done. Safe to call again."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()

    def _draw(
        self, columns: Sequence[ProgressColumn], what: str, done: int, total: int, left: int = 0
    ) -> None:
        if self._progress is None:
            console = self._console
            self._progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._progress.add_task(what, total=total, left=left)
            self._progress.start()
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=done, total=total, refresh=True, left=left)


class BytesBar(Bar):
    """A progress bar of bytes, called with (bytes done, bytes in total): give it to one rank only.

    Args:
        title: text before the bar.
        console: by default stderr.
        shown: ``False``: nothing is drawn (the Trainer's ``disable_tqdm``).
    """

    def __init__(self, title: str, console: Console | None = None, shown: bool = True) -> None:
        super().__init__(console)
        self._title, self._shown = title, shown

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show the progress; when the two are equal, the bar disappears."""
        if self._shown and shows_bars(self._console):
            columns = TextColumn(self._title), BarColumn(), DownloadColumn(binary_units=True)
            self._draw(columns, "", done_bytes, total_bytes)
        if done_bytes >= total_bytes:
            self.close()


class PinningBar(BytesBar):
    """A `BytesBar` while host memory is page-locked, for the host pool's ``progress``: for one rank only.

    At the end it writes a log line, whether the bar is drawn or not.

    Args:
        console: by default stderr.
        shown: ``False``: nothing is drawn.
    """

    def __init__(self, console: Console | None = None, shown: bool = True) -> None:
        super().__init__("pinning host memory", console, shown)
        self._started: float | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show the progress; when the two are equal, the bar disappears and a line is logged."""
        if self._started is None:
            self._started = time.monotonic()
        super().__call__(done_bytes, total_bytes)
        if done_bytes >= total_bytes:
            seconds, self._started = time.monotonic() - self._started, None
            logger.info("%.1f GiB of host memory ready after %.1f s.", gib(total_bytes), seconds)


class PlannerBar(Bar):
    """A ``progress`` callback of the planner, which measures and searches: give it to one rank only.

    Args:
        console: by default stderr.
        title: text before the phase.
    """

    def __init__(self, console: Console | None = None, title: str = "planner") -> None:
        super().__init__(console)
        self._title, self._phase, self._steps = title, "", 0

    def __call__(self, phase: str, steps_left: int) -> None:
        """Show the progress.

        Args:
            phase: the planner's phase; ``stable`` is the end.
            steps_left: the most steps that are left in the phase.
        """
        if phase == STABLE:
            self.close()
            return
        if not shows_bars(self._console):
            return
        if self._progress is None or phase != self._phase:
            self.close()
            self._phase, self._steps = phase, steps_left
        left = "{task.fields[left]} step(s) left at most"
        columns = TextColumn(f"{self._title}: {{task.description}}"), BarColumn(), TextColumn(left)
        done = max(self._steps - steps_left, 0)
        self._draw(columns, phase, done, max(self._steps, 1), left=steps_left)


@contextmanager
def console_logging(logger: logging.Logger) -> Iterator[None]:
    """Let INFO lines of ``logger`` reach the console where the program has not configured logging at all.

    A program that has (`logging.basicConfig`, a handler on ``hf_actswap``) decides for itself.
    """
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(levelname)s - %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
