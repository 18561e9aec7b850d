"""Predicts what a plan would cost in time and memory before it is applied: it simulates the engine's step.

A pure function of a profile, a plan and a link. Moments are as in `step_order`: within an op event nothing
has an order, so it reads at its start and frees at its end. The prediction for the empty plan is what was
measured.

Assumptions that no profile holds: a layer that runs again needs the same temporary memory as in forward; a
sliced tensor (``slice``) is kept whole; compiled layers that are compiled to save less are scaled
(`compiled_shares`). Without a link copies take no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

from ...engine.link import DuplexLink, Link
from ...plan.actions import MemoryPlan, PlanRow, Scope
from ...plan.recomputed_modules import RecomputedModules
from ...plan.saved_bytes import OpCall, SavedBytes, Use, held_results
from ..profile import CopyTimes, FrontierPoint, MemoryPoint, Prediction, Profile
from .compiled_shares import compile_points_of, with_compile_points, without_compile_options
from .plan_program import Assembled, assemble
from .scope_fates import ScopeFate, scope_fate
from .step_order import StepOrder
from .step_walk import BackwardWalk, ForwardWalk
from .storage_tickets import TicketRules

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
    """Predicts steps of one profile under many plans, and computes once what does not depend on the plan.

    Args:
        profile: profile of the step without a policy.
    """

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
        if points := compile_points_of(self.profile, plan):
            plain = without_compile_options(self.profile, plan)
            return self._sharing_of(points).predict(plain, link, optimizer_states_moved, curve)
        profile, link = self.profile, link or self.profile.link
        fates = self._fates(plan)
        assembled = assemble(self._order, fates, plan, link)
        duplex = None if link is None else DuplexLink(link)
        ahead = ForwardWalk(assembled.program, duplex)
        back = BackwardWalk(assembled.program, duplex, ahead.numbers, ahead.forward_end_ms, curve)
        away_bytes = profile.optimizer_state_bytes if optimizer_states_moved else 0
        memory = MemoryCounter(self._order, fates, assembled, ahead, back, away_bytes)
        outside_ms, outside_bytes = outside(profile, link, optimizer_states_moved)
        swapped_bytes = sum(moving.copy.size_bytes for moving in assembled.program.moving.values())
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
            copies=_copy_times(ahead, back, duplex),
            kept_bytes=memory.kept_bytes,
            swapped_bytes=swapped_bytes,
            recomputed_bytes=sum(fate.dropped_bytes for fate in fates),
            host_bytes=swapped_bytes,
            peak_gradient_bytes=memory.peak_gradient_bytes
            if memory.peak_bytes >= outside_bytes
            else (profile.gradient_bytes or (0,))[-1],
        )

    def _sharing_of(self, points: tuple[tuple[int, FrontierPoint], ...]) -> Simulator:
        """Return the simulator of the profile in which these compiled layers save less."""
        if points not in self._sharing:
            self._sharing[points] = Simulator(with_compile_points(self.profile, dict(points)))
        return self._sharing[points]

    def fates_of(self, plan: MemoryPlan) -> tuple[StorageOutcome, ...]:
        """Return the fate of each storage, as the function `fates_of` does."""
        if points := compile_points_of(self.profile, plan):
            return self._sharing_of(points).fates_of(without_compile_options(self.profile, plan))
        fates = self._fates(plan)
        assembled = assemble(self._order, fates, plan, self.profile.link)
        moving = {number for number, _ in assembled.program.moving}
        found: list[StorageOutcome] = [
            "recompute" if lifetime.last_place >= 0 else "unsaved" for lifetime in self._order.lifetimes
        ]
        for fate in fates:
            for item in fate.storages:
                if max(item.kept_place, assembled.kept_until.get(item.storage, -1)) >= 0:
                    found[item.storage] = "keep"
                elif item.storage in moving:
                    found[item.storage] = "swap"
        return tuple(found)

    def _fates(self, plan: MemoryPlan) -> list[ScopeFate]:
        """Return the fates scope by scope; those of rows that were asked for before are cached."""
        rows: defaultdict[Scope, list[PlanRow]] = defaultdict(list)
        for row in plan.rows:
            rows[row.scope].append(row)
        # Windows are not part of the key: `assemble` looks them up.
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
                fate = self._known[key] = scope_fate(self._order, TicketRules(self._order, part, held), scope)
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


def _copy_times(ahead: ForwardWalk, back: BackwardWalk, duplex: DuplexLink | None) -> tuple[CopyTimes, ...]:
    out, back_in = ahead.copy_times(duplex), back.copy_times(duplex)
    found = []
    for name, (start_ms, end_ms) in out.items():
        copy = ahead.moving[name].copy
        in_start_ms, in_end_ms, read_ms = back_in.get(name, (back.now_ms, back.now_ms, back.now_ms))
        found.append(
            CopyTimes(
                storage=name[0],
                call=copy.call,
                size_bytes=copy.size_bytes,
                out_start_ms=start_ms,
                out_end_ms=end_ms,
                release_ms=ahead.released_ms.get(name, end_ms),
                in_start_ms=in_start_ms,
                in_end_ms=in_end_ms,
                read_ms=read_ms,
            )
        )
    return tuple(found)


class MemoryCounter:
    """Computes how much memory is in use on the device at each moment.

    Args:
        order: the profile in the order of its step.
        fates: fates scope by scope.
        assembled: the step's program, made of these fates.
        ahead, back: the walks through forward and backward, done.
        moved_state_bytes: bytes of optimizer states that are on the host.

    Attributes:
        peak_bytes: the most in use in forward and backward.
        peak_at: the call that ran then.
        peak_gradient_bytes: part of the peak: gradients that were complete.
        kept_bytes: bytes of all storages that stay until backward reads them.
    """

    def __init__(
        self,
        order: StepOrder,
        fates: Sequence[ScopeFate],
        assembled: Assembled,
        ahead: ForwardWalk,
        back: BackwardWalk,
        moved_state_bytes: int,
    ) -> None:
        self._order, self._ahead, self._back = order, ahead, back
        forward_end = len(order.op_events)
        self._ends = [0] * (order.places.last + 2)
        self._kept, self._swapped, self._dropped = ([0] * (forward_end + 2) for _ in range(3))
        self.kept_bytes = 0
        for fate in fates:
            for birth, place, size_bytes in fate.kept:
                self._kept[birth] += size_bytes
                self._ends[place + 1] += size_bytes
                self.kept_bytes += size_bytes
            for birth, end, size_bytes in fate.dropped:
                self._dropped[birth] += size_bytes
                self._dropped[end + 1] -= size_bytes
        self._add_moved(assembled)
        self._base = [max(op_event.forward_base_bytes - moved_state_bytes, 0) for op_event in order.op_events]
        first = order.op_events[order.places.order[0]].backward_base_bytes if order.places.order else None
        last = order.op_events[-1].forward_base_bytes if order.op_events else 0
        self._base.append(max((last if first is None else min(last, first)) - moved_state_bytes, 0))
        self._kept, self._swapped, self._dropped = (
            list(accumulate(part))[: forward_end + 1] for part in (self._kept, self._swapped, self._dropped)
        )
        self._back_base = [max(size - moved_state_bytes, 0) for size in back.moments.base_bytes]
        left = self.kept_bytes
        self._kept_in = [left := left - end for end in self._ends]
        self._back_kept = [self._kept_in[place] for place in back.moments.places]
        self.peak_bytes, self.peak_at, place = self._peak()
        gradients, reached = order.profile.gradient_bytes, order.places.order
        self.peak_gradient_bytes = gradients[reached[place]] if gradients and reached else 0

    def points(self) -> tuple[MemoryPoint, ...]:
        """Return memory over time: a point at each change."""
        rows = zip(
            [*self._forward_ms(), *self._back.moments.start_ms],
            [*self._base, *self._back_base],
            [*self._kept, *self._back_kept],
            [*self._swapped, *self._back.moments.swapped_bytes],
            [*self._dropped, *self._back.moments.rebuilt_bytes],
            strict=True,
        )
        found: list[MemoryPoint] = []
        last: tuple[int, ...] = ()
        for ms, *sizes in rows:
            if tuple(sizes) != last:
                last = tuple(sizes)
                found.append(MemoryPoint(ms, *sizes))
        return tuple(found)

    def _add_moved(self, assembled: Assembled) -> None:
        """Add storages that move or that a region holds; in forward the base contains those not saved."""
        forward_end = len(self._order.op_events)
        for item in assembled.moved:
            lifetime = self._order.lifetimes[item.storage]
            birth = lifetime.birth if lifetime.last_place >= 0 else lifetime.forward_end + 1
            place = max(item.kept_place, assembled.kept_until.get(item.storage, -1))
            if place >= 0:
                self._kept[birth] += lifetime.size_bytes
                self._ends[place + 1] += lifetime.size_bytes
                self.kept_bytes += lifetime.size_bytes
                continue
            moments = [self._ahead.moments.get((item.storage, copy.number), 0) for copy in item.copies]
            end = max(lifetime.forward_end + 1, *moments, 0)
            part = self._swapped if item.copies else self._dropped
            part[min(birth, forward_end + 1)] += lifetime.size_bytes
            part[min(max(end, birth), forward_end + 1)] -= lifetime.size_bytes

    def _peak(self) -> tuple[int, OpCall, int]:
        """Return the peak, the call that ran then, and its place in backward (0 for a peak in forward)."""
        op_events, back = self._order.op_events, self._back.moments
        ahead = list(map(sum, zip(self._base, self._kept, self._swapped, self._dropped, strict=True)))
        behind = list(
            map(
                sum,
                zip(self._back_base, self._back_kept, back.swapped_bytes, back.rebuilt_bytes, strict=True),
            )
        )
        if behind and max(behind) > max(ahead, default=0):
            peak = max(behind)
            moment = behind.index(peak)
            return peak, op_events[back.op_events[moment]].call, back.places[moment]
        peak = max(ahead, default=0)
        at = min(ahead.index(peak), len(op_events) - 1) if op_events else -1
        return peak, op_events[at].call if op_events else (None, "", None), 0

    def _forward_ms(self) -> list[float]:
        waited = [0.0] * (len(self._order.op_events) + 1)
        for moment, ms in self._ahead.waits:
            waited[moment] += ms
        return [start + delay for start, delay in zip(self._order.start_ms, accumulate(waited), strict=True)]
