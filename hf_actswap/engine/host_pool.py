"""Host memory for swapped tensors: taken, given back, and used again over the steps.

Slabs of memory (`slabs`) are cut at exact sizes. A block may consist of several **pieces**: first because a
copy moves piece by piece, so that no copy waits behind a gigabyte; second because a request that is larger
than every free range is put together from several, so that all free memory can be used.

A block that comes back is kept as it is, for the next request of its size: training steps repeat their sizes,
and in steady state nothing is cut or joined. Only when a request cannot be served from blocks of its size or
from free ranges are the kept blocks joined again, and only then does the pool grow.

**Threads and the garbage collector.** Backward gives blocks back on a thread of its own, and a block may be
given back by a ``__del__`` that the garbage collector runs at any allocation: also inside `HostPool.take`,
on the thread that holds the pool's lock. So `HostPool.give_back` never waits for the lock: it appends to a
deque, which is atomic, and whoever takes the lock next collects what has come back. Nothing is changed but
by the lock's holder, so the garbage collector never meets a half-changed pool.

One case is left. After `HostPool.close` there may be no further call, so `give_back` itself tries the lock:
if it is free, it collects; if not, the lock's holder reads the deque once more *after* releasing the lock.
One of the two sees the block: an append before that read is seen by it, and one after it finds the lock free.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from .blocks import Blocks, HostBuffer
from .slabs import SlabSource

__all__ = ["HostBuffer", "HostPool"]

logger = logging.getLogger(__name__)

MIB = 2**20
_SLAB_STEP_BYTES = 2 * MIB
"""Slabs larger than usual are multiples of it: a huge page."""
_LEAST_PIECE_BYTES = MIB
_LAST_RESORT_PIECE_BYTES = MIB // 16
"""Smallest piece if there is no other way: a copy of 64 KiB costs twice its time in latency."""


class HostPool:
    """Gives out blocks of exact sizes, cut from slabs. All methods may be called from any thread.

    Args:
        source: where slabs come from.
        cap_bytes: most bytes of slabs held at once, and so of blocks in use; ``None``: no cap.
        slab_bytes: size of a slab; a larger request gets a slab of its own, rounded up to 2 MiB (or to
            ``slab_bytes`` if that is less, so that 1 means slabs of exactly the sizes asked for).
        progress: called on the reserving thread with (bytes reserved, bytes to reserve); the two are equal in
            its last call, even if the reservation ended early.
        room: returns the bytes that this process may still allocate, called before each new slab, under the
            pool's lock; ``None``: no limit.
        piece_bytes: longest piece of a block.

    Attributes:
        peak_bytes: most `used_bytes` so far.
        allocating_ms: what allocating slabs, and page-locking them, has taken so far.
    """

    def __init__(
        self,
        source: SlabSource,
        cap_bytes: int | None = None,
        slab_bytes: int = 256 * MIB,
        progress: Callable[[int, int], None] | None = None,
        room: Callable[[], int] | None = None,
        piece_bytes: int = 64 * MIB,
    ) -> None:
        self._source, self._cap_bytes, self._slab_bytes = source, cap_bytes, slab_bytes
        self._progress, self._room = progress, room
        self._blocks = Blocks(piece_bytes)
        self._returned: deque[HostBuffer] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._used_bytes = 0
        self.peak_bytes = 0
        self.allocating_ms = 0.0
        self._target_bytes = 0
        self._reserving = False
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._warned = False

    @property
    def used_bytes(self) -> int:
        """Exact bytes of the blocks in use, without what alignment adds."""
        with self._lock:
            self._collect()
            used_bytes = self._used_bytes
        if self._closed:
            self._settle()
        return used_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes that may be in use at once; ``None``: no limit is known."""
        room = None if self._room is None else self.held_bytes + self._room()
        limits = [limit for limit in (self._cap_bytes, room) if limit is not None]
        return min(limits) if limits else None

    @property
    def held_bytes(self) -> int:
        """Size of all slabs, in use or not."""
        return self._blocks.held_bytes

    def take(self, size_bytes: int) -> HostBuffer | None:
        """Return a block of ``size_bytes``.

        ``None`` if the cap would be passed, the machine has no more memory, or the pool is closed.
        """
        with self._lock:
            buffer = self._take(size_bytes)
        if self._closed:
            self._settle()
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Return a block to the pool; after `close` it is freed. Never blocks."""
        self._returned.append(buffer)
        if self._closed:
            self._settle()

    def reserve(self, total_bytes: int) -> None:
        """Allocate slabs on a thread of its own until `held_bytes` reaches ``total_bytes`` or the cap.

        Returns at once. A `take` that finds no free memory meanwhile waits for the next slab. A second call
        raises the goal of a reservation that is running.
        """
        cap = self._cap_bytes
        goal = total_bytes if cap is None else min(total_bytes, cap)
        if self._closed:
            return
        with self._lock:
            self._target_bytes = max(self._target_bytes, goal) if self._reserving else goal
            if self._reserving or self.held_bytes >= goal:
                return
            thread = threading.Thread(target=self._reserve, name="actswap-host-memory")
            thread.start()
            self._thread, self._reserving, self._failure = thread, True, None

    def wait_reserved(self) -> None:
        """Wait until the reservation has ended; raise what it raised. `held_bytes` is below the goal if there
        was not enough memory.
        """
        if self._thread is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Stop reserving and free what is not in use; a slab with blocks in use is freed with the last one.

        Safe to call again. `take` returns ``None`` from now on.
        """
        self._closed = True  # set first: if `give_back` still reads False, its block is collected below
        with self._lock:
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            self._collect()
            self._blocks.free_slabs(self._source.free)
        self._settle()

    def __del__(self) -> None:
        # Page-locked memory outlives its tensor unless it is unlocked.
        if not sys.is_finalizing() and hasattr(self, "_blocks") and self.held_bytes:
            self.close()

    def _settle(self) -> None:
        """Collect returned blocks, unless another thread holds the lock: then that one does it."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._collect()
                if self._closed:
                    self._blocks.free_slabs(self._source.free)
            finally:
                self._lock.release()

    # Everything from here to `_reserve` runs under the lock.

    def _collect(self) -> None:
        returned = self._returned
        while returned:
            buffer = returned.popleft()
            self._used_bytes -= buffer.size_bytes
            self._blocks.keep(buffer)

    def _take(self, size_bytes: int) -> HostBuffer | None:
        while True:
            if self._returned:
                self._collect()
            used = self._used_bytes + size_bytes
            if self._closed or (self._cap_bytes is not None and used > self._cap_bytes):
                return None
            buffer = self._blocks.take(size_bytes, _LEAST_PIECE_BYTES)
            if buffer is None:
                if self._reserving:
                    self._changed.wait()
                    continue
                if self._grow(size_bytes):
                    continue
                buffer = self._blocks.take(size_bytes, _LAST_RESORT_PIECE_BYTES)
                if buffer is None:
                    return None
            self._used_bytes = used
            if used > self.peak_bytes:
                self.peak_bytes = used
            return buffer

    def _grow(self, size_bytes: int) -> bool:
        """Allocate a slab, unless ``size_bytes`` would not fit even then; return whether it did."""
        want = self._slab_bytes
        if size_bytes > want:
            step = min(_SLAB_STEP_BYTES, self._slab_bytes)
            want = -(-size_bytes // step) * step
        want = self._allowed(want)
        if want <= 0 or self._blocks.free_bytes + want < size_bytes:
            return False
        try:
            self._add_slab(self._allocate(want))
        except (RuntimeError, MemoryError, OSError) as error:
            if not self._warned:
                self._warned = True
                logger.warning("No more host memory (%s): what does not fit stays on the device.", error)
            return False
        return True

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate a slab. Only one thread at a time does so: while one reserves, no other grows the pool."""
        started = time.perf_counter()
        slab = self._source.allocate(size_bytes)
        self.allocating_ms += (time.perf_counter() - started) * 1e3
        return slab

    def _allowed(self, want_bytes: int) -> int:
        """Return as much of ``want_bytes`` as the cap and the machine allow."""
        if self._cap_bytes is not None:
            want_bytes = min(want_bytes, self._cap_bytes - self.held_bytes)
        if self._room is not None and want_bytes > 0:
            want_bytes = min(want_bytes, self._room())
        return want_bytes

    def _add_slab(self, slab: torch.Tensor) -> None:
        self._blocks.add_slab(slab)
        self._changed.notify_all()

    def _reserve(self) -> None:
        """The reserving thread: allocates without the lock, so that blocks can be taken meanwhile."""
        try:
            while size_bytes := self._next_reserved_bytes():
                slab = self._allocate(size_bytes)
                with self._lock:
                    self._add_slab(slab)  # also if closed meanwhile: `close` waits for us, then frees
                self._report()
        except Exception as error:
            self._failure = error
            with self._lock:
                self._end_reservation()
        try:
            self._report(ended=True)
        except Exception as error:
            self._failure = self._failure or error

    def _next_reserved_bytes(self) -> int:
        """Return the size of the next slab to reserve; 0 after ending the reservation, if none is left."""
        with self._lock:
            left = self._target_bytes - self.held_bytes
            step = min(_SLAB_STEP_BYTES, self._slab_bytes)
            size_bytes = 0
            # At exit the interpreter waits for this thread; one that is killed inside PyTorch would abort.
            if left > 0 and not self._closed and threading.main_thread().is_alive():
                size_bytes = max(0, self._allowed(min(self._slab_bytes, -(-left // step) * step)))
            if size_bytes == 0:
                self._end_reservation()
            return size_bytes

    def _end_reservation(self) -> None:
        self._reserving = False
        self._changed.notify_all()

    def _report(self, ended: bool = False) -> None:
        if self._progress is not None:
            done = min(self.held_bytes, self._target_bytes)
            if ended or done < self._target_bytes:
                self._progress(done, done if ended else self._target_bytes)
