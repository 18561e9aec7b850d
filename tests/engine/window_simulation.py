"""A simulated step of the engine: what decisions about windows would cost in time and memory.

Compute passes the hooks of a timeline in order; each wait shifts everything after it. At a hook the
engine's order holds: releases that are due, then the new copy out (`ForwardPass.pack`); at the end of forward
everything is released; in backward the prefetches that are due, then the read (`Backward.reached`). The
queues are the engine's own (`schedule`). Copies of one direction run one after another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hf_actswap.engine import Link
from hf_actswap.engine.link import DuplexLink, Lane
from hf_actswap.engine.schedule import PrefetchOrder, PrefetchRequest, ReleaseQueue
from hf_actswap.engine.windows import Candidate, Decision, Timeline
from hf_actswap.plan import Windows

_TOLERANCE_MS = 1e-6
"""A wait that is shorter is rounding."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a step did.

    Args:
        step_ms: when the last hook of backward was reached.
        forward_stall_ms: compute waited at releases, those at the end of forward included.
        backward_stall_ms: compute waited for copies back.
        stalls: how often it waited.
        forward_end_ms: when backward could begin.
        out_finish_ms, in_finish_ms: per candidate when its copy was complete; ``None`` where it is kept.
        memory: (ms, bytes) of the candidates given, kept ones too, on the device at each change; give only
            the swapped ones to see those.
        peak_bytes: the most of it at the turn or later.
    """

    step_ms: float
    forward_stall_ms: float
    backward_stall_ms: float
    stalls: int
    forward_end_ms: float
    out_finish_ms: tuple[float | None, ...]
    in_finish_ms: tuple[float | None, ...]
    memory: tuple[tuple[float, int], ...]
    peak_bytes: int


def simulate(
    candidates: Sequence[Candidate], decisions: Sequence[Decision], timeline: Timeline, link: Link
) -> Simulated:
    """Run one step.

    Args:
        candidates: in the order in which they are saved.
        decisions: one for each.
        timeline: compute without stalls.
        link: how fast copies are.
    """
    run = _Step(candidates, decisions, timeline, link)
    run.forward()
    run.backward()
    return run.result()


class _Step:
    """The state of a run; see the module's text."""

    def __init__(
        self, candidates: Sequence[Candidate], decisions: Sequence[Decision], timeline: Timeline, link: Link
    ) -> None:
        self._candidates, self._timeline = candidates, timeline
        self._windows: dict[int, Windows] = {
            index: decision.windows
            for index, decision in enumerate(decisions)
            if decision.windows is not None
        }
        self._link = DuplexLink(link)
        self._releases: ReleaseQueue[int] = ReleaseQueue()
        self._now_ms, self._delay_ms, self._stalls = 0.0, 0.0, 0
        self._forward_end_ms, self._forward_stall_ms = 0.0, 0.0
        self._memory: list[tuple[float, int]] = []
        self._bytes = self._peak_bytes = 0

    def forward(self) -> None:
        """Hooks of forward, then its end."""
        ops = [op for op, _ in self._timeline.forward[:-1]]
        saved: list[list[int]] = [[] for _ in self._timeline.forward]
        for index in sorted(range(len(self._candidates)), key=lambda i: self._candidates[i].ready_op):
            saved[bisect_left(ops, self._candidates[index].ready_op)].append(index)
        for (op, ms), new in zip(self._timeline.forward, saved, strict=True):
            self._now_ms = ms + self._delay_ms
            at_end = new is saved[-1]
            if not at_end:
                self._release(self._releases.due(op))
            for index in new:
                self._save(index)
        self._release(self._releases.drain())
        self._forward_end_ms, self._forward_stall_ms = self._now_ms, self._delay_ms
        self._peak_bytes = self._bytes

    def backward(self) -> None:
        """Hooks of backward. A storage leaves the device at the hook after its last reader's."""
        hooks = self._timeline.backward
        order = PrefetchOrder(
            [op for op, _ in hooks],
            [
                PrefetchRequest(index, self._candidates[index].consumer_op, windows.prefetch_ops)
                for index, windows in sorted(self._windows.items(), key=lambda item: self._place(item[0]))
            ],
        )
        falling = [-op for op, _ in hooks]
        read: list[list[int]] = [[] for _ in hooks]
        left: list[list[int]] = [[] for _ in range(len(hooks) + 2)]
        for index, candidate in enumerate(self._candidates):
            first = bisect_left(falling, -candidate.consumer_op)
            last = max(first, bisect_left(falling, -candidate.ready_op))
            left[min(last, len(hooks)) + 1].append(index)
            if first < len(hooks) and falling[first] == -candidate.consumer_op and index in self._windows:
                read[first].append(index)
        for number, (op, ms) in enumerate(hooks):
            self._now_ms = ms + self._delay_ms
            for index in left[number]:
                self._count(-self._candidates[index].size_bytes)
            for index in order.due(op):
                self._fetch(index)
            for index in read[number]:
                self._wait(self._link.back, index)

    def result(self) -> Simulated:
        """What has happened; copies still running end undisturbed."""
        for index in self._windows:
            if index in self._link.back.left_bytes:
                self._link.wait(self._link.back, index, self._now_ms)
        out, back = (
            tuple(lane.finish_ms.get(index) for index in range(len(self._candidates)))
            for lane in (self._link.out, self._link.back)
        )
        return Simulated(
            step_ms=self._now_ms,
            forward_stall_ms=self._forward_stall_ms,
            backward_stall_ms=self._delay_ms - self._forward_stall_ms,
            stalls=self._stalls,
            forward_end_ms=self._forward_end_ms,
            out_finish_ms=out,
            in_finish_ms=back,
            memory=tuple(self._memory),
            peak_bytes=self._peak_bytes,
        )

    def _place(self, index: int) -> tuple[int, int]:
        return self._candidates[index].ready_op, index

    def _save(self, index: int) -> None:
        candidate, windows = self._candidates[index], self._windows.get(index)
        self._count(candidate.size_bytes)
        if windows is None:
            return
        self._link.enqueue(self._link.out, index, candidate.size_bytes, self._now_ms)
        self._releases.add(index, candidate.ready_op, windows.release_ops)

    def _release(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            self._wait(self._link.out, index)
            self._count(-self._candidates[index].size_bytes)

    def _fetch(self, index: int) -> None:
        size_bytes = self._candidates[index].size_bytes
        self._link.enqueue(self._link.back, index, size_bytes, self._now_ms)
        self._count(size_bytes)

    def _wait(self, lane: Lane, index: int) -> None:
        done_ms = self._link.wait(lane, index, self._now_ms)
        if done_ms > self._now_ms + _TOLERANCE_MS:
            self._stalls += 1
            self._delay_ms += done_ms - self._now_ms
            self._now_ms = done_ms

    def _count(self, change_bytes: int) -> None:
        if change_bytes:
            self._bytes += change_bytes
            self._memory.append((self._now_ms, self._bytes))
            self._peak_bytes = max(self._peak_bytes, self._bytes)
