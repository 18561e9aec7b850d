"""What the chunks of a sequence leave for each other in host memory.

`HostSequence` holds tensors under a key, brings them to the device and takes new ones back. It is the only
one that knows where they are: a tier behind host memory is a change here.

**Order.** Copies follow the contract of `engine.transfer`. `put` starts a copy to the host and holds its
source; compute waits for it when `_LEAVING` later ones have been put, so device memory holds the sources of
a few copies and no wait is for a copy that has only just been asked for. `expect` starts a copy back, ordered
by the transfer behind the copy that wrote the block; it is called for the next tensors before those that are
at hand are computed with. `bring` makes compute wait for that copy. What was brought is complete, so a `put`
under the same key writes the block after its last reader: the gradients of keys and values are brought, added
to, and put back. `drop` first waits for whatever still moves, then gives the block back to the pool.

All methods are called from one thread at a time: the one of the forward, later the one of backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch

from ..engine.blocks import HostBuffer
from ..engine.host_pool import HostPool
from ..engine.stats import Counters, gib_text
from ..engine.transfer import Copy, Transfer
from ..errors import PlanError, Problem

_LEAVING = 4
"""Entries whose copies to the host may be on their way at once."""

Key = Hashable


class _Entry:
    """Tensors in host memory.

    Args:
        hosts: a block for each.
    """

    __slots__ = ("coming", "hosts", "leaving", "written")

    def __init__(self, hosts: list[HostBuffer]) -> None:
        self.hosts = hosts
        self.written: list[Copy] = []
        self.leaving: tuple[torch.Tensor, ...] | None = None
        self.coming: list[tuple[torch.Tensor, Copy]] = []


class HostSequence:
    """Holds keys and values, and their gradients, of all chunks in host memory; fetches what a chunk reads.

    Args:
        pool: of host memory.
        transfer: moves bytes.
        counters: count them.
    """

    def __init__(self, pool: HostPool, transfer: Transfer, counters: Counters) -> None:
        self._pool, self._transfer, self._counters = pool, transfer, counters
        self._entries: dict[Key, _Entry] = {}
        self._leaving: deque[_Entry] = deque()

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def make_ready(self, size_bytes: int, longest: Callable[[int], int]) -> None:
        """Begin to lock as much memory as the sequence will take.

        Args:
            size_bytes: of it.
            longest: says how many tokens of such a sequence take so many bytes.

        Raises:
            PlanError: so much may not be taken.
        """
        most_bytes = self._pool.most_bytes
        if most_bytes is not None and size_bytes > most_bytes:
            needed, allowed = gib_text(size_bytes), gib_text(most_bytes)
            fit = f"enough for {longest(max(most_bytes, 0)):,} tokens"
            raise _no_host_memory(f"{needed} needed, and this rank may take {allowed}, {fit}")
        if self._transfer.overlaps:
            self._pool.reserve(size_bytes)

    def put(self, key: Key, *tensors: torch.Tensor) -> None:
        """Copy tensors of the device to the host, over those of the same key and sizes if there are any.

        Args:
            key: they are brought under.
            tensors: contiguous; nobody writes to them afterwards.

        Raises:
            PlanError: there is no host memory left.
        """
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry([])
            for tensor in tensors:
                entry.hosts.append(self._taken(tensor.nbytes))
        self._has_left(entry)
        entry.written = []
        for tensor, host in zip(tensors, entry.hosts, strict=True):
            host.hold(tensor.dtype, tensor.shape)
            entry.written.append(self._transfer.offload(tensor, host))
            self._counters.offloads += 1
            self._counters.offloaded_bytes += tensor.nbytes
        entry.leaving = tensors
        self._leaving.append(entry)
        while len(self._leaving) > _LEAVING:
            self._has_left(self._leaving.popleft())

    def expect(self, key: Key) -> None:
        """Start the copies to the device, if there are such tensors and they are not on their way."""
        entry = self._entries.get(key)
        if entry is None or entry.coming:
            return
        for host, written in zip(entry.hosts, entry.written, strict=True):
            entry.coming.append(self._transfer.reload(host, written))
            self._counters.prefetches += 1
            self._counters.prefetched_bytes += host.size_bytes

    def bring(self, key: Key) -> list[torch.Tensor]:
        """Return the tensors of a key on the device; they are the caller's."""
        entry = self._entries[key]
        if not entry.coming:
            self.expect(key)
            self._counters.late_prefetches += len(entry.coming)
        coming, entry.coming = entry.coming, []
        for _, copy in coming:
            self._counters.stalled(copy.wait())
        return [tensor for tensor, _ in coming]

    def drop(self, key: Key) -> None:
        """Nobody will ask for a key any more."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._has_left(entry)
        for _, copy in entry.coming:
            copy.wait()
        for host in entry.hosts:
            self._transfer.host_reader_done(host)
            self._pool.give_back(host)

    def close(self) -> None:
        """Drop everything. Safe to call again."""
        for key in list(self._entries):
            self.drop(key)
        self._leaving.clear()

    def __del__(self) -> None:
        self.close()  # the graph has died without a backward

    def _has_left(self, entry: _Entry) -> None:
        if entry.leaving is not None:
            for copy in entry.written:
                self._counters.stalled(copy.wait())
            entry.leaving = None

    def _taken(self, size_bytes: int) -> HostBuffer:
        host = self._pool.take(size_bytes)
        if host is None:
            raise _no_host_memory(f"no {size_bytes:,} bytes more")
        return host


def _no_host_memory(found: str) -> PlanError:
    """Return the error where the sequence does not fit into host memory."""
    hint = "Shorten the sequence, raise memory.host_memory_gib if it is set, or start fewer ranks here."
    return PlanError([Problem("stream_config", "host memory for the whole sequence", found, hint)])
