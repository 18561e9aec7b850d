"""``auto``: what is swapped and when, chosen from measurement.

==================== ==================================================================================
forward 1            nothing is decided: kernels are loaded, layers compiled. What ``auto`` may swap stays
                     on the device as far as it fits, and is swapped with windows of 1 beyond.
forward 2            the link is measured before it, all ranks at once; the step is observed. At its end the
                     host memory is allocated, between forward and backward, where no time is taken.
forward 3 (or later, the ranks exchange what they saw, take the slowest of all, and each computes the same
once backward 2 ran) decisions (`windows`). From here on every step does the same.
==================== ==================================================================================

On a stage of a pipeline it is steps instead of forwards, and each rank decides for itself: `StageWindows`.

Nothing inside a step depends on a clock or on free memory: what may stay on the device is fixed when a
forward starts. A tensor is recognised by the layer in which it was saved and by its place among the swapped
ones there, so that sequences may differ in length. A tensor that was not observed stays on the device.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from ..plan.actions import SCOPES, Adjustment, Scope, Windows, layer_order
from .agreement import from_all_ranks
from .backward import Backward
from .fates import KEEP, Action
from .host_pool import HostPool
from .link import Link, slowest
from .passes import REACH, PassOrder
from .schedule import NEVER
from .stats import Counters, PendingTime, gib_text
from .transfer import StepLog, Transfer
from .windows import TOO_LATE_BACK, Candidate, Decision, Timeline, choose_windows

logger = logging.getLogger(__name__)

KEPT_SHARE_OF_FREE = 0.6
"""Of the free device memory, what may be filled with kept tensors before anything is decided."""
_UNHIDDEN = Windows.of_prefetch(1)
_TOO_LARGE = "does not fit on the device beside the rest: swapped, and compute waits for the copies"
_HEADROOM = 1.1
"""Host memory made ready, relative to what the link can carry in one forward: its time is taken once."""


_NOTHING_TO_HIDE = Adjustment(
    "swap_config",
    (),
    "",
    "backward_prefetch auto",
    "1",
    "copies on this device do not overlap compute, so nothing is measured (1 is the reference's Auto)",
)


Key = tuple[Scope | None, int]
"""Where a tensor was saved (scope) and as which of the swapped ones there, in order."""


@dataclass(slots=True)
class Seen:
    """A storage that the plan swaps.

    Args:
        op_path: of the plan row.
        size_bytes: what would move.
        ready_op: operator that first saves it.
        consumer_op: operator that backward first reads it in, that is the highest that saves it.
        windows: numbers of the user; ``None``: auto.
    """

    op_path: str
    size_bytes: int
    ready_op: int
    consumer_op: int
    windows: Windows | None


@dataclass(frozen=True)
class Measured:
    """An observation as numbers, the same for all ranks once they have agreed."""

    keys: tuple[Key, ...]
    candidates: tuple[Candidate, ...]
    timeline: Timeline


_Part = Literal["forward", "forward_end", "resumed", "backward"]


class Observation:
    """One forward and its backward under watch: who is swapped, how large, and when compute got where.

    Two things are taken out of the times, so that they are compute's alone: waits for copies, and the pause
    between forward and backward in which host memory is prepared.

    Args:
        transfer: whose compute is timed.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.seen: dict[Key, Seen] = {}
        self._log: StepLog[tuple[_Part, int, int]] = StepLog(transfer)
        self._latest: dict[_Part, int] = {}
        self._waits: list[PendingTime] = []

    def waited(self, time: PendingTime) -> None:
        """Compute waited for a copy."""
        self._waits.append(time)

    def in_forward(self, op: int) -> None:
        """A hook of forward; operators that do not rise are the same moment."""
        if op > self._latest.get("forward", -1):
            self._note("forward", op)

    def turned(self, last_op: int | None = None) -> None:
        """Forward has ended, with this operator; ``None``: it is not known."""
        self._note("forward_end", self._latest.get("forward", 0) if last_op is None else last_op)

    def resumed(self) -> None:
        """What followed the end of forward, and is none of compute's business, has ended too."""
        self._note("resumed", 0)

    def in_backward(self, op: int) -> None:
        """A hook of backward; operators that do not fall are the same moment."""
        if "resumed" not in self._latest:
            self.resumed()
        if op < self._latest.get("backward", op + 1):
            self._note("backward", op)

    def forward_ms(self) -> float:
        """Compute's time until the end of forward; the device must have got there."""
        return self._compute()["forward_end"][-1][1]

    def measured(self) -> Measured | None:
        """The numbers, or ``None`` if forward or backward had no hook; the device must be idle."""
        if not {"forward", "forward_end", "resumed", "backward"} <= self._latest.keys():
            return None
        times = self._compute()
        pause_ms = times["resumed"][0][1] - times["forward_end"][0][1]
        backward = [(op, ms - pause_ms) for op, ms in times["backward"]]
        entries = sorted(self.seen.items(), key=lambda item: item[1].ready_op)
        return Measured(
            tuple(key for key, _ in entries),
            tuple(
                Candidate(seen.size_bytes, seen.ready_op, seen.consumer_op, seen.windows)
                for _, seen in entries
            ),
            Timeline(*_rising([*times["forward"], *times["forward_end"]], backward)),
        )

    def _note(self, part: _Part, op: int) -> None:
        self._latest[part] = op
        self._log.note((part, op, len(self._waits)))

    def _compute(self) -> Mapping[_Part, list[tuple[int, float]]]:
        """(operator, compute's time until there) of all events."""
        waited_ms = list(accumulate((wait.elapsed_ms() or 0.0 for wait in self._waits), initial=0.0))
        found: defaultdict[_Part, list[tuple[int, float]]] = defaultdict(list)
        for (part, op, waits), ms in self._log.times():
            found[part].append((op, ms - waited_ms[waits]))
        return found


