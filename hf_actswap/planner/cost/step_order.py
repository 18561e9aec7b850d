"""Finds where in a step the storages of a profile are made, read and freed, as far as no plan changes it.

A step is counted in **moments**: each op event of forward is one, the end of forward is one, and each op
event that backward visits is one, in the order of `OpEvent.backward_place` (its number in this order is its
*place*). Within a moment nothing has an order: what an op event makes or reads is on the device from its
start to its end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...engine.windows import Timeline
from ...plan.actions import Scope
from ...plan.model_structure import is_below
from ...plan.saved_bytes import Use
from ..profile import Profile
from ..record.lifetimes import Places, lifetimes


@dataclass(frozen=True, slots=True)
class Pack:
    """A moment at which autograd saves (packs) a tensor, and the engine gets control.

    Args:
        order: order of the use; a tensor that is no use of the profile comes half way to the next use.
        op_event: op event in which it happens.
        op: operator of the node that saves.
        at_end: whether the op event itself makes the tensor, and so has run by then.
    """

    order: float
    op_event: int
    op: int
    at_end: bool


class StepOrder:
    """A profile with the indices that the simulator needs.

    Args:
        profile: the profile of a step.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile, self.op_events = profile, profile.op_events
        self.places = Places(profile.op_events)
        self.scope_events: dict[Scope, list[int]] = {}
        for number, op_event in enumerate(self.op_events):
            if op_event.call[0] is not None:
                self.scope_events.setdefault(op_event.call[0], []).append(number)
        self.start_ms = list(accumulate((op_event.forward_ms for op_event in self.op_events), initial=0.0))
        self.lifetimes = lifetimes(profile.saved, self.op_events, self.places)
        self._op_of_order: dict[int, int] = {}
        for pack_order, op in profile.hooks:  # the first entry of an order is that of its use
            self._op_of_order.setdefault(pack_order, op)
        self.packs = self._packs()
        self.ops_of_event: list[tuple[int, ...]] = [()] * len(self.op_events)
        """For each op event its packs' operators, from high to low: backward's hooks in it."""
        for pack in reversed(self.packs):
            if pack.op not in self.ops_of_event[pack.op_event]:
                self.ops_of_event[pack.op_event] += (pack.op,)
        self._pack_events = [pack.op_event for pack in self.packs]
        self.born_in: list[list[int]] = [[] for _ in self.op_events]
        """For each op event, the numbers of the saved storages that it makes."""
        for number, lifetime in enumerate(self.lifetimes):
            if lifetime.last_place >= 0 and lifetime.made_in >= 0:
                self.born_in[lifetime.made_in].append(number)
        self.functions = self._functions()
        self.temporary_bytes = self._temporary_bytes()
        self.touching: dict[Scope, list[int]] = {}
        self.scopes_of: list[tuple[Scope, ...]] = []
        for number, storage in enumerate(profile.saved.storages):
            met = {
                scope for use in storage.uses for scope in (use.at[0], use.producer[0]) if scope is not None
            }
            self.scopes_of.append(tuple(sorted(met, key=str)))
            for scope in met:
                self.touching.setdefault(scope, []).append(number)

    def use_op(self, use: Use, op_event: int) -> int:
        """Return the operator at which the engine meets a use; for a call's inputs that before its nodes."""
        return (
            self.saved_op(use.order, op_event)
            if use.kind == "saved"
            else max(self.op_events[op_event].first_op - 1, 0)
        )

    def saved_op(self, order: int, op_event: int) -> int:
        """Return the operator that saves, and so reads in backward; if unknown, the last of its op event."""
        last = self.op_events[op_event].first_op + max(self.op_events[op_event].num_ops - 1, 0)
        return self._op_of_order.get(order, last)

    def inside(self, scope: Scope, path: str) -> list[int]:
        """Return the op events at and below a path of a scope."""
        return [
            number
            for number in self.scope_events.get(scope, ())
            if is_below(self.op_events[number].call[1], path)
        ]

    def packs_between(self, first: int, last: int) -> list[Pack]:
        """Return the packs in op events from ``first`` to ``last``."""
        return self.packs[bisect_left(self._pack_events, first) : bisect_right(self._pack_events, last)]

    def last_op(self, scope: Scope) -> int:
        """Return the last operator of a scope."""
        op_event = self.op_events[self.scope_events[scope][-1]]
        return op_event.first_op + max(op_event.num_ops - 1, 0)

    def _packs(self) -> list[Pack]:
        found, listed = [], set()
        for storage, lifetime in zip(self.profile.saved.storages, self.lifetimes, strict=True):
            for use, op_event in zip(storage.uses, lifetime.op_events, strict=True):
                if use.kind == "saved":
                    found.append(
                        Pack(use.order, op_event, self.use_op(use, op_event), lifetime.made_in == op_event)
                    )
                    listed.add((use.order, found[-1].op))
        first_ops = [op_event.first_op for op_event in self.op_events]
        for order, op in self.profile.hooks:
            if (order, op) not in listed:
                op_event = max(bisect_right(first_ops, op) - 1, 0)
                found.append(Pack(order + 0.5, op_event, op, False))
        return sorted(found, key=lambda pack: (pack.order, pack.op))

    def _functions(self) -> frozenset[int]:
        """Return the op events that are calls of functions, and not what runs between functions."""
        return frozenset(
            op_event
            for storage, lifetime in zip(self.profile.saved.storages, self.lifetimes, strict=True)
            for use, op_event in zip(storage.uses, lifetime.op_events, strict=True)
            if use.at == self.op_events[op_event].call
            and (use.kind == "function" or (use.kind == "returned" and use.at[2] is not None))
        )

    def _temporary_bytes(self) -> list[int]:
        """Return the bytes that each op event needs beyond what stays, in forward and when it runs again."""
        stays = list(accumulate(reversed([op_event.forward_base_bytes for op_event in self.op_events]), min))[
            ::-1
        ]
        return [
            op_event.forward_base_bytes - least for op_event, least in zip(self.op_events, stays, strict=True)
        ]


def timeline(
    forward: Sequence[tuple[int, float]], forward_end_ms: float, backward: Sequence[tuple[int, float]]
) -> Timeline:
    """Return a timeline of hooks (operator, ms); hooks out of order join the moment of the one before."""
    rising: list[tuple[int, float]] = []
    for op, ms in forward:
        if not rising or op > rising[-1][0]:
            rising.append((op, max(ms, rising[-1][1] if rising else 0.0)))
    falling: list[tuple[int, float]] = []
    for op, ms in backward:
        if not falling or op < falling[-1][0]:
            falling.append((op, ms))
    return Timeline((*rising, (rising[-1][0] if rising else 0, forward_end_ms)), tuple(falling))
