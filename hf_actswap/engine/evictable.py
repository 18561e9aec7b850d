"""Kept tensors that can be evicted from the device when memory has run out.

A plan says beforehand what is swapped. Before there is a plan, in the planner's first steps, everything is
kept, and when the device is full, **idle** tensors can be evicted: those that are saved for backward and held
only by autograd. `EvictableTensors.keep` replaces `tickets.keep`, and `EvictableTensors.evict` moves the
storages that backward will read last to the host, synchronously::

    on device --evict--> host only --read--> block on the device --last reader, or evict--> host only

A storage is idle if only our tickets hold it, that is if its use count is the number of our tickets. So
nothing that is in use is evicted: parameters, tensors in a variable of the model's code, the inputs of the
op that runs, and what a running backward node has read (a reader gets an alias, which counts), until the
node is done. Nothing is freed by force: our references are dropped, and a storage is freed because these
were the last ones.

All tickets of one storage share its host copy, and share the reloaded block until each has read it once. The
host copy stays: so the block can be dropped again without a copy, and a second backward can reload it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .host_pool import HostBuffer, HostPool, mapped
from .swapped_storages import unmovable
from .tickets import StaleTensorError, Ticket, View, keep

logger = logging.getLogger(__name__)

_free_weak_ref = torch.UntypedStorage._free_weak_ref
_use_count = torch._C._storage_Use_Count


def _uses(storage: torch.UntypedStorage) -> int:
    """Return the use count of a storage; ``storage`` itself counts. Private to torch, read only here."""
    return int(_use_count(storage._cdata))


class EvictableTensors:
    """The evictable tensors that are alive, in order of packing: backward reads them from the end.

    All methods may be called from any thread.

    Args:
        device: device whose memory is short; tensors elsewhere stay where they are.
        pool: host memory for evicted storages; if it is full they stay. ``None``: pageable memory.
        min_tensor_bytes: smaller storages stay.

    Attributes:
        evictions, evicted_bytes: copies to the host so far, and their bytes.
        reloads: copies back so far.
        away_bytes: bytes that backward is still to read and that are not on the device now.
    """

    def __init__(
        self, device: torch.device, pool: HostPool | None = None, min_tensor_bytes: int = 2**16
    ) -> None:
        one = torch.empty(1, device=device)
        self.device, self.pool = one.device, pool  # "cuda" has become "cuda:0"
        self._min_tensor_bytes = max(1, min_tensor_bytes)
        self._known: dict[int, weakref.ref[EvictableStorage]] = {}
        self._lock = threading.RLock()
        self._uses_of_one = _uses(one.untyped_storage())
        self.evictions = self.evicted_bytes = self.reloads = self.away_bytes = 0

    def keep(self, tensor: torch.Tensor) -> Ticket:
        """Make the ticket of a tensor that stays on the device until memory runs out.

        Args:
            tensor: detached; nothing else holds this tensor, but other tensors may share its storage.
        """
        if unmovable(tensor, self.device) is not None:
            return keep(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_tensor_bytes:
            return keep(tensor)
        with self._lock:
            reference = self._known.pop(storage._cdata, None)
            group = None if reference is None else reference()
            if group is None:
                group = EvictableStorage(self, storage)
                reference = weakref.ref(group)
            if reference is not None:
                self._known[storage._cdata] = reference  # at the end: backward reads it sooner than the rest
            return EvictableTicket(group, group.join(tensor))

    def evict(self, wanted_bytes: int) -> int:
        """Free at least ``wanted_bytes`` of device memory, if so much is idle.

        Storages that have a host copy already go first, then those that backward reads last.

        Returns:
            Bytes of the storages that were freed.
        """
        freed_bytes = 0
        with self._lock, _disable_current_modes():
            alive = [
                group for group in (found() for found in list(self._known.values())) if group is not None
            ]
            for group in alive:
                if freed_bytes < wanted_bytes:
                    freed_bytes += group.drop_reloaded()
            for group in alive:
                if freed_bytes < wanted_bytes:
                    freed_bytes += group.evict()
        return freed_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes that `evict` could free now if the host has room for them."""
        with self._lock:
            return sum(group.idle_bytes() for group in self._alive())

    def _alive(self) -> list[EvictableStorage]:
        found = [reference() for reference in list(self._known.values())]
        return [group for group in found if group is not None]

    def forget(self, key: int, group: EvictableStorage) -> None:
        """Note that the last ticket was freed. Also called by the garbage collector, so it takes no lock."""
        reference = self._known.get(key)
        if reference is not None and reference() in (None, group):
            self._known.pop(key, None)


