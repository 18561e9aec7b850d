"""Host memory for the tensors that one chunk of a sequence stores and other chunks read.

`HostSequence` stores tensors under a key and copies them to the device and back. No other module knows
where they are: a second tier behind host memory would be added here.

**Order.** Copies follow the contract of `engine.transfer`. `put` starts a copy to the host and keeps its
source; compute waits for that copy after `_MAX_PENDING_OFFLOADS` later calls of `put`. So device memory holds
the sources of a few copies only, and compute never waits for a copy that was started just before. `prefetch`
starts a copy to the device, which the transfer orders after the copy that wrote the host block; callers start
it for the next tensors before they compute with the present ones. `fetch` makes compute wait for that copy.
A `put` under the same key may then overwrite the block, because its last reader is done: gradients of keys
and values are brought, added to, and put back. `drop` waits for copies that still run, then returns the block
to the pool.

All methods are called from one thread at a time: first that of the forward, later that of the backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import torch

from ..engine.host_pool import HostBuffer, HostPool
from ..engine.stats import Counters, gib_text
from ..engine.transfer import Copy, Transfer
from ..errors import PlanError, Problem

_MAX_PENDING_OFFLOADS = 4
"""How many entries may have unfinished copies to the host."""

Key = Hashable


class _Entry:
    """The tensors of one key in host memory.

    Args:
        hosts: one host block for each tensor.
    """

    __slots__ = ("coming", "hosts", "leaving", "written")

    def __init__(self, hosts: list[HostBuffer]) -> None:
        self.hosts = hosts
        self.written: list[Copy] = []
        self.leaving: tuple[torch.Tensor, ...] | None = None
        self.coming: list[tuple[torch.Tensor, Copy]] = []


class HostSequence:
    """Stores tensors of the chunks of one sequence in host memory, and copies them back for other chunks.

    Args:
        pool: where host blocks are taken from.
        transfer: copies between device and host.
        counters: counters of the plan, to which copies, their bytes and waits are added.
    """

    def __init__(self, pool: HostPool, transfer: Transfer, counters: Counters) -> None:
        self._pool, self._transfer, self._counters = pool, transfer, counters
        self._entries: dict[Key, _Entry] = {}
        self._leaving: deque[_Entry] = deque()

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def make_ready(self, size_bytes: int, longest: Callable[[int], int]) -> None:
        """Start page-locking the host memory that the sequence needs.

        Args:
            size_bytes: the most host memory that the sequence takes.
            longest: returns the number of tokens that fit in a number of bytes; for the error message.

        Raises:
            PlanError: the pool is limited to less.
        """
        most_bytes = self._pool.limit_bytes
        if most_bytes is not None and size_bytes > most_bytes:
            needed, allowed = gib_text(size_bytes), gib_text(most_bytes)
            fit = f"enough for {longest(max(most_bytes, 0)):,} tokens"
            raise _no_host_memory(f"{needed} needed, and this rank may take {allowed}, {fit}")
        if self._transfer.overlaps:
            self._pool.reserve(size_bytes)

    def put(self, key: Key, *tensors: torch.Tensor) -> None:
        """Start copying device tensors to the host; tensors stored under the same key are overwritten.

        Args:
            key: under which `fetch` returns them.
            tensors: contiguous, not written to afterwards, of the same sizes as those that they overwrite.

        Raises:
            PlanError: there is no host memory left.
            ValueError: a tensor is not contiguous.
        """
        if not all(tensor.is_contiguous() for tensor in tensors):
            layouts = ", ".join(f"{list(item.shape)} with strides {list(item.stride())}" for item in tensors)
            raise ValueError(f"host memory for {key}: expected contiguous tensors, found shapes {layouts}.")
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
        while len(self._leaving) > _MAX_PENDING_OFFLOADS:
            self._has_left(self._leaving.popleft())

    def prefetch(self, key: Key) -> None:
        """Start the copies of a key to the device, unless the key is unknown or they were started already."""
        entry = self._entries.get(key)
        if entry is None or entry.coming:
            return
        for host, written in zip(entry.hosts, entry.written, strict=True):
            entry.coming.append(self._transfer.reload(host, written))
            self._counters.prefetches += 1
            self._counters.prefetched_bytes += host.size_bytes

    def fetch(self, key: Key) -> list[torch.Tensor]:
        """Return the tensors of a key on the device, after compute waits for their copies."""
        entry = self._entries[key]
        if not entry.coming:
            self.prefetch(key)
            self._counters.late_prefetches += len(entry.coming)
        coming, entry.coming = entry.coming, []
        for _, copy in coming:
            self._counters.stalled(copy.wait())
        return [tensor for tensor, _ in coming]

    def drop(self, key: Key) -> None:
        """Free the host memory of a key, after its copies; unknown keys are ignored."""
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
