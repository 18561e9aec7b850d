"""The simulator against steps worked out by hand."""

from __future__ import annotations

import pytest

from hf_actswap.engine.link import Link
from hf_actswap.engine.windows import Candidate, Decision, Timeline
from hf_actswap.plan import Windows
from tests.engine.window_simulation import Simulated, simulate

# A hook each 10 ms: forward 0 ... 4, the turn at 50, backward 4 ... 0 from 50 on.
TIMELINE = Timeline(
    forward=(*((op, 10.0 * op) for op in range(5)), (5, 50.0)),
    backward=tuple((op, 50.0 + 10.0 * (4 - op)) for op in range(4, -1, -1)),
)
LINK = Link(1.0, 2.0, 1.0, 2.0, latency_ms=0.0)  # 1 byte per ms out, 2 back
KEEP = Decision(False, None, "kept")


def swap(prefetch_ops: int, release_ops: int) -> Decision:
    return Decision(True, Windows(prefetch_ops, release_ops), "")


def one(size_bytes: int, decision: Decision, ready_op: int = 1, consumer_op: int = 1) -> Simulated:
    return simulate([Candidate(size_bytes, ready_op, consumer_op)], [decision], TIMELINE, LINK)


def test_a_hidden_round_trip() -> None:
    """16 bytes: out from 10 to 26, released at 30; issued at 70 (operator 2), read at 80, gone at 90."""
    done = one(16, swap(1, 2))
    assert (done.step_ms, done.forward_end_ms, done.stalls) == (90.0, 50.0, 0)
    assert (done.forward_stall_ms, done.backward_stall_ms) == (0.0, 0.0)
    assert (done.out_finish_ms, done.in_finish_ms) == ((26.0,), (78.0,))
    assert done.memory == ((10.0, 16), (30.0, 0), (70.0, 16), (90.0, 0))
    assert (done.peak_bytes, done.out_in_flight_bytes, done.in_in_flight_bytes) == (16, 16, 16)


def test_a_release_that_is_too_early_stalls_and_shifts_everything_after() -> None:
    """The release at operator 2 (20 ms) waits until 26."""
    done = one(16, swap(1, 1))
    assert (done.forward_stall_ms, done.backward_stall_ms, done.stalls) == (6.0, 0.0, 1)
    assert (done.forward_end_ms, done.step_ms) == (56.0, 96.0)
    assert done.memory == ((10.0, 16), (26.0, 0), (76.0, 16), (96.0, 0))


def test_the_end_of_forward_waits_for_what_is_left() -> None:
    """45 bytes from 10 to 55; 22.5 ms back, issued at 55."""
    done = one(45, swap(9, 99))
    assert (done.forward_stall_ms, done.forward_end_ms, done.out_finish_ms) == (5.0, 55.0, (55.0,))
    assert (done.in_finish_ms, done.backward_stall_ms, done.stalls) == ((77.5,), 0.0, 1)


def test_a_prefetch_without_lead_stalls_for_the_whole_copy() -> None:
    done = one(16, swap(0, 2))
    assert (done.backward_stall_ms, done.stalls, done.step_ms) == (8.0, 1, 98.0)


def test_a_prefetch_point_before_backward_is_its_first_hook() -> None:
    assert one(16, swap(99, 2)).in_finish_ms == (58.0,)


def test_a_point_between_hooks_is_the_last_hook_before_it_in_backward_and_the_first_after_it_in_forward() -> (
    None
):
    timeline = Timeline(
        forward=((0, 0.0), (4, 40.0), (9, 90.0)), backward=((8, 90.0), (4, 130.0), (0, 170.0))
    )
    done = simulate([Candidate(10, 0, 0)], [swap(2, 1)], timeline, LINK)
    assert done.memory[1:3] == ((40.0, 0), (130.0, 10))


def test_copies_queue_in_the_order_of_saving_and_of_reading() -> None:
    """Out: 10 to 22, 22 to 34. Back, both issued at the first hook: what is read first goes first."""
    candidates = [Candidate(12, 1, 1), Candidate(12, 2, 3)]
    done = simulate(candidates, [swap(9, 9), swap(9, 9)], TIMELINE, LINK)
    assert done.out_finish_ms == (22.0, 34.0)
    assert done.in_finish_ms == (62.0, 56.0)
    assert done.stalls == 0
    assert (done.out_in_flight_bytes, done.in_in_flight_bytes) == (24, 24)