class EvictableStorage:
    """One storage that can be evicted, with the tensors on it that tickets hold.

    Args:
        idle: the collection that it belongs to.
        storage: the storage, on the device.
    """

    def __init__(self, idle: EvictableTensors, storage: torch.UntypedStorage) -> None:
        self._idle, self._device, self._size_bytes = idle, storage.device, storage.nbytes()
        self._tensors: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._views: dict[int, View] = {}
        self._stale: dict[int, int] = {}
        self._host: HostBuffer | None = None
        self._pool: HostPool | None = None
        self._block: torch.Tensor | None = None
        self._unread: set[int] = set()
        self._away = False
        self._key: Any = storage._weak_ref()  # keeps its address from being reused

    def join(self, tensor: torch.Tensor) -> int:
        """Add another ticket, of ``tensor``; return the number with which it reads the tensor."""
        number = len(self._versions)
        self._tensors[number], self._versions[number] = tensor, tensor._version
        return number

    def leave(self, number: int) -> None:
        """Note that a ticket was freed. Also called by the garbage collector, so it takes no lock."""
        self._tensors.pop(number, None)
        self._views.pop(number, None)
        self._unread.discard(number)
        if not self._unread:
            self._block = None

    def read(self, number: int) -> torch.Tensor:
        """Return the tensor of a ticket. Raises `StaleTensorError` if it changed since it was saved."""
        tensor = self._tensors.get(number)
        if tensor is None:
            with self._idle._lock:
                return self._read_reloaded(number)
        if tensor._version != self._versions[number]:
            raise StaleTensorError(tensor.shape, self._versions[number], tensor._version)
        return tensor.detach()  # counts as a user of the storage until its reader is done

    def idle_bytes(self) -> int:
        """Bytes that `drop_reloaded` or `evict` would free now, host memory permitting."""
        if self._block is not None:
            return self._size_bytes if self._held_by(1, self._block) else 0
        return self._size_bytes if self._is_idle() else 0

    def drop_reloaded(self) -> int:
        """Free the block that was read back, unless it is in use; return the bytes freed."""
        block = self._block
        if block is None or not self._held_by(1, block) or block._version != 0:
            return 0
        self._block = None
        self._unread.clear()
        self._goes_away(True)
        return self._size_bytes

    def evict(self) -> int:
        """Move to the host, unless it is in use or there already; return the bytes freed."""
        if not self._is_idle():
            return 0
        host = self._new_host()
        if host is None:
            return 0
        self._copy_out(host)
        for number, tensor in list(self._tensors.items()):
            self._views[number] = View.of(tensor)
            if tensor._version != self._versions[number]:
                self._stale[number] = tensor._version
        self._host = host
        self._tensors = {}
        self._goes_away(True)
        self._idle.evictions += 1
        self._idle.evicted_bytes += self._size_bytes
        return self._size_bytes

    def _read_reloaded(self, number: int) -> torch.Tensor:
        view, stale = self._views[number], self._stale.get(number)
        if stale is not None:
            raise StaleTensorError(view.shape, self._versions[number], stale)
        block = self._block
        if block is None:
            block = self._reload()
        if block._version != 0:
            raise StaleTensorError(view.shape, 0, block._version)
        self._unread.discard(number)
        if not self._unread:
            self._block = None
        return view.on(block, 0)

    def _reload(self) -> torch.Tensor:
        host = self._host
        if host is None:
            raise RuntimeError("an evicted tensor has no host copy")
        # These are ordinary ops: a guard against out-of-memory sees them and frees memory.
        block = host.new_block(self._device)
        with torch.no_grad():
            for part, target in host.pairs(block):
                target.data.copy_(part)  # leaves the version as it is: the data is the same
        self._block, self._unread = block, set(self._views)
        self._goes_away(False)
        self._idle.reloads += 1
        return block

    def _goes_away(self, away: bool) -> None:
        if away != self._away:
            self._away = away
            self._idle.away_bytes += self._size_bytes if away else -self._size_bytes

    def _is_idle(self) -> bool:
        first = next(iter(self._tensors.values()), None)
        return first is not None and self._held_by(len(self._tensors), first)

    def _held_by(self, tensors: int, one: torch.Tensor) -> bool:
        """Whether exactly this number of tensors holds the storage of ``one``."""
        storage = one.untyped_storage()
        uses = self._idle._uses_of_one + tensors - 1
        return storage.nbytes() == self._size_bytes and _uses(storage) == uses

    def _new_host(self) -> HostBuffer | None:
        self._pool = self._idle.pool
        if self._pool is not None:
            host = self._pool.take(self._size_bytes)
        else:
            try:
                host = HostBuffer(self._size_bytes, (mapped(self._size_bytes),), ())
            except (OSError, MemoryError, RuntimeError) as error:
                logger.warning("No more host memory (%s): nothing can be evicted.", error)
                return None
        if host is not None:
            if host.last_use is not None:
                host.last_use.synchronize()  # a transfer may still read what the block held before
            host.hold(torch.uint8, torch.Size([self._size_bytes]))
        return host

    def _copy_out(self, host: HostBuffer) -> None:
        """Copy the whole storage. A method of its own, so that no variable holds the storage afterwards."""
        first = next(iter(self._tensors.values()))
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            whole.set_(first.untyped_storage(), 0, (self._size_bytes,), (1,))
            for target, part in host.pairs(whole):
                target.copy_(part)

    def __del__(self) -> None:
        # Reached when autograd has dropped the last ticket. The address is free only after this.
        self._goes_away(False)
        self._idle.forget(self._key, self)
        _free_weak_ref(self._key)
        if self._pool is not None and self._host is not None:
            self._pool.give_back(self._host)


class EvictableTicket:
    """The ticket of a kept tensor that may have been evicted when backward needs it.

    Args:
        storage: the storage that the tensor is on.
        number: number that `EvictableStorage.join` returned for the tensor.
    """

    __slots__ = ("_number", "_storage")

    def __init__(self, storage: EvictableStorage, number: int) -> None:
        self._storage, self._number = storage, number

    def restore(self) -> torch.Tensor:
        """Return the tensor that was saved. Raises `StaleTensorError` if it changed."""
        return self._storage.read(self._number)

    def __del__(self) -> None:
        self._storage.leave(self._number)
