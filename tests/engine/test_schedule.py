"""The schedule against a naive simulation, over all small worlds, and the reference's timing vectors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement

import pytest

from hf_actswap.engine.schedule import PrefetchOrder, PrefetchRequest, ReleaseQueue
from hf_actswap.plan import Windows

NODES = range(6)


def subsets(nodes: range) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(nodes) + 1):
        yield from combinations(nodes, size)


def fetched_at(hooks: tuple[int, ...], wants: list[PrefetchRequest[str]]) -> dict[str, int]:
    """Run one backward over ``hooks``; return the node at which each item was fetched."""
    order = PrefetchOrder(hooks, wants)
    found: dict[str, int] = {}
    for node in sorted(set(hooks), reverse=True):
        for item in order.due(node):
            assert item not in found, "fetched twice"
            found[item] = node
    return found


def last_hook_in_time(hooks: tuple[int, ...], point: int) -> int:
    """The naive rule: walk down from the top, take the last hook not past the point; else the first."""
    chosen = max(hooks)
    for hook in sorted(hooks, reverse=True):
        if hook >= point:
            chosen = hook
    return chosen


def test_prefetch_starts_at_the_last_hook_in_time_in_every_small_world() -> None:
    worlds = 0
    for hooks in subsets(NODES):
        for consumer in hooks:
            for prefetch in range(len(NODES) + 2):
                found = fetched_at(hooks, [PrefetchRequest("x", consumer, prefetch)])
                expected = last_hook_in_time(hooks, consumer + prefetch)
                assert found == {"x": expected}, (hooks, consumer, prefetch)
                assert found["x"] >= consumer  # never after the consumer
                assert found["x"] >= min(consumer + prefetch, max(hooks))  # never later than asked
                worlds += 1
    assert worlds == 6 * 2**5 * 8


def test_two_wants_do_not_disturb_each_other() -> None:
    for hooks in subsets(NODES):
        for one, two in combinations_with_replacement(hooks, 2):
            for lead in range(4):
                for other_lead in range(4):
                    wants = [PrefetchRequest("one", one, lead), PrefetchRequest("two", two, other_lead)]
                    assert fetched_at(hooks, wants) == {
                        "one": last_hook_in_time(hooks, one + lead),
                        "two": last_hook_in_time(hooks, two + other_lead),
                    }


def test_what_is_needed_first_is_fetched_first_at_one_hook() -> None:
    order = PrefetchOrder(
        [1, 2, 9],
        [PrefetchRequest("late", 1, 20), PrefetchRequest("early", 9, 20), PrefetchRequest("middle", 2, 20)],
    )
    assert order.due(9) == ["early", "middle", "late"]


def test_a_skipped_hook_does_not_lose_its_items() -> None:
    """A branch without gradient is never asked: the next hook takes what was due there."""
    for hooks in subsets(NODES):
        for consumer in hooks:
            for prefetch in range(3):
                for now in (node for node in hooks if node <= consumer):
                    order = PrefetchOrder(hooks, [PrefetchRequest("x", consumer, prefetch)])
                    assert order.due(now) == ["x"]
                    assert order.due(now) == []


def test_a_number_that_rises_starts_the_order_again() -> None:
    wants = [PrefetchRequest("a", 5, 1), PrefetchRequest("b", 3, 0), PrefetchRequest("c", 1, 0)]
    for stop in range(1, 6):
        order = PrefetchOrder([1, 3, 5, 6], wants)
        first = [item for node in (6, 5, 3, 1) if node >= stop for item in order.due(node)]
        second = [item for node in (6, 5, 3, 1) for item in order.due(node)]
        assert first == ["a", "b", "c"][: 3 if stop == 1 else 2 if stop <= 3 else 1]
        if stop < 6:
            assert second == ["a", "b", "c"]


def test_the_same_number_twice_fetches_once() -> None:
    """One node unpacks several tensors."""
    order = PrefetchOrder([4], [PrefetchRequest("x", 4, 0)])
    assert [order.due(4), order.due(4), order.due(3)] == [["x"], [], []]


def test_without_hooks_an_item_is_due_at_its_point() -> None:
    assert PrefetchOrder([1, 2], []).due(1) == []
    assert PrefetchOrder([], [PrefetchRequest("x", 1, 2)]).due(3) == ["x"]


@pytest.mark.parametrize(
    ("vector", "prefetch", "fetched_before", "hidden_by"),
    [("T1", 0, 15, 0), ("T2", 1, 14, 1), ("T4", 14, 1, 14), ("T5", 15, 0, 15), ("T5+", 99, 0, 15)],
)
def test_prefetch_vectors(vector: str, prefetch: int, fetched_before: int, hidden_by: int) -> None:
    """Execution order o0 ... o19, consumer o15: the copy back starts right before operator o(15 - p).

    Backward runs node numbers downwards, so operator o_i is node 19 - i. T4's and T5's floor is the copy out,
    which our forward has always behind it; what is left is the clamp to the first operator.
    """
    node_of = {operator: 19 - operator for operator in range(20)}
    order = PrefetchOrder(node_of.values(), [PrefetchRequest(vector, node_of[15], prefetch)])
    started = [operator for operator in range(20) if order.due(node_of[operator])]
    assert started == [fetched_before]
    assert 15 - started[0] == hidden_by


def released_at(hooks: tuple[int, ...], copied_at: int, release_ops: int) -> int | None:
    """Run one forward; return the hook of the release, ``None`` if it came with the end."""
    queue: ReleaseQueue[str] = ReleaseQueue()
    for hook in hooks:
        if queue.due(hook):
            return hook
        if hook == copied_at:
            queue.add("x", hook, release_ops)
    assert queue.drain() == ["x"]
    assert queue.drain() == []
    return None


def test_release_comes_at_the_first_hook_at_or_after_the_point_in_every_small_world() -> None:
    for hooks in subsets(NODES):
        for copied_at in hooks:
            for release in range(1, len(NODES) + 2):
                later = [hook for hook in hooks if hook > copied_at and hook >= copied_at + release]
                found = released_at(hooks, copied_at, release)
                assert found == (min(later) if later else None), (hooks, copied_at, release)


@pytest.mark.parametrize(
    ("prefetch", "copied_at", "kernels", "released"),
    [(1, 4, 40, 7), (10, 4, 40, 34), (10, 4, 34, None), (10, 4, 35, 34), (99, 0, 40, None)],
)
def test_release_vectors(prefetch: int, copied_at: int, kernels: int, released: int | None) -> None:
    """p = 1: wait after k + 3; p = 10: after k + 30; k + 3p >= N: at the end of the forward.

    Where there is no kernel at its point the reference slides forward to the next one.
    """
    release = Windows.of_prefetch(prefetch).release_ops
    assert released_at(tuple(range(kernels)), copied_at, release) == released


def test_releases_leave_in_order_of_their_points_and_then_of_their_copies() -> None:
    queue: ReleaseQueue[str] = ReleaseQueue()
    for name, copied_at, release in [("d", 3, 9), ("b", 2, 3), ("a", 1, 1), ("c", 5, 0), ("e", 4, 8)]:
        queue.add(name, copied_at, release)
    assert queue.due(1) == []
    assert queue.due(5) == ["a", "b", "c"]
    assert queue.drain() == ["d", "e"]
    assert queue.due(99) == []
