"""Tickets: what stands in autograd's place for a saved tensor.

Autograd holds a ticket as long as its graph lives and asks it once per backward for the tensor. So a
ticket's life needs no counters of ours: a branch that never runs backward, an exception in mid-step, a
second forward before the first backward, ``retain_graph`` all end as they do without us.

A swapped storage has one `SwapGroup`, shared by the tickets of all tensors that view it::

    on device, copying out --release--> host only --fetch--> on device again --last reader--> host only
          |                                                                                     |
          +------------------- all tickets gone: the host block returns to the pool -----------+

The device copy that a backward fetched is dropped when the last ticket that backward asks has been read,
and never kept for a second backward, which fetches its own.

Any pack hook turns autograd's version check off, so every ticket compares versions itself: kept tensors
when they are read, swapped ones when they are released (until then the copy may be reading them).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .blocks import HostBuffer
from .host_pool import HostPool
from .stats import Counters
from .transfer import Copy, Transfer

_ALIGNMENT_BYTES = 64


class View(NamedTuple):
    """How a tensor looks at its storage (the offset in bytes)."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(
            tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()) * tensor.element_size()
        )

    def on(self, block: torch.Tensor, start_bytes: int) -> torch.Tensor:
        """Return this view of ``block``, whose first byte is byte ``start_bytes`` of the original storage.

        It shares the version counter of ``block``, so that a write through one view is seen by the readers
        of the others, as autograd has it. (An offset that the dtype does not divide cannot share it.)
        """
        size = self.dtype.itemsize
        offset = (self.offset_bytes - start_bytes) // size
        if block.dtype != self.dtype:
            first = int(block.storage_offset()) * block.element_size()
            usable = block.numel() * block.element_size() // size * size
            if first % size or not block.is_contiguous():
                empty = torch.empty(0, dtype=self.dtype, device=block.device)
                return empty.set_(block.untyped_storage(), offset, self.shape, self.stride)
            block = block.view(-1).view(torch.uint8)[:usable].view(self.dtype)
        return block.as_strided(self.shape, self.stride, offset)

    @property
    def range_bytes(self) -> tuple[int, int]:
        """First byte, and byte after the last, that the view can reach."""
        if 0 in self.shape:
            return self.offset_bytes, self.offset_bytes
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset_bytes, self.offset_bytes + (last + 1) * self.dtype.itemsize


class Ticket(Protocol):
    """What autograd holds in place of a saved tensor."""

    def restore(self) -> torch.Tensor:
        """Return the tensor that was saved."""


class StaleTensorError(RuntimeError):
    """A tensor needed for backward was changed in place after it was saved; autograd's own error, kept up."""

    def __init__(self, shape: torch.Size, saved: int, now: int) -> None:
        super().__init__(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"tensor of shape {list(shape)} is at version {now}; expected version {saved} instead."
        )


