"""Where log lines go: the console of rank 0, and a file per process in the reference's format."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

logger = logging.getLogger(__name__)

_WORKER_FORMAT = "-%(levelname)s - %(message)s"
"""As in the log excerpts of the MindFormers documents, so that their ``grep`` commands print their lines."""


@contextmanager
def worker_log(path: str, append: bool = False) -> Iterator[logging.Logger]:
    """Write to a fresh file at ``path``, or behind what it holds; nothing else sees the lines.

    They are written at the end of the block. A file that cannot be written is a warning, and no more.
    """
    text = StringIO()
    worker = logging.Logger(f"hf_actswap.worker.{os.path.basename(path)}", logging.INFO)
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter(_WORKER_FORMAT))
    worker.addHandler(handler)
    yield worker
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a" if append else "w", encoding="utf-8") as file:
            file.write(text.getvalue())
    except OSError as error:
        logger.warning("%s cannot be written (%s). The training goes on.", path, error.strerror)


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
