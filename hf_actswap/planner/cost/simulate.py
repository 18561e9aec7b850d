"""Predicts what a plan would cost in time and memory before it is applied: it simulates the engine's step.

A pure function of a profile, a plan and a link. Moments are as in `scope_fates`: within an op event nothing
has an order, so it reads at its start and frees at its end. The prediction for the empty plan is what was
measured.

The engine acts at hooks, so *in which* moment something happens does not depend on times. Times only say how
long compute waits there. Copies are queued by the engine's own queues (`engine.schedule`) and take the time
that a link needs; copies in one direction run one after another. A value that the host reads in forward
(`OpEvent.reads_values`) is one of them: compute waits for all copies out that have begun.

In forward, each pack (autograd saves a tensor) makes the releases that are due, then starts its copy out; at
the end of forward the remaining releases follow. In backward, each op event starts the prefetches whose point
is reached, then reads its tensors: it waits for a copy back, which it starts if nothing has; what was dropped
is built again, its inputs first. Operators are autograd nodes, in order of creation.

Assumptions that no profile holds: a layer that runs again needs the same temporary memory as in forward; a
sliced tensor (``slice``) is kept whole; compiled layers that are compiled to save less are scaled
(`compiled_shares`). Without a link copies take no time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from ...engine.link import DuplexLink, Lane, Link
from ...engine.schedule import PrefetchOrder, PrefetchRequest
from ...engine.windows import Candidate, Timeline, choose_windows, windows_of_all
from ...plan.actions import MemoryPlan, PlanRow, Scope, Windows
from ...plan.saved_bytes import OpCall, RecomputedModules, SavedBytes, Use, held_results
from ..profile import CopyTimes, MemoryPoint, Prediction, Profile
from .compiled_shares import compile_points_of, with_compile_points, without_compile_options
from .scope_fates import (
    CopyId,
    CopyOut,
    Pack,
    RebuiltStorage,
    RecomputedRegion,
    RunStep,
    ScopeFate,
    StepOrder,
    scope_fate,
    timeline,
)

_Times = dict[CopyId, tuple[float, float]]

_TOLERANCE_MS = 1e-9

_READ, _RELEASE, _LEAVE = -1, 0, 1
"""What happens in forward, in this order at one use: a value is read, memory freed, a copy out begins."""


@dataclass(frozen=True, slots=True)
class MovingCopy:
    """A copy that a step carries out.

    Args:
        want_op: the operator whose backward needs it first.
        tickets: how often it is read; 0: its host memory is freed at once.
    """

    copy: CopyOut
    windows: Windows
    want_op: int
    tickets: int


class Moment(NamedTuple):
    """A moment of backward, or one of a region that runs again within it."""

    op_event: int
    start_ms: float
    base_bytes: int
    swapped_bytes: int
    rebuilt_bytes: int
    place: int


class ForwardWalk:
    """Simulates forward, up to its end; without a link copies take no time.

    Attributes:
        moments: for each copy, the first moment in which its device memory is free.
        released_ms: for each copy, the time of that.
        waits: (op event, ms): how long compute waits before, or within, an op event.
    """

    def __init__(
        self, program: StepProgram, moving: Mapping[CopyId, MovingCopy], link: DuplexLink | None
    ) -> None:
        self.program, self.moving, self.link = program, moving, link
        self.numbers = {copy: number for number, copy in enumerate(moving)}
        self.moments: dict[CopyId, int] = {}
        self.released_ms: dict[CopyId, float] = {}
        self.queued_ms: dict[CopyId, float] = {}
        self.waits: list[tuple[int, float]] = []
        self.stall_ms = 0.0
        self._walk()
        self.forward_end_ms = program.order.start_ms[-1] + self.stall_ms

    def copy_times(self) -> _Times:
        """Return when each copy out began and ended; call it when the whole step has been simulated."""
        if (link := self.link) is None:
            return {name: (ms, ms) for name, ms in self.queued_ms.items()}
        for name, ms in self.queued_ms.items():  # copies for which nothing has waited
            link.wait(link.out, self.numbers[name], ms)
        return _lane_times(link.out, self.numbers, self.queued_ms)

    def _walk(self) -> None:
        packs, start_ms = self.program.packs, self.program.order.start_ms
        orders, ops = [pack.order for pack in packs], [pack.op for pack in packs]
        forward_end = len(start_ms) - 1
        events: list[tuple[float, int, tuple[int, int], CopyId | None, int, bool]] = []
        for at_event, running in enumerate(self.program.order.op_events if self.moving else ()):
            if running.reads_values:
                events.append((running.first_order, _READ, (at_event, 0), None, at_event, False))
        last: CopyId | None = None
        for number, (name, moving) in enumerate(self.moving.items()):
            copy = moving.copy
            point = copy.op + moving.windows.release_ops
            at = max(bisect_left(ops, point), bisect_right(orders, copy.order))
            events.append((copy.order, _LEAVE, (number, 0), name, copy.op_event, copy.at_end))
            if moving.tickets and at < len(packs):
                pack = packs[at]
                events.append((pack.order, _RELEASE, (point, number), name, pack.op_event, pack.at_end))
            elif moving.tickets:
                events.append((1 << 60, _RELEASE, (point, number), name, forward_end, False))
            else:
                self.moments[name] = 0
        for _, kind, _, moved, op_event, at_end in sorted(events, key=lambda event: event[:3]):
            moment = min(op_event + at_end, forward_end)
            now_ms = start_ms[moment] + self.stall_ms
            if moved is None:
                if last is not None:  # the value is copied on the same lane, behind all that have begun
                    self._wait(last, moment, now_ms)
            elif kind == _LEAVE:
                self.queued_ms[moved], last = now_ms, moved
                if self.link is not None:
                    size_bytes = self.moving[moved].copy.size_bytes
                    self.link.enqueue(self.link.out, self.numbers[moved], size_bytes, now_ms)
            else:
                self.moments[moved], self.released_ms[moved] = moment, self._wait(moved, moment, now_ms)

    def _wait(self, name: CopyId, moment: int, now_ms: float) -> float:
        """Let compute wait for a copy out; return when it goes on."""
        if self.link is None:
            return now_ms
        waited_ms = self.link.wait(self.link.out, self.numbers[name], now_ms) - now_ms
        if waited_ms > _TOLERANCE_MS:
            self.stall_ms += waited_ms
            self.waits.append((moment, waited_ms))
            now_ms += waited_ms
        return now_ms


class BackwardWalk:
    """Simulates backward, from the end of forward.

    ``each_step``: whether a region that runs again has a moment for each of its op events, or one in all.
    """

    def __init__(self, ahead: ForwardWalk, each_step: bool) -> None:
        self._program, self._moving = ahead.program, ahead.moving
        self._link, self._numbers = ahead.link, ahead.numbers
        self._each_step = each_step
        self.now_ms, self.stall_ms, self.recompute_ms = ahead.forward_end_ms, 0.0, 0.0
        self.moments: list[Moment] = []
        self.read_ms: dict[CopyId, float] = {}
        self.hook_ms: list[tuple[int, float]] = []
        self._swapped_bytes = self._rebuilt_bytes = 0
        self._unread = {name: moving.tickets for name, moving in self._moving.items()}
        self._fetched: dict[CopyId, float] = {}
        self._ready: set[CopyId] = set()
        self._run: set[int] = set()
        self._tickets: dict[int, int] = {}
        self._reading: list[CopyId | RebuiltStorage] = []
        self._walk()

    def copy_times(self) -> dict[CopyId, tuple[float, float, float]]:
        """Return when each copy back began and ended, and when it was first read."""
        if (link := self._link) is None:
            times: _Times = {name: (ms, ms) for name, ms in self._fetched.items()}
        else:
            for name in self._fetched:  # copies for which nothing has waited
                link.wait(link.back, self._numbers[name], self.now_ms)
            times = _lane_times(link.back, self._numbers, self._fetched)
        return {name: (*times[name], self.read_ms.get(name, self.now_ms)) for name in times}

    def _walk(self) -> None:
        program, order = self._program, self._program.order
        moving = sorted(self._moving.items(), key=lambda item: item[1].copy.order)
        wants = [
            PrefetchRequest(name, item.want_op, item.windows.prefetch_ops)
            for name, item in moving
            if item.tickets
        ]
        due = PrefetchOrder((op for hooks in program.hooks for op in hooks), wants)
        last = order.op_events[-1].forward_base_bytes if order.op_events else 0
        for place, op_event in enumerate(order.places.order):
            running = order.op_events[op_event]
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
            last = running.backward_base_bytes
            self._add_moment(op_event, last, self._rebuilt_bytes, place)
            self._let_go()
            self.now_ms += running.backward_ms

    def _add_moment(self, op_event: int, base_bytes: int, rebuilt_bytes: int, place: int) -> None:
        moment = Moment(op_event, self.now_ms, base_bytes, self._swapped_bytes, rebuilt_bytes, place)
        self.moments.append(moment)

    def _fetch(self, name: CopyId) -> None:
        if name in self._fetched:
            return
        size_bytes = self._moving[name].copy.size_bytes
        self._fetched[name] = self.now_ms
        self._swapped_bytes += size_bytes
        if self._link is not None:
            self._link.enqueue(self._link.back, self._numbers[name], size_bytes, self.now_ms)

    def _read_copy(self, name: CopyId) -> None:
        if name not in self._moving:  # it was not swapped after all
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
                    self._swapped_bytes -= self._moving[item].copy.size_bytes
        self._reading.clear()

    def _build(self, region: RecomputedRegion, place: int, boundary_bytes: int) -> None:
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
        for step in steps:
            self._rebuilt_bytes += step.built_bytes
            rebuilt_bytes = self._rebuilt_bytes + step.passing_bytes
            self._add_moment(step.op_event, boundary_bytes, rebuilt_bytes, place)
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


_UNHIDDEN = Windows.of_prefetch(1)
"""Windows of a swap that are to be chosen by measurement (`engine.auto_windows`), if nothing is measured."""


def windows_in(plan: MemoryPlan, call: OpCall) -> Windows | None:
    """Return the windows that a plan has for the results of a call."""
    scope, path, ordinal = call
    row = None if scope is None else plan.row(scope, path, ordinal)
    return None if row is None else row.windows


class StepProgram:
    """The fates of all scopes under a plan, put together. Places count op events in the order of backward.

    Attributes:
        packs: where the engine gets control in forward.
        hooks: by place, the falling operators at which backward calls the engine.
        copies: all that may move, in their order.
        reads: by place, the regions whose results nodes read, with these results.
        swap_reads: by place, the copies that nodes read.
    """

    def __init__(self, order: StepOrder, fates: Sequence[ScopeFate], plan: MemoryPlan) -> None:
        self.order, self.fates, self._plan = order, fates, plan
        found = {
            (item.storage, copy.number): copy
            for fate in fates
            for item in fate.storages
            for copy in item.copies
        }
        self.copies = dict(sorted(found.items(), key=lambda item: item[1].order))
        self._wanted = {name: (copy.op, 0) for name, copy in self.copies.items()}
        """For each copy the operator whose backward needs it first, and how often it is read."""
        self.packs, self.hooks = self._points()
        self.reads: dict[int, list[tuple[RecomputedRegion, RebuiltStorage]]] = {}
        self.swap_reads: dict[int, list[CopyId]] = {}
        for fate in fates:
            for read in fate.copy_reads:
                first, tickets = self._wanted[read.copy]
                self._wanted[read.copy] = max(first, read.op), tickets + 1
                if not read.by_region:
                    self.swap_reads.setdefault(read.place, []).append(read.copy)
            for place, region, item in fate.reads:
                self.reads.setdefault(place, []).append((region, item))

    def moving(self, link: Link | None) -> dict[CopyId, MovingCopy]:
        """Return the copies that move. By the rates of ``link`` windows are chosen that the plan leaves to
        measurement; ``None``: all are 1.
        """
        windows = {name: windows_in(self._plan, copy.call) for name, copy in self.copies.items()}
        chosen = self.chosen(windows, link) if None in windows.values() else self.within_host(windows)
        return self.with_windows(chosen)

    def with_windows(self, windows: Mapping[CopyId, Windows | None]) -> dict[CopyId, MovingCopy]:
        """Return the copies that have windows."""
        return {
            name: MovingCopy(copy, chosen, *self._wanted[name])
            for name, copy in self.copies.items()
            if (chosen := windows.get(name)) is not None
        }

    def kept_until(self, moving: Mapping[CopyId, MovingCopy]) -> dict[int, int]:
        """Return until which place of backward regions, and copies that do not move, keep storages."""
        found: dict[int, int] = {}
        holds = [hold for fate in self.fates for hold in fate.holds]
        holds += [
            (read.copy[0], read.place)
            for fate in self.fates
            for read in fate.copy_reads
            if read.copy not in moving
        ]
        for number, place in holds:
            found[number] = max(found.get(number, -1), place)
        return found

    def within_host(self, windows: Mapping[CopyId, Windows | None]) -> dict[CopyId, Windows | None]:
        """Drop the copies for which host memory is used up, in the order in which the engine meets them."""
        left = self._plan.host_memory_bytes
        found = dict(windows)
        for name, copy in self.copies.items():
            if left is None or name not in found:
                continue
            if copy.size_bytes > left:
                del found[name]
            else:
                left -= copy.size_bytes
        return found

    def chosen(
        self, windows: Mapping[CopyId, Windows | None], link: Link | None
    ) -> dict[CopyId, Windows | None]:
        """Choose windows as the engine would after it has measured a step, here one with instant copies."""
        if link is None or not self.packs:
            return self.within_host({name: given or _UNHIDDEN for name, given in windows.items()})
        candidates, _, seen = self.seen(windows)
        decisions = choose_windows(candidates, seen, link, self._plan.host_memory_bytes)
        return {
            name: decision.windows
            for name, decision in zip(self.copies, decisions, strict=True)
            if decision.swap
        }

    def seen(
        self, windows: Mapping[CopyId, Windows | None]
    ) -> tuple[list[Candidate], list[tuple[float, float]], Timeline]:
        """Return all copies, when each can start and is read, and the hooks, as if copies took no time."""
        moving = self.with_windows({name: given or _UNHIDDEN for name, given in windows.items()})
        ahead = ForwardWalk(self, moving, None)
        back = BackwardWalk(ahead, False)
        start_ms = self.order.start_ms
        forward = [(pack.op, start_ms[pack.op_event + pack.at_end]) for pack in self.packs]
        candidates = [
            Candidate(copy.size_bytes, copy.op, self._wanted[name][0], windows[name])
            for name, copy in self.copies.items()
        ]
        moments_ms = [
            (start_ms[copy.op_event + copy.at_end], back.read_ms.get(name, back.now_ms))
            for name, copy in self.copies.items()
        ]
        return candidates, moments_ms, timeline(forward, ahead.forward_end_ms, back.hook_ms)

    def _points(self) -> tuple[list[Pack], list[Sequence[int]]]:
        """Return packs and hooks where the engine gets control; a layer recomputed whole has one of each."""
        order, places = self.order, self.order.places
        hooks: list[Sequence[int]] = [order.ops_of_event[op_event] for op_event in places.order]
        checkpoints = {fate.checkpointed: fate for fate in self.fates if fate.checkpointed is not None}
        if not checkpoints:
            return order.packs, hooks
        packs = [pack for pack in order.packs if order.op_events[pack.op_event].call[0] not in checkpoints]
        for scope, fate in checkpoints.items():
            op_events = order.scope_events[scope]
            for op_event in op_events:
                if places.of_event[op_event] >= 0:
                    hooks[places.of_event[op_event]] = ()
            for region in fate.regions[:1]:
                hooks[region.first_place] = (region.last_op,)
            first = order.op_events[op_events[0]]
            own = Pack(first.first_order, op_events[0], first.first_op, False)
            insort(packs, own, key=lambda pack: pack.order)
        return packs, hooks


StorageOutcome = Literal["keep", "swap", "recompute", "unsaved"]

_OUTSIDE: OpCall = (None, "", None)


def predict(
    profile: Profile, plan: MemoryPlan, link: Link | None = None, optimizer_states_moved: bool = False
) -> Prediction:
    """Predict one step under a plan.

    Args:
        profile: profile of the step without a policy.
        plan: a plan for the same model.
        link: rates of host and device; ``None``: the profile's. If that has none either, copies take no time.
        optimizer_states_moved: whether optimizer states are on the host during forward and backward; the
            optimizer then takes at least as long as they need to come and to go.
    """
    return Simulator(profile).predict(plan, link, optimizer_states_moved)


def outside(profile: Profile, link: Link | None, optimizer_states_moved: bool) -> tuple[float, int]:
    """Return the time of a step outside forward and backward, in ms, and the bytes in use meanwhile.

    Optimizer states that are on the host (``optimizer_states_moved``) come and go in this time.
    """
    away_bytes = profile.optimizer_state_bytes if optimizer_states_moved else 0
    outside_ms = profile.outside_ms
    if away_bytes and link is not None:
        rate = min(link.in_beside_out_bytes_per_ms, link.out_beside_in_bytes_per_ms)
        outside_ms = max(outside_ms, away_bytes / rate)
    return outside_ms, max(profile.outside_base_bytes - away_bytes, 0)


def fates_of(profile: Profile, plan: MemoryPlan) -> tuple[StorageOutcome, ...]:
    """Return the fate of each storage of a profile; ``unsaved``: the storage is neither saved nor held.

    A storage of which a part moves and a part stays counts as kept.
    """
    return Simulator(profile).fates_of(plan)


class Simulator:
    """Predicts steps of one profile under many plans, and computes once what does not depend on the plan."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._order = StepOrder(profile)
        self._neighbours: dict[Scope, tuple[Scope, ...]] = {}
        for scope, numbers in self._order.touching.items():
            met = {scope, *(other for number in numbers for other in self._order.scopes_of[number])}
            self._neighbours[scope] = tuple(sorted(met, key=str))
        self._known: dict[object, ScopeFate] = {}
        self._held: dict[object, dict[int, Use]] = {}
        self._sharing: dict[object, Simulator] = {}

    def predict(
        self,
        plan: MemoryPlan,
        link: Link | None = None,
        optimizer_states_moved: bool = False,
        curve: bool = True,
    ) -> Prediction:
        """Predict one step, as the function `predict` does.

        Without ``curve`` this is faster, and `Prediction.memory` is empty.
        """
        profile, program = self._program(plan)
        link = link or profile.link
        ahead = ForwardWalk(program, program.moving(link), None if link is None else DuplexLink(link))
        back = BackwardWalk(ahead, curve)
        away_bytes = profile.optimizer_state_bytes if optimizer_states_moved else 0
        memory = MemoryCounter(ahead, back, away_bytes)
        outside_ms, outside_bytes = outside(profile, link, optimizer_states_moved)
        swapped_bytes = sum(moving.copy.size_bytes for moving in ahead.moving.values())
        return Prediction(
            step_ms=back.now_ms + outside_ms,
            compute_ms=profile.compute_ms,
            recompute_ms=back.recompute_ms,
            forward_stall_ms=ahead.stall_ms,
            backward_stall_ms=back.stall_ms,
            forward_end_ms=ahead.forward_end_ms,
            peak_bytes=max(memory.peak_bytes, outside_bytes),
            peak_at=memory.peak_at if memory.peak_bytes >= outside_bytes else _OUTSIDE,
            memory=memory.points() if curve else (),
            copies=_copy_times(ahead, back),
            kept_bytes=memory.kept_bytes,
            swapped_bytes=swapped_bytes,
            recomputed_bytes=sum(fate.dropped_bytes for fate in program.fates),
            host_bytes=swapped_bytes,
            peak_gradient_bytes=memory.peak_gradient_bytes
            if memory.peak_bytes >= outside_bytes
            else (profile.gradient_bytes or (0,))[-1],
        )

    def _program(self, plan: MemoryPlan) -> tuple[Profile, StepProgram]:
        """Return the program of a step under a plan, and the profile in which its compiled layers are as the
        plan compiles them.
        """
        if points := compile_points_of(self.profile, plan):
            if points not in self._sharing:
                self._sharing[points] = Simulator(with_compile_points(self.profile, dict(points)))
            return self._sharing[points]._program(without_compile_options(self.profile, plan))
        return self.profile, StepProgram(self._order, self._fates(plan), plan)

    def windows_of(self, plan: MemoryPlan, link: Link) -> dict[OpCall, list[Windows]]:
        """Return windows of all that moves, by the call that makes it, as if none were written."""
        _, program = self._program(plan)
        found: dict[OpCall, list[Windows]] = {}
        if copies := program.copies:
            chosen = windows_of_all(*program.seen(dict.fromkeys(copies)), link)
            for copy, windows in zip(copies.values(), chosen, strict=True):
                found.setdefault(copy.call, []).append(windows)
        return found

    def fates_of(self, plan: MemoryPlan) -> tuple[StorageOutcome, ...]:
        """Return the fate of each storage, as the function `fates_of` does."""
        profile, program = self._program(plan)
        copies = program.moving(profile.link)
        kept_until, moving = program.kept_until(copies), {number for number, _ in copies}
        found: list[StorageOutcome] = [
            "recompute" if lifetime.last_place >= 0 else "unsaved" for lifetime in program.order.lifetimes
        ]
        for fate in program.fates:
            for item in fate.storages:
                if max(item.kept_place, kept_until.get(item.storage, -1)) >= 0:
                    found[item.storage] = "keep"
                elif item.storage in moving:
                    found[item.storage] = "swap"
        return tuple(found)

    def _fates(self, plan: MemoryPlan) -> list[ScopeFate]:
        """Return the fates scope by scope; those of rows that were asked for before are cached."""
        rows: defaultdict[Scope, list[PlanRow]] = defaultdict(list)
        for row in plan.rows:
            rows[row.scope].append(row)
        # Windows are not part of the key: the program looks them up.
        keys = {scope: tuple((row.op_path, row.ordinal, row.fate) for row in rows[scope]) for scope in rows}
        found = []
        for scope, neighbours in self._neighbours.items():
            key = scope, plan.min_tensor_bytes, tuple(keys.get(other, ()) for other in neighbours)
            fate = self._known.get(key)
            if fate is None:
                part = replace(plan, rows=tuple(row for other in neighbours for row in rows.get(other, ())))
                held: dict[int, Use] = {}
                for other in neighbours:
                    held.update(self._held_in(other, part, keys.get(other, ())))
                recomputed = RecomputedModules(part, self.profile.saved.modules)
                fate = self._known[key] = scope_fate(self._order, recomputed, held, scope)
            found.append(fate)
        return found

    def _held_in(self, scope: Scope, plan: MemoryPlan, rows: object) -> dict[int, Use]:
        """Return the results that recomputed modules of a scope hold of ops inside that do not run again."""
        key = scope, rows
        known = self._held.get(key)
        if known is None:
            known = self._held[key] = {}
            saved = self.profile.saved
            alone = replace(plan, rows=tuple(row for row in plan.rows if row.scope == scope))
            recomputed = RecomputedModules(alone, saved.modules)
            if any(recomputed.keeps_inside(scope, root) for root in recomputed.roots.get(scope, ())):
                numbers = self._order.touching.get(scope, [])
                part = SavedBytes(tuple(saved.storages[number] for number in numbers), saved.modules)
                known.update((numbers[at], use) for at, use in held_results(part, recomputed))
        return known


