"""Host memory for swapped tensors: taken, given back, and used again over the steps."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class HostBuffer:
    """A block of host memory.

    Args:
        data: uint8, shape (bytes,).
        last_use: what the transfer must wait for before the block is written again; its own business.
    """

    data: torch.Tensor
    last_use: Any = None

    @property
    def size_bytes(self) -> int:
        """Size of the block."""
        return self.data.numel()


class HostPool:
    """Blocks of exact sizes, reused by size; training steps repeat the same sizes.

    Args:
        pinned: page-locked memory, needed for copies that overlap compute. If the machine has no more of
            it, blocks are pageable and a warning says so once.
        cap_bytes: most bytes in use at once; ``None``: no cap.
    """

    def __init__(self, pinned: bool, cap_bytes: int | None = None) -> None:
        self._pinned = pinned
        self._cap_bytes = cap_bytes
        self._free: dict[int, list[HostBuffer]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.used_bytes = 0
        self.peak_bytes = 0
        self.held_bytes = 0

    def take(self, size_bytes: int) -> HostBuffer | None:
        """Return a block of ``size_bytes``, or ``None`` if the cap would be passed."""
        with self._lock:
            if self._cap_bytes is not None and self.used_bytes + size_bytes > self._cap_bytes:
                return None
            stack = self._free.get(size_bytes)
            buffer = stack.pop() if stack else None
            if buffer is None:
                self._make_room(size_bytes)
                self.held_bytes += size_bytes
            self.used_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return buffer or HostBuffer(self._allocate(size_bytes))

    def give_back(self, buffer: HostBuffer) -> None:
        """Return a block to the pool; after `close` it is freed."""
        with self._lock:
            self.used_bytes -= buffer.size_bytes
            if self._closed:
                self.held_bytes -= buffer.size_bytes
            else:
                self._free.setdefault(buffer.size_bytes, []).append(buffer)

    def close(self) -> None:
        """Free what is not in use; blocks still in use are freed when they are given back."""
        with self._lock:
            self._closed = True
            self._drop_free()

    def _make_room(self, size_bytes: int) -> None:
        """Free unused blocks of other sizes where the cap would be passed by holding them as well."""
        if self._cap_bytes is not None and self.held_bytes + size_bytes > self._cap_bytes:
            self._drop_free()

    def _drop_free(self) -> None:
        self.held_bytes -= sum(block.size_bytes for stack in self._free.values() for block in stack)
        self._free.clear()

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        if self._pinned:
            try:
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pinned = False
                logger.warning(
                    "No more page-locked host memory (%s): swapped tensors go to pageable memory, "
                    "whose copies do not overlap compute.",
                    str(error).splitlines()[0],
                )
        return torch.empty(size_bytes, dtype=torch.uint8)
