"""Tickets: the objects that autograd holds instead of saved tensors.

Autograd holds a ticket as long as its graph exists and reads the tensor from it once per backward. So
lifetimes need no counters: a branch that never runs backward, an exception in the middle of a step, a second
forward before the first backward, and ``retain_graph`` work as they do without tickets.

A swapped storage has one `SwapGroup`. It is itself the ticket of the tensor that was saved first, for most
storages are saved once; if the storage is saved again, that gets a `SwapTicket` on the group::

    on device, copying out --release--> host only --fetch--> on device again --last reader--> host only
          |                                                                                     |
          +------------------- all tickets gone: the host block returns to the pool -----------+

The device copy that a backward fetched is dropped when backward has read the last ticket that it needs,
and never kept for a second backward, which fetches its own.

Backward runs in reverse, so the ticket that was made first is read last and freed last.

Any pack hook turns autograd's version check off, so every ticket compares versions itself: kept tensors
when they are read, swapped ones when they are released (until then the copy may be reading them).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..plan.saved_bytes import moved_range
from .host_pool import HostBuffer, HostPool
from .moving_block import MovingBlock
from .stats import Counters
from .transfer import Transfer


class View(NamedTuple):
    """A tensor's dtype, shape, stride and byte offset on its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
        # Faster than the constructor of `NamedTuple`: one is made for each swapped tensor.
        return tuple.__new__(cls, (tensor.dtype, tensor.shape, tensor.stride(), offset_bytes))

    def on(self, block: torch.Tensor, start_bytes: int) -> torch.Tensor:
        """Return this view of ``block``, which begins at byte ``start_bytes`` of the original storage.

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
            if block.dtype != torch.uint8 or block.dim() != 1:
                block = block.view(-1).view(torch.uint8)
            block = (block if usable == block.numel() else block[:usable]).view(self.dtype)
        return block.as_strided(self.shape, self.stride, offset)

    @property
    def range_bytes(self) -> tuple[int, int]:
        """The first byte of the storage that the view can reach, and the byte after the last."""
        if 0 in self.shape:
            return self.offset_bytes, self.offset_bytes
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset_bytes, self.offset_bytes + (last + 1) * self.dtype.itemsize


class Place(NamedTuple):
    """Where a tensor is on its storage, and what moves with it if it is the first one saved of the storage.

    Args:
        range_bytes: first byte of the part of the storage that moves, and the byte after its last.
        whole: the view, if the tensor is contiguous and all of its storage, else ``None``: then it need not
            be viewed, nor the tensor that comes back.
    """

    view: View
    storage_bytes: int
    range_bytes: tuple[int, int]
    whole: View | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        view, storage_bytes = View.of(tensor), tensor.untyped_storage().nbytes()
        is_whole = tensor.nbytes == storage_bytes and tensor.is_contiguous()
        moved = moved_range(view, tensor.nbytes, storage_bytes)
        return cls(view, storage_bytes, moved, view if is_whole else None)


class StaleTensorError(RuntimeError):
    """A tensor needed for backward was changed in place after it was saved; worded as autograd's error.

    Args:
        saved, now: version of the tensor when it was saved, and its present one.
        what: the tensor's name, or where it is read again; empty: not known.
    """

    def __init__(self, shape: torch.Size, saved: int, now: int, what: str = "") -> None:
        super().__init__(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"tensor of shape {list(shape)} is at version {now}; expected version {saved} instead."
            + (f" It is read again in backward by what is recomputed ({what})." if what else "")
        )


Kept = tuple[torch.Tensor, int]
"""The ticket of a tensor that stays: the tensor and its version. A bare tuple, because there are many."""


class RestorableTicket(Protocol):
    """The ticket of a tensor that must be copied back or rebuilt."""

    def restore(self) -> torch.Tensor:
        """Return the tensor that was saved. Raises `StaleTensorError` if it changed."""


Ticket = Kept | RestorableTicket


def keep(tensor: torch.Tensor) -> Kept:
    return tensor, tensor._version


def restore(ticket: Ticket) -> torch.Tensor:
    """Return the tensor that was saved. Raises `StaleTensorError` if it changed."""
    if not isinstance(ticket, tuple):
        return ticket.restore()
    tensor, version = ticket
    if tensor._version != version:
        raise StaleTensorError(tensor.shape, version, tensor._version)
    return tensor


def _flat(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return bytes ``start`` to ``stop`` of the storage: in the tensor's dtype if that divides them."""
    size = tensor.element_size()
    if start % size == stop % size == 0:
        return tensor.as_strided(((stop - start) // size,), (1,), start // size)
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


_free_weak_ref = torch.UntypedStorage._free_weak_ref


class SwapGroup(MovingBlock):
    """One swapped storage: its device copy, then its host copy, then a device copy again.

    It is also the ticket of ``source``.

    Args:
        source: a detached tensor on ``storage``; dropped at release.
        host: is given back to ``pool`` at the end.
        prefetch_ops: prefetch window, in operators.
    """

    __slots__ = (
        "__weakref__",
        "_counted",
        "_pool",
        "_storage",
        "_tickets",
        "_unread",
        "_view",
        "has_read",
        "last_use",
        "prefetch_ops",
        "range_bytes",
        "whole",
    )

    def __init__(
        self,
        source: torch.Tensor,
        place: Place,
        storage: torch.UntypedStorage,
        host: HostBuffer,
        pool: HostPool,
        transfer: Transfer,
        counters: Counters,
        prefetch_ops: int,
    ) -> None:
        self._storage = storage._weak_ref()  # keeps its address from being reused
        super().__init__(host, transfer, counters)
        self._view, _, self.range_bytes, self.whole = place
        self.prefetch_ops = prefetch_ops
        self.last_use = self.has_read = self._unread = self._counted = 0
        self._tickets = 1
        self.leave(source, None if self.whole is not None else _flat(source, *self.range_bytes))
        # In one statement, so that no interrupt comes between the two: `__del__` undoes both.
        self._pool, counters.live_swaps = pool, counters.live_swaps + 1

    def covers(self, view: View, version: int) -> bool:
        """Whether the copy holds what ``view`` shows, as it is at ``version``."""
        if version != self.version:
            return False
        if self.whole is not None or view == self._view:
            return True
        start, stop = view.range_bytes
        return self.range_bytes[0] <= start and stop <= self.range_bytes[1]

    @property
    def group(self) -> SwapGroup:
        return self  # as a `SwapTicket` has it

    def restore(self) -> torch.Tensor:
        return self.read(self, self._view)

    def read(self, ticket: SwapTicket | SwapGroup, view: View) -> torch.Tensor:
        """Return ``view`` of the data on the device; after the last reader the device copy is dropped."""
        source = self.source
        if source is not None and source._version != self.version:
            self.stale_version = source._version
        if self.stale_version is not None:
            raise StaleTensorError(self._view.shape, self.version, self.stale_version)
        if source is not None:
            return source if view is self.whole else view.on(source, 0)
        target = self.target
        if target is None:
            target = self.reload()
            self.counters.late_prefetches += 1
        last = False
        if ticket.has_read != self.fetches:
            if self._counted != self.fetches:  # `_count_readers`, without its call for each tensor
                self._counted, self._unread = self.fetches, self._tickets
            ticket.has_read = self.fetches
            self._unread -= 1
            last = not self._unread
        if last:
            self.take()
        else:
            self.settle()
        if target._version != self.target_version:
            raise StaleTensorError(view.shape, self.target_version, target._version)
        if view is self.whole and target.dtype is view.dtype and target.stride() == view.stride:
            return target
        return view.on(target, self.range_bytes[0])

    def _count_readers(self) -> None:
        """Count the tickets that are to read what came back last, unless they have been counted."""
        if self._counted != self.fetches:
            self._counted, self._unread = self.fetches, self._tickets

    def join(self) -> int:
        """Add a ticket to this group; return its first `has_read`: all fetches so far count as read."""
        self._count_readers()
        self._tickets += 1
        return self.fetches

    def ticket_freed(self, ticket: SwapTicket) -> None:
        """Note that a ticket was freed; one that has not read what was fetched will not read it."""
        self._count_readers()
        self._tickets -= 1
        if self.target is not None and ticket.has_read != self.fetches:
            self._unread -= 1
            if not self._unread:
                self.drop()

    def __del__(self) -> None:
        # Reached when autograd has dropped the last ticket; a half-built group has no pool yet.
        _free_weak_ref(self._storage)
        if hasattr(self, "_pool"):
            self.end()
            self._pool.give_back(self.host)
            self.counters.live_swaps -= 1


class SwapTicket:
    """One more saved tensor on a swapped storage."""

    __slots__ = ("__weakref__", "_view", "group", "has_read")

    def __init__(self, group: SwapGroup, view: View) -> None:
        self.group = group
        self._view = group.whole if group.whole == view else view
        self.has_read = group.join()  # number of the fetch that it read last

    def restore(self) -> torch.Tensor:
        return self.group.read(self, self._view)

    def __del__(self) -> None:
        self.group.ticket_freed(self)
