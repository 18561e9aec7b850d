"""Host memory of the engine: what is handed out, what comes back, and how it grows."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_actswap.engine import BlockingTransfer, HostBuffer, HostPool
from hf_actswap.engine.host_pool import ALIGNMENT_BYTES, FreeRanges, Range

MIB = 2**20
UNIT = MIB // 16
"""The smallest piece that the pool resorts to: requests in such units never fail for fragmentation."""


class WatchedSlabs:
    """Ordinary memory; remembers what is out.

    Args:
        fails_at: number of the slab that cannot be had.
        gate: a slab may be allocated each time it is released.
    """

    pinned = False

    def __init__(self, fails_at: int | None = None, gate: threading.Semaphore | None = None) -> None:
        self.out: dict[int, int] = {}
        self.sizes_bytes: list[int] = []
        self.waiting = threading.Event()
        self.on_free: Callable[[], None] = lambda: None
        self.on_allocate: Callable[[], None] = lambda: None
        self._fails_at, self._gate = fails_at, gate

    def allocate(self, size_bytes: int) -> torch.Tensor:
        if self._gate is not None:
            self.waiting.set()
            assert self._gate.acquire(timeout=30)
        if len(self.sizes_bytes) == self._fails_at:
            raise RuntimeError("no more memory")
        self.on_allocate()
        slab = torch.empty(size_bytes, dtype=torch.uint8)
        self.sizes_bytes.append(size_bytes)
        self.out[slab.data_ptr()] = size_bytes
        return slab

    def free(self, slab: torch.Tensor) -> None:
        assert self.out.pop(slab.data_ptr()) == slab.numel()
        self.on_free()


def taken(pool: HostPool, size_bytes: int) -> HostBuffer:
    buffer = pool.take(size_bytes)
    assert buffer is not None
    return buffer


def spans(buffers: list[HostBuffer]) -> list[tuple[int, int]]:
    found = [(piece.data_ptr(), piece.numel()) for buffer in buffers for piece in buffer.pieces]
    return sorted((start, start + size) for start, size in found)


def within_seconds(work: Callable[[], None], seconds: float = 30) -> None:
    """Run ``work`` on a thread: a deadlock fails the test instead of hanging it."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"
    if failures:
        raise failures[0]


class Read:
    """An event: a copy that may still read a block."""

    def __init__(self) -> None:
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True


STEPS = st.lists(st.tuples(st.sampled_from(["take", "take", "give"]), st.integers(1, 100)), max_size=60)


@settings(max_examples=80)
@given(STEPS, st.none() | st.integers(1, 200), st.sampled_from([1, UNIT, MIB, 3 * MIB]))
def test_blocks_never_overlap_and_free_memory_is_usable(
    steps: list[tuple[str, int]], cap_units: int | None, slab_bytes: int
) -> None:
    source, piece_bytes = WatchedSlabs(), 12 * UNIT
    cap = None if cap_units is None else cap_units * UNIT
    pool = HostPool(source, cap, slab_bytes, piece_bytes=piece_bytes)
    out: list[HostBuffer] = []
    peak = 0
    for kind, number in steps:
        used = sum(buffer.size_bytes for buffer in out)
        if kind == "give":
            if out:
                pool.give_back(out.pop(number % len(out)))
        else:
            buffer = pool.take(number * UNIT)
            assert (buffer is None) == (cap is not None and used + number * UNIT > cap)
            if buffer is not None:
                out.append(buffer)
        used = sum(buffer.size_bytes for buffer in out)
        peak = max(peak, used)
        assert (pool.used_bytes, pool.peak_bytes) == (used, peak)
        assert pool.held_bytes == sum(source.out.values())
        assert cap is None or pool.held_bytes <= cap
        for one in out:
            assert sum(piece.numel() for piece in one.pieces) == one.size_bytes
            assert all(0 < piece.numel() <= piece_bytes for piece in one.pieces)
        found = spans(out)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(found))
        slabs = [(start, start + size) for start, size in source.out.items()]
        assert all(any(low <= start and stop <= high for low, high in slabs) for start, stop in found)
    for buffer in out:
        pool.give_back(buffer)
    pool.close()
    assert (pool.used_bytes, pool.held_bytes, source.out) == (0, 0, {})


