"""The tensor-parallel group: passed, or taken from the enclosing context.

The context variable is the only state of this package that is not an argument. It is not seen on the threads
on which autograd runs a device's backward: whatever communicates in backward holds its group from forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist

from .collectives import gathered, own_part

_ENCLOSING: ContextVar[dist.ProcessGroup | None] = ContextVar("tensor_parallel_group", default=None)


@contextmanager
def tensor_parallel_group(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Within the block, mappings and parallel layers that are given no group use this one."""
    token = _ENCLOSING.set(group)
    try:
        yield group
    finally:
        _ENCLOSING.reset(token)


def enclosing_group() -> dist.ProcessGroup | None:
    """Return the group of the innermost `tensor_parallel_group` block, or ``None`` outside of any."""
    return _ENCLOSING.get()


def group_or_enclosing(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``group``, or the enclosing one.

    Raises:
        RuntimeError: neither is there. A silent group of one would train replicas that drift apart.
    """
    found = group if group is not None else enclosing_group()
    if found is None:
        raise RuntimeError(
            "no tensor-parallel group: pass process_group, or call inside "
            "`with tensor_parallel_group(group):`"
        )
    return found


class Replicas:
    """The ranks of a group, which hold a tensor alike: what the engine needs to keep a slice of it.

    Args:
        group: tensor-parallel group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = group.size()

    def own_slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice along dim 0, in a storage of its own; dim 0 divides by `size`."""
        return own_part(tensor, 0, self._group)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the slices of all ranks along dim 0. Every rank must call it."""
        return gathered(part, 0, self._group)


def enclosing_replicas() -> Replicas | None:
    """Return the ranks of the enclosing group, or ``None`` outside of any."""
    group = enclosing_group()
    return None if group is None else Replicas(group)
