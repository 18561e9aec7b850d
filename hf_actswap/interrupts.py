"""Delays Ctrl-C while hooks and modes are being put on a model or removed.

Python raises `KeyboardInterrupt` between any two steps of a program. Between the registration of a hook and
the record of how to remove it, an interrupt would leave a hook that cannot be removed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a Ctrl-C to the end of this block; may be nested, and be used as a decorator.

    Only the main thread receives signals, so in other threads this does nothing. Do not use it around code
    that takes long (a search, page-locking memory, a training step).
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