class KeepTicket:
    """The tensor itself, with the version it had."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def restore(self) -> torch.Tensor:
        """Return the tensor. Raises `StaleTensorError` if it changed."""
        tensor = self._tensor
        if tensor._version != self._version:
            raise StaleTensorError(tensor.shape, self._version, tensor._version)
        return tensor


class SwapGroup:
    """One swapped storage: its device copy, then its host copy, then a device copy again.

    Args:
        source: a detached tensor on the storage; dropped at release.
        range_bytes: the part of the storage that moves.
        host: where it goes.
        prefetch_ops: lead in backward.
    """

    def __init__(
        self,
        source: torch.Tensor,
        range_bytes: tuple[int, int],
        host: HostBuffer,
        pool: HostPool,
        transfer: Transfer,
        counters: Counters,
        prefetch_ops: int,
    ) -> None:
        self.range_bytes = range_bytes
        self.storage = StorageWeakRef(source.untyped_storage())  # keeps its address from being reused
        self.prefetch_ops = prefetch_ops
        self.last_use = 0
        self.version = source._version
        self._shape = source.shape
        self._stale_version: int | None = None
        self._source: torch.Tensor | None = source
        self._host, self._pool, self._transfer, self._counters = host, pool, transfer, counters
        self._fetched: torch.Tensor | None = None
        self._copy_in: Copy | None = None
        self._fetched_version = 0
        self._alive: set[int] = set()
        self._unread: set[int] = set()
        start, stop = range_bytes
        whole = torch.empty(0, dtype=torch.uint8, device=source.device)
        whole.set_(source.untyped_storage(), start, (stop - start,), (1,))
        self._copy_out = transfer.offload(whole, host)
        counters.offloads += 1
        counters.offloaded_bytes += host.size_bytes
        counters.live_swaps += 1

    def covers(self, view: View, version: int) -> bool:
        """Whether the copy holds what ``view`` shows, as it is at ``version``."""
        start, stop = view.range_bytes
        return version == self.version and self.range_bytes[0] <= start and stop <= self.range_bytes[1]

    def release(self) -> None:
        """Wait for the copy out, then let go of the device memory."""
        if self._source is None:
            return
        self._counters.stalled(self._copy_out.wait())
        if self._source._version != self.version:
            self._stale_version = self._source._version
        self._source = None

    def fetch(self, late: bool = False) -> None:
        """Start the copy back, unless the device still has the data."""
        if self._fetched is not None or self._source is not None or self._stale_version is not None:
            return
        self._fetched, self._copy_in = self._transfer.reload(self._host, self._copy_out)
        self._fetched_version = self._fetched._version
        self._unread = set(self._alive)
        self._counters.prefetches += 1
        self._counters.late_prefetches += late
        self._counters.prefetched_bytes += self._host.size_bytes

    def read(self, ticket: int, view: View) -> torch.Tensor:
        """Return ``view`` of the data on the device; the last reader's copy is dropped with it."""
        if self._source is not None and self._source._version != self.version:
            self._stale_version = self._source._version
        if self._stale_version is not None:
            raise StaleTensorError(self._shape, self.version, self._stale_version)
        if self._source is not None:
            return view.on(self._source, 0)
        self.fetch(late=True)
        self._settle()
        block = self._block()
        if block._version != self._fetched_version:
            raise StaleTensorError(view.shape, self._fetched_version, block._version)
        tensor = view.on(block, self.range_bytes[0])
        self._was_read(ticket)
        return tensor

    def join(self, ticket: int) -> None:
        """A ticket begins to share this group."""
        self._alive.add(ticket)

    def leave(self, ticket: int) -> None:
        """A ticket is gone."""
        self._alive.discard(ticket)
        self._was_read(ticket)

    def __del__(self) -> None:
        # Reached when autograd has dropped the last ticket; a half-built group has no copy yet.
        if hasattr(self, "_copy_out"):
            if self._copy_in is not None:
                self._copy_in.wait()
            if self._source is not None:
                self._copy_out.wait()
            self._transfer.host_reader_done(self._host)
            self._pool.give_back(self._host)
            self._counters.live_swaps -= 1

    def _settle(self) -> None:
        """Make compute wait for the copy back: before the data is read, and before the block is dropped."""
        if self._copy_in is not None:
            self._counters.stalled(self._copy_in.wait())
            self._copy_in = None

    def _block(self) -> torch.Tensor:
        if self._fetched is None:
            raise RuntimeError("a swapped tensor has neither a device copy nor a copy on its way")
        return self._fetched

    def _was_read(self, ticket: int) -> None:
        self._unread.discard(ticket)
        if self._fetched is not None and not self._unread:
            self._settle()
            self._fetched = None


class SwapTicket:
    """One saved tensor on a swapped storage."""

    __slots__ = ("__weakref__", "_view", "group")

    def __init__(self, group: SwapGroup, view: View) -> None:
        self.group, self._view = group, view
        group.join(id(self))

    def restore(self) -> torch.Tensor:
        """Return the tensor, from the device copy that was prefetched. Raises `StaleTensorError`."""
        return self.group.read(id(self), self._view)

    def __del__(self) -> None:
        self.group.leave(id(self))


def moved_range(view: View, storage_bytes: int) -> tuple[int, int]:
    """Return the bytes to move for a first view of a storage: all of it, unless the view shows under half.

    A slice is worth moving alone only where it is small beside its storage: what else is saved of the
    storage then has a copy of its own.
    """
    start, stop = view.range_bytes
    start -= start % _ALIGNMENT_BYTES
    return (start, stop) if 2 * (stop - start) < storage_bytes else (0, storage_bytes)
