"""Simulates one step under a plan, in the engine's order: when compute waits, and what is on the device.

The engine acts at hooks, so *in which* moment something happens does not depend on times. Times only say how
long compute waits there. Copies are queued by the engine's own queues (`engine.schedule`) and take the time
that a link needs; copies in one direction run one after another.

In forward, each pack (autograd saves a tensor) makes the releases that are due, then starts its copy out; at
the end of forward the remaining releases follow. In backward, each op event starts the prefetches whose point
is reached, then reads its tensors: it waits for a copy back, which it starts if nothing has; what was dropped
is built again, its inputs first. Operators are autograd nodes, in order of creation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...engine.link import DuplexLink, Lane
from ...engine.schedule import PrefetchOrder, PrefetchRequest
from ...plan.actions import Windows
from .scope_fates import CopyId, RebuiltStorage, RecomputedRegion, RunStep
from .step_order import Pack, StepOrder
from .storage_tickets import CopyOut

_Times = dict[CopyId, tuple[float, float]]

_TOLERANCE_MS = 1e-9


@dataclass(frozen=True, slots=True)
class MovingCopy:
    """A copy that a step carries out.

    Args:
        copy: the copy to the host.
        windows: windows of release and prefetch.
        want_op: the operator whose backward needs it first.
        tickets: how often it is read; 0: its host memory is freed at once.
    """

    copy: CopyOut
    windows: Windows
    want_op: int
    tickets: int


@dataclass(frozen=True)
class StepProgram:
    """A plan's fates, ready to be simulated. Places count op events in the order of backward.

    Args:
        order: the profile in the order of its step.
        packs: the packs of forward, in order.
        moving: the copies that the step carries out.
        reads: by place, the regions whose results nodes read, with these results.
        swap_reads: by place, the copies that nodes read.
        hooks: by place, the falling operators at which backward calls the engine.
    """

    order: StepOrder
    packs: Sequence[Pack]
    moving: Mapping[CopyId, MovingCopy]
    reads: Mapping[int, Sequence[tuple[RecomputedRegion, RebuiltStorage]]]
    swap_reads: Mapping[int, Sequence[CopyId]]
    hooks: Sequence[Sequence[int]]


@dataclass
class Moments:
    """Lists with an entry for each moment of backward, those of regions that run again included."""

    op_events: list[int] = field(default_factory=list)
    start_ms: list[float] = field(default_factory=list)
    base_bytes: list[int] = field(default_factory=list)
    swapped_bytes: list[int] = field(default_factory=list)
    rebuilt_bytes: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


class ForwardWalk:
    """Simulates forward, up to its end.

    Args:
        program: the fates to simulate.
        link: the link between device and host; ``None``: copies take no time.

    Attributes:
        moments: for each copy, the first moment in which its device memory is free.
        released_ms: for each copy, the time of that.
        waits: (op event, ms): how long compute waits before, or within, an op event.
    """

    def __init__(self, program: StepProgram, link: DuplexLink | None) -> None:
        self._program, self._link = program, link
        self.moving = program.moving
        self.numbers = {copy: number for number, copy in enumerate(program.moving)}
        self.moments: dict[CopyId, int] = {}
        self.released_ms: dict[CopyId, float] = {}
        self.queued_ms: dict[CopyId, float] = {}
        self.waits: list[tuple[int, float]] = []
        self.stall_ms = 0.0
        self._walk()
        self.forward_end_ms = program.order.start_ms[-1] + self.stall_ms

    def copy_times(self, link: DuplexLink | None) -> _Times:
        """Return when each copy out began and ended; call it when the whole step has been simulated."""
        if link is None:
            return {name: (ms, ms) for name, ms in self.queued_ms.items()}
        for name in self.queued_ms:  # copies for which nothing has waited
            link.wait(link.out, self.numbers[name], self.queued_ms[name])
        return _lane_times(link.out, self.numbers, self.queued_ms)

    def _walk(self) -> None:
        packs, start_ms = self._program.packs, self._program.order.start_ms
        orders, ops = [pack.order for pack in packs], [pack.op for pack in packs]
        forward_end = len(start_ms) - 1
        events: list[tuple[float, int, tuple[int, int], CopyId, int, bool]] = []
        for number, (name, moving) in enumerate(self._program.moving.items()):
            copy = moving.copy
            point = copy.op + moving.windows.release_ops
            at = max(bisect_left(ops, point), bisect_right(orders, copy.order))
            events.append((copy.order, 1, (number, 0), name, copy.op_event, copy.at_end))
            if moving.tickets and at < len(packs):
                pack = packs[at]
                events.append((pack.order, 0, (point, number), name, pack.op_event, pack.at_end))
            elif moving.tickets:
                events.append((1 << 60, 0, (point, number), name, forward_end, False))
            else:
                self.moments[name] = 0
        for _, kind, _, name, op_event, at_end in sorted(events):
            moment = min(op_event + at_end, forward_end)
            now_ms = start_ms[moment] + self.stall_ms
            if kind:
                self.queued_ms[name] = now_ms
                if self._link is not None:
                    size_bytes = self._program.moving[name].copy.size_bytes
                    self._link.enqueue(self._link.out, self.numbers[name], size_bytes, now_ms)
                continue
            if self._link is not None:
                waited_ms = self._link.wait(self._link.out, self.numbers[name], now_ms) - now_ms
                if waited_ms > _TOLERANCE_MS:
                    self.stall_ms += waited_ms
                    self.waits.append((moment, waited_ms))
                    now_ms += waited_ms
            self.moments[name], self.released_ms[name] = moment, now_ms


class BackwardWalk:
    """Simulates backward, from the end of forward.

    Args:
        program: the fates to simulate.
        link: the link of forward; ``None``: copies take no time.
        numbers: the number of each copy on the link.
        start_ms: when forward ended.
        each_step: whether a region that runs again has a moment for each of its op events, or one in all.
    """

    def __init__(
        self,
        program: StepProgram,
        link: DuplexLink | None,
        numbers: Mapping[CopyId, int],
        start_ms: float,
        each_step: bool,
    ) -> None:
        self._program, self._link, self._numbers = program, link, numbers
        self._each_step = each_step
        self.now_ms, self.stall_ms, self.recompute_ms = start_ms, 0.0, 0.0
        self.moments = Moments()
        self.read_ms: dict[CopyId, float] = {}
        self.hook_ms: list[tuple[int, float]] = []
        self._swapped_bytes = self._rebuilt_bytes = 0
        self._unread = {name: moving.tickets for name, moving in program.moving.items()}
        self._fetched: dict[CopyId, float] = {}
        self._ready: set[CopyId] = set()
        self._run: set[int] = set()
        self._tickets: dict[int, int] = {}
        self._reading: list[CopyId | RebuiltStorage] = []
        self._walk()

    def copy_times(self, link: DuplexLink | None) -> dict[CopyId, tuple[float, float, float]]:
        """Return when each copy back began and ended, and when it was first read."""
        if link is None:
            times: _Times = {name: (ms, ms) for name, ms in self._fetched.items()}
        else:
            for name in self._fetched:  # copies for which nothing has waited
                link.wait(link.back, self._numbers[name], self.now_ms)
            times = _lane_times(link.back, self._numbers, self._fetched)
        return {name: (*times[name], self.read_ms.get(name, self.now_ms)) for name in times}

    def _walk(self) -> None:
        program, order = self._program, self._program.order
        op_events, moments = order.op_events, self.moments
        due = self._prefetches()
        last = op_events[-1].forward_base_bytes if op_events else 0
        for place, op_event in enumerate(order.places.order):
            running = op_events[op_event]
            for op in program.hooks[place]:
                self.hook_ms.append((op, self.now_ms))
                for name in due.due(op):
                    self._fetch(name)
            if place in program.swap_reads or place in program.reads:
                boundary = min(last, running.backward_base_bytes)
                for name in program.swap_reads.get(place, ()):
                    self._read_copy(name)
                for region, item in program.reads.get(place, ()):
                    self._build(region, place, boundary)
                    self._reading.append(item)
            moments.op_events.append(op_event)
            moments.start_ms.append(self.now_ms)
            moments.base_bytes.append(running.backward_base_bytes)
            moments.swapped_bytes.append(self._swapped_bytes)
            moments.rebuilt_bytes.append(self._rebuilt_bytes)
            moments.places.append(place)
            self._let_go()
            self.now_ms += running.backward_ms
            last = running.backward_base_bytes

    def _prefetches(self) -> PrefetchOrder[CopyId]:
        moving = sorted(self._program.moving.items(), key=lambda item: item[1].copy.order)
        wants = [
            PrefetchRequest(name, item.want_op, item.windows.prefetch_ops)
            for name, item in moving
            if item.tickets
        ]
        return PrefetchOrder((op for hooks in self._program.hooks for op in hooks), wants)

    def _fetch(self, name: CopyId) -> None:
        if name in self._fetched:
            return
        size_bytes = self._program.moving[name].copy.size_bytes
        self._fetched[name] = self.now_ms
        self._swapped_bytes += size_bytes
        if self._link is not None:
            self._link.enqueue(self._link.back, self._numbers[name], size_bytes, self.now_ms)

    def _read_copy(self, name: CopyId) -> None:
        """Let compute read a swapped storage: fetch it if nothing has, and wait for the copy back."""
        if name not in self._program.moving:  # it was not swapped after all
            return
        self._fetch(name)
        if name not in self._ready:
            self._ready.add(name)
            if self._link is not None:
                done_ms = self._link.wait(self._link.back, self._numbers[name], self.now_ms)
                self.stall_ms += done_ms - self.now_ms
                self.now_ms = done_ms
            self.read_ms[name] = self.now_ms
        self._reading.append(name)

    def _let_go(self) -> None:
        """Count the current reads as done, and free what nothing will read again."""
        for item in self._reading:
            if isinstance(item, RebuiltStorage):
                left = self._tickets[id(item)] = self._tickets.get(id(item), item.tickets) - 1
                if not left:
                    self._rebuilt_bytes -= item.size_bytes
            else:
                self._unread[item] -= 1
                if not self._unread[item]:
                    self._swapped_bytes -= self._program.moving[item].copy.size_bytes
        self._reading.clear()

    def _build(self, region: RecomputedRegion, place: int, boundary_bytes: int) -> None:
        """Run a region again, unless this has happened."""
        if id(region) in self._run:
            return
        self._run.add(id(region))
        for wanted in region.inputs:
            if isinstance(wanted[1], RebuiltStorage):
                self._build(wanted[0], place, boundary_bytes)
        # Reads by this op event's nodes last until it ends; reads by the region end when it has run.
        node_reads, self._reading = self._reading, []
        for wanted in region.inputs:
            if isinstance(wanted[1], RebuiltStorage):
                self._reading.append(wanted[1])
            else:
                self._read_copy(wanted)
        steps: Sequence[RunStep] = region.steps
        if not self._each_step:
            passing_bytes = region.peak_bytes - region.built_bytes
            steps = (RunStep(region.peak_event, region.ms, region.built_bytes, passing_bytes),)
        moments = self.moments
        for step in steps:
            self._rebuilt_bytes += step.built_bytes
            moments.op_events.append(step.op_event)
            moments.start_ms.append(self.now_ms)
            moments.base_bytes.append(boundary_bytes)
            moments.swapped_bytes.append(self._swapped_bytes)
            moments.rebuilt_bytes.append(self._rebuilt_bytes + step.passing_bytes)
            moments.places.append(place)
            self.now_ms += step.ms
        self.recompute_ms += region.ms
        self._let_go()
        self._reading = node_reads


def _lane_times(lane: Lane, numbers: Mapping[CopyId, int], queued_ms: Mapping[CopyId, float]) -> _Times:
    """Return when each copy of a lane began and ended; they run one after another, in the order queued."""
    found: _Times = {}
    free_ms = 0.0
    for name, at_ms in queued_ms.items():
        end_ms = lane.finish_ms[numbers[name]]
        found[name] = max(free_ms, at_ms), end_ms
        free_ms = end_ms
    return found
