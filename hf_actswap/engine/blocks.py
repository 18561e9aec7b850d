"""Blocks of exact sizes, cut out of slabs. Not thread-safe: `host_pool` holds a lock around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .free_ranges import ALIGNMENT_BYTES, FreeRanges, Range

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
        """Set the dtype and shape of the contiguous tensor, of ``size_bytes`` bytes, that the block holds."""
        if shape != self.shape or dtype is not self.dtype:
            self.dtype, self.shape, self._held = dtype, shape, ()

    def new_block(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor on ``device``, of the dtype and shape that the block holds."""
        if len(self.pieces) > 1:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        (held,) = self._as_held()  # `torch.empty` itself takes the host twice as long
        return torch.empty_like(held) if held.device == device else torch.empty_like(held, device=device)

    def pairs(self, block: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return (host, device) tensors whose copies, in order, move all of ``block``.

        Args:
            block: contiguous device tensor of the dtype and shape that this host block holds.

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
    """Slabs, their free ranges, and returned blocks that are kept whole for the next request of their size.

    Args:
        piece_bytes: longest piece of a block.

    Attributes:
        held_bytes: size of all slabs.
    """

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._slabs: dict[int, torch.Tensor] = {}
        self._next_slab = 0
        self._free = FreeRanges()
        self._kept: dict[int, list[HostBuffer]] = {}
        self.held_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Free bytes outside of kept blocks."""
        return self._free.total_bytes

    def add_slab(self, slab: torch.Tensor) -> None:
        """Cut blocks out of ``slab`` (uint8, shape (bytes,)) too."""
        size_bytes = slab.numel()
        self._slabs[self._next_slab] = slab
        self._free.add(Range(self._next_slab, 0, size_bytes))
        self._next_slab += 1
        self.held_bytes += size_bytes

    def keep(self, buffer: HostBuffer) -> None:
        """Take a block back; the next request of its size gets it unchanged."""
        stack = self._kept.get(buffer.size_bytes)
        if stack is None:
            self._kept[buffer.size_bytes] = [buffer]
        else:
            stack.append(buffer)

    def take(self, size_bytes: int, least_bytes: int) -> HostBuffer | None:
        """Return a block, or ``None`` if no free range is large enough.

        Args:
            size_bytes: size of the block.
            least_bytes: smallest range to use if several make up the block; the last may be smaller.
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
