"""Records the op events of a step, row by row while it runs.

A row ends when execution gets to another call *and* something has run since the row began. Ops that compute
nothing (views, casts to the type that a tensor has) make no row of their own: their nodes and uses belong to
the row after them. So rows follow each other without gaps in time, in nodes and in uses. At the end of each
row there is one time stamp and one query of the meter, and none per aten op.

Autograd runs the nodes of a graph in descending order of their numbers, so backward visits each row once, in
reverse. Nodes that no row made belong to the row in which backward is: gradients that accumulate, layers that
run again, a later forward, and a backward that a node runs inside, as tiles do (`engine.tiled_calls`). A
backward that runs inside the forward belongs to the forward (`engine.chunked_logits`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...engine.autograd_state import next_node_number, packing_node_number, running_backward
from ...engine.transfer import Stamp
from ...plan.op_facts import RANDOM_FUNCTIONS, is_communication
from ...plan.saved_bytes import OpCall, SavedBytes
from ..meter import Meter
from ..profile import OpEvent
from .clock import Clock
from .lifetimes import Places, lifetimes, saved_on_device


@dataclass(slots=True)
class _Visit:
    """A visit of backward to a row; ``peak_bytes`` ``None``: nothing ran in it."""

    place: int
    start: Stamp
    end: Stamp
    peak_bytes: int | None
    gradient_bytes: int


@dataclass(slots=True)
class _Row:
    call: OpCall
    first_order: int
    last_order: int
    first_node: int
    first_op: int
    num_ops: int
    start: Stamp
    end: Stamp
    peak_bytes: int
    communicates: bool
    random: bool
    visits: list[_Visit] = field(default_factory=list)
    backward_place: int = -1


class OpEventLog:
    """Writes the rows of one forward and its backward.

    Args:
        meter: measures device memory; ``None``: it is not measured.
        clock: makes time stamps.
        order: returns the order of the use that was recorded last.
        sees_ops: whether `ran` is called for every op. If not, a row ends wherever nodes were made.
        nodes: number of operators that a call counts as, however many nodes it makes: compiled layers.
        away_bytes: returns the bytes that are on the host for lack of room; they count as on the device.
        gradient_bytes: returns the bytes of weights' gradients that are complete by now.
        chunks: number of forwards that are recorded as one; their backwards come in reverse order.
    """

    def __init__(
        self,
        meter: Meter | None,
        clock: Clock,
        order: Callable[[], int],
        sees_ops: bool,
        nodes: Mapping[OpCall, int],
        away_bytes: Callable[[], int] = lambda: 0,
        gradient_bytes: Callable[[], int] = lambda: 0,
        chunks: int = 1,
    ) -> None:
        self._away_bytes, self._gradient_bytes = away_bytes, gradient_bytes
        self._meter, self._clock, self._order, self._sees_ops = meter, clock, order, sees_ops
        self._nodes, self._backwards_left = nodes, chunks
        self._rows: list[_Row] = []
        self._first_nodes: list[int] = []
        self._packs: list[tuple[int, int]] = []
        self._call: OpCall = (None, "", None)
        self._busy = self._communicates = self._random = False
        self._first_node = self._first_op = self._visits = self._gradients_before = 0
        self._since: Stamp | None = None
        self._visited: _Row | None = None
        self._turned = self._ended = False
        self._backward: int | None = -1
        self.in_forward = False
        """Whether the model's own forward runs."""
        self.turned = False
        """Whether backward has begun."""
        self.peak_bytes = 0
        """The most device memory in use, in forward and backward."""
        self.outside_ms_of: tuple[Stamp, Stamp] | None = None
        self.outside_peak_bytes = 0
        self.gradients_below: tuple[int, ...] = ()
        """`Profile.gradient_bytes`, once `op_events` has been called."""
        self.on_backward: Callable[[], None] | None = None
        """Called when backward begins, from the thread that runs it."""

    def start(self) -> None:
        """Begin to record a forward, or that of the next chunk."""
        self._first_node, self.in_forward = next_node_number(), True
        self._busy = self._communicates = self._random = False
        self._look()
        self._since = self._clock.stamp()

    def pause(self) -> None:
        """End a chunk's forward; what runs until the next chunk's `start` is not recorded."""
        self._finish_forward(next_node_number())

    def enters(self, call: OpCall) -> None:
        """Note that execution has got to another call: a new row begins if anything has run."""
        if self._since is None or self._turned:
            return
        if self._is_busy():
            self._close(next_node_number())
        self._call = call

    def ran(self, communicates: bool = False, random: bool = False) -> None:
        """Note that an op has run that computes, with whether it communicates or draws random numbers."""
        self._busy = True
        row = self._visited
        if row is None:
            self._communicates |= communicates
            self._random |= random
        else:
            row.communicates |= communicates
            row.random |= random

    def packs(self) -> None:
        """Note that autograd saves a tensor."""
        if self._since is not None and not self._turned:
            self._packs.append((self._order(), packing_node_number()))

    def reached(self, node: int) -> None:
        """Note that backward runs the node of this number."""
        if self._since is None or self._ended or self.in_forward:
            return
        if not self._turned:
            self._backward_begins(node)
        elif self._backward is None:
            self._backward = running_backward()
            self._look()
            self._since = self._clock.stamp()
            if self.on_backward is not None:
                self.on_backward()
        if running_backward() != self._backward:
            return
        at = bisect_right(self._first_nodes, node) - 1
        if at >= 0 and node < self._first_node and self._rows[at] is not self._visited:
            self._leave_row()
            self._visit(self._rows[at])

    def end_backward(self) -> None:
        """Note that a backward has ended: that of the forward, or of one chunk."""
        if self._turned and not self._ended and self._backward is not None:
            self._leave_row()
            self._visited, self._busy = None, False
            self._backwards_left -= 1
            if self._backwards_left:
                self._backward = None
            self._ended = not self._backwards_left

    def end(self) -> None:
        """End recording with the step, whether backward has run or not."""
        if self._since is None:
            return
        if not self._turned and not self._ended:
            self._turned = self._ended = True
            self._finish_forward(next_node_number())
        self._backwards_left = 1
        self.end_backward()
        since, self._since = self._since, self._clock.stamp()
        self.outside_ms_of = since, self._since
        self.outside_peak_bytes = self._look()
        self._since = None

    def op_events(self, saved: SavedBytes) -> tuple[OpEvent, ...]:
        """Return the rows as op events. Compute must have passed all stamps (`Clock.synchronize`)."""
        start_op = self._rows[0].first_op if self._rows else 0
        places = Places(self._rows)
        forward, backward = saved_on_device(lifetimes(saved, self._rows, places), places)
        below: dict[int, tuple[int, int]] = {}  # a visit in which nothing ran has the one before's
        peaks = sorted(
            (visit.place, number, visit.peak_bytes, visit.gradient_bytes)
            for number, row in enumerate(self._rows)
            for visit in row.visits
        )
        base_bytes = 0
        for _, number, peak_bytes, gradient_bytes in peaks:
            if peak_bytes is not None:
                base_bytes = max(0, peak_bytes - backward[number])
            below[number] = max(below.get(number, (0, 0)), (base_bytes, gradient_bytes))
        self.gradients_below = (
            *(below.get(number, (0, 0))[1] for number in range(len(self._rows))),
            self._gradient_bytes(),
        )
        return tuple(
            OpEvent(
                call=row.call,
                first_order=row.first_order,
                last_order=row.last_order,
                first_op=row.first_op - start_op,
                num_ops=row.num_ops,
                forward_ms=max(0.0, row.end.ms_since(row.start)),
                backward_ms=sum(max(0.0, visit.end.ms_since(visit.start)) for visit in row.visits),
                forward_base_bytes=max(0, row.peak_bytes - forward[number]),
                backward_base_bytes=below.get(number, (0, 0))[0],
                backward_place=row.backward_place,
                communicates=row.communicates,
                random=row.random,
            )
            for number, row in enumerate(self._rows)
        )

    def hooks(self) -> tuple[tuple[int, int], ...]:
        """Return `Profile.hooks`. Tensors that a compiled layer saves belong to its last operator."""
        found = []
        for order, node in self._packs:
            row = self._rows[max(bisect_right(self._first_nodes, node) - 1, 0)]
            last = max(row.num_ops - 1, 0)
            behind = last if self._nodes.get(row.call) else min(max(node - row.first_node, 0), last)
            found.append((order, row.first_op + behind - self._rows[0].first_op))
        return tuple(dict.fromkeys(found))

    def _is_busy(self) -> bool:
        return self._busy if self._sees_ops else next_node_number() != self._first_node

    def _look(self) -> int:
        """Return the most device memory in use since the last call."""
        if self._meter is None:
            return 0
        peak_bytes = self._meter.peak_bytes() + self._away_bytes()
        self._meter.reset_peak()
        return peak_bytes

    def _close(self, end_node: int) -> None:
        """End the current row and record it; the next one starts here."""
        assert self._since is not None
        now, made = self._clock.stamp(), end_node - self._first_node
        num_ops = (self._nodes.get(self._call) or made) if made else 0
        name = self._call[1].rpartition(".")[2]
        row = _Row(
            call=self._call,
            first_order=self._rows[-1].last_order + 1 if self._rows else 1,
            last_order=self._order(),
            first_node=self._first_node,
            first_op=self._first_op,
            num_ops=num_ops,
            start=self._since,
            end=now,
            peak_bytes=self._look(),
            communicates=self._communicates or is_communication(self._call[1]),
            random=self._random or (not self._sees_ops and name in RANDOM_FUNCTIONS),
        )
        self._rows.append(row)
        self._first_nodes.append(self._first_node)
        self.peak_bytes = max(self.peak_bytes, row.peak_bytes)
        self._first_node, self._first_op, self._since = end_node, self._first_op + num_ops, now
        self._busy = self._communicates = self._random = False

    def _finish_forward(self, end_node: int) -> None:
        """Record forward's last row; if nothing ran in it, add its nodes and uses to the one before."""
        end_node = max(end_node, self._first_node)
        if not self._rows or self._busy or (not self._sees_ops and end_node > self._first_node):
            self._close(end_node)
            return
        last = self._rows[-1]
        last.num_ops += end_node - self._first_node
        last.last_order = self._order()
        self._first_node = end_node
        self._since = self._clock.stamp()

    def _backward_begins(self, node: int) -> None:
        """End forward at ``node``, built last and run first: backward's thread has its own node counter."""
        self._turned, self.turned, self._backward = True, True, running_backward()
        self._finish_forward(node + 1)
        if self.on_backward is not None:
            self.on_backward()
        self._visit(self._rows[-1])

    def _visit(self, row: _Row) -> None:
        if row.backward_place < 0:
            row.backward_place = self._visits
        self._visited, self._busy = row, False
        self._gradients_before = self._gradient_bytes()
        self._visits += 1

    def _leave_row(self) -> None:
        row, since = self._visited, self._since
        if row is None or since is None:
            return
        now, peak_bytes = since, None
        if self._busy or not self._sees_ops:
            now, peak_bytes = self._clock.stamp(), self._look()
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
        row.visits.append(_Visit(self._visits - 1, since, now, peak_bytes, self._gradients_before))
        self._since = now
