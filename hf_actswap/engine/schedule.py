"""When tensors are released and prefetched, in operators: arithmetic over node numbers, without tensors.

One operator is one autograd node (`autograd_state`). The engine gets control only in hooks: in forward each
time a tensor is packed, in backward each time one is unpacked. So an action happens at the *first* hook at
or after a release point, and at the *last* hook at or before a prefetch point (never later than asked).

::

    forward   node k: copy out starts          node >= k + release_ops: wait for it, release
    backward  nodes run downwards: ... c+p: copy back starts ... c: first consumer

The reference's rules and clamps: `docs/reference.md`, "Windows".
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

NEVER = 1 << 62


class ReleaseQueue(Generic[Item]):
    """Copies out whose device memory has not been released yet."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Item]] = []
        self._count = 0
        self.next_at = NEVER
        """Node at which the next release is due. It is read at each saved tensor, so kept up to date here."""

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, item: Item, copied_at: int, release_ops: int) -> None:
        """Release ``item`` at the first hook at or after node ``copied_at + release_ops``."""
        heapq.heappush(self._heap, (copied_at + release_ops, self._count, item))
        self._count += 1
        self.next_at = self._heap[0][0]

    def due(self, now: int) -> list[Item]:
        """Take out what is due at a hook at node ``now``, earliest first."""
        items = []
        while self._heap and self._heap[0][0] <= now:
            items.append(heapq.heappop(self._heap)[2])
        self.next_at = self._heap[0][0] if self._heap else NEVER
        return items

    def drain(self) -> list[Item]:
        """Take out all items, because the forward has ended (the reference clips to the last operator)."""
        items = [item for _, _, item in sorted(self._heap, key=lambda entry: entry[:2])]
        self._heap.clear()
        self.next_at = NEVER
        return items


class PrefetchRequest(NamedTuple, Generic[Item]):
    """A tensor that backward will need.

    Args:
        item: the object to fetch.
        consumer: number of the first node that needs it in backward, which is the highest.
        prefetch_ops: how many operators before that node the fetch starts.
    """

    item: Item
    consumer: int
    prefetch_ops: int


class PrefetchOrder(Generic[Item]):
    """Says which items to fetch at which hook of backward.

    Args:
        hooks: numbers of the nodes at which backward will call us, in any order.
        wants: tensors to fetch. A prefetch point before the first hook of backward is moved to that hook.
    """

    def __init__(self, hooks: Iterable[int], wants: Iterable[PrefetchRequest[Item]]) -> None:
        points = sorted(set(hooks))
        triggers = []
        for item, consumer, prefetch_ops in wants:
            point = consumer + prefetch_ops
            index = bisect_left(points, point)
            # The last hook at or before the prefetch point in backward: the lowest number not below it.
            at = points[index] if index < len(points) else points[-1] if points else point
            triggers.append((at, consumer, item))
        triggers.sort(key=itemgetter(0, 1), reverse=True)  # stable: equal ones stay in order
        self._items = [item for _, _, item in triggers]
        self._at = [*(at for at, _, _ in triggers), -NEVER]
        self._next = 0
        self._last = NEVER

    def __bool__(self) -> bool:
        return bool(self._items)

    def due(self, now: int) -> list[Item]:
        """Return what to start fetching at a hook at node ``now``.

        Numbers fall during a backward. A number that rises means that another backward has begun over the
        same graph (``retain_graph``), and the order starts again.
        """
        if now > self._last:
            self._next = 0
        self._last = now
        start = stop = self._next
        while self._at[stop] >= now:
            stop += 1
        self._next = stop
        return self._items[start:stop]
