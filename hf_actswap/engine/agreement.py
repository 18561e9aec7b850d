"""Exchange of values between ranks before a decision. Used between steps only, never inside a step.

All ranks take part, or, within `agreeing_among`, the ranks of one group (those of a pipeline stage).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")

_GROUP: ContextVar[dist.ProcessGroup | None] = ContextVar("agreeing_ranks", default=None)


@contextmanager
def agreeing_among(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within the block the ranks of a group decide for themselves; ``None``: all ranks decide together."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def world_size() -> int:
    """Return how many ranks decide together: 1 without a process group."""
    return dist.get_world_size(_GROUP.get()) if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number among the ranks that decide together; 0 without a process group."""
    return dist.get_rank(_GROUP.get()) if dist.is_available() and dist.is_initialized() else 0


def from_all_ranks(value: Value) -> list[Value]:
    """Return every rank's ``value`` in rank order; one rank gets a list of one. Every rank must call it."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_GROUP.get())
    return values


def from_one_rank(value: Value | None, source: int = 0) -> Value:
    """Return what rank ``source`` passes; the others pass ``None``. Every rank must call it."""
    if world_size() == 1:
        return value  # type: ignore[return-value]
    values: list[Any] = [value]
    dist.broadcast_object_list(values, group_src=source, group=_GROUP.get())
    found: Value = values[0]
    return found