def test_at_one_hook_releases_come_before_the_new_copy() -> None:
    """At operator 2 the copy from operator 1 is waited for (26), and only then is the next enqueued."""
    candidates = [Candidate(16, 1, 1), Candidate(4, 2, 2)]
    done = simulate(candidates, [swap(9, 1), swap(9, 9)], TIMELINE, LINK)
    assert done.out_finish_ms == (26.0, 30.0)


def test_at_one_hook_prefetches_come_before_the_read() -> None:
    """At operator 3 the read waits for its own copy, and the next one is enqueued behind it already."""
    candidates = [Candidate(8, 0, 3), Candidate(8, 1, 2)]
    done = simulate(candidates, [swap(0, 9), swap(1, 9)], TIMELINE, LINK)
    assert done.in_finish_ms == (64.0, 68.0)
    assert (done.backward_stall_ms, done.stalls) == (4.0, 1)


def test_what_is_kept_counts_as_memory_from_its_first_save_to_its_last_reader() -> None:
    """Saved at operator 1, read at 3 and last at 1: it leaves at the hook after that."""
    done = one(7, KEEP, ready_op=1, consumer_op=3)
    assert (done.memory, done.peak_bytes) == (((10.0, 7), (90.0, 0)), 7)
    assert (done.out_finish_ms, done.in_finish_ms) == ((None,), (None,))
    assert (done.out_in_flight_bytes, done.in_in_flight_bytes) == (0, 0)


def test_the_peak_is_that_of_the_turn_and_after() -> None:
    """Both are on the device at 20, one of them at the turn, both again from 50 on in turn."""
    candidates = [Candidate(10, 1, 1), Candidate(30, 2, 2)]
    kept_later = simulate(candidates, [swap(1, 2), KEEP], TIMELINE, LINK)
    assert max(size for _, size in kept_later.memory) == 40
    assert kept_later.peak_bytes == 40  # fetched at operator 2, while the other is being read
    assert simulate(candidates, [swap(0, 2), KEEP], TIMELINE, LINK).peak_bytes == 30


def test_a_copy_back_that_nobody_reads_ends_after_the_step() -> None:
    """Operator -1 saved nothing that backward comes by: the last hook (operator 0) issues it all the same."""
    done = one(200, swap(0, 99), ready_op=0, consumer_op=-1)
    assert (done.forward_stall_ms, done.backward_stall_ms, done.step_ms) == (150.0, 0.0, 240.0)
    assert done.in_finish_ms == (340.0,)


def test_what_is_saved_after_the_last_hook_is_copied_at_the_end() -> None:
    done = one(5, swap(0, 3), ready_op=5, consumer_op=4)
    assert (done.out_finish_ms, done.forward_stall_ms) == ((55.0,), 5.0)


def test_latency_is_paid_by_each_copy() -> None:
    slow = Link(1.0, 2.0, 1.0, 2.0, latency_ms=0.5)
    candidates = [Candidate(4, 1, 1), Candidate(4, 1, 1)]
    done = simulate(candidates, [swap(9, 9), swap(9, 9)], TIMELINE, slow)
    assert (done.out_finish_ms, done.in_finish_ms) == ((14.5, 19.0), (52.5, 55.0))


def test_nothing_to_do() -> None:
    done = simulate([], [], TIMELINE, LINK)
    assert (done.step_ms, done.stalls, done.peak_bytes, done.memory) == (90.0, 0, 0, ())


def test_what_does_not_fit_together_is_rejected() -> None:
    with pytest.raises(ValueError, match="1 candidates, 0 decisions"):
        simulate([Candidate(1, 0, 0)], [], TIMELINE, LINK)
    with pytest.raises(ValueError, match="a swap needs windows"):
        simulate([Candidate(1, 0, 0)], [Decision(True, None, "")], TIMELINE, LINK)


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ((), ((0, 1.0),), "hooks in forward and in backward"),
        (((0, 1.0),), (), "hooks in forward and in backward"),
        (((1, 0.0), (1, 1.0), (2, 2.0)), ((0, 3.0),), "operators of a forward must rise"),
        (((2, 0.0), (1, 1.0)), ((0, 3.0),), "operators of a forward must rise"),
        (((1, 0.0), (2, 1.0)), ((1, 3.0), (1, 4.0)), "operators of a backward must fall"),
        (((1, 0.0), (2, 1.0)), ((1, 0.5),), "times of a step must not fall"),
    ],
)
def test_a_timeline_out_of_order_is_rejected(
    forward: tuple[tuple[int, float], ...], backward: tuple[tuple[int, float], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline(forward, backward)