@given(st.lists(st.integers(0, 5000), max_size=40))
def test_sizes_are_exact(sizes: list[int]) -> None:
    pool = HostPool(WatchedSlabs(), slab_bytes=MIB)
    out = [taken(pool, size) for size in sizes]
    assert [sum(piece.numel() for piece in buffer.pieces) for buffer in out] == sizes
    assert pool.used_bytes == pool.peak_bytes == sum(sizes)
    assert pool.held_bytes == (MIB if any(sizes) else 0)
    assert all(piece.data_ptr() % 64 == 0 for buffer in out for piece in buffer.pieces)


def test_steps_that_repeat_get_the_same_blocks() -> None:
    pool = HostPool(WatchedSlabs(), slab_bytes=4 * MIB)
    sizes = [100, 3 * MIB, MIB, 100, 2 * MIB]
    seen = []
    for _ in range(4):
        out = [taken(pool, size) for size in sizes]
        seen.append([id(buffer) for buffer in out])
        for buffer in reversed(out):
            pool.give_back(buffer)
    assert seen[1] == seen[2] == seen[3]


def test_a_block_of_several_slabs_has_pieces_in_order() -> None:
    source = WatchedSlabs()
    pool = HostPool(source, cap_bytes=6 * MIB, slab_bytes=2 * MIB)
    low = [taken(pool, 2 * MIB) for _ in range(3)]
    for buffer in low:
        pool.give_back(buffer)
    buffer = taken(pool, 5 * MIB + 17)
    assert [piece.numel() for piece in buffer.pieces] == [2 * MIB, 2 * MIB, MIB + 17]
    assert source.sizes_bytes == [2 * MIB] * 3
    assert pool.take(MIB) is None
    assert taken(pool, MIB - 17 - 256).size_bytes == MIB - 17 - 256


def test_a_piece_ends_within_an_element_only_with_the_block() -> None:
    """Catches a block of floats that is put together from slabs of odd sizes."""
    pool = HostPool(WatchedSlabs(), slab_bytes=1)
    for buffer in [taken(pool, 2 * MIB + odd) for odd in (1, 3)]:
        pool.give_back(buffer)
    source = torch.arange(MIB, dtype=torch.float32)
    host = taken(pool, source.nbytes)
    host.hold(source.dtype, source.shape)
    transfer = BlockingTransfer(torch.device("cpu"))
    assert torch.equal(transfer.reload(host, transfer.offload(source, host))[0], source)
    assert pool.held_bytes == 4 * MIB + 4


@pytest.mark.parametrize("piece_bytes", [16, MIB], ids=["pieces", "one piece"])
def test_a_copy_of_what_is_not_contiguous_is_refused(piece_bytes: int) -> None:
    buffer = taken(HostPool(WatchedSlabs(), slab_bytes=1, piece_bytes=piece_bytes), 48)
    buffer.hold(torch.float32, torch.Size([3, 4]))
    with pytest.raises(ValueError, match=r"expected a contiguous tensor, found shape \[3, 4\] with strides"):
        BlockingTransfer(torch.device("cpu")).offload(torch.ones(4, 3).t(), buffer)


def test_pieces_are_about_equally_long() -> None:
    pool = HostPool(WatchedSlabs(), piece_bytes=MIB)
    assert [piece.numel() for piece in taken(pool, 2 * MIB + 2).pieces] == [699136, 699136, 698882]
    assert [piece.numel() for piece in taken(pool, MIB).pieces] == [MIB]


@pytest.mark.parametrize(
    ("slab_bytes", "cap", "request_bytes", "slab"),
    [
        (256 * MIB, None, 5, 256 * MIB),
        (256 * MIB, 7 * MIB, 5, 7 * MIB),
        (MIB, None, 3 * MIB + 1, 4 * MIB),
        (MIB, 3 * MIB + 1, 3 * MIB + 1, 3 * MIB + 1),
        (1, None, 12345, 12345),
    ],
)
def test_sizes_of_slabs(slab_bytes: int, cap: int | None, request_bytes: int, slab: int) -> None:
    source = WatchedSlabs()
    pool = HostPool(source, cap, slab_bytes)
    assert pool.take(request_bytes) is not None
    assert source.sizes_bytes == [slab]


