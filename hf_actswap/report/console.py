"""Lets log lines reach the console of a program that has not configured logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
