"""What ranks tell each other before they decide: nothing inside a step, everything between steps."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def from_all_ranks(value: Value) -> list[Value]:
    """Return every rank's ``value`` in rank order; alone: a list of one. Every rank must call it."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_one_rank(value: Value | None, rank: int = 0) -> Value:
    """Return what rank ``rank`` passes, on every rank; the others pass ``None``. Every rank must call it."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return value  # type: ignore[return-value]
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=rank)
    found: Value = values[0]
    return found
