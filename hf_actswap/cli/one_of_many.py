"""One process that takes itself for a rank of several: what a rank holds is known without the others.

PyTorch's fake process group answers every collective at once and moves nothing. On fake tensors there is
nothing to move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..parallel import tensor_parallel_group


class _AllSayTheSame(Store):
    """A store in which every rank has written what this one wrote: its keys end in the number of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[_without_rank(key)] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self._values[_without_rank(key)]

    def add(self, _key: str, amount: int) -> int:
        return amount

    def wait(self, _keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        """All have come."""

    def check(self, _keys: Sequence[str]) -> bool:
        return True


@contextmanager
def rank_0_of(size: int) -> Iterator[dist.ProcessGroup]:
    """Be rank 0 of a tensor-parallel group of ``size`` within the block.

    Raises:
        RuntimeError: there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group exists already: this command pretends to be one of several")
    store = _AllSayTheSame()  # kept here: PyTorch holds its C++ part only
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None  # just made
        with tensor_parallel_group(group):
            yield group
    finally:
        dist.destroy_process_group()


def _without_rank(key: str) -> str:
    return key.rpartition("/")[0]
