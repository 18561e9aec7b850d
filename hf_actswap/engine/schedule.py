"""When tensors are released and prefetched, in operators: arithmetic over node numbers, without tensors.

One operator is one autograd node (`autograd_state`). The engine gets control only in hooks: in forward each
time a tensor is packed, in backward each time one is unpacked. So an action happens at the *first* hook at
or after a release point, and at the *last* hook at or before a prefetch point (never later than asked).

::

    forward   node k: copy out starts          node >= k + release_ops: wait for it, release
    backward  nodes run downwards: ... c+p: copy back starts ... c: first consumer

The reference's rules and clamps: `docs/reference.md`, "Windows".

**Operators that are no nodes** (`OperatorClock`). A compiled region is one node, or a few, where the eager
layer has about 80, and a window that was written or measured for the layer counts those. So at a compiled
region the clock jumps ahead by the nodes that the eager layer would have made. All that the region saves
counts as saved at its last operator, the first one that backward reaches. A layer that is recomputed whole
builds its nodes as usual, but backward needs everything of it at once, so its nodes are counted as one
(`swapped_storages`).

**Windows that reach into other passes, on a stage of a pipeline** (`PassOrder`). A pass is the forward or the
backward of one micro-batch through one chunk of layers. Without a known order of passes, a forward releases
everything by its end, and copies back start with its backward. On a stage of a pipeline the schedule fixes
which passes of other micro-batches run between the two. Windows then count the operators of all these
passes, in the order in which they run::

    forward 3        | backward 1 | forward 4 | backward 2        | forward 5           | backward 3
    copy out ... release_ops ... release                      copy back ... prefetch_ops ... read

A release or copy that is due in a pass happens at the first hook at or after its point, or else at the first
hook of the next pass. A pass is assumed to have as many operators as the latest forward of the same chunk;
the first forward of a chunk releases at its end.

A window reaches at most two thirds of a pass (`REACH`). So of all micro-batches in flight, two thirds of one
are not yet released and two thirds of one are copied back early, apart from the distance between hooks: at
most 1.5 are on the device, however large the windows are and however many passes run between. If one pass
runs between, its middle separates releases from copies back. If a backward follows its forward directly, as
on the last stage of 1F1B, nothing differs from an unknown order.

Why a wrong order costs time but never changes a result:

* **The right micro-batch.** The order only decides when a tensor moves. What moves is a `SwapGroup` with its
  own host block, and only autograd's tickets decide which group a backward reads.
* **Release, then copy back.** For each group the release is due first. `SwapGroup.fetch` does nothing as long
  as the device has the data, and a release waits for the copy out, so no copy back reads an unfinished host
  block.
* **Late copies** are started by `Backward`, as without an order; starting a copy twice does nothing.
* **Lifetimes.** Groups are referred to weakly. One whose graph dies between two passes waits for its copies.
* **Streams.** Release and copy back are requested during another micro-batch's pass. `StreamTransfer` takes
  the current stream then, and orders copies as always: all streams that ever requested copies wait for a copy
  out, the copy back waits for the stream whose memory it fills, and its reader waits for the copy.
* **Threads.** Passes of a stage run one after another, also where backward has a thread of its own.
"""

from __future__ import annotations

import heapq
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

import torch

from .autograd_state import packing_node_number, running_node_number
from .tickets import SwapGroup, Ticket, restore

Item = TypeVar("Item")

NEVER = 1 << 62


class ReleaseQueue(Generic[Item]):
    """Copies out whose device memory has not been released yet."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Item]] = []
        self._count = 0
        self.next_at = NEVER
        """Node at which the next release is due. It is read at each saved tensor, so kept up to date here."""

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
    """A tensor to fetch for backward, ``prefetch_ops`` operators before its ``consumer``.

    The consumer is the first node that needs it in backward: the one with the highest number.
    """

    item: Item
    consumer: int
    prefetch_ops: int


class PrefetchOrder(Generic[Item]):
    """Says which items to fetch at which hook of backward.

    Args:
        hooks: numbers of the nodes at which backward will call us, in any order.
        wants: tensors to fetch; those due before the first hook are fetched at that hook.
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

    def __init__(self) -> None:
        self.shift = self._before = self._entered = self._nodes = 0
        self._starts: list[int] = []
        self._shifts: list[int] = []
        self._gathered: list[int] = []
        self._last: list[int] = []
        self.jumps = False
        """Whether some operator differs from its node's number; if none does, `operator` is not called."""

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


