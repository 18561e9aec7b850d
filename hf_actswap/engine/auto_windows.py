"""``backward_prefetch: auto``: measure one step, then choose which tensors are swapped, and their windows.

==================== ==================================================================================
forward 1            nothing is decided: kernels are loaded, layers compiled. Tensors that ``auto`` may swap
                     stay on the device as far as they fit; the rest is swapped with windows of 1.
forward 2            the link is measured before it, on all ranks at once; the step is observed. Host memory
                     is allocated between its forward and its backward, and that pause is not counted.
forward 3 (or later, the ranks exchange their measurements and take the slowest of all; so each computes the
once backward 2 ran) same decisions (`windows`). All later steps use these decisions.
==================== ==================================================================================

On a stage of a pipeline the rows are steps instead of forwards, and each rank decides alone: `StageWindows`.

Nothing inside a step depends on a clock or on free memory: how much may stay on the device is fixed when a
forward starts. A tensor is recognised by the layer in which it was saved and by its number among the tensors
to be swapped there, so sequences may differ in length. A tensor that was not observed stays on the device.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from ..config.sizes import gib_text
from ..plan.actions import SCOPES, Adjustment, Scope, Windows, layer_order
from .agreement import from_all_ranks
from .fates import KEEP, Action
from .host_pool import HostPool
from .link import Link, slowest
from .schedule import NEVER, REACH, Backward, PassOrder
from .stats import Counters, PendingTime
from .transfer import StepLog, Transfer
from .windows import TOO_LATE_BACK, Candidate, Decision, Timeline, choose_windows

logger = logging.getLogger(__name__)

KEPT_SHARE_OF_FREE = 0.6
"""Share of the free device memory that kept tensors may fill before anything is decided."""
_UNHIDDEN = Windows.of_prefetch(1)
_NOT_SEEN = "auto: the observed step had no backward; another one is observed"
_TOO_LARGE = "does not fit on the device beside the rest: swapped, and compute waits for the copies"
_HEADROOM = 1.1
"""Host memory to allocate, relative to the bytes that the link can carry during the one timed forward."""


_NOTHING_TO_HIDE = Adjustment(
    "swap_config",
    (),
    "",
    "backward_prefetch auto",
    "1",
    "copies on this device do not overlap compute, so nothing is measured (1 is the reference's Auto)",
)


Key = tuple[Scope | None, int]
"""The scope in which a tensor was saved, and its number (from 0) among those to be swapped in that scope."""


@dataclass(frozen=True)
class Measured:
    """The result of an `Observation`, for each storage that the plan swaps; all times are compute's."""

    keys: tuple[Key, ...]
    op_paths: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    timeline: Timeline


_Part = Literal["forward", "forward_end", "resumed", "backward"]


