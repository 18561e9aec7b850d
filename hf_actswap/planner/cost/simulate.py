"""What a plan would cost in time and memory, before it is applied: a step of the engine on paper.

A pure function of a profile, a plan and a link. Moments are as in `step_order`: within a span nothing is told
apart, so that a span reads at its start and lets go at its end. What is predicted of the empty plan is what
was measured.

Taken for granted, and not in a profile: a layer that is run again needs the same temporary memory as in
forward; a sliced tensor (``slice``) is kept whole; compiled layers that save less than by themselves are
scaled (`compiled_shares`). Without a link copies take no time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Literal

from ...engine.link import DuplexLink, Link
from ...plan.actions import MemoryPlan, PlanRow, Scope
from ...plan.kept_inside import KeptInside
from ...plan.saved_bytes import OpCall, SavedBytes, Use, held_results
from ..profile import CopyTimes, FrontierPoint, Prediction, Profile
from .compiled_shares import points_in, with_points, without_points
from .plan_program import assemble
from .scope_fates import ScopeFate, scope_fate
from .step_memory import MemoryWalk
from .step_order import StepOrder
from .step_walk import BackwardWalk, ForwardWalk
from .storage_tickets import TicketRules

StorageOutcome = Literal["keep", "swap", "recompute", "unsaved"]

_OUTSIDE: OpCall = (None, "", None)


def predict(
    profile: Profile, plan: MemoryPlan, link: Link | None = None, optimizer_states_moved: bool = False
) -> Prediction:
    """Predict one step.

    Args:
        profile: of the step without a policy.
        plan: for the same model.
        link: of host and device; ``None``: the profile's. If that has none either, copies take no time.
        optimizer_states_moved: whether optimizer states are on the host during forward and backward; the
            optimizer then takes at least as long as they need to come and to go.
    """
    return Simulator(profile).predict(plan, link, optimizer_states_moved)


def fates_of(profile: Profile, plan: MemoryPlan) -> tuple[StorageOutcome, ...]:
    """Return what becomes of each storage of a profile; ``unsaved``: nobody saves or holds it.

    A storage of which a part moves and a part stays is kept.
    """
    return Simulator(profile).fates_of(plan)


class Simulator:
    """Predicts steps of one profile: what does not depend on the plan is computed once.

    Args:
        profile: of the step without a policy.
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
        """Predict one step; see the function.

        Without ``curve`` it is faster, and `Prediction.memory` is empty.
        """
        if points := points_in(self.profile, plan):
            plain = without_points(self.profile, plan)
            return self._sharing_of(points).predict(plain, link, optimizer_states_moved, curve)
        profile, link = self.profile, link or self.profile.link
        fates = self._fates(plan)
        assembled = assemble(self._order, fates, plan, link)
        duplex = None if link is None else DuplexLink(link)
        ahead = ForwardWalk(assembled.program, duplex)
        back = BackwardWalk(assembled.program, duplex, ahead.numbers, ahead.turn_ms, curve)
        away_bytes = profile.optimizer_state_bytes if optimizer_states_moved else 0
        memory = MemoryWalk(self._order, fates, assembled, ahead, back, away_bytes)
        outside_ms, outside_bytes = profile.outside_ms, max(profile.outside_base_bytes - away_bytes, 0)
        if away_bytes and link is not None:
            rate = min(link.in_beside_out_bytes_per_ms, link.out_beside_in_bytes_per_ms)
            outside_ms = max(outside_ms, away_bytes / rate)
        swapped_bytes = sum(moving.copy.size_bytes for moving in assembled.program.moving.values())
        return Prediction(
            step_ms=back.now_ms + outside_ms,
            compute_ms=profile.compute_ms,
            recompute_ms=back.recompute_ms,
            forward_stall_ms=ahead.stall_ms,
            backward_stall_ms=back.stall_ms,
            turn_ms=ahead.turn_ms,
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
        """The simulator of the profile in which compiled layers save less."""
        if points not in self._sharing:
            self._sharing[points] = Simulator(with_points(self.profile, dict(points)))
        return self._sharing[points]

    def fates_of(self, plan: MemoryPlan) -> tuple[StorageOutcome, ...]:
        """Return what becomes of each storage; see the function."""
        if points := points_in(self.profile, plan):
            return self._sharing_of(points).fates_of(without_points(self.profile, plan))
        fates = self._fates(plan)
        assembled = assemble(self._order, fates, plan, self.profile.link)
        moving = {number for number, _ in assembled.program.moving}
        found: list[StorageOutcome] = [
            "recompute" if life.last_place >= 0 else "unsaved" for life in self._order.lives
        ]
        for fate in fates:
            for item in fate.storages:
                if max(item.kept_place, assembled.kept_until.get(item.storage, -1)) >= 0:
                    found[item.storage] = "keep"
                elif item.storage in moving:
                    found[item.storage] = "swap"
        return tuple(found)

    def _fates(self, plan: MemoryPlan) -> list[ScopeFate]:
        """The fates scope by scope, from memory where the same rows were asked for before."""
        rows: defaultdict[Scope, list[PlanRow]] = defaultdict(list)
        for row in plan.rows:
            rows[row.scope].append(row)
        # Windows are looked up when copies are put together.
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
        """What recomputed modules of a scope hold of ops that are not run again."""
        key = scope, rows
        known = self._held.get(key)
        if known is None:
            known = self._held[key] = {}
            saved = self.profile.saved
            inside = KeptInside(plan, saved.modules)
            if any(
                inside.anything(scope, row.op_path)
                for row in plan.rows
                if row.scope == scope and row.fate == "recompute"
            ):
                numbers = self._order.touching.get(scope, [])
                part = SavedBytes(tuple(saved.storages[number] for number in numbers), saved.modules)
                alone = replace(plan, rows=tuple(row for row in plan.rows if row.scope == scope))
                known.update((numbers[at], use) for at, use in held_results(part, alone))
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