def test_cutting_up_a_block_waits_for_its_last_reader() -> None:
    pool = HostPool(WatchedSlabs(), cap_bytes=2 * MIB)
    buffer, read = taken(pool, 2 * MIB), Read()
    buffer.last_use = read
    pool.give_back(buffer)
    assert taken(pool, 2 * MIB).last_use is read  # whole: the next writer's stream waits
    assert not read.waited
    pool.give_back(buffer)
    assert taken(pool, MIB).last_use is None
    assert read.waited


def test_a_slab_beyond_the_room_of_the_machine_is_rejected() -> None:
    source, room = WatchedSlabs(), [3 * MIB]
    pool = HostPool(source, slab_bytes=4 * MIB, room=lambda: room[0])
    first = taken(pool, MIB)
    assert source.sizes_bytes == [3 * MIB]
    room[0] = 0
    assert pool.take(3 * MIB) is None
    assert taken(pool, 2 * MIB).size_bytes == 2 * MIB
    room[0] = -5
    assert pool.take(MIB) is None
    pool.give_back(first)
    assert pool.take(MIB) is not None
    room[0] = MIB
    assert pool.take(2 * MIB) is None
    assert source.sizes_bytes == [3 * MIB]
    assert pool.take(MIB) is not None


def test_memory_that_cannot_be_had_is_rejected_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(WatchedSlabs(fails_at=1), slab_bytes=MIB)
    with caplog.at_level(logging.WARNING):
        assert [pool.take(MIB) is not None for _ in range(3)] == [True, False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "No more host memory (no more memory): what does not fit stays on the device."
    ]


def test_after_close_slabs_go_with_their_last_block() -> None:
    source = WatchedSlabs()
    pool = HostPool(source, slab_bytes=2 * MIB)
    first, second, other = (taken(pool, MIB) for _ in range(3))
    pool.give_back(other)
    pool.close()
    pool.close()
    assert (pool.held_bytes, pool.used_bytes) == (2 * MIB, 2 * MIB)
    assert pool.take(10) is None
    pool.reserve(8 * MIB)
    pool.give_back(first)
    assert pool.held_bytes == 2 * MIB
    pool.give_back(second)
    assert (pool.held_bytes, pool.used_bytes, source.out) == (0, 0, {})


def test_a_block_given_back_while_another_is_freed_is_freed_too() -> None:
    source = WatchedSlabs()
    pool = HostPool(source, slab_bytes=1)
    first, second = taken(pool, 1000), taken(pool, 2000)
    waiting = [second]
    source.on_free = lambda: pool.give_back(waiting.pop()) if waiting else None
    pool.close()
    within_seconds(lambda: pool.give_back(first))
    assert (pool.held_bytes, source.out) == (0, {})


def test_a_pool_that_is_dropped_frees_its_slabs() -> None:
    source = WatchedSlabs()
    pool = HostPool(source)
    pool.give_back(taken(pool, 10))
    del pool
    gc.collect()
    assert source.out == {}


def test_the_garbage_collector_may_give_back_inside_take() -> None:
    source = WatchedSlabs()
    pool = HostPool(source, slab_bytes=1)

    class Group:
        def __init__(self) -> None:
            self.buffer, self.itself = taken(pool, 1000), self

        def __del__(self) -> None:
            pool.give_back(self.buffer)
            events.append("given back")

    def collect() -> None:
        gc.collect()
        events.append("collected")

    events: list[str] = []
    gc.disable()
    try:
        Group()
        source.on_allocate = collect  # called with the pool's lock held
        within_seconds(lambda: pool.give_back(taken(pool, 3000)))
    finally:
        gc.enable()
    assert events == ["given back", "collected"]
    assert pool.used_bytes == 0


