"""A progress bar for the minutes in which host memory is page-locked."""

from __future__ import annotations

import logging
import time

from rich.console import Console

from .bytes_bar import BytesBar

logger = logging.getLogger(__name__)

_GIB = 2**30


class PinningBar(BytesBar):
    """A ``progress`` callback of the host pool: give it to one rank only. See `BytesBar`.

    One log line at the end, whether the bar is drawn or not.

    Args:
        console: by default stderr.
        shown: ``False``: nothing is drawn.
    """

    def __init__(self, console: Console | None = None, shown: bool = True) -> None:
        super().__init__("pinning host memory", console, shown)
        self._started: float | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far it is; the two equal: the end."""
        if self._started is None:
            self._started = time.monotonic()
        super().__call__(done_bytes, total_bytes)
        if done_bytes >= total_bytes:
            seconds, self._started = time.monotonic() - self._started, None
            logger.info("%.1f GiB of host memory ready after %.1f s.", total_bytes / _GIB, seconds)
