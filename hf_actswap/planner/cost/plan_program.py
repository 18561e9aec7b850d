"""Assembles fates scope by scope into a step: which copies move, with which windows, and what reads them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...engine.link import Link
from ...engine.windows import Candidate, choose_windows
from ...plan.actions import MemoryPlan, Scope, Windows
from .scope_fates import CopyId, RebuiltStorage, RecomputedRegion, ScopeFate, StorageFate
from .step_order import Pack, StepOrder, timeline
from .step_walk import BackwardWalk, ForwardWalk, MovingCopy, StepProgram
from .storage_tickets import CopyOut

_UNHIDDEN = Windows.of_prefetch(1)
"""Windows of a swap that are to be chosen by measurement (`engine.auto_windows`), if nothing is measured."""


@dataclass(frozen=True)
class Assembled:
    """A step's program, and the storages that stay.

    Args:
        program: the program to simulate.
        moved: storages that have copies, or that a region may hold.
        kept_until: number of a storage -> place of backward until which a region, or a copy that could not
            start, keeps it.
    """

    program: StepProgram
    moved: Sequence[StorageFate]
    kept_until: Mapping[int, int]


def assemble(order: StepOrder, fates: Sequence[ScopeFate], plan: MemoryPlan, link: Link | None) -> Assembled:
    """Put the fates of all scopes together.

    Args:
        order: the profile in the order of its step.
        fates: the fates of its scopes under ``plan``.
        plan: has the windows, and the cap on host memory.
        link: rates by which windows are chosen if the plan leaves them to measurement; ``None``: all are 1.
    """
    moved = [item for fate in fates for item in fate.moved]
    copies = {(item.storage, copy.number): copy for item in moved for copy in item.copies}
    copies = dict(sorted(copies.items(), key=lambda item: item[1].order))
    wanted = _wants(fates, copies)
    windows = {name: _windows(plan, copy) for name, copy in copies.items()}
    assembler = _Assembler(order, fates, plan, copies, wanted)
    if any(item is None for item in windows.values()):
        windows = assembler.chosen(windows, link)
    else:
        windows = assembler.within_host(windows)
    kept_until: dict[int, int] = {}
    holds = [hold for fate in fates for hold in fate.holds]
    holds += [(name[0], place) for fate in fates for place, name in fate.swap_reads if name not in windows]
    holds += [(name[0], place) for fate in fates for name, place in fate.swap_holds if name not in windows]
    for number, place in holds:
        kept_until[number] = max(kept_until.get(number, -1), place)
    return Assembled(assembler.program(windows), moved, kept_until)


def _wants(fates: Sequence[ScopeFate], copies: Mapping[CopyId, CopyOut]) -> dict[CopyId, tuple[int, int]]:
    """Return for each copy the operator whose backward needs it first, and how often it is read."""
    wanted = {name: (copy.op, 0) for name, copy in copies.items()}
    for fate in fates:
        for name, op in fate.wants:
            first, tickets = wanted[name]
            wanted[name] = max(first, op), tickets + 1
    return wanted


def _windows(plan: MemoryPlan, copy: CopyOut) -> Windows | None:
    scope, path, ordinal = copy.call
    row = None if scope is None else plan.row(scope, path, ordinal)
    return None if row is None else row.windows


class _Assembler:
    def __init__(
        self,
        order: StepOrder,
        fates: Sequence[ScopeFate],
        plan: MemoryPlan,
        copies: Mapping[CopyId, CopyOut],
        wanted: Mapping[CopyId, tuple[int, int]],
    ) -> None:
        self._order, self._plan, self._copies, self._wanted = order, plan, copies, wanted
        self._checkpoints: dict[Scope, RecomputedRegion | None] = {
            fate.checkpointed: next((region for region in fate.regions), None)
            for fate in fates
            if fate.checkpointed is not None
        }
        self._packs, self._hooks = self._points()
        reads: dict[int, list[tuple[RecomputedRegion, RebuiltStorage]]] = {}
        swap_reads: dict[int, list[CopyId]] = {}
        for fate in fates:
            for place, region, item in fate.reads:
                reads.setdefault(place, []).append((region, item))
            for place, name in fate.swap_reads:
                swap_reads.setdefault(place, []).append(name)
        self._reads, self._swap_reads = reads, swap_reads

    def program(self, windows: Mapping[CopyId, Windows | None]) -> StepProgram:
        """Return the program in which the copies that have windows move."""
        moving = {
            name: MovingCopy(copy, chosen, *self._wanted[name])
            for name, copy in self._copies.items()
            if (chosen := windows.get(name)) is not None
        }
        return StepProgram(self._order, self._packs, moving, self._reads, self._swap_reads, self._hooks)

    def within_host(self, windows: Mapping[CopyId, Windows | None]) -> dict[CopyId, Windows | None]:
        """Drop the copies for which host memory is used up, in the order in which the engine meets them."""
        left = self._plan.host_memory_bytes
        found = dict(windows)
        for name, copy in self._copies.items():
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
        if link is None or not self._packs:
            return self.within_host({name: given or _UNHIDDEN for name, given in windows.items()})
        program = self.program({name: given or _UNHIDDEN for name, given in windows.items()})
        ahead = ForwardWalk(program, None)
        back = BackwardWalk(program, None, ahead.numbers, ahead.forward_end_ms, False)
        start_ms = self._order.start_ms
        forward = [(pack.op, start_ms[pack.op_event + pack.at_end]) for pack in self._packs]
        names = list(self._copies)
        candidates = [
            Candidate(
                self._copies[name].size_bytes, self._copies[name].op, self._wanted[name][0], windows[name]
            )
            for name in names
        ]
        seen = timeline(forward, ahead.forward_end_ms, back.hook_ms)
        decisions = choose_windows(candidates, seen, link, self._plan.host_memory_bytes)
        return {
            name: decision.windows for name, decision in zip(names, decisions, strict=True) if decision.swap
        }

    def _points(self) -> tuple[list[Pack], list[Sequence[int]]]:
        """Return packs and hooks where the engine gets control; a layer recomputed whole has one of each."""
        order = self._order
        places = order.places
        hooks: list[Sequence[int]] = [order.ops_of_event[op_event] for op_event in places.order]
        if not self._checkpoints:
            return order.packs, hooks
        packs = [
            pack for pack in order.packs if order.op_events[pack.op_event].call[0] not in self._checkpoints
        ]
        for scope, region in self._checkpoints.items():
            op_events = order.scope_events[scope]
            for op_event in op_events:
                if places.of_event[op_event] >= 0:
                    hooks[places.of_event[op_event]] = ()
            if region is not None:
                hooks[region.first_place] = (region.last_op,)
            first = order.op_events[op_events[0]]
            insort(
                packs,
                Pack(first.first_order, op_events[0], first.first_op, False),
                key=lambda pack: pack.order,
            )
        return packs, hooks