def test_threads_do_not_meet_in_one_block() -> None:
    source = WatchedSlabs()
    pool = HostPool(source, cap_bytes=4 * MIB, slab_bytes=MIB, piece_bytes=MIB // 8)
    wrong: list[int] = []

    def hammer(number: int) -> None:
        handed: list[HostBuffer] = []
        for turn in range(150):
            buffer = pool.take(1 + (turn * 7919 * number) % (MIB // 2))
            if buffer is not None:
                for piece in buffer.pieces:
                    piece.fill_(number)
                handed.append(buffer)
            if len(handed) > 3 or buffer is None:
                while len(handed) > 1:
                    oldest = handed.pop(0)
                    if any(bool((piece != number).any()) for piece in oldest.pieces):
                        wrong.append(number)
                    pool.give_back(oldest)
        for rest in handed:
            pool.give_back(rest)

    threads = [threading.Thread(target=hammer, args=(number,), daemon=True) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert pool.used_bytes == 0
    assert MIB < pool.held_bytes <= 4 * MIB
    pool.close()
    assert source.out == {}


def test_a_reservation_reports_and_stops_at_its_goal() -> None:
    source, reports = WatchedSlabs(), list[tuple[int, int]]()
    pool = HostPool(source, slab_bytes=4 * MIB, progress=lambda done, total: reports.append((done, total)))
    pool.reserve(9 * MIB)
    pool.wait_reserved()
    assert source.sizes_bytes == [4 * MIB, 4 * MIB, 2 * MIB]
    assert reports == [(4 * MIB, 9 * MIB), (8 * MIB, 9 * MIB), (9 * MIB, 9 * MIB)]
    pool.reserve(10 * MIB)  # is there already
    pool.wait_reserved()
    assert len(source.sizes_bytes) == 3
    assert [piece.numel() for piece in taken(pool, 10 * MIB).pieces] == [4 * MIB, 4 * MIB, 2 * MIB]
    assert pool.held_bytes == 10 * MIB


@pytest.mark.parametrize("first", ["named", "set aside"])
def test_what_is_set_aside_comes_on_top_of_what_is_named(first: str) -> None:
    gate = threading.Semaphore(0)
    source = WatchedSlabs(gate=gate)
    pool = HostPool(source, slab_bytes=2 * MIB)
    calls = {"named": lambda: pool.reserve(4 * MIB), "set aside": lambda: pool.set_aside(6 * MIB)}
    calls.pop(first)()
    assert source.waiting.wait(30)  # the reservation of the first is running when the second comes
    for later in calls.values():
        later()
    for _ in range(5):
        gate.release()
    pool.wait_reserved()
    assert pool.held_bytes == 10 * MIB
    pool.set_aside(0)  # what is there stays, and serves others
    pool.reserve(10 * MIB)
    pool.wait_reserved()
    assert pool.held_bytes == 10 * MIB


@pytest.mark.parametrize(("cap", "room"), [(3 * MIB, 100 * MIB), (None, 0)])
def test_a_reservation_ends_early_without_room(cap: int | None, room: int) -> None:
    source, reports = WatchedSlabs(), list[tuple[int, int]]()
    pool = HostPool(
        source,
        cap,
        2 * MIB,
        progress=lambda done, total: reports.append((done, total)),
        room=lambda: 3 * MIB - pool.held_bytes if room == 0 else room,
    )
    pool.reserve(9 * MIB)
    pool.wait_reserved()
    assert pool.held_bytes == 3 * MIB
    assert reports[-1] == (3 * MIB, 3 * MIB)


def test_to_set_nothing_aside_begins_no_reservation() -> None:
    """One that ended early for lack of room is not taken up again when the states are brought back."""
    room = [3 * MIB]
    pool = HostPool(WatchedSlabs(), slab_bytes=MIB, room=lambda: room[0] - pool.held_bytes)
    pool.set_aside(2 * MIB)
    pool.reserve(4 * MIB)
    pool.wait_reserved()
    room[0] = 100 * MIB
    pool.set_aside(0)
    pool.wait_reserved()
    assert pool.held_bytes == 3 * MIB


def test_take_waits_for_the_reserving_thread_instead_of_allocating_beside_it() -> None:
    gate = threading.Semaphore(0)
    source = WatchedSlabs(gate=gate)
    pool = HostPool(source, slab_bytes=2 * MIB)
    pool.reserve(4 * MIB)
    assert source.waiting.wait(30)
    out: list[HostBuffer] = []
    taker = threading.Thread(target=lambda: out.append(taken(pool, 3 * MIB)), daemon=True)
    taker.start()
    gate.release()
    taker.join(0.2)
    assert out == []  # one slab is not enough
    gate.release()
    taker.join(30)
    pool.wait_reserved()
    assert [buffer.size_bytes for buffer in out] == [3 * MIB]
    assert source.sizes_bytes == [2 * MIB, 2 * MIB]


def test_a_failed_reservation_is_raised_where_it_is_waited_for() -> None:
    reports: list[tuple[int, int]] = []
    source = WatchedSlabs(fails_at=1)
    pool = HostPool(source, slab_bytes=MIB, progress=lambda done, total: reports.append((done, total)))
    pool.reserve(4 * MIB)
    with pytest.raises(RuntimeError, match="no more memory"):
        pool.wait_reserved()
    pool.wait_reserved()  # raised once
    assert reports == [(MIB, 4 * MIB), (MIB, MIB)]
    assert taken(pool, MIB).size_bytes == MIB


def test_close_stops_the_reserving_thread_and_whoever_waits_for_it() -> None:
    gate = threading.Semaphore(0)
    source = WatchedSlabs(gate=gate)
    pool = HostPool(source, slab_bytes=MIB)
    pool.reserve(100 * MIB)
    assert source.waiting.wait(30)
    got: list[HostBuffer | None] = []
    taker = threading.Thread(target=lambda: got.append(pool.take(MIB)), daemon=True)
    taker.start()
    closer = threading.Thread(target=pool.close, daemon=True)
    closer.start()
    taker.join(30)
    assert got == [None]
    gate.release()  # the slab that was under way
    closer.join(30)
    pool.wait_reserved()
    assert (len(source.sizes_bytes), source.out, pool.held_bytes) == (1, {}, 0)


def test_a_process_that_ends_while_memory_is_reserved_waits_for_one_slab() -> None:
    script = f"""
import time
import torch
from hf_actswap.engine.host_pool import HostPool

class Slow:
    def allocate(self, size_bytes):
        time.sleep(0.2)
        return torch.empty(size_bytes, dtype=torch.uint8)

def progress(done_bytes, goal_bytes):
    print("ended" if done_bytes == goal_bytes else "reserving", flush=True)

pool = HostPool(Slow(), None, {MIB}, progress)
pool.reserve(10_000 * {MIB})
time.sleep(0.5)
raise SystemExit("the training failed")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr.strip()) == (1, "the training failed")
    assert set(run.stdout.split()) == {"reserving", "ended"}


def test_a_second_reservation_raises_the_goal() -> None:
    gate = threading.Semaphore(0)
    source = WatchedSlabs(gate=gate)
    pool = HostPool(source, slab_bytes=2 * MIB)
    pool.reserve(2 * MIB)
    assert source.waiting.wait(30)
    pool.reserve(6 * MIB)
    for _ in range(3):
        gate.release()
    pool.wait_reserved()
    assert pool.held_bytes == 6 * MIB


def test_the_time_of_allocating_is_counted_and_that_of_using_again_is_not() -> None:
    source = WatchedSlabs()
    source.on_allocate = lambda: time.sleep(0.02)
    pool = HostPool(source, slab_bytes=MIB)
    pool.reserve(2 * MIB)
    pool.wait_reserved()
    reserved_ms = pool.allocating_ms
    assert reserved_ms >= 40
    buffers = [taken(pool, MIB) for _ in range(2)]
    assert pool.allocating_ms == reserved_ms
    taken(pool, MIB)  # the pool grows
    assert pool.allocating_ms >= reserved_ms + 20
    grown_ms = pool.allocating_ms
    pool.give_back(buffers[0])
    taken(pool, MIB)
    assert pool.allocating_ms == grown_ms


# The free list against a map of single units.

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
