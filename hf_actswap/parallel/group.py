"""The tensor-parallel group: passed, or taken from the enclosing context.

The context variable is the only state of this package that is not an argument. The threads on which autograd
runs a device's backward do not see it: what communicates in backward must keep its group from forward.
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
    """Within the ``with`` block, mappings and parallel layers without a group of their own use ``group``."""
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
        RuntimeError: there is neither. A silent group of one would train replicas that drift apart.
    """
    found = group if group is not None else enclosing_group()
    if found is None:
        raise RuntimeError(
            "no tensor-parallel group: pass process_group, or call inside "
            "`with tensor_parallel_group(group):`"
        )
    return found


class Replicas:
    """The ranks of a group that hold a tensor alike; the engine uses it to keep a slice on each rank.

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