_Times = tuple[tuple[int, float], ...]


def _rising(forward: list[tuple[int, float]], backward: list[tuple[int, float]]) -> tuple[_Times, _Times]:
    """Times that never fall: a clock's resolution, or a wait counted a little too long, may make them."""
    latest = 0.0
    times: list[list[tuple[int, float]]] = [[], []]
    for part, entries in zip(times, (forward, backward), strict=True):
        for op, ms in entries:
            latest = max(latest, ms)
            part.append((op, latest))
    return tuple(times[0]), tuple(times[1])


class AutoWindows:
    """Decides for one applied plan.

    Args:
        transfer: measures the link and compute's time.
        pool: where host memory is made ready.
        counters: report the waits.
        pending_bytes: device memory that the step will take beside what is saved (gradients not there yet).
        decided: called with the adjustments, once.
    """

    def __init__(
        self,
        transfer: Transfer,
        pool: HostPool,
        counters: Counters,
        pending_bytes: Callable[[], int],
        decided: Callable[[Sequence[Adjustment]], None],
    ) -> None:
        self._transfer, self._pool, self._counters = transfer, pool, counters
        self._pending_bytes, self._tell = pending_bytes, decided
        self._forwards = 0
        self._link: Link | None = None
        self._observation: Observation | None = None
        self._kept_limit: int | None = None
        self._backward: weakref.ref[Backward] | None = None
        self._actions: dict[Key, Action] | None = None

    def forward_starts(self, backward: Backward) -> AutoForward:
        """A training forward starts; every rank calls this for each of its forwards."""
        self._forwards += 1
        if not self._transfer.overlaps:
            if self._forwards == 1:
                self._tell([_NOTHING_TO_HIDE])
            return AutoForward(None, None, 0, settled=True)  # nothing stays: all moves with windows of 1
        if self._actions is None and self._observation is not None:
            self._try_to_decide()
        if self._actions is not None:
            return AutoForward(self._actions, None, None, settled=True)
        limit = self._free_bytes()
        if self._observation is None and self._forwards > 1:
            self._link = self._link or self._measured_link()
            if self._link is not None:
                self._kept_limit = limit
                self._observation = Observation(self._transfer)
                self._backward = weakref.ref(backward)
                self._counters.listener = self._observation.waited
                backward.watch(self._observation.in_backward)
                return AutoForward(None, self._observation, limit)
        return AutoForward(None, None, limit)

    def forward_ended(self, forward: AutoForward) -> None:
        """It ended: if it was observed, make ready the host memory that its copies can fill."""
        observation = forward.observation
        if observation is None or self._link is None:
            return
        observation.turned()
        self._transfer.synchronize()
        wanted = sum(seen.size_bytes for seen in observation.seen.values())
        carried = self._link.out_bytes_per_ms * observation.forward_ms() * _HEADROOM
        self._pool.reserve(int(min(wanted, carried)))
        self._pool.wait_reserved()
        observation.resumed()

    def _free_bytes(self) -> int | None:
        free = self._transfer.free_bytes()
        return None if free is None else max(0, int((free - self._pending_bytes()) * KEPT_SHARE_OF_FREE))

    def _measured_link(self) -> Link | None:
        from_all_ranks(0)  # start together
        link = self._transfer.link()
        links = [item for item in from_all_ranks(link) if item is not None]
        return slowest(links) if links and link is not None else None

    def _try_to_decide(self) -> None:
        """Decide if backward of the observed forward has run on all ranks."""
        ran = self._backward is None or self._backward() is None
        if not all(from_all_ranks(ran)) or self._observation is None or self._link is None:
            return
        self._transfer.synchronize()
        measured = self._observation.measured()
        heard = from_all_ranks(measured)
        everyone = [item for item in heard if item is not None]
        self._counters.listener = None
        seen, self._observation = self._observation.seen, None
        if measured is None or len(everyone) < len(heard):
            logger.info("auto: the observed step had no backward; another one is observed")
            return
        agreed = _slowest_step(measured, everyone)
        chosen = choose_windows(
            agreed.candidates, agreed.timeline, self._link, self._pool.most_bytes, safety=1.1
        )
        decisions = _within_device(agreed, chosen, self._kept_limit)
        self._actions = _actions(agreed, decisions)
        self._say([(agreed, decisions, seen)], self._link)

    def _say(
        self, decided: Sequence[tuple[Measured, Sequence[Decision], Mapping[Key, Seen]]], link: Link
    ) -> None:
        """Log what was decided, of each forward that was observed, and add it to the plan."""
        self._transfer.empty_cache()  # two steps kept everything, and later ones need much less
        self._tell([adjustment for found in decided for adjustment in _adjustments(*found, link)])
        swapped, kept = (
            sum(_bytes_decided(measured, decisions, swap) for measured, decisions, _ in decided)
            for swap in (True, False)
        )
        logger.info(
            "auto has measured: it swaps %s a forward and keeps %s; see applied.plan.adjustments",
            gib_text(swapped),
            gib_text(kept),
        )