def _copy_times(ahead: ForwardWalk, back: BackwardWalk) -> tuple[CopyTimes, ...]:
    out, back_in = ahead.copy_times(), back.copy_times()
    unread = (back.now_ms,) * 3
    found = []
    for name, (start_ms, end_ms) in out.items():
        copy, released_ms = ahead.moving[name].copy, ahead.released_ms.get(name, end_ms)
        times = (start_ms, end_ms, released_ms, *back_in.get(name, unread))
        found.append(CopyTimes(name[0], copy.call, copy.size_bytes, *times))
    return tuple(found)


class MemoryCounter:
    """Computes how much memory is in use on the device at each moment, once both walks are done.

    ``moved_state_bytes`` of optimizer states are on the host. The attributes are as in `Prediction`.
    """

    def __init__(self, ahead: ForwardWalk, back: BackwardWalk, moved_state_bytes: int) -> None:
        self._order, self._ahead, self._back = ahead.program.order, ahead, back
        order, forward_end = self._order, len(self._order.op_events)
        self._ends = [0] * (order.places.last + 2)
        self._kept, self._swapped, self._dropped = ([0] * (forward_end + 2) for _ in range(3))
        self.kept_bytes = 0
        self._add_storages()
        base = [max(op_event.forward_base_bytes - moved_state_bytes, 0) for op_event in order.op_events]
        first = order.op_events[order.places.order[0]].backward_base_bytes if order.places.order else None
        last = order.op_events[-1].forward_base_bytes if order.op_events else 0
        base.append(max((last if first is None else min(last, first)) - moved_state_bytes, 0))
        parts = (accumulate(part) for part in (self._kept, self._swapped, self._dropped))
        self._sizes_ahead = list(zip(base, *parts, strict=False))
        left = self.kept_bytes
        kept = [left := left - end for end in self._ends]
        self._sizes_behind = [
            (max(size - moved_state_bytes, 0), kept[place], swapped, rebuilt)
            for _, _, size, swapped, rebuilt, place in back.moments
        ]
        self.peak_bytes, self.peak_at, place = self._peak()
        gradients, reached = order.profile.gradient_bytes, order.places.order
        self.peak_gradient_bytes = gradients[reached[place]] if gradients and reached else 0

    def points(self) -> tuple[MemoryPoint, ...]:
        """Return memory over time: a point at each change."""
        waited = [0.0] * (len(self._order.op_events) + 1)
        for moment, ms in self._ahead.waits:
            waited[moment] += ms
        starts_ms = [start + ms for start, ms in zip(self._order.start_ms, accumulate(waited), strict=True)]
        starts_ms += [moment.start_ms for moment in self._back.moments]
        found: list[MemoryPoint] = []
        last = None
        for ms, sizes in zip(starts_ms, [*self._sizes_ahead, *self._sizes_behind], strict=True):
            if sizes != last:
                last = sizes
                found.append(MemoryPoint(ms, *sizes))
        return tuple(found)

    def _add_storages(self) -> None:
        """Add what is saved, or held by a region; in forward the base contains storages not saved."""
        ahead, forward_end = self._ahead, len(self._order.op_events)
        kept_until = ahead.program.kept_until(ahead.moving)
        for item in [item for fate in ahead.program.fates for item in fate.storages]:
            lifetime = item.lifetime
            birth = lifetime.birth if lifetime.last_place >= 0 else lifetime.forward_end + 1
            place = item.kept_place
            if item.storage in kept_until:
                place = max(place, kept_until[item.storage])
            if place >= 0:
                self._kept[birth] += lifetime.size_bytes
                self._ends[place + 1] += lifetime.size_bytes
                self.kept_bytes += lifetime.size_bytes
                continue
            end, part = lifetime.forward_end + 1, self._dropped
            for copy in item.copies:
                end, part = max(end, ahead.moments.get((item.storage, copy.number), 0)), self._swapped
            part[min(birth, forward_end + 1)] += lifetime.size_bytes
            part[min(max(end, birth), forward_end + 1)] -= lifetime.size_bytes

    def _peak(self) -> tuple[int, OpCall, int]:
        """Return the peak, the call that ran then, and its place in backward (0 for a peak in forward)."""
        op_events = self._order.op_events
        ahead, behind = list(map(sum, self._sizes_ahead)), list(map(sum, self._sizes_behind))
        if behind and max(behind) > max(ahead, default=0):
            peak = max(behind)
            moment = self._back.moments[behind.index(peak)]
            return peak, op_events[moment.op_event].call, moment.place
        peak = max(ahead, default=0)
        at = min(ahead.index(peak), len(op_events) - 1) if op_events else -1
        return peak, op_events[at].call if op_events else (None, "", None), 0