class Observation:
    """Observes one forward and its backward: what may be swapped, its size, and when compute ran each hook.

    Two things are subtracted, so that only compute's own time is left: waits for copies, and the pause
    between forward and backward in which host memory is allocated.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._seen: dict[Key, tuple[str, Candidate]] = {}
        self._log: StepLog[tuple[_Part, int, int]] = StepLog(transfer)
        self._latest: dict[_Part, int] = {}
        self._waits: list[PendingTime] = []

    @property
    def seen_bytes(self) -> int:
        """Bytes of the storages that were saved so far."""
        return sum(item.size_bytes for _, item in self._seen.values())

    def saved(self, key: Key, requested: Action, size_bytes: int, op: int) -> None:
        """Record that operator ``op`` is the first to save a storage that the plan swaps."""
        self._seen[key] = requested.op_path, Candidate(size_bytes, op, op, requested.windows)

    def used(self, key: Key, op: int) -> None:
        """Record that operator ``op`` also saves the storage with this key."""
        op_path, item = self._seen[key]
        self._seen[key] = op_path, replace(item, consumer_op=op)

    def waited(self, time: PendingTime) -> None:
        """Record that compute waited for a copy."""
        self._waits.append(time)

    def in_forward(self, op: int) -> None:
        """Record when forward ran a hook at operator ``op``, unless it has reached that operator before."""
        if op > self._latest.get("forward", -1):
            self._note("forward", op)

    def forward_ended(self, last_op: int | None = None) -> None:
        """Record the end of forward, at operator ``last_op``; ``None``: at the last one recorded."""
        self._note("forward_end", self._latest.get("forward", 0) if last_op is None else last_op)

    def pause_ended(self) -> None:
        """Record the end of the pause after forward, which is not counted as compute's time."""
        self._note("resumed", 0)

    def in_backward(self, op: int) -> None:
        """Record when backward ran a hook at operator ``op``, unless it has reached that operator before."""
        if "resumed" not in self._latest:
            self.pause_ended()
        if op < self._latest.get("backward", op + 1):
            self._note("backward", op)

    def forward_ms(self) -> float:
        """Return compute's time until the end of forward; the device must have finished the forward."""
        return self._compute()["forward_end"][-1][1]

    def measured(self) -> Measured | None:
        """Return the result, or ``None`` if forward or backward ran no hook; the device must be idle."""
        if not {"forward", "forward_end", "resumed", "backward"} <= self._latest.keys():
            return None
        times = self._compute()
        pause_ms = times["resumed"][0][1] - times["forward_end"][0][1]
        forward = [*times["forward"], *times["forward_end"]]
        hooks = [*forward, *((op, ms - pause_ms) for op, ms in times["backward"])]
        # Measured times may fall: clocks are coarse, and waits are counted a bit long.
        rising_ms = accumulate((max(ms, 0.0) for _, ms in hooks), max)
        rising = tuple((op, ms) for (op, _), ms in zip(hooks, rising_ms, strict=True))
        entries = sorted(self._seen.items(), key=lambda entry: entry[1][1].ready_op)
        return Measured(
            tuple(key for key, _ in entries),
            tuple(op_path for _, (op_path, _) in entries),
            tuple(item for _, (_, item) in entries),
            Timeline(rising[: len(forward)], rising[len(forward) :]),
        )

    def _note(self, part: _Part, op: int) -> None:
        self._latest[part] = op
        self._log.note((part, op, len(self._waits)))

    def _compute(self) -> Mapping[_Part, list[tuple[int, float]]]:
        """Return the events of each part of the step: (operator, compute's time until then in ms)."""
        waited_ms = list(accumulate((wait.elapsed_ms() or 0.0 for wait in self._waits), initial=0.0))
        found: defaultdict[_Part, list[tuple[int, float]]] = defaultdict(list)
        for (part, op, waits), ms in self._log.times():
            found[part].append((op, ms - waited_ms[waits]))
        return found


