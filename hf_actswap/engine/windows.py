"""The choice of windows under ``auto``: what to swap, when to release it, when to fetch it back.

The engine acts in hooks only (`schedule`). Copies of one direction run one after another; copies out run in
the order of saving. Everything is released at the end of forward, so within a step the two directions never
share the link, and each has the rate that was measured with nothing else on the link.

* **What** is swapped: the most bytes whose copies are hidden behind compute in both directions (below).
* **Release**: the first hook at which the copy out is complete.
* **Prefetch**: as late as possible. From the last read backwards, each copy back ends at its read or where
  the next copy begins, whichever is first, and is issued at the last hook before its start. So no more is on
  the device ahead of need than the reads and the distance between hooks require.
* **Windows that the user wrote** are obeyed. Their copies take their place in both queues, and no chosen copy
  delays them: a window that is too small stalls as much as it would alone.

Memory peaks at the end of forward, where everything is released. Every byte that has left the device by then
lowers the peak by one, whichever tensor it belongs to. So the best set is the one with the most bytes among
the sets that fit both ways:

* **Out.** Copies run one after another in the order of saving. All have one deadline, the end of forward, so
  no other order is better. A set fits if each copy, started at max(previous finished, saved), ends by then.
  If bytes were divisible, taking every tensor as it comes would be optimal: the link is busy from the first
  candidate to the end of forward, and only what is still queued then is kept. Tensors are not divisible, so
  that can lose nearly as many bytes as the copy that did not fit. The search over sets wins them back.
* **Back.** All copies may start at the first hook of backward, so a set fits if earliest-deadline-first does.
  The search assumes that backward reads in the reverse order of saving: a copy that comes later in forward
  goes before all others, and the least slack among these counts. If backward does read in that order this is
  exact, else it errs on the safe side; `Loads` then adds candidates that still fit, by an exact test.

A state of the search is (bytes, end of the last copy out, least slack of the copies back). The search drops
states that another beats in all three, and beyond a limit those with the fewest bytes. Up to 10 candidates
the limit is never reached, so the set is optimal (for reads in reverse order). With many candidates the state
of taking every tensor as it comes is kept until the link is full, so the loss is below one copy that did not
fit. Among equals the state whose copies out end first wins. It has early tensors, which backward needs last:
nothing comes back while memory is at its peak.

Operators are autograd nodes in order of creation: they rise through forward, and backward runs them falling.
Times are in ms on one clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..plan.actions import Windows
from .link import Link
from .schedule import NEVER

EMPTY = "it has no bytes"
NOT_READ = "backward does not read it"
TOO_LATE_OUT = "its copy out would not be complete when backward starts"
TOO_LATE_BACK = "backward needs it before its copy back could be complete"
NO_HOST_MEMORY = "host memory"

ROUNDING_MS = 1e-7
_SEARCH_STEPS = 12_000
"""Most states of the search, times candidates. Four times as many find 0.05 % more bytes for 320 candidates,
in four to six times the time (12 ms)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A storage that autograd saves and that may be swapped.

    Args:
        size_bytes: bytes that a swap would move.
        ready_op: first operator that saves it, where its copy out can be enqueued; the last to read it.
        consumer_op: last operator that saves it, and the first of backward to read it.
        windows: windows that the user wrote, which are obeyed; ``None``: both windows are chosen.
    """

    size_bytes: int
    ready_op: int
    consumer_op: int
    windows: Windows | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """When compute reaches each hook of a step in which nothing stalls.

    Args:
        forward: (operator, ms) at each hook; operators rise. The last entry is the end of forward, where all
            that is left is released; its operator may be that of the last hook.
        backward: (operator, ms) at each hook; operators fall. The last entry ends the step.
    """

    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.forward or not self.backward:
            raise ValueError("a timeline needs hooks in forward and in backward")
        if any(after[0] <= before[0] for before, after in pairwise(self.forward[:-1])) or (
            len(self.forward) > 1 and self.forward[-1][0] < self.forward[-2][0]
        ):
            raise ValueError("operators of a forward must rise")
        if any(after[0] >= before[0] for before, after in pairwise(self.backward)):
            raise ValueError("operators of a backward must fall")
        if any(after[1] < before[1] for before, after in pairwise((*self.forward, *self.backward))):
            raise ValueError("times of a step must not fall")


class HookTimes:
    """Looks up which hook of a timeline carries out an action, and when."""

    def __init__(self, timeline: Timeline) -> None:
        self._forward = timeline.forward[:-1]
        self._ops = [op for op, _ in self._forward]
        self._times_ms = [ms for _, ms in self._forward]
        self._backward = timeline.backward
        self._backward_ops = [-op for op, _ in timeline.backward]
        self._backward_ms = [ms for _, ms in timeline.backward]
        self._forward_end_ms = timeline.forward[-1][1]
        self.after_forward = max(timeline.forward[-1][0], self._ops[-1] + 1 if self._ops else 0)
        """An operator above all hooks of forward: a release due there happens at the end of forward."""

    def ready_ms(self, ready_op: int) -> float:
        """Return when a copy out is enqueued: at the hook of ``ready_op``, or at the first hook after it."""
        at = bisect_left(self._ops, ready_op)
        return self._times_ms[at] if at < len(self._ops) else self._forward_end_ms

    def released_ms(self, ready_op: int, release_ops: int) -> float:
        """Return when a release happens: at the first hook at or after its point, after the copy's own."""
        at = max(bisect_left(self._ops, ready_op + release_ops), bisect_left(self._ops, ready_op) + 1)
        return self._times_ms[at] if at < len(self._ops) else self._forward_end_ms

    def release_op(self, done_ms: float) -> int:
        """Return the first hook at which a copy out is complete; `after_forward` if no hook comes later."""
        at = bisect_left(self._times_ms, done_ms)
        return self._ops[at] if at < len(self._ops) else self.after_forward

    def consumed_ms(self, consumer_op: int) -> float | None:
        """Return when backward reads what an operator saved; ``None`` if it does not read it."""
        at = bisect_left(self._backward_ops, -consumer_op)
        found = at < len(self._backward_ops) and self._backward_ops[at] == -consumer_op
        return self._backward_ms[at] if found else None

    def prefetched_ms(self, point: int) -> float:
        """Return when a copy back is issued: at the last hook at or before its point, else at the first."""
        return self._backward_ms[max(bisect_right(self._backward_ops, -point) - 1, 0)]

    def prefetch_op(self, start_ms: float) -> int:
        """Return the last hook of backward at or before a time, or else the first."""
        return self._backward[max(bisect_right(self._backward_ms, start_ms) - 1, 0)][0]


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a candidate.

    Args:
        windows: windows of the swap; ``None``: it is kept.
        reason: why it is kept, or swapped with windows that do not hide the copies.
    """

    windows: Windows | None
    reason: str = ""

    @property
    def swap(self) -> bool:
        """Whether it is swapped at all."""
        return self.windows is not None


def choose_windows(
    candidates: Sequence[Candidate],
    timeline: Timeline,
    link: Link,
    host_bytes: int | None = None,
    safety: float = 1.1,
    most_release_ops: int = NEVER,
) -> tuple[Decision, ...]:
    """Decide for each candidate whether it is swapped, and with which windows; the same on every rank.

    Nothing stalls if the user wrote no windows and copies are at most ``safety`` times slower than ``link``.

    Args:
        candidates: in the order in which they are saved.
        timeline: compute without stalls.
        link: how fast copies are.
        host_bytes: most bytes swapped in all; candidates with windows of the user go first. ``None``: no cap.
        safety: factor by which copies are taken to last longer than ``link`` says, at least 1.
        most_release_ops: longest release window; the engine releases after so many operators at the latest.
    """
    if safety < 1:
        raise ValueError(f"safety is a factor of at least 1, not {safety}")
    hooks = HookTimes(timeline)
    rejected, host_left = _rejected(candidates, hooks, math.inf if host_bytes is None else host_bytes)
    queue = _queue(candidates, rejected, timeline, hooks, link, safety, most_release_ops)
    _tighten_deadlines(queue)
    busy = _fixed_back(queue, candidates, hooks)
    for copy in queue:
        copy.link_time_ms -= sum(max(min(end, copy.read_ms) - start, 0.0) for start, end in busy)
    loads = Loads(queue, best_set(queue, host_left), host_left)
    for copy in sorted(queue, key=lambda copy: (-copy.size_bytes, copy.place)):
        if not copy.fixed and copy.index not in loads.chosen:
            if reason := loads.obstacle(copy):
                rejected[copy.index] = reason
            else:
                loads = Loads(queue, loads.chosen | {copy.index}, host_left)
    prefetch_ops = _prefetches([copy for copy in queue if copy.index in loads.chosen], busy, timeline, hooks)
    rejected.update(dict.fromkeys(loads.chosen - prefetch_ops.keys(), TOO_LATE_BACK))
    release_ops = _releases(queue, prefetch_ops.keys(), hooks)
    return tuple(
        Decision(None, rejected[index])
        if index in rejected
        else Decision(candidate.windows or Windows(prefetch_ops[index], release_ops[index]))
        for index, candidate in enumerate(candidates)
    )


def windows_of_all(
    candidates: Sequence[Candidate],
    moments_ms: Sequence[tuple[float, float]],
    timeline: Timeline,
    link: Link,
) -> list[Windows]:
    """Return windows for candidates that are all swapped; copies that cannot be hidden begin with backward.

    Args:
        candidates: in the order in which they are saved.
        moments_ms: for each, when its copy out can start, and when backward reads it.
        timeline: compute without stalls.
        link: how long copies take.
    """
    hooks = HookTimes(timeline)
    queue = _queue(candidates, (), timeline, hooks, link, 1.0, NEVER)
    for copy in queue:
        copy.ready_ms, copy.read_ms = moments_ms[copy.index]
    release_ops = _releases(queue, range(len(candidates)), hooks)
    found: dict[int, Windows] = {}
    next_ms = math.inf
    for copy in sorted(queue, key=lambda copy: (-copy.read_ms, -copy.place)):
        next_ms = min(copy.read_ms, next_ms) - copy.in_ms
        prefetch_ops = max(hooks.prefetch_op(next_ms + ROUNDING_MS) - copy.consumer_op, 0)
        found[copy.index] = Windows(prefetch_ops, max(release_ops[copy.index], 1))
    return [found[index] for index in range(len(candidates))]


def _rejected(
    candidates: Sequence[Candidate], hooks: HookTimes, host_bytes: float
) -> tuple[dict[int, str], float]:
    """Return candidates ruled out at once, with reasons, and the host bytes that fixed ones leave."""
    rejected: dict[int, str] = {}
    for index, candidate in sorted(enumerate(candidates), key=lambda item: item[1].ready_op):
        if candidate.windows is not None:
            if candidate.size_bytes > host_bytes:
                rejected[index] = NO_HOST_MEMORY
            else:
                host_bytes -= candidate.size_bytes
        elif candidate.size_bytes <= 0:
            rejected[index] = EMPTY
        elif hooks.consumed_ms(candidate.consumer_op) is None:
            rejected[index] = NOT_READ
    return rejected, host_bytes


def _queue(
    candidates: Sequence[Candidate],
    rejected: Collection[int],
    timeline: Timeline,
    hooks: HookTimes,
    link: Link,
    safety: float,
    most_release_ops: int,
) -> list[SwapCopy]:
    """Return the candidates that are not rejected, in the order of their copies out."""
    start_ms, end_ms = timeline.backward[0][1], timeline.backward[-1][1]
    queue: list[SwapCopy] = []
    for _, index in sorted(
        (c.ready_op, index) for index, c in enumerate(candidates) if index not in rejected
    ):
        candidate, windows = candidates[index], candidates[index].windows
        read_ms = hooks.consumed_ms(candidate.consumer_op)
        if read_ms is None:
            read_ms = end_ms
        queue.append(
            SwapCopy(
                index=index,
                place=len(queue),
                size_bytes=candidate.size_bytes,
                ready_op=candidate.ready_op,
                consumer_op=candidate.consumer_op,
                fixed=windows is not None,
                ready_ms=hooks.ready_ms(candidate.ready_op),
                out_ms=link.out_ms(candidate.size_bytes) * safety,
                in_ms=link.in_ms(candidate.size_bytes) * safety,
                out_by_ms=hooks.released_ms(
                    candidate.ready_op, windows.release_ops if windows else most_release_ops
                ),
                read_ms=read_ms,
                link_time_ms=read_ms - start_ms,
            )
        )
    return queue


def _tighten_deadlines(queue: Sequence[SwapCopy]) -> None:
    """Set earlier deadlines for copies before a fixed one, so that they do not delay it past its release."""
    fixed = [copy for copy in queue if copy.fixed]
    for copy, end_ms in zip(fixed, out_ends_ms(fixed), strict=True):
        copy.out_by_ms = max(copy.out_by_ms, end_ms)
    latest_ms = math.inf
    for copy in reversed(queue):
        copy.out_by_ms = min(copy.out_by_ms, latest_ms)
        if copy.fixed:
            latest_ms = copy.out_by_ms - copy.out_ms


def _fixed_back(
    queue: Sequence[SwapCopy], candidates: Sequence[Candidate], hooks: HookTimes
) -> list[tuple[float, float]]:
    """Return the times, (from, to), at which the link alone would copy the fixed ones back."""
    issued = []
    for copy in queue:
        windows = candidates[copy.index].windows
        if windows is not None:
            issued_ms = hooks.prefetched_ms(copy.consumer_op + windows.prefetch_ops)
            issued.append((issued_ms, -copy.consumer_op, copy.place, copy.in_ms))
    busy: list[tuple[float, float]] = []
    for issued_ms, _, _, in_ms in sorted(issued):
        start_ms = max(issued_ms, busy[-1][1] if busy else -math.inf)
        busy.append((start_ms, start_ms + in_ms))
    return busy


def _prefetches(
    chosen: Sequence[SwapCopy], busy: Sequence[tuple[float, float]], timeline: Timeline, hooks: HookTimes
) -> dict[int, int]:
    """Return the shortest prefetch window of each chosen copy that fits between fixed ones in one piece."""
    found: dict[int, int] = {}
    next_ms, ahead = math.inf, list(busy)
    for copy in sorted(chosen, key=lambda copy: (copy.consumer_op, -copy.place)):
        end_ms = min(copy.read_ms, next_ms)
        while ahead and end_ms - copy.in_ms < ahead[-1][1]:
            end_ms = min(end_ms, ahead.pop()[0])
        start_ms = end_ms - copy.in_ms
        if start_ms >= timeline.backward[0][1] - ROUNDING_MS:
            found[copy.index] = max(hooks.prefetch_op(start_ms + ROUNDING_MS) - copy.consumer_op, 0)
            next_ms = start_ms
    return found


def _releases(queue: Sequence[SwapCopy], chosen: Collection[int], hooks: HookTimes) -> dict[int, int]:
    """Return after how many operators each copy out is complete."""
    out = [copy for copy in queue if copy.fixed or copy.index in chosen]
    return {
        copy.index: hooks.release_op(end_ms - ROUNDING_MS) - copy.ready_op
        for copy, end_ms in zip(out, out_ends_ms(out), strict=True)
    }


@dataclass(slots=True)
class SwapCopy:
    """A candidate with the durations and deadlines of its two copies.

    Args:
        index: index of the candidate.
        place: its place in the queue of copies out.
        size_bytes, ready_op, consumer_op: as of the `Candidate`.
        fixed: whether the user wrote its windows, so that it is swapped in any case.
        ready_ms, out_by_ms: when the copy out may start, and when it must have ended.
        out_ms, in_ms: how long the copy out and the copy back take.
        read_ms: when backward reads it.
        link_time_ms: time on the link from the start of backward until ``read_ms``, without fixed copies.
    """

    index: int
    place: int
    size_bytes: int
    ready_op: int
    consumer_op: int
    fixed: bool
    ready_ms: float
    out_ms: float
    in_ms: float
    out_by_ms: float
    read_ms: float
    link_time_ms: float


def best_set(queue: Sequence[SwapCopy], host_bytes: float) -> frozenset[int]:
    """Return the indexes of the set with the most bytes, up to ``host_bytes``, whose copies are hidden.

    Beside the fixed copies, and both ways. The queue is in order of ``place``.
    """
    limit = min(max(_SEARCH_STEPS // max(len(queue), 1), 32), 2048)
    host_binds = host_bytes < _most_bytes([copy for copy in queue if not copy.fixed])
    parents: list[tuple[int, int]] = [(-1, -1)]  # (entry of the previous state, candidate that was added)
    states = [(0, -math.inf, -math.inf, 0)]  # -bytes, end of the last copy out, -slack, entry in parents
    for copy in queue:
        if copy.fixed:
            states = [(b, max(end, copy.ready_ms) + copy.out_ms, s, at) for b, end, s, at in states]
            continue
        taken = []
        for minus_bytes, end_ms, minus_slack, at in states:
            done_ms = max(end_ms, copy.ready_ms) + copy.out_ms
            slack_ms = min(-minus_slack, copy.link_time_ms) - copy.in_ms
            size_bytes = copy.size_bytes - minus_bytes
            in_time = done_ms <= copy.out_by_ms + ROUNDING_MS and slack_ms >= -ROUNDING_MS
            if in_time and size_bytes <= host_bytes:
                taken.append((-size_bytes, done_ms, -slack_ms, len(parents)))
                parents.append((at, copy.index))
        if taken:
            states = _undominated(sorted(taken + states), limit, host_binds)
    found, at = set(), states[0][3]
    while at:
        at, index = parents[at]
        found.add(index)
    return frozenset(found)


def _most_bytes(queue: Sequence[SwapCopy]) -> float:
    """Return a bound of the bytes that can be hidden: all, or what a link carries that is never idle."""
    if not queue:
        return 0.0
    event_ms = max(copy.out_by_ms for copy in queue) - min(copy.ready_ms for copy in queue)
    rate = max(copy.size_bytes / copy.out_ms for copy in queue)
    return min(sum(copy.size_bytes for copy in queue), max(event_ms, 0.0) * rate)


def _undominated(
    states: Iterable[tuple[int, float, float, int]], limit: int, host_binds: bool
) -> list[tuple[int, float, float, int]]:
    """Drop states that end no earlier than one with at least as many bytes, and have no more slack.

    If host memory is short, bytes are a cost too: then only states of equal bytes are compared.
    """
    kept: list[tuple[int, float, float, int]] = []
    best: tuple[int, float, float, int] | None = None
    for state in states:
        if best is None or state[1] < best[1] or (host_binds and state[0] != best[0]):
            best = state
        elif state[2] >= best[2]:
            continue
        kept.append(state)
        if len(kept) == limit:
            break
    return kept


class Loads:
    """Both directions of the link under a set that fits, to test whether one more copy fits too.

    Args:
        queue: in order of ``place``.
        chosen: indexes of the copies that are swapped beside the fixed ones.
        host_bytes: most bytes of these.
    """

    def __init__(self, queue: Sequence[SwapCopy], chosen: frozenset[int], host_bytes: float) -> None:
        self.chosen = chosen
        self._host_left = host_bytes - sum(copy.size_bytes for copy in queue if copy.index in chosen)
        out = [copy for copy in queue if copy.fixed or copy.index in chosen]
        self._places = [copy.place for copy in out]
        self._ends_ms = out_ends_ms(out)
        self._latest_ms = [math.inf]  # latest start of each copy out, from the last copy to the first
        for copy in reversed(out):
            self._latest_ms.append(min(copy.out_by_ms, self._latest_ms[-1]) - copy.out_ms)
        self._latest_ms.reverse()
        back = sorted((copy for copy in out if not copy.fixed), key=lambda copy: -copy.consumer_op)
        self._reads = [-copy.consumer_op for copy in back]
        self._back_ms = list(accumulate((copy.in_ms for copy in back), initial=0.0))
        slacks = [copy.link_time_ms - end for copy, end in zip(back, self._back_ms[1:], strict=True)]
        self._slacks_ms = list(accumulate(reversed(slacks), min, initial=math.inf))[::-1]

    def obstacle(self, copy: SwapCopy) -> str:
        """Return why a copy that is not in the set cannot join it; empty if it can."""
        at = bisect_left(self._places, copy.place)
        start_ms = max(copy.ready_ms, self._ends_ms[at - 1] if at else -math.inf)
        if start_ms + copy.out_ms > min(copy.out_by_ms, self._latest_ms[at]) + ROUNDING_MS:
            return TOO_LATE_OUT
        at = bisect_right(self._reads, -copy.consumer_op)
        slack_ms = min(copy.link_time_ms - self._back_ms[at], self._slacks_ms[at])
        if slack_ms < copy.in_ms - ROUNDING_MS:
            return TOO_LATE_BACK
        return NO_HOST_MEMORY if copy.size_bytes > self._host_left else ""


def out_ends_ms(queue: Iterable[SwapCopy]) -> list[float]:
    """Return when each copy out ends; they run one after another."""
    ends: list[float] = []
    for copy in queue:
        ends.append(max(copy.ready_ms, ends[-1] if ends else -math.inf) + copy.out_ms)
    return ends
