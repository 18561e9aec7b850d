"""What to swap under ``auto``: the set of most bytes whose copies are hidden. Pure arithmetic, times in ms.

Memory peaks at the *turn*, the end of forward, where everything is released. There every byte that has left
the device lowers the peak by one, whichever tensor it is of, so the best set is simply the one with the most
bytes among those that fit both ways:

* **Out.** Copies run one after another in the order of saving; with one deadline for all, the turn, no other
  order is better. A set fits if each copy, started at max(previous finished, saved), ends by the turn. Were
  bytes divisible, taking whatever comes would be optimal, because it keeps the link busy from the first
  candidate to the turn; the tail that is kept is what the backlog leaves, not a constant. As they are not,
  taking what comes can lose nearly the copy that did not fit. The search over sets wins that back.
* **Back.** All may start at the first hook of backward, so a set fits if earliest-deadline-first does. The
  search tracks it as if backward read in the reverse order of saving: a copy that comes later in forward goes
  before all others, and what counts is the least slack among those. Where backward does read in that order
  this is exact, elsewhere it errs on the safe side; `Loads` then adds what the search left, exactly.

The search keeps states (bytes, end of the last copy out, least slack of the copies back), drops those that
another beats in all three, and beyond a limit those of the fewest bytes. Up to 10 candidates the limit is
never reached, so the set is optimal (for reads in reverse order); with many the state of taking whatever
comes is always among those kept until the link is full, so the loss stays below one copy that did not fit.
Among equals the copies out that end first win. These are early tensors, which backward needs last: nothing
comes back while memory is at its peak.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

TOO_LATE_OUT = "its copy out would not be complete when backward starts"
TOO_LATE_BACK = "backward needs it before its copy back could be complete"
NO_HOST_MEMORY = "host memory"

ROUNDING_MS = 1e-7
_SEARCH_STEPS = 12_000
"""Four times as many find 0.05 % more bytes for 320 candidates, in four to six times the time (12 ms)."""


@dataclass(slots=True)
class SwapCopy:
    """A candidate as the link sees it.

    Args:
        index: of the candidate.
        place: in the out queue.
        size_bytes, ready_op, consumer_op: of the candidate.
        fixed: the user gave its windows, so it is swapped in any case.
        ready_ms: when the copy out may start.
        out_ms, in_ms: how long the copies take.
        out_by_ms: when the copy out must have ended.
        read_ms: when backward reads it.
        room_ms: time on the link from the start of backward until then, fixed copies deducted.
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
    room_ms: float


def best_set(queue: Sequence[SwapCopy], host_bytes: float) -> frozenset[int]:
    """Return the indexes to swap beside the fixed ones; see the module's text.

    Args:
        queue: in order of ``place``.
        host_bytes: the most that the set may have.
    """
    limit = min(max(_SEARCH_STEPS // max(len(queue), 1), 32), 2048)
    host_binds = host_bytes < _most_bytes([copy for copy in queue if not copy.fixed])
    parents: list[tuple[int, int]] = [(-1, -1)]  # the state before, and the candidate that it took
    states = [(0, -math.inf, -math.inf, 0)]  # -bytes, end of the last copy out, -slack, entry in parents
    for copy in queue:
        if copy.fixed:
            states = [(b, max(end, copy.ready_ms) + copy.out_ms, s, at) for b, end, s, at in states]
            continue
        taken = []
        for minus_bytes, end_ms, minus_slack, at in states:
            done_ms = max(end_ms, copy.ready_ms) + copy.out_ms
            slack_ms = min(-minus_slack, copy.room_ms) - copy.in_ms
            size_bytes = copy.size_bytes - minus_bytes
            if (
                done_ms <= copy.out_by_ms + ROUNDING_MS
                and slack_ms >= -ROUNDING_MS
                and size_bytes <= host_bytes
            ):
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
    """A bound on what can be hidden: all bytes, or the link busy from the first copy to the last end."""
    if not queue:
        return 0.0
    span_ms = max(copy.out_by_ms for copy in queue) - min(copy.ready_ms for copy in queue)
    rate = max(copy.size_bytes / copy.out_ms for copy in queue)
    return min(sum(copy.size_bytes for copy in queue), max(span_ms, 0.0) * rate)


def _undominated(
    states: Iterable[tuple[int, float, float, int]], limit: int, host_binds: bool
) -> list[tuple[int, float, float, int]]:
    """Drop states that end no earlier than one with as many bytes, and have no more slack.

    Where host memory binds, bytes are also a cost: only states of equal bytes can be compared.
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
    """Both directions of the link under a set that fits, and what one more copy would do to them.

    Args:
        queue: in order of ``place``.
        chosen: indexes swapped beside the fixed ones.
        host_bytes: the most that they may have.
    """

    def __init__(self, queue: Sequence[SwapCopy], chosen: frozenset[int], host_bytes: float) -> None:
        self.chosen = chosen
        self._host_left = host_bytes - sum(copy.size_bytes for copy in queue if copy.index in chosen)
        out = [copy for copy in queue if copy.fixed or copy.index in chosen]
        self._places = [copy.place for copy in out]
        self._ends_ms = out_ends_ms(out)
        self._latest_ms = [math.inf]  # the latest start of a copy out, from the last one
        for copy in reversed(out):
            self._latest_ms.append(min(copy.out_by_ms, self._latest_ms[-1]) - copy.out_ms)
        self._latest_ms.reverse()
        back = sorted((copy for copy in out if not copy.fixed), key=lambda copy: -copy.consumer_op)
        self._reads = [-copy.consumer_op for copy in back]
        self._back_ms = list(accumulate((copy.in_ms for copy in back), initial=0.0))
        slacks = [copy.room_ms - end for copy, end in zip(back, self._back_ms[1:], strict=True)]
        self._slacks_ms = list(accumulate(reversed(slacks), min, initial=math.inf))[::-1]

    def obstacle(self, copy: SwapCopy) -> str:
        """Return why a copy that is not in the set cannot join it; empty if it can."""
        at = bisect_left(self._places, copy.place)
        start_ms = max(copy.ready_ms, self._ends_ms[at - 1] if at else -math.inf)
        if start_ms + copy.out_ms > min(copy.out_by_ms, self._latest_ms[at]) + ROUNDING_MS:
            return TOO_LATE_OUT
        at = bisect_right(self._reads, -copy.consumer_op)
        slack_ms = min(copy.room_ms - self._back_ms[at], self._slacks_ms[at])
        if slack_ms < copy.in_ms - ROUNDING_MS:
            return TOO_LATE_BACK
        return NO_HOST_MEMORY if copy.size_bytes > self._host_left else ""


def out_ends_ms(queue: Iterable[SwapCopy]) -> list[float]:
    """When each copy out ends, one after another."""
    ends: list[float] = []
    for copy in queue:
        ends.append(max(copy.ready_ms, ends[-1] if ends else -math.inf) + copy.out_ms)
    return ends
