"""Host memory for swapped tensors: taken, given back, and used again over the steps.

Slabs of memory are cut at exact sizes. A block may consist of several **pieces**: because a copy moves piece
by piece, so that no copy waits behind a gigabyte; and because a request that is larger than every free range
is put together from several, so that all free memory can be used.

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

**Slabs.** Copies that run beside compute need page-locked memory. PyTorch's own (``pin_memory=True``) comes
from a cache that rounds sizes up to powers of two (pytorch#95823) and never gives anything back, so
`PinnedSlabs` maps memory itself and has the driver lock it. Most of the time goes into the first touch of
cold pages; several threads on the processors of the device's NUMA node do that, so the pages also lie there.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from .host_memory import bound_to, locked_memory_limit, usable_cpus

ALIGNMENT_BYTES = 256
"""Every range starts at a multiple of it. It is enough for copy engines and for any dtype."""


class Range(NamedTuple):
    """Bytes ``start`` to ``stop`` (exclusive) of one slab."""

    slab: int
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class FreeRanges:
    """Free ranges of numbered slabs, in order of address; no two of them touch. Not thread-safe."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.total_bytes = 0

    def add(self, freed: Range) -> None:
        """Add a range that was not free, and join it with free neighbours."""
        self.total_bytes += freed.size_bytes
        at = bisect_left(self.ranges, freed)
        slab, start, stop = freed
        first = last = at
        if at and self.ranges[at - 1].slab == slab and self.ranges[at - 1].stop == start:
            first, start = at - 1, self.ranges[at - 1].start
        if at < len(self.ranges) and self.ranges[at].slab == slab and self.ranges[at].start == stop:
            last, stop = at + 1, self.ranges[at].stop
        self.ranges[first:last] = [Range(slab, start, stop)]

    def take(self, size_bytes: int, least_bytes: int) -> list[Range] | None:
        """Take ranges that hold ``size_bytes`` together; ``None`` if there are none.

        The first range that is long enough, or else the longest ranges, so that there are few. Each holds at
        least ``least_bytes``, or all of the rest. The last one ends at a multiple of `ALIGNMENT_BYTES` or
        with its slab, so it may be a little longer than needed.
        """
        if size_bytes == 0:
            return []
        for found in self.ranges:
            if found.size_bytes >= size_bytes:
                return [self._cut(found, size_bytes)]
        chosen: list[tuple[Range, int]] = []
        rest = size_bytes
        for found in sorted(self.ranges, key=lambda free: (-free.size_bytes, free)):
            if found.size_bytes < min(least_bytes, rest):
                break
            # A slab of exact size may end within an element: only the last piece may reach such an end.
            whole_bytes = found.size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            chosen.append((found, rest if found.size_bytes >= rest else whole_bytes))
            rest -= chosen[-1][1]
            if rest == 0:
                return [self._cut(found, held) for found, held in chosen]
        return None

    def take_whole(self, slab: int, size_bytes: int) -> bool:
        """Take a slab's only range if all ``size_bytes`` of it are free; return whether they were."""
        whole = Range(slab, 0, size_bytes)
        at = bisect_left(self.ranges, whole)
        if at == len(self.ranges) or self.ranges[at] != whole:
            return False
        self._cut(whole, size_bytes)
        return True

    def _cut(self, free: Range, size_bytes: int) -> Range:
        """Take the first ``size_bytes`` of a free range, rounded up to the alignment where it goes on."""
        stop = min(free.stop, free.start + -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        at = bisect_left(self.ranges, free)
        self.ranges[at : at + 1] = [] if stop == free.stop else [Range(free.slab, stop, free.stop)]
        self.total_bytes -= stop - free.start
        return Range(free.slab, free.start, stop)


_NO_SHAPE = torch.Size([])


@dataclass(eq=False, slots=True)
class HostBuffer:
    """A block of host memory.

    Args:
        size_bytes: size of all pieces together.
        pieces: uint8, shape (bytes,) each, in order; no two overlap, none is longer than the pool's limit.
        ranges: places of the pieces in the slabs; used by the pool only.
        last_use: event of the last copy that reads the block, ``None`` if there is none. The transfer sets
            it and waits for it before the next write; the pool, before it cuts the block up.
        dtype, shape: those of the contiguous tensor that the block holds; set by `hold`.
    """

    size_bytes: int
    pieces: tuple[torch.Tensor, ...]
    ranges: tuple[Range, ...]
    last_use: Any = None
    dtype: torch.dtype = torch.uint8
    shape: torch.Size = _NO_SHAPE
    _held: tuple[torch.Tensor, ...] = ()
    _lengths: tuple[int, ...] = ()

    def hold(self, dtype: torch.dtype, shape: torch.Size) -> None:
        """Set the dtype and shape of the contiguous tensor that the block holds."""
        if shape != self.shape or dtype is not self.dtype:
            self.dtype, self.shape, self._held = dtype, shape, ()

    def whole(self) -> torch.Tensor | None:
        """Return the memory as one tensor, uint8, shape (size_bytes,); ``None``: it is in several places."""
        if len(self.ranges) > 1:
            return None
        first = self.pieces[0]
        memory, start = first.untyped_storage(), int(first.storage_offset())
        return torch.empty(0, dtype=torch.uint8).set_(memory, start, (self.size_bytes,), (1,))

    def new_block(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor of the dtype and shape that the block holds."""
        if len(self.pieces) > 1:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        (held,) = self._as_held()  # `torch.empty` itself takes the host twice as long
        return torch.empty_like(held) if held.device == device else torch.empty_like(held, device=device)

    def pairs(self, block: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return (host, device) tensors whose copies, in order, move all of ``block``.

        Raises:
            ValueError: it is not contiguous. A copy of its bytes piece by piece would be another tensor, and
                PyTorch would copy it whole on the copy stream first.
        """
        if not block.is_contiguous():
            layout = f"shape {list(block.shape)} with strides {list(block.stride())}"
            raise ValueError(f"copies to host memory and back: expected a contiguous tensor, found {layout}.")
        held = self._as_held()
        if len(held) == 1:
            return ((held[0], block),)
        return list(zip(held, torch.split_with_sizes(block.view(-1), self._lengths), strict=True))

    def _as_held(self) -> tuple[torch.Tensor, ...]:
        if not self._held:  # made once: a block mostly holds the same shape in every step
            whole = len(self.pieces) == 1
            parts = (piece.view(self.dtype) for piece in self.pieces)
            self._held = tuple(part.view(self.shape) if whole else part for part in parts)
            self._lengths = tuple(part.numel() for part in self._held)
        return self._held


class Blocks:
    """Slabs, their free ranges, and returned blocks that are kept whole. Not thread-safe."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._slabs: dict[int, torch.Tensor] = {}
        self._next_slab = 0
        self._free = FreeRanges()
        self._kept: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        self.held_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Free bytes outside of kept blocks."""
        return self._free.total_bytes

    def add_slab(self, slab: torch.Tensor) -> None:
        size_bytes = slab.numel()
        self._slabs[self._next_slab] = slab
        self._free.add(Range(self._next_slab, 0, size_bytes))
        self._next_slab += 1
        self.held_bytes += size_bytes

    def keep(self, buffer: HostBuffer) -> None:
        """Take a block back; the next request of its size gets it unchanged."""
        self._kept[buffer.size_bytes].append(buffer)

    def take(self, size_bytes: int, least_bytes: int) -> HostBuffer | None:
        """Return a block, or ``None`` if there is none.

        ``least_bytes``: smallest range to use if several make up the block; the last may be smaller.
        """
        stack = self._kept.get(size_bytes)
        if stack:
            return stack.pop()
        ranges = self._free.take(size_bytes, least_bytes)
        if ranges is None and self._kept:
            self._join_kept()
            ranges = self._free.take(size_bytes, least_bytes)
        if ranges is None:
            return None
        pieces: list[torch.Tensor] = []
        rest = size_bytes
        for found in ranges:
            held = min(rest, found.size_bytes)
            pieces += self._pieces(self._slabs[found.slab], found.start, held)
            rest -= held
        return HostBuffer(size_bytes, tuple(pieces), tuple(ranges))

    def free_slabs(self, free: Callable[[torch.Tensor], None]) -> None:
        """Call ``free`` for each slab without a block in use, newest first."""
        self._join_kept()
        for number in sorted(self._slabs, reverse=True):
            size_bytes = self._slabs[number].numel()
            if self._free.take_whole(number, size_bytes):
                self.held_bytes -= size_bytes
                free(self._slabs.pop(number))

    def _pieces(self, slab: torch.Tensor, start: int, size_bytes: int) -> list[torch.Tensor]:
        """Return slices of about equal length: a short last one would cost as much latency as a long one."""
        count = -(-size_bytes // self._piece_bytes)
        step = min(self._piece_bytes, -(-size_bytes // (count * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES)
        stop = start + size_bytes
        return [slab[at : min(at + step, stop)] for at in range(start, stop, step)]

    def _join_kept(self) -> None:
        """Turn kept blocks into free ranges. Rare; so it may wait for a copy that still reads one."""
        for stack in self._kept.values():
            for buffer in stack:
                if buffer.last_use is not None:
                    buffer.last_use.synchronize()
                for given in buffer.ranges:
                    self._free.add(given)
        self._kept.clear()


logger = logging.getLogger(__name__)

_MOST_THREADS = 8
_CHUNK_BYTES = 16 * 2**20


class SlabSource(Protocol):
    """Gives and takes back slabs of host memory. The host pool calls it from one thread at a time."""

    pinned: bool
    """Whether the next slab will be page-locked."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return host memory: uint8, shape (size_bytes,).

        Raises `RuntimeError`, `MemoryError` or `OSError` if there is none.
        """

    def free(self, slab: torch.Tensor) -> None:
        """Take back what `allocate` returned; the caller drops its references."""


class PageableSlabs:
    """Pageable memory: for the CPU as the device, where page-locking gains nothing."""

    pinned = False

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def free(self, slab: torch.Tensor) -> None:
        """Do nothing: the memory goes with the last reference."""


class PinnedSlabs:
    """Page-locked memory of exact sizes.

    Ordinary memory is locked with ``cudaHostRegister`` where there is a CUDA runtime (CUDA, ROCm); other
    accelerators get PyTorch's pinned memory, sizes rounded as it does. When no more can be locked, a warning
    says so once, and slabs are pageable from then on.

    Args:
        device: the accelerator.
        cpus: processors next to it; threads there touch new memory first. Empty: any processor.
        cudart: has ``cudaHostRegister(pointer, size, flags)`` and ``cudaHostUnregister(pointer)``, by default
            ``torch.cuda.cudart()`` (on ROCm HIP's runtime under the same names).
        synchronize: waits until the device has nothing more to do; called before memory is unlocked, because
            a copy whose graph is gone may still be under way. By default torch's own.

    Attributes:
        pinned: becomes ``False`` when no more memory can be locked.
    """

    def __init__(
        self,
        device: torch.device,
        cpus: frozenset[int] = frozenset(),
        cudart: Any = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.pinned = True
        self._device = device
        self._cpus = cpus
        self._cudart = torch.cuda.cudart() if cudart is None and device.type == "cuda" else cudart
        self._synchronize = synchronize or partial(torch.accelerator.synchronize, device)
        self._locked: set[int] = set()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        if self.pinned and self._cudart is None:
            return self._from_torch(size_bytes)
        slab = mapped(size_bytes)
        if self.pinned:
            self._lock(slab)
        return slab

    def free(self, slab: torch.Tensor) -> None:
        self._synchronize()
        pointer = slab.data_ptr()
        if pointer in self._locked:
            self._locked.discard(pointer)
            with self._on_device():
                code = int(self._cudart.cudaHostUnregister(pointer))
            if code != 0:
                logger.warning("Could not unlock %d bytes of host memory (error %d).", slab.numel(), code)

    def _lock(self, slab: torch.Tensor) -> None:
        """Touch the pages, then lock them.

        It uses threads of its own: a failed call leaves its error code as the *thread's* last error, and the
        next kernel launch on the same thread would report that error.
        """
        threads = min(_MOST_THREADS, len(self._cpus) or len(usable_cpus()) or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="actswap-pinning") as pool:
            starts = range(0, slab.numel(), _CHUNK_BYTES)
            list(pool.map(partial(self._touch, slab), starts))
            problem = pool.submit(self._register, slab).result()
        if problem:
            self._no_more(problem)
        else:
            self._locked.add(slab.data_ptr())

    def _touch(self, slab: torch.Tensor, start: int) -> None:
        with bound_to(self._cpus):  # ctypes frees the interpreter's lock meanwhile
            ctypes.memset(slab.data_ptr() + start, 0, min(_CHUNK_BYTES, slab.numel() - start))

    def _register(self, slab: torch.Tensor) -> str:
        """Lock ``slab``; return what went wrong, or an empty string."""
        try:
            with self._on_device(), bound_to(self._cpus):
                code = int(self._cudart.cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
        except RuntimeError as error:
            return _first_line(error)
        return f"cudaHostRegister failed with error {code}" if code != 0 else ""

    def _on_device(self) -> AbstractContextManager[Any]:
        """Select the device: otherwise a new thread makes a context on the first one, in every process."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _from_torch(self, size_bytes: int) -> torch.Tensor:
        try:
            with bound_to(self._cpus):
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self._no_more(_first_line(error))
        return mapped(size_bytes)

    def _no_more(self, reason: str) -> None:
        self.pinned = False
        logger.warning(
            "No more page-locked host memory (%s; %s): swapped tensors go to pageable memory, "
            "whose copies do not overlap compute.",
            reason,
            locked_memory_limit(),
        )


MAPPING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if hasattr(mmap, "MAP_ANONYMOUS") else 0
"""How `mapped` maps pages, as flags of mmap(2); 0: the platform has none."""


def mapped(size_bytes: int) -> torch.Tensor:
    """Return newly mapped pages, uint8, shape (size_bytes,); unmapped when the tensor's storage is freed.

    They are whole pages, so that no other data is locked with them; huge ones if the kernel has them, which
    are faster to touch and to lock. Forked processes (data loader workers) do not inherit them and do not
    need them: otherwise the next write after a fork would go to a copy of the page, which is not locked for
    the device.
    """
    pages = mmap.mmap(-1, size_bytes, **({"flags": MAPPING} if MAPPING else {}))
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with suppress(OSError):
                pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


MIB = 2**20
PINNED_SLAB_BYTES = 256 * MIB
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
        slab_bytes: int = PINNED_SLAB_BYTES,
        progress: Callable[[int, int], None] | None = None,
        room: Callable[[], int] | None = None,
        piece_bytes: int = 256 * MIB,
    ) -> None:
        self._source, self._cap_bytes, self._slab_bytes = source, cap_bytes, slab_bytes
        self._step_bytes = min(_SLAB_STEP_BYTES, slab_bytes)
        self._progress, self._room = progress, room
        self._blocks = Blocks(piece_bytes)
        self._returned: deque[HostBuffer] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._used_bytes = 0
        self.peak_bytes = 0
        self.allocating_ms = 0.0
        self._target_bytes = self._named_bytes = self._aside_bytes = 0
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
        """Return a block; ``None`` if the cap or the machine's memory is too small, or the pool closed."""
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
        raises the goal of a reservation that is running. What is set aside comes on top.
        """
        if self._closed:
            return
        with self._lock:
            self._named_bytes = max(self._named_bytes, total_bytes) if self._reserving else total_bytes
            goal = self._named_bytes + self._aside_bytes
            self._target_bytes = goal if self._cap_bytes is None else min(goal, self._cap_bytes)
            if self._reserving or self.held_bytes >= self._target_bytes:
                return
            thread = threading.Thread(target=self._reserve, name="actswap-host-memory")
            thread.start()
            self._thread, self._reserving, self._failure = thread, True, None

    def set_aside(self, size_bytes: int) -> None:
        """Reserve bytes for others than the callers of `reserve`: what these name is allocated beside.

        With 0 nothing new is begun; a reservation that is running ends sooner.
        """
        self._aside_bytes = size_bytes
        if size_bytes or self._reserving:
            self.reserve(self._named_bytes)

    def wait_reserved(self) -> None:
        """Wait until the reservation has ended, with or without enough memory; raise what it raised."""
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
            want = -(-size_bytes // self._step_bytes) * self._step_bytes
        want = self._allowed(want)
        if want <= 0 or self._blocks.free_bytes + want < size_bytes:
            return False
        try:
            self._add_slab(self._allocate(want))
        except (RuntimeError, MemoryError, OSError) as error:
            if not self._warned:
                self._warned = True
                logger.warning("No more host memory (%s): what does not fit stays on the device.", str(error))
            return False
        return True

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate a slab. Only one thread at a time does so: while one reserves, no other grows the pool."""
        started = time.perf_counter()
        slab = self._source.allocate(size_bytes)
        self.allocating_ms += (time.perf_counter() - started) * 1e3
        return slab

    def _allowed(self, want_bytes: int) -> int:
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
            step, size_bytes = self._step_bytes, 0
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
