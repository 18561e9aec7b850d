"""How long a sequence a method can train: the length is doubled until it no longer fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.frontier_minutes import Minutes
from benchmarks.measure import Reference, empty_result, measure_row
from benchmarks.records import Result
from benchmarks.rows import Row
from benchmarks.workloads import Workload, training_step

_WARMUP_STEPS = 3
"""``auto`` measures in the first steps what it does in the next."""


def longest_results(
    workload: Workload, rows: Sequence[Row], device: torch.device, limit_tokens: int, minutes: Minutes
) -> Iterator[Result]:
    """Search row by row.

    Args:
        workload: its length is the first that is tried.
        rows: what to search for; nothing is compared with eager.
        device: where.
        limit_tokens: the search ends there.
        minutes: the search ends when they are over.

    Yields:
        For each row the result at its longest length, and why the search ended there; where not even the
        first fits, the result of that.
    """
    for row in rows:
        yield _longest(workload, row, device, limit_tokens, minutes)


def _longest(
    workload: Workload, row: Row, device: torch.device, limit_tokens: int, minutes: Minutes
) -> Result:
    best: Result | None = None
    tokens = workload.tokens
    while best is None or tokens <= limit_tokens:
        if best is not None and minutes.remaining_s() <= 0:
            return _ended(best, f"{tokens} tokens were not tried: no time left")
        result = _at(replace(workload, tokens=tokens, warmup_steps=_WARMUP_STEPS, steps=1), row, device)
        if result.status != "measured":
            return _ended(best, f"{tokens} tokens: {result.status} ({result.reason})") if best else result
        best, tokens = result, 2 * tokens
    return _ended(best, f"more than {limit_tokens} tokens were not tried")


def _ended(best: Result, reason: str) -> Result:
    best.reason = reason
    return best


def _at(workload: Workload, row: Row, device: torch.device) -> Result:
    try:
        step = training_step(workload, device)
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        step = None
    if step is None:
        result = empty_result(row, workload)
        result.status, result.reason = "out of memory", reason
    else:
        result = measure_row(step, row, Reference(fault="lengths are searched, gradients are not compared"))
    result.longest = True
    return result