class StageWindows(AutoWindows):
    """Decides on a stage of a pipeline, for each of its chunks.

    Other micro-batches' passes lie between a forward and its backward, and ranks of other stages are not at
    the same forward. So nothing is exchanged: each rank decides by its own times, when a step starts.

    ====== =====================================================================================
    step 1 nothing is decided.
    step 2 the link is measured before it, on all ranks at once. The first forward of each chunk
           and its backward are observed.
    step 3 decisions are made before it, and host memory for all micro-batches in flight is
           allocated.
    ====== =====================================================================================

    Args:
        transfer, pool, counters, pending_bytes, decided: see `AutoWindows`.
        passes: of the stage.
    """

    def __init__(
        self,
        transfer: Transfer,
        pool: HostPool,
        counters: Counters,
        pending_bytes: Callable[[], int],
        decided: Callable[[Sequence[Adjustment]], None],
        passes: PassOrder,
    ) -> None:
        super().__init__(transfer, pool, counters, pending_bytes, decided)
        self._passes = passes
        self._observed: dict[int, tuple[Observation, weakref.ref[Backward]]] = {}
        self._chosen: dict[int, Mapping[Key, Action]] = {}
        passes.listen(self.step_starts)

    def step_starts(self) -> None:
        """A step starts on all ranks."""
        if self._chosen or not self._transfer.overlaps:
            return
        if self._link is None:
            self._link, self._kept_limit = self._transfer.link(), self._free_bytes()
        else:
            self._decide(self._link)

    def forward_starts(self, backward: Backward) -> AutoForward:
        """A training forward starts."""
        running = self._passes.running
        chunk = 0 if running is None else running.chunk
        if not self._transfer.overlaps:
            return super().forward_starts(backward)
        if self._chosen:
            return AutoForward(self._chosen.get(chunk, {}), None, None, settled=True)
        if self._link is None or chunk in self._observed:
            return AutoForward(None, None, self._free_bytes())
        observation = Observation(self._transfer)
        self._observed[chunk] = observation, weakref.ref(backward)
        self._counters.listener = self._waited
        backward.watch(observation.in_backward)
        return AutoForward(None, observation, self._free_bytes())

    def forward_ended(self, forward: AutoForward) -> None:
        """It ended."""
        for observation, reference in self._observed.values():
            if observation is forward.observation and (backward := reference()) is not None:
                observation.turned(backward.clock.now())

    def _waited(self, time: PendingTime) -> None:
        for observation, _ in self._observed.values():
            observation.waited(time)

    def _decide(self, link: Link) -> None:
        self._transfer.synchronize()
        observed, self._observed = self._observed, {}
        self._counters.listener = None
        measured = {chunk: observation.measured() for chunk, (observation, _) in observed.items()}
        found = {chunk: item for chunk, item in measured.items() if item is not None}
        if not found or len(found) < len(measured):
            logger.info("auto: the observed step had no backward; another one is observed")
            return
        passes = self._passes.most_in_flight()
        decided = []
        for chunk, seen in found.items():
            decisions = self._decisions(chunk, seen, link, passes)
            self._chosen[chunk] = _actions(seen, decisions)
            decided.append((seen, decisions, observed[chunk][0].seen))
        swapped = max(
            sum(item.size_bytes for item, one in zip(seen.candidates, decisions, strict=True) if one.swap)
            for seen, decisions, _ in decided
        )
        self._pool.reserve(passes * swapped)
        self._pool.wait_reserved()
        self._say(decided, link)

    def _decisions(self, chunk: int, seen: Measured, link: Link, in_flight: int) -> list[Decision]:
        """Choose for one chunk; what would have to come back earlier than windows reach is kept."""
        length, most_ops = self._passes.operators(chunk), NEVER
        timeline = seen.timeline
        if length is not None and in_flight > 1:
            most_ops = int(REACH * length)
            timeline = _across_passes(timeline, length, most_ops, *self._passes.crossed(chunk))
            link = replace(
                link,
                out_bytes_per_ms=link.out_beside_in_bytes_per_ms,
                in_bytes_per_ms=link.in_beside_out_bytes_per_ms,
            )
        most_bytes, limit = self._pool.most_bytes, self._kept_limit
        host_bytes = None if most_bytes is None else most_bytes // in_flight
        chosen = [
            Decision(False, None, TOO_LATE_BACK)
            if item.windows is None and one.windows is not None and one.windows.prefetch_ops > most_ops
            else one
            for item, one in zip(
                seen.candidates,
                choose_windows(seen.candidates, timeline, link, host_bytes, 1.1, most_ops),
                strict=True,
            )
        ]
        return _within_device(seen, chosen, None if limit is None else limit // in_flight)


class AutoForward:
    """One forward: says what becomes of each tensor that the plan swaps.

    Args:
        actions: what was decided; ``None``: not yet.
        observation: of this forward, if it is watched.
        kept_limit: bytes that may stay on the device before decisions; ``None``: no limit.
        settled: whether later forwards will say the same.
    """

    def __init__(
        self,
        actions: Mapping[Key, Action] | None,
        observation: Observation | None,
        kept_limit: int | None,
        settled: bool = False,
    ) -> None:
        self._actions, self.observation, self._kept_limit = actions, observation, kept_limit
        self.settled = settled
        self._count: Counter[Scope | None] = Counter()
        self._kept_bytes = 0

    def action(self, requested: Action, scope: Scope | None, size_bytes: int, op: int) -> tuple[Action, Key]:
        """Return what to do with a storage that is saved for the first time, and its key."""
        key = scope, self._count[scope]
        self._count[scope] += 1
        if self.observation is not None:
            self.observation.seen[key] = Seen(requested.op_path, size_bytes, op, op, requested.windows)
        if requested.windows is not None:
            return requested, key
        if self._actions is not None:
            return self._actions.get(key, KEEP), key
        self._kept_bytes += size_bytes
        if self._kept_limit is not None and self._kept_bytes > self._kept_limit:
            self._kept_bytes -= size_bytes
            return replace(requested, windows=_UNHIDDEN), key
        return KEEP, key

    def used(self, key: Key, op: int) -> None:
        """Another node saves the same storage."""
        if self.observation is not None:
            self.observation.seen[key].consumer_op = op


def _across_passes(timeline: Timeline, length: int, most_ops: int, after: bool, before: bool) -> Timeline:
    """Return a step with the hooks of the passes around it that windows reach (`passes`).

    Operators go on through the pass after the forward as they rose, and through the pass ahead of the
    backward as they fall. Those passes are taken to be like the stage's own.

    Args:
        timeline: a forward, and its backward as if it followed at once.
        length: operators of a pass.
        most_ops: of a window.
        after: whether a backward of another micro-batch follows the forward.
        before: whether a forward of another comes ahead of the backward.
    """
    last_op, end_ms = timeline.forward[-1]
    forward, backward = list(timeline.forward[:-1]), list[tuple[int, float]]()
    if after:
        shifted = ((last_op + 1 + last_op - op, ms) for op, ms in timeline.backward)
        forward += [(op, ms) for op, ms in shifted if op <= last_op + most_ops]
    forward.append((max(last_op, forward[-1][0]), max(end_ms, forward[-1][1])))
    start_ms = forward[-1][1]
    if before:
        shifted = ((last_op + length - (op - last_op - 1 + length), ms) for op, ms in timeline.forward[:-1])
        backward = [(op, start_ms + ms) for op, ms in shifted if op <= last_op + most_ops]
        start_ms += end_ms
    backward += [(op, start_ms + ms - end_ms) for op, ms in timeline.backward]
    return Timeline(tuple(forward), tuple(backward))


def _actions(measured: Measured, decisions: Sequence[Decision]) -> dict[Key, Action]:
    return {
        key: Action("swap", decision.windows) if decision.swap else KEEP
        for key, decision in zip(measured.keys, decisions, strict=True)
    }


def _slowest_step(own: Measured, everyone: Sequence[Measured]) -> Measured:
    """The step of the slowest rank at each hook, where all ranks did the same work; else this rank's own."""
    ops = _operators(own)
    if any(_operators(other) != ops for other in everyone):
        logger.info("auto: ranks did different work in the observed step; each decides by its own times")
        return own
    forward, backward = (
        tuple((hooks[0][0], max(ms for _, ms in hooks)) for hooks in zip(*parts, strict=True))
        for parts in (
            [other.timeline.forward for other in everyone],
            [other.timeline.backward for other in everyone],
        )
    )
    candidates = tuple(
        replace(mine[0], size_bytes=max(item.size_bytes for item in mine))
        for mine in zip(*(other.candidates for other in everyone), strict=True)
    )
    return Measured(own.keys, candidates, Timeline(forward, backward))


def _operators(measured: Measured) -> object:
    """The work of a step: operators relative to its first, without sizes and times."""
    first = measured.timeline.forward[0][0]
    return (
        measured.keys,
        [op - first for op, _ in measured.timeline.forward],
        [op - first for op, _ in measured.timeline.backward],
        [(item.ready_op - first, item.consumer_op - first) for item in measured.candidates],
    )


def _within_device(measured: Measured, decisions: Sequence[Decision], limit: int | None) -> list[Decision]:
    """Swap kept tensors that do not fit on the device, although compute then waits; the earliest first,
    because they are on the device longest.
    """
    kept = sum(
        item.size_bytes
        for item, decision in zip(measured.candidates, decisions, strict=True)
        if not decision.swap
    )
    changed = list(decisions)
    for index, item in enumerate(measured.candidates):
        if limit is None or kept <= limit:
            break
        if not changed[index].swap:
            changed[index] = Decision(True, _UNHIDDEN, _TOO_LARGE)
            kept -= item.size_bytes
    return changed


def _bytes_decided(measured: Measured, decisions: Sequence[Decision], swap: bool) -> int:
    """Bytes of one forward that were decided to be swapped, or kept; the user's numbers are no decisions."""
    return sum(
        item.size_bytes
        for item, decision in zip(measured.candidates, decisions, strict=True)
        if item.windows is None and decision.swap is swap
    )


def _adjustments(
    measured: Measured, decisions: Sequence[Decision], seen: Mapping[Key, Seen], link: Link
) -> list[Adjustment]:
    """One for each (op path, outcome): layers, bytes, and the windows from the least to the largest."""
    groups: defaultdict[tuple[str, bool, str], list[int]] = defaultdict(list)
    for index, key in enumerate(measured.keys):
        if measured.candidates[index].windows is None:
            decision = decisions[index]
            groups[seen[key].op_path, decision.swap, decision.reason].append(index)
    rates = (
        f"the link carries {link.out_bytes_per_ms / 1e6:.1f} GB/s out, {link.in_bytes_per_ms / 1e6:.1f} in"
    )
    found = []
    for (op_path, swap, reason), indexes in groups.items():
        size_bytes = sum(measured.candidates[index].size_bytes for index in indexes)
        scopes = {measured.keys[index][0] for index in indexes} - {None, *SCOPES}
        layers = sorted((scope for scope in scopes if scope is not None), key=layer_order)
        got = f"keep {size_bytes:,} bytes"
        if swap:
            windows = [window for index in indexes if (window := decisions[index].windows) is not None]
            prefetch = _range([window.prefetch_ops for window in windows])
            release = _range([window.release_ops for window in windows])
            got = f"swap {size_bytes:,} bytes, prefetch {prefetch} and release {release} operators"
        where = "swap_config"
        asked = "swap, backward_prefetch auto"
        found.append(Adjustment(where, tuple(layers), op_path, asked, got, reason or f"measured: {rates}"))
    return found


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"
