"""Exchange of values between ranks before a decision; only between steps, never inside one."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def world_size() -> int:
    """Return how many ranks train together: 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def from_all_ranks(value: Value) -> list[Value]:
    """Return every rank's ``value`` in rank order; alone: a list of one. Every rank must call it."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def from_one_rank(value: Value | None, source: int = 0) -> Value:
    """Return what rank ``source`` passes; the others pass ``None``. Every rank must call it."""
    if world_size() == 1:
        return value  # type: ignore[return-value]
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=source)
    found: Value = values[0]
    return found
