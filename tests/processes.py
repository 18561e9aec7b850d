"""Waiting for processes that a test has started."""

from __future__ import annotations

from time import monotonic

from torch.multiprocessing.spawn import ProcessContext


def finish(context: ProcessContext, limit_s: float) -> None:
    """Wait for all processes; raise what one of them raised.

    Raises:
        TimeoutError: they take longer than the limit; they are killed.
    """
    end = monotonic() + limit_s
    while not context.join(timeout=1):
        if monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{len(context.processes)} processes did not finish in {limit_s} s")
