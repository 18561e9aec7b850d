"""Allocates the slabs of host memory that the host pool cuts up.

Copies that run beside compute need page-locked memory. PyTorch's own (``pin_memory=True``) comes from a cache
that rounds sizes up to powers of two (pytorch#95823) and never gives anything back, so `PinnedSlabs` maps
memory itself and has the driver lock it. Most of the time goes into the first touch of cold pages; several
threads on the processors of the device's NUMA node do that, so the pages also lie on that node.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch

from .host_memory import locked_memory_limit
from .numa import bound_to, usable_cpus

logger = logging.getLogger(__name__)

_MOST_THREADS = 8
_CHUNK_BYTES = 16 * 2**20


class SlabSource(Protocol):
    """Gives and takes back slabs of host memory. The host pool calls it from one thread at a time."""

    pinned: bool
    """Whether the next slab will be page-locked."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return host memory: uint8, shape (size_bytes,).

        Raises:
            RuntimeError, MemoryError, OSError: there is none.
        """

    def free(self, slab: torch.Tensor) -> None:
        """Take back what `allocate` returned; the caller drops its references."""


class Cudart(Protocol):
    """The functions used of ``torch.cuda.cudart()``, which on ROCm is HIP's runtime under the same names."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Any:
        """Page-lock memory."""

    def cudaHostUnregister(self, pointer: int) -> Any:
        """Unlock memory."""


class PageableSlabs:
    """Pageable memory: for the CPU as the device, where page-locking gains nothing."""

    pinned = False

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return host memory: uint8, shape (size_bytes,)."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def free(self, slab: torch.Tensor) -> None:
        """Take back what `allocate` returned; the caller drops its references."""


class PinnedSlabs:
    """Page-locked memory of exact sizes.

    Ordinary memory is locked with ``cudaHostRegister`` where there is a CUDA runtime (CUDA, ROCm); other
    accelerators get PyTorch's pinned memory, sizes rounded as it does. When no more can be locked, a warning
    says so once, and slabs are pageable from then on.

    Args:
        device: the accelerator.
        cpus: processors next to it; threads there touch new memory first. Empty: any processor.
        cudart: functions that lock memory, by default torch's own.
        synchronize: waits until the device has nothing more to do; called before memory is unlocked, because
            a copy whose graph is gone may still be under way. By default torch's own.

    Attributes:
        pinned: becomes ``False`` when no more memory can be locked.
    """

    def __init__(
        self,
        device: torch.device,
        cpus: frozenset[int] = frozenset(),
        cudart: Cudart | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.pinned = True
        self._device = device
        self._cpus = cpus
        self._cudart = torch.cuda.cudart() if cudart is None and device.type == "cuda" else cudart
        self._synchronize = synchronize or partial(torch.accelerator.synchronize, device)
        self._locked: set[int] = set()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return host memory: uint8, shape (size_bytes,)."""
        if self.pinned and self._cudart is None:
            return self._from_torch(size_bytes)
        slab = mapped(size_bytes)
        if self._cudart is not None and self.pinned:
            self._lock(slab, self._cudart)
        return slab

    def free(self, slab: torch.Tensor) -> None:
        """Take back what `allocate` returned; the caller drops its references. Waits for the device first."""
        self._synchronize()
        pointer = slab.data_ptr()
        if pointer in self._locked and self._cudart is not None:
            self._locked.discard(pointer)
            with self._on_device():
                code = int(self._cudart.cudaHostUnregister(pointer))
            if code != 0:
                logger.warning("Could not unlock %d bytes of host memory (error %d).", slab.numel(), code)

    def _lock(self, slab: torch.Tensor, cudart: Cudart) -> None:
        """Touch the pages, then lock them.

        It uses threads of its own: a failed call leaves its error code as the *thread's* last error, and the
        next kernel launch on the same thread would report that error.
        """
        threads = min(_MOST_THREADS, len(self._cpus) or len(usable_cpus()) or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="actswap-pinning") as pool:
            starts = range(0, slab.numel(), _CHUNK_BYTES)
            list(pool.map(partial(self._touch, slab), starts))
            problem = pool.submit(self._register, slab, cudart).result()
        if problem:
            self._no_more(problem)
        else:
            self._locked.add(slab.data_ptr())

    def _touch(self, slab: torch.Tensor, start: int) -> None:
        with bound_to(self._cpus):  # ctypes frees the interpreter's lock meanwhile
            ctypes.memset(slab.data_ptr() + start, 0, min(_CHUNK_BYTES, slab.numel() - start))

    def _register(self, slab: torch.Tensor, cudart: Cudart) -> str:
        """Lock ``slab``; return what went wrong, or an empty string."""
        try:
            with self._on_device(), bound_to(self._cpus):
                code = int(cudart.cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
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


def mapped(size_bytes: int) -> torch.Tensor:
    """Return newly mapped pages, uint8, shape (size_bytes,); unmapped when the tensor's storage is freed.

    They are whole pages, so that no other data is locked with them; huge ones if the kernel has them, which
    are faster to touch and to lock. Forked processes (data loader workers) do not inherit them and do not
    need them: otherwise the next write after a fork would go to a copy of the page, which is not locked for
    the device.
    """
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    pages = mmap.mmap(-1, size_bytes, **flags)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with suppress(OSError):
                pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
