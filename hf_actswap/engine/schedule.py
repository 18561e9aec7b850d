"""When tensors are released and prefetched, in operators: arithmetic over node numbers, without tensors.

One operator is one autograd node (`autograd_state`). The engine gets control only in hooks: in forward each
time a tensor is packed, in backward each time one is unpacked. So an action happens at the *first* hook at
or after a release point, and at the *last* hook at or before a prefetch point (never later than asked).

::

    forward   node k: copy out starts          node >= k + release_ops: wait for it, release
    backward  nodes run downwards: ... c+p: copy back starts ... c: first consumer

The reference's rules and clamps: `docs/reference.md`, "Windows".

Operators of one forward: autograd's node numbers, with compiled regions counted as their eager layers.

A compiled region is one node, or a few. The layer that was compiled has about 80, and a window that was
written or measured for it counts those. So at a compiled region the clock jumps ahead by the nodes that the
eager layer would have made. All that the region saves counts as saved at its last operator, the first one
that backward reaches. A layer that is recomputed whole builds its nodes as usual, but backward needs
everything of it at once, so its nodes are counted as one (`checkpoint_inputs`).

The backward of one forward. Autograd asks it for each saved tensor; then it starts copies that are due.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from .autograd_state import next_node_number, packing_node_number, running_node_number
from .tickets import Ticket, restore

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


class OperatorClock:
    """Turns node numbers into operators. Shared by a forward, which writes, and its backward, which reads."""

    __slots__ = (
        "_before",
        "_entered",
        "_gathered",
        "_last",
        "_nodes",
        "_shifts",
        "_starts",
        "jumps",
        "shift",
    )

    def __init__(self) -> None:
        self.shift = self._before = self._entered = self._nodes = 0
        self._starts: list[int] = []
        self._shifts: list[int] = []
        self._gathered: list[int] = []
        self._last: list[int] = []
        self.jumps = False
        """Whether some operator differs from its node's number; if not, `operator` need not be called."""

    def next_node(self) -> int:
        """Return the number that the next node will get."""
        return next_node_number()

    def gather(self, first_node: int) -> int:
        """Count all nodes from ``first_node`` to the last one built as the last one; return its operator."""
        last = packing_node_number()
        if last >= first_node:
            self._gathered.append(first_node)
            self._last.append(last)
            self.jumps = True
        return last + self.shift

    def now(self) -> int:
        """Return the operator that is being built in forward."""
        return packing_node_number() + self.shift

    def enter_compiled(self, nodes: int) -> None:
        """Start a compiled region that counts as ``nodes`` eager nodes (0: unknown; its own are counted)."""
        self._entered, self._before, self._nodes = packing_node_number() + 1, self.shift, nodes
        if nodes:
            self._jump(self._entered, self.shift + nodes - 1)

    def leave_compiled(self) -> None:
        """End the compiled region: however many nodes it made, it counts as the ``nodes`` of its start."""
        made = packing_node_number() + 1 - self._entered
        if self._nodes and made:
            self._jump(packing_node_number() + 1, self._before + self._nodes - made)
        elif self._nodes:
            self._jump(self._entered, self._before)
        self._nodes = 0

    def operator(self, node: int) -> int:
        """Return the operator of a node that this forward made."""
        if self._last:
            at = bisect_left(self._last, node)
            if at < len(self._last) and self._gathered[at] <= node:
                node = self._last[at]
        if not self._starts:
            return node
        at = bisect_right(self._starts, node)
        return node + (self._shifts[at - 1] if at else 0)

    def _jump(self, node: int, shift: int) -> None:
        self._starts.append(node)
        self._shifts.append(shift)
        self.shift, self.jumps = shift, True


class Fetchable(Protocol):
    """Something on the host that backward will need on the device."""

    def fetch(self) -> None:
        """Start the copy back."""


Reference = Callable[[], Fetchable | None]
"""A weak reference: returns ``None`` when the object is gone."""


class Backward:
    """Gives autograd the saved tensors of one forward, and starts the copies back in time.

    Autograd's graph holds this object through the unpack hook. References to swapped storages are weak: only
    tickets keep them alive.
    """

    def __init__(self) -> None:
        self.clock = OperatorClock()
        self._order: PrefetchOrder[Reference] | None = None
        self._watchers: tuple[Callable[[int], object], ...] = ()
        self._idle = True

    def watch(self, watcher: Callable[[int], object]) -> None:
        """Tell ``watcher`` the operator at each hook."""
        self._watchers, self._idle = (*self._watchers, watcher), False

    def schedule(self, order: PrefetchOrder[Reference]) -> None:
        """Set what to prefetch and when, after the forward has ended."""
        self._order, self._idle = order, False

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """Return a saved tensor to a node of this graph, after starting the copies that are due by now."""
        if not self._idle:
            self._reached()
        if not isinstance(ticket, tuple):
            return ticket.restore()
        if ticket[0]._version == ticket[1]:
            return ticket[0]  # most tickets: calling `restore` would cost as much as all else here
        return restore(ticket)

    def _reached(self) -> None:
        node = running_node_number()
        if node is None:
            return
        op = self.clock.operator(node) if self.clock.jumps else node
        for watcher in self._watchers:
            watcher(op)
        if self._order is not None:
            for reference in self._order.due(op):
                waiting = reference()
                if waiting is not None:
                    waiting.fetch()