class AutoWindows:
    """Measures one step of an applied plan, then decides what is swapped and with which windows.

    Args:
        transfer: measures the link and compute's time.
        pool: host memory, which is allocated for the observed copies.
        counters: report the waits.
        pending_bytes: returns the device memory that gradients will take which are not allocated yet.
        decided: called once with the adjustments that say what was decided.
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
        self._kept_limit: int | None = None
        self._observed: dict[int, tuple[Observation, weakref.ref[Backward]]] = {}
        self._chosen: dict[int, Mapping[Key, Action]] = {}
        """Both by chunk of layers; all layers are one chunk, but on a stage of a pipeline."""

    def forward_starts(self, backward: Backward) -> AutoForward:
        """Return how to treat the training forward that starts. Every rank must call it for each forward."""
        self._forwards += 1
        if not self._transfer.overlaps:
            if self._forwards == 1:
                self._tell([_NOTHING_TO_HIDE])
            return AutoForward(None, None, 0, settled=True)  # nothing stays: all moves with windows of 1
        if self._observed:
            self._try_to_decide()
        if self._forwards > 1 and not self._chosen and not self._observed:
            self._link, self._kept_limit = self._link or self._measured_link(), self._free_bytes()
        return self._treated(0, backward)

    def forward_ended(self, forward: AutoForward) -> None:
        """Note that a training forward has ended; if it was observed, allocate host memory for its copies."""
        observation = forward.observation
        if observation is None or self._link is None:
            return
        observation.forward_ended()
        self._transfer.synchronize()
        carried = self._link.out_bytes_per_ms * observation.forward_ms() * _HEADROOM
        self._pool.reserve(int(min(observation.seen_bytes, carried)))
        self._pool.wait_reserved()
        observation.pause_ended()

    def _treated(self, chunk: int, backward: Backward) -> AutoForward:
        """Return how to treat a forward of a chunk; the first one after the link was measured is observed."""
        if self._chosen:
            return AutoForward(self._chosen.get(chunk, {}), None, None, settled=True)
        if self._link is None or chunk in self._observed:
            return AutoForward(None, None, self._free_bytes())
        observation = Observation(self._transfer)
        self._observed[chunk] = observation, weakref.ref(backward)
        self._counters.listener = self._waited
        backward.watch(observation.in_backward)
        return AutoForward(None, observation, self._free_bytes())

    def _waited(self, time: PendingTime) -> None:
        for observation, _ in self._observed.values():
            observation.waited(time)

    def _measured(self) -> dict[int, Measured | None]:
        """End the observation and return its results."""
        self._transfer.synchronize()
        observed, self._observed = self._observed, {}
        self._counters.listener = None
        return {chunk: observation.measured() for chunk, (observation, _) in observed.items()}

    def _free_bytes(self) -> int | None:
        free = self._transfer.free_bytes()
        return None if free is None else max(0, int((free - self._pending_bytes()) * KEPT_SHARE_OF_FREE))

    def _measured_link(self) -> Link | None:
        from_all_ranks(0)  # start together
        link = self._transfer.link()
        links = [item for item in from_all_ranks(link) if item is not None]
        return slowest(links) if links and link is not None else None

    def _try_to_decide(self) -> None:
        """Decide now, provided that the backward of the observed forward has run on all ranks."""
        ran = all(reference() is None for _, reference in self._observed.values())
        if not all(from_all_ranks(ran)) or self._link is None:
            return
        (measured,) = self._measured().values()
        heard = from_all_ranks(measured)
        everyone = [item for item in heard if item is not None]
        if measured is None or len(everyone) < len(heard):
            logger.info(_NOT_SEEN)
            return
        agreed = _slowest_step(measured, everyone)
        chosen = choose_windows(agreed.candidates, agreed.timeline, self._link, self._pool.limit_bytes)
        self._use({0: (agreed, _within_device(agreed, chosen, self._kept_limit))}, self._link)

    def _use(self, decided: Mapping[int, tuple[Measured, Sequence[Decision]]], link: Link) -> None:
        """Use the decisions for each chunk from now on, log them, and add them to the plan as adjustments."""
        self._chosen = {chunk: _actions(*found) for chunk, found in decided.items()}
        self._transfer.empty_cache()  # two steps kept everything, and later ones need much less
        self._tell([adjustment for found in decided.values() for adjustment in _adjustments(*found, link)])
        swapped, kept = (
            sum(
                item.size_bytes
                for measured, decisions in decided.values()
                for item, decision in zip(measured.candidates, decisions, strict=True)
                if item.windows is None and decision.swap is swap
            )
            for swap in (True, False)
        )
        logger.info(
            "auto has measured: it swaps %s a forward and keeps %s; see applied.plan.adjustments",
            gib_text(swapped),
            gib_text(kept),
        )


class StageWindows(AutoWindows):
    """Chooses windows on a stage of a pipeline, for each chunk of layers that the stage has.

    Passes of other micro-batches run between a forward and its backward, and ranks of other stages are not
    at the same forward. So ranks exchange nothing: each decides by its own times, when a step starts. Before
    step 2 the link is measured, on all ranks at once, and in it the first forward of each chunk and its
    backward are observed. Decisions are made before step 3, when host memory for all micro-batches in flight
    is allocated.
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
        passes.listen(self.step_starts)

    def step_starts(self) -> None:
        """Measure the link, or decide if a step has been observed; called when a step starts on all ranks."""
        if self._chosen or not self._transfer.overlaps:
            return
        if self._link is None:
            self._link, self._kept_limit = self._transfer.link(), self._free_bytes()
        else:
            self._decide(self._link)

    def forward_starts(self, backward: Backward) -> AutoForward:
        """Return how to treat the training forward that starts."""
        if not self._transfer.overlaps:
            return super().forward_starts(backward)
        running = self._passes.running
        return self._treated(0 if running is None else running.chunk, backward)

    def forward_ended(self, forward: AutoForward) -> None:
        """Note that a training forward has ended."""
        for observation, reference in self._observed.values():
            if observation is forward.observation and (backward := reference()) is not None:
                observation.forward_ended(backward.clock.now())

    def _decide(self, link: Link) -> None:
        measured = self._measured()
        found = {chunk: item for chunk, item in measured.items() if item is not None}
        if not found or len(found) < len(measured):
            logger.info(_NOT_SEEN)
            return
        passes = self._passes.most_in_flight()
        decided = {chunk: (seen, self._decisions(chunk, seen, link, passes)) for chunk, seen in found.items()}
        swapped = max(
            sum(item.size_bytes for item, one in zip(seen.candidates, decisions, strict=True) if one.swap)
            for seen, decisions in decided.values()
        )
        self._pool.reserve(passes * swapped)
        self._pool.wait_reserved()
        self._use(decided, link)

    def _decisions(self, chunk: int, seen: Measured, link: Link, in_flight: int) -> list[Decision]:
        """Choose for one chunk; a tensor that would need a longer window than windows can be is kept."""
        length, most_ops = self._passes.operators(chunk), NEVER
        timeline = seen.timeline
        if length is not None and in_flight > 1:
            most_ops = int(REACH * length)
            timeline = _across_passes(timeline, length, most_ops, *self._passes.neighbours(chunk))
            link = replace(
                link,
                out_bytes_per_ms=link.out_beside_in_bytes_per_ms,
                in_bytes_per_ms=link.in_beside_out_bytes_per_ms,
            )
        most_bytes, limit = self._pool.limit_bytes, self._kept_limit
        host_bytes = None if most_bytes is None else most_bytes // in_flight
        found = choose_windows(seen.candidates, timeline, link, host_bytes, most_release_ops=most_ops)
        chosen = [
            Decision(None, TOO_LATE_BACK)
            if item.windows is None and one.windows is not None and one.windows.prefetch_ops > most_ops
            else one
            for item, one in zip(seen.candidates, found, strict=True)
        ]
        return _within_device(seen, chosen, None if limit is None else limit // in_flight)


class AutoForward:
    """Says, in one forward, what becomes of each tensor that the plan swaps.

    Args:
        actions: what was decided, by key; ``None``: nothing yet.
        observation: records this forward; ``None``: it is not observed.
        kept_limit: bytes that may stay on the device until there are decisions; ``None``: no limit.
        settled: whether later forwards will treat tensors in the same way.
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
        """Return what to do with a storage that operator ``op`` is the first to save, and its key.

        Args:
            requested: the plan's action for it.
            scope: where it is saved.
            size_bytes: bytes that a swap would move.
            op: the operator.
        """
        key = scope, self._count[scope]
        self._count[scope] += 1
        if self.observation is not None:
            self.observation.saved(key, requested, size_bytes, op)
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
        """Record that operator ``op`` also saves the storage with this key."""
        if self.observation is not None:
            self.observation.used(key, op)


def _across_passes(timeline: Timeline, length: int, most_ops: int, after: bool, before: bool) -> Timeline:
    """Return a timeline that also has the hooks of the neighbouring passes that windows reach (`schedule`).

    Operators go on rising in the pass after the forward. In the pass before the backward they fall towards
    the backward's first. The neighbours are taken to last as long as this forward and this backward.

    Args:
        timeline: a forward, and its backward as if it followed at once.
        length: operators of a pass.
        most_ops: longest window.
        after, before: whether another micro-batch's backward runs right after the forward, and whether
            another's forward runs right before the backward.
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
    """Return the latest time of all ranks at each hook if all did the same work, else this rank's own."""
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
    return replace(own, candidates=candidates, timeline=Timeline(forward, backward))


def _operators(measured: Measured) -> object:
    """Return what ranks that did the same work have in common: operators relative to the step's first."""
    first = measured.timeline.forward[0][0]
    return (
        measured.keys,
        [op - first for op, _ in measured.timeline.forward],
        [op - first for op, _ in measured.timeline.backward],
        [(item.ready_op - first, item.consumer_op - first) for item in measured.candidates],
    )


def _within_device(measured: Measured, decisions: Sequence[Decision], limit: int | None) -> list[Decision]:
    # Kept tensors that exceed ``limit`` bytes are swapped although compute then waits for them; the earliest
    # first, because they stay longest.
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
            changed[index] = Decision(_UNHIDDEN, _TOO_LARGE)
            kept -= item.size_bytes
    return changed


def _adjustments(measured: Measured, decisions: Sequence[Decision], link: Link) -> list[Adjustment]:
    """Return one adjustment per op path and outcome, with layers, bytes and the range of the windows."""
    groups: defaultdict[tuple[str, bool, str], list[int]] = defaultdict(list)
    for index, decision in enumerate(decisions):
        if measured.candidates[index].windows is None:
            groups[measured.op_paths[index], decision.swap, decision.reason].append(index)
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
