"""Ctrl-C waits while hooks and modes are being put on a model or taken off.

Python raises `KeyboardInterrupt` between any two steps of a program. Between the registration of a hook and
the note of how to take it off again, it would leave a hook that nobody can remove.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt that comes meanwhile act at the end; may be nested, and be used as a decorator.

    Only the main thread receives signals, so in others there is nothing to do. What waits for something (a
    search, page-locked memory, a training step) does not belong in here.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
