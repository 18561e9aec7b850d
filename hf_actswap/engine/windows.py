"""The choice of windows under ``auto``: what to swap, when to release it, when to fetch it back.

The engine acts in hooks only (`schedule`). Copies of one direction run one after another, those out in the
order of saving. Everything is released at the end of forward, so within a step the directions never share
the link, and their rates alone count.

* **What** is swapped: the most bytes that both directions can hide (`swap_choice`).
* **Release**: the first hook at which the copy out is complete.
* **Prefetch**: as late as possible. From the last read backwards, each copy back ends at its read or where
  the next one begins, whichever is first, and is issued at the last hook before its start. So no more is on
  the device ahead of need than the reads and the distance of hooks ask for.
* **Numbers of the user** are obeyed. They take their place in both queues, and nothing chosen here delays
  them: one that is too small stalls as much as it would alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ..plan.actions import Windows
from .link import Link
from .swap_choice import NO_HOST_MEMORY, ROUNDING_MS, TOO_LATE_BACK, Loads, SwapCopy, best_set, out_ends_ms
from .window_choices import Candidate, Decision, Hooks, Timeline

EMPTY = "it has no bytes"
NOT_READ = "backward does not read it"


def choose_windows(
    candidates: Sequence[Candidate],
    timeline: Timeline,
    link: Link,
    host_bytes: int | None = None,
    safety: float = 1.1,
) -> tuple[Decision, ...]:
    """Decide for each candidate whether it is swapped, and with which windows.

    The same arguments give the same decisions on every rank: nothing else is looked at.

    Args:
        candidates: in the order in which they are saved.
        timeline: compute without stalls.
        link: how fast copies are.
        host_bytes: what is swapped never exceeds it, in all; the user's numbers go first. ``None``: no cap.
        safety: copies are taken to last this many times as long as ``link`` says.

    Returns:
        One decision for each candidate. Without numbers of the user, and with copies at most ``safety`` times
        slower than ``link``, nothing stalls (`simulate`).

    Raises:
        ValueError: ``safety`` is below 1.
    """
    if safety < 1:
        raise ValueError(f"safety is a factor of at least 1, not {safety}")
    hooks = Hooks(timeline)
    refused, host_left = _refused(candidates, hooks, math.inf if host_bytes is None else host_bytes)
    queue = _queue(candidates, refused, timeline, hooks, link, safety)
    _clear_way_out(queue)
    busy = _fixed_back(queue, candidates, hooks)
    for copy in queue:
        copy.room_ms -= sum(max(min(end, copy.read_ms) - start, 0.0) for start, end in busy)
    loads = Loads(queue, best_set(queue, host_left), host_left)
    for copy in sorted(queue, key=lambda copy: (-copy.size_bytes, copy.place)):
        if not copy.fixed and copy.index not in loads.chosen:
            reason = loads.obstacle(copy)
            if reason:
                refused[copy.index] = reason
            else:
                loads = Loads(queue, loads.chosen | {copy.index}, host_left)
    prefetch_ops = _prefetches([copy for copy in queue if copy.index in loads.chosen], busy, timeline, hooks)
    refused.update({index: TOO_LATE_BACK for index in loads.chosen - prefetch_ops.keys()})
    release_ops = _releases(queue, prefetch_ops.keys(), hooks)
    return tuple(
        Decision(False, None, refused[index])
        if index in refused
        else Decision(True, candidate.windows or Windows(prefetch_ops[index], release_ops[index]), "")
        for index, candidate in enumerate(candidates)
    )


def _refused(
    candidates: Sequence[Candidate], hooks: Hooks, host_bytes: float
) -> tuple[dict[int, str], float]:
    """Return who is out before any arithmetic, and the host memory that fixed ones leave."""
    refused: dict[int, str] = {}
    for index, candidate in sorted(enumerate(candidates), key=lambda item: item[1].ready_op):
        if candidate.windows is not None:
            if candidate.size_bytes > host_bytes:
                refused[index] = NO_HOST_MEMORY
            else:
                host_bytes -= candidate.size_bytes
        elif candidate.size_bytes <= 0:
            refused[index] = EMPTY
        elif hooks.consumed_ms(candidate.consumer_op) is None:
            refused[index] = NOT_READ
    return refused, host_bytes


def _queue(
    candidates: Sequence[Candidate],
    refused: Collection[int],
    timeline: Timeline,
    hooks: Hooks,
    link: Link,
    safety: float,
) -> list[SwapCopy]:
    """Return the copies in the order of the out queue."""
    start_ms, end_ms = timeline.backward[0][1], timeline.backward[-1][1]
    queue: list[SwapCopy] = []
    for _, index in sorted((c.ready_op, index) for index, c in enumerate(candidates) if index not in refused):
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
                out_by_ms=hooks.released_ms(candidate.ready_op, windows.release_ops)
                if windows
                else timeline.turn_ms,
                read_ms=read_ms,
                room_ms=read_ms - start_ms,
            )
        )
    return queue


def _clear_way_out(queue: Sequence[SwapCopy]) -> None:
    """Bring forward the ends of what is copied before a fixed one, which must end as if it were alone.

    A fixed copy that would be complete before its release may be delayed up to there.
    """
    fixed = [copy for copy in queue if copy.fixed]
    for copy, end_ms in zip(fixed, out_ends_ms(fixed), strict=True):
        copy.out_by_ms = max(copy.out_by_ms, end_ms)
    latest_ms = math.inf
    for copy in reversed(queue):
        copy.out_by_ms = min(copy.out_by_ms, latest_ms)
        if copy.fixed:
            latest_ms = copy.out_by_ms - copy.out_ms


def _fixed_back(
    queue: Sequence[SwapCopy], candidates: Sequence[Candidate], hooks: Hooks
) -> list[tuple[float, float]]:
    """When (from, to) the link brings fixed ones back if nothing else uses it."""
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
    chosen: Sequence[SwapCopy], busy: Sequence[tuple[float, float]], timeline: Timeline, hooks: Hooks
) -> dict[int, int]:
    """Return the lead in operators of each chosen copy, as short as possible.

    A copy that fits between fixed ones only in pieces is left out.
    """
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


def _releases(queue: Sequence[SwapCopy], chosen: Collection[int], hooks: Hooks) -> dict[int, int]:
    """Return after how many operators the copy out of each is complete."""
    out = [copy for copy in queue if copy.fixed or copy.index in chosen]
    return {
        copy.index: hooks.release_op(end_ms - ROUNDING_MS) - copy.ready_op
        for copy, end_ms in zip(out, out_ends_ms(out), strict=True)
    }
