"""Free bytes of the slabs: a list of ranges in order of address, which are joined when they touch."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

ALIGNMENT_BYTES = 256
"""Every range starts at a multiple of it. It is enough for copy engines and for any dtype."""


class Range(NamedTuple):
    """Bytes ``start`` to ``stop`` (exclusive) of one slab."""

    slab: int
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Length of the range."""
        return self.stop - self.start


class FreeRanges:
    """Free ranges of numbered slabs; not thread-safe.

    Attributes:
        total_bytes: sum of the free ranges.
    """

    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self.total_bytes = 0

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The free ranges in order of address; no two of them touch."""
        return tuple(self._ranges)

    def add(self, freed: Range) -> None:
        """Add a range that was not free, and join it with free neighbours."""
        self.total_bytes += freed.size_bytes
        at = bisect_left(self._ranges, freed)
        slab, start, stop = freed
        first = last = at
        if at and self._ranges[at - 1].slab == slab and self._ranges[at - 1].stop == start:
            first, start = at - 1, self._ranges[at - 1].start
        if at < len(self._ranges) and self._ranges[at].slab == slab and self._ranges[at].start == stop:
            last, stop = at + 1, self._ranges[at].stop
        self._ranges[first:last] = [Range(slab, start, stop)]

    def take(self, size_bytes: int, least_bytes: int) -> list[Range] | None:
        """Take ranges that hold ``size_bytes`` together; ``None`` if there are none.

        The first range that is long enough, or else the longest ranges, so that there are few. Each holds at
        least ``least_bytes``, or all of the rest. The last one ends at a multiple of `ALIGNMENT_BYTES` or
        with its slab, so it may be a little longer than needed.
        """
        if size_bytes == 0:
            return []
        for found in self._ranges:
            if found.size_bytes >= size_bytes:
                return [self._cut(found, size_bytes)]
        chosen: list[tuple[Range, int]] = []
        rest = size_bytes
        for found in sorted(self._ranges, key=lambda free: (-free.size_bytes, free)):
            if found.size_bytes < min(least_bytes, rest):
                break
            chosen.append((found, min(rest, found.size_bytes)))
            rest -= chosen[-1][1]
            if rest == 0:
                return [self._cut(found, held) for found, held in chosen]
        return None

    def take_whole(self, slab: int, size_bytes: int) -> bool:
        """Take a slab's only range if all ``size_bytes`` of it are free; return whether they were."""
        whole = Range(slab, 0, size_bytes)
        at = bisect_left(self._ranges, whole)
        if at == len(self._ranges) or self._ranges[at] != whole:
            return False
        self._cut(whole, size_bytes)
        return True

    def _cut(self, free: Range, size_bytes: int) -> Range:
        """Take the first ``size_bytes`` of a free range, rounded up to the alignment where it goes on."""
        stop = min(free.stop, free.start + -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        at = bisect_left(self._ranges, free)
        self._ranges[at : at + 1] = [] if stop == free.stop else [Range(free.slab, stop, free.stop)]
        self.total_bytes -= stop - free.start
        return Range(free.slab, free.start, stop)
