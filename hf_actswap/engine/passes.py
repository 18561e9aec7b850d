"""Windows that cross the ends of passes, where the passes between a forward and its backward are known.

Alone, a forward releases at its end what is left, and copies back begin with its backward: nothing is known
of what comes between. A stage of a pipeline knows it. Between the forward of a micro-batch and its backward
lie whole passes of others, in an order that the schedule fixes. There windows count operators through all
passes, those of a forward as they rise, those of a backward as they fall::

    forward 3        | backward 1 | forward 4 | backward 2        | forward 5           | backward 3
    copy out ... release_ops ... release                      copy back ... prefetch_ops ... read

What is due in a pass is done at its first hook at or after the point, or else at the first hook of the next
pass. A pass is taken to have as many operators as the latest forward of the same chunk; a chunk's first
forward releases at its end.

A window counts for two thirds of a pass at most (`REACH`). So of all micro-batches in flight two thirds of
one wait for their release, and two thirds of one are back ahead of need, besides what a hook more or less
makes: at most 1.5 are on the device, however large the windows are and however many passes lie between.
Where one pass lies between, its middle separates releases from copies back. Where a backward follows its
forward at once, as on the last stage of 1F1B, all is as without an order.

Why it is safe, whatever the order says:

* **The right micro-batch.** The order says when something moves, never what. Due is a `SwapGroup`, which
  knows its own host block; autograd's tickets alone say which group a backward reads.
* **Release, then copy back.** Of each group the release is due first. `SwapGroup.fetch` does nothing as long
  as the device has the data, and a release waits for the copy out, so no copy back reads an unfinished host
  block.
* **What was not done in time** is done by `Backward` as without an order; starting a copy twice does nothing.
* **Lifetimes.** Groups are referred to weakly. One whose graph dies between two passes waits for its copies.
* **Streams.** Release and copy back are asked for within another micro-batch's pass. `StreamTransfer` takes
  the stream of that moment, and orders as ever: all streams that ever requested copies wait for a copy out,
  the copy back waits for the stream whose memory it fills, and its reader waits for it.
* **Threads.** Passes of a stage run one after another, also where backward has a thread of its own.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from .backward import Backward
from .schedule import NEVER, ReleaseQueue
from .tickets import SwapGroup

Swapped = weakref.ref[SwapGroup]

REACH = 2 / 3
"""Of a pass, how far a window reaches at most."""

Point = tuple[int, int]
"""Which pass of the order, and the operators of it that have run by then."""


class Pass(NamedTuple):
    """A forward or a backward of one micro-batch through one chunk of the layers.

    Args:
        chunk, micro_batch: numbers.
        is_backward: which of the two.
    """

    chunk: int
    micro_batch: int
    is_backward: bool


class PassOrder:
    """The passes of a step on one stage, and which releases and copies back are due in them.

    Who runs the passes says what they are (`begin`, `forward_follows`, `end`); the rest is the engine's.

    Attributes:
        running: the latest forward.
    """

    def __init__(self) -> None:
        self._order: tuple[Pass, ...] = ()
        self._place: dict[Pass, int] = {}
        self._following: Pass | None = None
        self.running: Pass | None = None
        self._listener: weakref.WeakMethod[Callable[[], None]] | None = None
        self._lengths: dict[int, int] = {}
        self._due: list[tuple[Point, int, Swapped, bool]] = []
        self._count = 0

    def begin(self, order: Sequence[Pass] = ()) -> None:
        """Start a step; all stages do at the same time.

        Args:
            order: all of its passes; empty: it is not known, and each pass is treated alone.
        """
        self.end()
        self._order = tuple(order)
        self._place = {one: index for index, one in enumerate(self._order)}
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener()

    def end(self) -> None:
        """The step has ended, also by an exception: nothing is due."""
        self._order, self._place, self._following = (), {}, None
        self._due.clear()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a method, which is referred to weakly, at the start of each step."""
        self._listener = weakref.WeakMethod(listener)

    def forward_follows(self, chunk: int, micro_batch: int) -> None:
        """The next call of the model is the forward of these."""
        self._following = Pass(chunk, micro_batch, False)

    def releases(self, first_op: int) -> ReleaseQueue[Swapped]:
        """Return the queue of releases of a forward that starts.

        Args:
            first_op: the operator that it builds first.
        """
        self.running = one = self._following
        self._following = None
        index = -1 if one is None else self._place.get(one, -1)
        return (
            ReleaseQueue()
            if index < 0 or self._backward_of(index) < index
            else CrossingReleases(self, index, first_op)
        )

    def forward_ended(
        self, queue: CrossingReleases, swapped: Iterable[Swapped], backward: Backward
    ) -> list[Swapped]:
        """A forward has ended: note when what it has swapped is released, if it is not yet, and comes back.

        Args:
            queue: of the forward.
            swapped: all that it has swapped.
            backward: of the forward.

        Returns:
            What is released now: all that is not yet, where the backward follows at once, and of the first
            forward of a chunk, whose length was not known.
        """
        last_op, back = backward.clock.now(), self._backward_of(queue.index)
        self._lengths[self._order[queue.index].chunk] = max(last_op + 1 - queue.first_op, 1)
        backward.watch(lambda op: self.reached((back, last_op - op)))
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

    def crossed(self, chunk: int) -> tuple[bool, bool]:
        """Say what lies around most passes of a chunk, where copies have the link for themselves.

        Returns:
            Whether a backward of another micro-batch follows its forwards, and a forward of another comes
            ahead of its backwards. Where a forward follows, that has copies out of its own.
        """
        found: list[tuple[bool, bool]] = []
        for index, one in enumerate(self._order):
            back = self._backward_of(index) if one.chunk == chunk and not one.is_backward else -1
            if back > index:
                after, before = self._order[index + 1], self._order[back - 1]
                found.append(
                    (after.is_backward and back > index + 1, not before.is_backward and back > index + 1)
                )
        half = len(found) / 2
        return sum(after for after, _ in found) > half, sum(before for _, before in found) > half

    def most_ops(self, index: int) -> int:
        """Return how far windows of a forward reach.

        There is no limit where its backward follows at once, and where no forward of its chunk has ended.
        """
        length = self._lengths.get(self._order[index].chunk)
        return NEVER if length is None or self._backward_of(index) == index + 1 else int(REACH * length)

    def reached(self, now: Point) -> int:
        """Do what is due at a hook; return after how many operators of this pass the next is."""
        while self._due and self._due[0][0] <= now:
            _, _, reference, is_release = heapq.heappop(self._due)
            group = reference()
            if group is not None:
                group.release() if is_release else group.fetch()
        return self._due[0][0][1] if self._due and self._due[0][0][0] == now[0] else NEVER

    def _backward_of(self, index: int) -> int:
        """The place of a forward's backward; -1: it has none."""
        return self._place.get(self._order[index]._replace(is_backward=True), -1)

    def _add(self, point: Point, reference: Swapped, is_release: bool) -> None:
        heapq.heappush(self._due, (point, self._count, reference, is_release))
        self._count += 1

    def _point(self, index: int, ops: int) -> Point:
        """Return where so many operators after (or before) the start of a pass are, one pass on at most."""
        if ops < 0:
            return index - 1, max(ops + self._length(index - 1), 0)
        length = self._length(index)
        return (index, ops) if ops < length else (index + 1, ops - length)

    def _length(self, index: int) -> int:
        """Operators of a pass; of a chunk that has run no forward yet, a guess."""
        return self._lengths.get(self._order[index].chunk, max(self._lengths.values()))


class CrossingReleases(ReleaseQueue[Swapped]):
    """Copies out of one forward; at the same hooks what earlier forwards have left for this pass is done.

    Args:
        passes: of the step.
        index: of the forward among them.
        first_op: the operator that it builds first.
    """

    def __init__(self, passes: PassOrder, index: int, first_op: int) -> None:
        super().__init__()
        self._passes, self.index, self.first_op = passes, index, first_op
        self.most_ops = passes.most_ops(index)
        self.next_at = self._others_at = first_op

    def add(self, item: Swapped, copied_at: int, release_ops: int) -> None:
        """See `ReleaseQueue`."""
        super().add(item, copied_at, min(release_ops, self.most_ops))
        self.next_at = min(self.next_at, self._others_at)

    def due(self, now: int) -> list[Swapped]:
        """See `ReleaseQueue`."""
        self._others_at = self.first_op + self._passes.reached((self.index, now - self.first_op))
        items = super().due(now)
        self.next_at = min(self.next_at, self._others_at)
        return items

    def left(self) -> list[tuple[int, Swapped]]:
        """Return what is not released, each with the operator at which it is due."""
        return [(due_op, item) for due_op, _, item in self._heap]
