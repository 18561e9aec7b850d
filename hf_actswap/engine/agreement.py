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