Reference = weakref.ref[SwapGroup]


class Backward:
    """Gives autograd the saved tensors of one forward, and starts the copies back in time.

    Autograd's graph holds this object through the unpack hook, so it refers to swapped storages weakly.
    """

    def __init__(self) -> None:
        self.clock = OperatorClock()
        self._order: PrefetchOrder[Reference] | None = None
        self._watchers: tuple[Callable[[int], object], ...] = ()
        self._idle = True

    def watch(self, watcher: Callable[[int], object]) -> None:
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


REACH = 2 / 3
"""The longest window, as a fraction of the operators of a pass."""

Point = tuple[int, int]
"""A point in the step: index of a pass in the order, and how many of its operators have run."""


class Pass(NamedTuple):
    """A forward or a backward of one micro-batch of the step through one chunk of the layers."""

    chunk: int
    micro_batch: int
    is_backward: bool


class PassOrder:
    """The order of passes of a step on one stage, and the releases and copies back that are due in them.

    The pipeline calls `begin`, `forward_follows` and `end`; the engine calls the other methods. ``running``
    is the latest forward.
    """

    def __init__(self) -> None:
        self._order: tuple[Pass, ...] = ()
        self._place: dict[Pass, int] = {}
        self._following: Pass | None = None
        self.running: Pass | None = None
        self._listener: weakref.WeakMethod[Callable[[], None]] | None = None
        self._lengths: dict[int, int] = {}
        self._due: list[tuple[Point, int, Reference, bool]] = []
        self._count = 0

    def begin(self, order: Sequence[Pass] = ()) -> None:
        """Start a step with these passes; empty: not known, and no window leaves its pass."""
        self.end()
        self._order = tuple(order)
        self._place = {one: index for index, one in enumerate(self._order)}
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener()

    def end(self) -> None:
        """End the step, also after an exception: no release or copy is due any more."""
        self._order, self._place, self._following = (), {}, None
        self._due.clear()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener``, a method that is referred to weakly, at the start of each step."""
        self._listener = weakref.WeakMethod(listener)

    def forward_follows(self, chunk: int, micro_batch: int) -> None:
        """Note that the next call of the model is the forward of this micro-batch through this chunk."""
        self._following = Pass(chunk, micro_batch, False)

    def releases(self, first_op: int) -> ReleaseQueue[Reference]:
        """Return the queue of releases for a forward that starts, by the number of its first operator."""
        self.running = one = self._following
        self._following = None
        index = -1 if one is None else self._place.get(one, -1)
        if index < 0 or self._backward_of(index) < index:
            return ReleaseQueue()
        return CrossingReleases(self, index, first_op)

    def forward_ended(
        self, queue: CrossingReleases, swapped: Iterable[Reference], backward: Backward
    ) -> list[Reference]:
        """At the end of a forward, schedule its remaining releases and its copies back in later passes.

        Returns what the caller releases now: all that is left, if the backward follows directly or if the
        length of the chunk's forward was not known before.

        Args:
            queue: releases of the forward.
            swapped: everything that it has swapped.
            backward: its backward.
        """
        last_op, back = backward.clock.now(), self._backward_of(queue.index)
        self._lengths[self._order[queue.index].chunk] = max(last_op + 1 - queue.first_op, 1)
        backward.watch(lambda op: self.run_due((back, last_op - op)))
        if back == queue.index + 1:
            return queue.drain()
        released = queue.drain() if queue.most_ops == NEVER else []
        most_ops = self.most_ops(queue.index)
        latest, earliest = (back, 0), (back - 1, 0)
        if back == queue.index + 2:
            latest = earliest = (back - 1, self._length(back - 1) // 2)
        for due_op, reference in queue.left():
            self._add(min(self._point(queue.index, due_op - queue.first_op), latest), reference, True)
        for reference in swapped:
            if (group := reference()) is not None:
                group.prefetch_ops = min(group.prefetch_ops, most_ops)
                ahead_ops = group.last_use + group.prefetch_ops - last_op
                if ahead_ops > 0:
                    self._add(max(self._point(back, -ahead_ops), earliest), reference, False)
        return released

    def operators(self, chunk: int) -> int | None:
        """Return how many operators a chunk's latest forward in an order had; ``None``: there was none."""
        return self._lengths.get(chunk)

    def most_in_flight(self) -> int:
        """Return the most forwards of a step whose backwards have not begun; 1 if the order is not known."""
        return max(accumulate(-1 if one.is_backward else 1 for one in self._order), default=1)

    def neighbours(self, chunk: int) -> tuple[bool, bool]:
        """Return whether, for most micro-batches of a chunk, another's backward follows the forward, and
        whether another's forward comes before the backward.

        There its copies have their direction of the link to themselves; a forward after it has copies out.
        """
        after, before, half = 0, 0, 0.0
        for index, one in enumerate(self._order):
            back = self._backward_of(index) if one.chunk == chunk and not one.is_backward else -1
            half += 0.5 if back > index else 0
            if back > index + 1:
                after += self._order[index + 1].is_backward
                before += not self._order[back - 1].is_backward
        return after > half, before > half

    def most_ops(self, index: int) -> int:
        """Return the longest window, in operators, of the forward with this index in the order.

        `NEVER` (no limit) if its backward follows directly, or no forward of its chunk has ended yet.
        """
        length = self._lengths.get(self._order[index].chunk)
        return NEVER if length is None or self._backward_of(index) == index + 1 else int(REACH * length)

    def run_due(self, now: Point) -> int:
        """Run the releases and copies that are due; return the operator of this pass at which the next is."""
        while self._due and self._due[0][0] <= now:
            _, _, reference, is_release = heapq.heappop(self._due)
            group = reference()
            if group is not None:
                group.release() if is_release else group.fetch()
        return self._due[0][0][1] if self._due and self._due[0][0][0] == now[0] else NEVER

    def _backward_of(self, index: int) -> int:
        """Return the index of a forward's backward in the order; -1: it has none."""
        return self._place.get(self._order[index]._replace(is_backward=True), -1)

    def _add(self, point: Point, reference: Reference, is_release: bool) -> None:
        heapq.heappush(self._due, (point, self._count, reference, is_release))
        self._count += 1

    def _point(self, index: int, ops: int) -> Point:
        """Return the point ``ops`` operators after a pass starts, or before; one pass away at most."""
        if ops < 0:
            return index - 1, max(ops + self._length(index - 1), 0)
        length = self._length(index)
        return (index, ops) if ops < length else (index + 1, ops - length)

    def _length(self, index: int) -> int:
        """Return the operators of a pass; for a chunk that has run no forward yet, the most of any chunk."""
        return self._lengths.get(self._order[index].chunk, max(self._lengths.values()))


class CrossingReleases(ReleaseQueue[Reference]):
    """Releases of one forward; its hooks also run what earlier forwards have scheduled for this pass."""

    def __init__(self, passes: PassOrder, index: int, first_op: int) -> None:
        super().__init__()
        self._passes, self.index, self.first_op = passes, index, first_op
        self.most_ops = passes.most_ops(index)
        self.next_at = self._others_at = first_op

    def add(self, item: Reference, copied_at: int, release_ops: int) -> None:
        """Add an item as `ReleaseQueue.add` does, with a window of `most_ops` operators at most."""
        super().add(item, copied_at, min(release_ops, self.most_ops))
        self.next_at = min(self.next_at, self._others_at)

    def due(self, now: int) -> list[Reference]:
        """Return this forward's items that are due, after running what earlier forwards have scheduled."""
        self._others_at = self.first_op + self._passes.run_due((self.index, now - self.first_op))
        items = super().due(now)
        self.next_at = min(self.next_at, self._others_at)
        return items

    def left(self) -> list[tuple[int, Reference]]:
        """Return the operator at which each item that is left is due, and the item."""
        return [(due_op, item) for due_op, _, item in self._heap]
