"""The free list against a map of single units."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hf_actswap.engine.host_pool import ALIGNMENT_BYTES, FreeRanges, Range

SLABS = {0: 16 * ALIGNMENT_BYTES, 1: 8 * ALIGNMENT_BYTES + 100}


def bytes_of(ranges: list[Range]) -> set[tuple[int, int]]:
    """Every byte, in steps of 4, which divide all bounds."""
    return {(found.slab, at) for found in ranges for at in range(found.start, found.stop, 4)}


def test_neighbours_grow_together_and_slabs_do_not() -> None:
    free = FreeRanges()
    for added in (Range(0, 512, 768), Range(1, 0, 256), Range(0, 0, 256), Range(0, 256, 512)):
        free.add(added)
    assert free.ranges == [Range(0, 0, 768), Range(1, 0, 256)]
    assert free.total_bytes == 1024


def test_one_long_enough_range_is_preferred_to_several() -> None:
    free = FreeRanges()
    for added in (Range(0, 0, 256), Range(0, 512, 1536), Range(1, 0, 2048)):
        free.add(added)
    assert free.take(1000, 256) == [Range(0, 512, 1536)]
    assert free.take(2048 + 200, 256) == [Range(1, 0, 2048), Range(0, 0, 256)]
    assert free.ranges == []


def test_short_ranges_are_left_alone_unless_they_hold_the_rest() -> None:
    free = FreeRanges()
    free.add(Range(0, 0, 1024))
    free.add(Range(1, 0, 256))
    assert free.take(1280, 512) == [Range(0, 0, 1024), Range(1, 0, 256)]
    free.add(Range(0, 0, 512))
    free.add(Range(0, 768, 1024))
    free.add(Range(1, 0, 256))
    assert free.take(1024, 512) is None
    assert free.total_bytes == 1024


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * ALIGNMENT_BYTES // 4), st.integers(0, 9))))
def test_what_is_taken_is_free_no_more_and_all_comes_back(steps: list[tuple[bool, int, int]]) -> None:
    free, out = FreeRanges(), list[list[Range]]()
    for slab, size_bytes in SLABS.items():
        free.add(Range(slab, 0, size_bytes))
    for gives, quarter, which in steps:
        before = bytes_of(free.ranges)
        if gives and out:
            given_back = out.pop(which % len(out))
            for one in given_back:
                free.add(one)
            assert bytes_of(free.ranges) == before | bytes_of(given_back)
        else:
            taken = free.take(4 * quarter, ALIGNMENT_BYTES)
            if taken is None:
                assert 4 * quarter > free.total_bytes - 100  # the odd end of slab 1 is under the least
                continue
            assert 0 <= sum(one.size_bytes for one in taken) - 4 * quarter < ALIGNMENT_BYTES
            assert all(one.start % ALIGNMENT_BYTES == 0 for one in taken)
            assert bytes_of(taken) <= before
            assert bytes_of(free.ranges) == before - bytes_of(taken)
            out.append(taken)
        assert all(a.slab < b.slab or a.stop < b.start for a, b in pairwise(free.ranges))
        assert free.total_bytes == sum(one.size_bytes for one in free.ranges)
    for taken in out:
        for one in taken:
            free.add(one)
    assert free.ranges == [Range(slab, 0, size) for slab, size in SLABS.items()]
    assert all(free.take_whole(slab, size) for slab, size in SLABS.items())
    assert not free.take_whole(0, SLABS[0])
