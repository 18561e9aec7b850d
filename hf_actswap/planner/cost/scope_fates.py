"""A plan's fates scope by scope: regions and when they run, copies, and which storages stay.

Nothing here depends on times, and only the rows of a scope, and of scopes with which it shares storages,
matter. So the result is computed once for each such set of rows, however many plans have them.

A step is counted in **moments**: each op event of forward is one, the end of forward is one, and each op
event that backward visits is one, in the order of `OpEvent.backward_place` (its number in this order is its
*place*). Within a moment nothing has an order: what an op event makes or reads is on the device from its
start to its end.

Which tensors get a ticket, with which fate, who reads it and who rebuilds what was dropped is what
`plan.saved_bytes.ticket_uses` says. Added here is when that happens.

A **region** is a call that runs again: a function, a recomputed module, or a layer recomputed whole (these
with ordinal ``None``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from ...engine.windows import Timeline
from ...plan.actions import Scope, is_layer
from ...plan.model_structure import is_below
from ...plan.saved_bytes import OpCall, RecomputedModules, TicketUse, Use, ticket_uses
from ..profile import Places, Profile, StorageLifetime, lifetimes


@dataclass(frozen=True, slots=True)
class Pack:
    """A moment at which autograd saves (packs) a tensor, and the engine gets control.

    Args:
        order: order of the use; a tensor that is no use of the profile comes half way to the next use.
        op: operator of the node that saves.
        at_end: whether the op event itself makes the tensor, and so has run by then.
    """

    order: float
    op_event: int
    op: int
    at_end: bool


class StepOrder:
    """A profile with the indices that the simulator needs."""

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
        self.function_events = self._function_events()
        """The op event of each call of a function in a layer."""
        base = [op_event.forward_base_bytes for op_event in self.op_events]
        stays = list(accumulate(reversed(base), min))[::-1]
        self.temporary_bytes = [size - least for size, least in zip(base, stays, strict=True)]
        """What each op event needs beyond what stays, in forward and when it runs again."""
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
        return self._op_of_order.get(order, self.last_op_of(op_event))

    def inside(self, scope: Scope | None, path: str) -> list[int]:
        """Return the op events at and below a path of a scope."""
        return [
            number
            for number in (() if scope is None else self.scope_events.get(scope, ()))
            if is_below(self.op_events[number].call[1], path)
        ]

    def packs_between(self, first: int, last: int) -> list[Pack]:
        """Return the packs in op events from ``first`` to ``last``."""
        return self.packs[bisect_left(self._pack_events, first) : bisect_right(self._pack_events, last)]

    def is_region(self, call: OpCall) -> bool:
        """Whether the profile says what runs again with a call."""
        return call[2] is None or call in self.function_events

    def place_of(self, storage: int, ticket: TicketUse) -> int:
        """Return the place of backward whose nodes read a ticket of a storage."""
        return self.places.of_reader(self.lifetimes[storage].op_events[ticket.number])

    def last_op_of(self, op_event: int) -> int:
        """Return the last operator of an op event."""
        row = self.op_events[op_event]
        return row.first_op + max(row.num_ops - 1, 0)

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
                # A weight is saved before its op runs. The loss saves what it has made itself.
                is_loss = self.op_events[op_event].call[0] is None
                found.append(Pack(order + 0.5, op_event, op, at_end=is_loss))
        return sorted(found, key=lambda pack: (pack.order, pack.op))

    def _function_events(self) -> dict[OpCall, int]:
        return {
            use.at: op_event
            for storage, lifetime in zip(self.profile.saved.storages, self.lifetimes, strict=True)
            for use, op_event in zip(storage.uses, lifetime.op_events, strict=True)
            if use.at == self.op_events[op_event].call
            and is_layer(use.at[0])
            and (use.kind == "function" or (use.kind == "returned" and use.at[2] is not None))
        }


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


@dataclass(frozen=True, slots=True)
class CopyOut:
    """One copy of (a part of) a storage to the host.

    Args:
        number: its number among the copies of the storage.
        order, op_event, op: order, op event and operator of the use at which it starts.
        at_end: whether the op event has run by then.
    """

    number: int
    call: OpCall
    size_bytes: int
    order: int
    op_event: int
    op: int
    at_end: bool


CopyId = tuple[int, int]
"""(number of a storage, number of one of its copies)."""

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class RunStep:
    """One op event that a region runs again, in ``ms`` of compute time.

    Args:
        built_bytes: bytes of the tensors made here that the region is run for.
        passing_bytes: bytes on the device only while the region runs, temporaries included.
    """

    op_event: int
    ms: float
    built_bytes: int
    passing_bytes: int


@dataclass(eq=False, slots=True)
class RebuiltStorage:
    """A storage that a region makes again; ``tickets``: how often it is read before it is dropped."""

    size_bytes: int
    tickets: int = 0


@dataclass(eq=False, slots=True)
class RecomputedRegion:
    """A region: a call that runs again in backward.

    Args:
        first_event: op event in which it begins in forward.
        last_op: the last operator of forward in it; backward reaches this one first, and may need its inputs.
        inputs: what it reads before it runs, in order: host copies, and storages that other regions build.
        built: the storages that it builds, by number.
        first_place: place of backward by which it must have run.
        last_place: place of backward after which its inputs are not held any more.
        ms, built_bytes: sums over all steps.
        peak_bytes, peak_event: the most bytes on the device for it while it runs, and in which op event.
    """

    key: OpCall
    first_event: int
    last_op: int = -1
    steps: tuple[RunStep, ...] = ()
    inputs: list[CopyId | tuple[RecomputedRegion, RebuiltStorage]] = field(default_factory=list)
    built: dict[int, RebuiltStorage] = field(default_factory=dict)
    first_place: int = _NEVER
    last_place: int = -1
    ms: float = 0.0
    built_bytes: int = 0
    peak_bytes: int = 0
    peak_event: int = 0


class CopyRead(NamedTuple):
    """A copy is needed: by nodes at ``place``, or (``by_region``) until there by a region that runs again.

    ``op`` is the operator whose backward needs it.
    """

    copy: CopyId
    op: int
    place: int
    by_region: bool


@dataclass(eq=False, slots=True)
class StorageFate:
    """The fate of one storage; ``kept_place``: until where its own tickets keep it, -1 if none does."""

    storage: int
    lifetime: StorageLifetime
    copies: tuple[CopyOut, ...]
    kept_place: int


@dataclass(eq=False, slots=True)
class ScopeFate:
    """The fates of the storages and calls of one scope.

    Args:
        checkpointed: the scope, if it is a layer that is recomputed whole.
        storages: fates of the storages that the scope makes, if backward or a region needs them.
        dropped_bytes: bytes of the storages that are built again.
        regions: its regions, in the order of forward.
        reads: (place, region, storage) of rebuilt storages that nodes themselves read.
        holds: (storage, place): a region keeps the storage until that place.
        copy_reads: who needs the copies; a copy may have several readers.
    """

    checkpointed: Scope | None = None
    storages: list[StorageFate] = field(default_factory=list)
    dropped_bytes: int = 0
    regions: list[RecomputedRegion] = field(default_factory=list)
    reads: list[tuple[int, RecomputedRegion, RebuiltStorage]] = field(default_factory=list)
    holds: list[tuple[int, int]] = field(default_factory=list)
    copy_reads: list[CopyRead] = field(default_factory=list)


def scope_fate(
    order: StepOrder, recomputed: RecomputedModules, held: Mapping[int, Use], scope: Scope
) -> ScopeFate:
    """Return what a plan does in one scope.

    Args:
        recomputed: index of a plan with at least the rows of this scope and of those that share its storages.
        held: number of a storage -> the use at which a recomputed module holds it (`held_results`).
    """
    fate = ScopeFate(scope if scope in recomputed.whole_layers else None)
    known = {
        number: _tickets_of(order, recomputed, held.get(number), number)
        for number in order.touching.get(scope, ())
    }
    fate.regions = _regions(order, recomputed, scope, known, fate)
    for number, (tickets, copies) in known.items():
        storage = order.profile.saved.storages[number]
        if storage.uses[0].producer[0] == scope:
            _sort_in(order, fate, number, tickets, copies)
    return fate


def _tickets_of(
    order: StepOrder, recomputed: RecomputedModules, held: Use | None, number: int
) -> tuple[list[TicketUse], list[CopyOut]]:
    """Return the tickets of a storage, and its copies out, in order."""
    storage, lifetime = order.profile.saved.storages[number], order.lifetimes[number]
    calls = [order.op_events[op_event].call for op_event in lifetime.op_events]
    tickets: list[TicketUse] = []
    copies: list[CopyOut] = []
    for ticket in ticket_uses(storage, recomputed, held, calls):
        if ticket.starts_copy:
            use, op_event = ticket.use, lifetime.op_events[ticket.number]
            if ticket.holder is not None:  # an input that the call's first op saves is met there
                later = zip(storage.uses[ticket.number :], lifetime.op_events[ticket.number :], strict=True)
                saves = (one for one, at in later if one.kind == "saved" and at == op_event)
                use = next(saves, use)
            at_end = use.kind == "returned" or (use.kind == "saved" and lifetime.made_in == op_event)
            place = use.order, op_event, order.use_op(use, op_event), at_end
            copies.append(CopyOut(ticket.copy, use.producer, ticket.copy_bytes, *place))
        if ticket.source is not None and not order.is_region(ticket.source):
            ticket = replace(ticket, kind="keep", source=None)
        if ticket.holder is None or order.is_region(ticket.holder):
            tickets.append(ticket)
    return tickets, copies


def _sort_in(
    order: StepOrder, fate: ScopeFate, number: int, tickets: list[TicketUse], copies: list[CopyOut]
) -> None:
    lifetime = order.lifetimes[number]
    direct = [ticket for ticket in tickets if ticket.holder is None]
    kept = max((order.place_of(number, item) for item in direct if item.kind == "keep"), default=-1)
    for ticket in direct:
        if ticket.kind == "swap":
            inside = next(item.op for item in copies if item.number == ticket.copy)
            op = max(inside, order.saved_op(ticket.use.order, lifetime.op_events[ticket.number]))
            fate.copy_reads.append(CopyRead((number, ticket.copy), op, order.place_of(number, ticket), False))
    if direct or copies or any(ticket.kind != "built" for ticket in tickets):
        fate.storages.append(StorageFate(number, lifetime, tuple(copies), kept))
    if direct and kept < 0 and not copies:
        fate.dropped_bytes += lifetime.size_bytes


def _regions(
    order: StepOrder,
    recomputed: RecomputedModules,
    scope: Scope,
    known: Mapping[int, tuple[list[TicketUse], list[CopyOut]]],
    fate: ScopeFate,
) -> list[RecomputedRegion]:
    """Return the regions of a scope; those that nothing needs are left out, as in the engine."""
    found: dict[OpCall, RecomputedRegion] = {}
    inputs: dict[OpCall, list[tuple[int, int, TicketUse]]] = {}
    readers: dict[OpCall, list[tuple[int, TicketUse]]] = {}
    for number, (tickets, _) in known.items():
        for ticket in tickets:
            if ticket.source is not None and ticket.source[0] == scope:
                readers.setdefault(ticket.source, []).append((number, ticket))
            if ticket.holder is not None and ticket.holder[0] == scope:
                inputs.setdefault(ticket.holder, []).append((ticket.use.order, number, ticket))
    for key in readers:
        found[key] = RecomputedRegion(key, _op_events(order, key)[0])
    needed: list[RecomputedRegion] = []
    for region in sorted(found.values(), key=lambda item: (-item.first_event, item.key[2] is None)):
        for number, ticket in readers[region.key]:
            _read_by(order, fate, region, number, ticket, found)
        if not region.built:
            del found[region.key]
            continue
        needed.append(region)
        _lay_out(order, recomputed, region, [ticket for _, ticket in readers[region.key]])
        _hold(order, region, sorted(inputs.get(region.key, ()), key=lambda item: item[:2]), found, fate)
    return needed[::-1]


def _read_by(
    order: StepOrder,
    fate: ScopeFate,
    region: RecomputedRegion,
    number: int,
    ticket: TicketUse,
    found: Mapping[OpCall, RecomputedRegion],
) -> None:
    """Note that a node, or a region later in forward, needs storage ``number``, which ``region`` builds."""
    if ticket.holder is not None and ticket.holder not in found:
        return
    item = region.built.setdefault(number, RebuiltStorage(order.lifetimes[number].size_bytes))
    item.tickets += 1
    if ticket.holder is None:
        first = last = order.place_of(number, ticket)
        fate.reads.append((first, region, item))
    else:
        reader = found[ticket.holder]
        first, last = reader.first_place, reader.last_place
    region.first_place = min(region.first_place, first)
    region.last_place = max(region.last_place, last)


def _hold(
    order: StepOrder,
    region: RecomputedRegion,
    inputs: Iterable[tuple[int, int, TicketUse]],
    found: Mapping[OpCall, RecomputedRegion],
    fate: ScopeFate,
) -> None:
    for _, number, ticket in inputs:
        if ticket.kind == "keep":
            fate.holds.append((number, region.last_place))
        elif ticket.kind == "swap":
            copy = number, ticket.copy
            region.inputs.append(copy)
            fate.copy_reads.append(CopyRead(copy, region.last_op, region.last_place, True))
        elif ticket.source is not None and ticket.source in found:
            source = found[ticket.source]
            item = source.built.setdefault(number, RebuiltStorage(order.lifetimes[number].size_bytes))
            region.inputs.append((source, item))


def _op_events(order: StepOrder, key: OpCall) -> list[int]:
    scope, path, ordinal = key
    return order.inside(scope, path) if ordinal is None else [order.function_events[key]]


def _lay_out(
    order: StepOrder, recomputed: RecomputedModules, region: RecomputedRegion, tickets: list[TicketUse]
) -> None:
    """Set which op events of a region run again, for how long, and with how much memory."""
    key, op_events = region.key, _op_events(order, region.key)
    if key[2] is not None:
        region.last_op = order.last_op_of(op_events[0])
    else:
        packs = order.packs_between(op_events[0], op_events[-1])
        last = max(ticket.use.order for ticket in tickets if ticket.holder is None)
        end = next(pack for pack in packs if pack.order == last)
        region.last_op = max(pack.op for pack in packs)
        if key[0] in recomputed.whole_layers:
            region.last_op = order.last_op_of(order.scope_events[key[0]][-1])
        # The run stops as soon as the last tensor is there: before the op that saves it, unless that made it.
        op_events = [
            op_event
            for op_event in op_events
            if op_event < end.op_event + end.at_end
            and recomputed.runs_again(order.op_events[op_event].call, key)
        ]
    region.steps = tuple(_steps(order, region, op_events))
    held = 0
    for step in region.steps:
        held += step.built_bytes
        region.ms += step.ms
        if held + step.passing_bytes >= region.peak_bytes:
            region.peak_bytes, region.peak_event = held + step.passing_bytes, step.op_event
    region.built_bytes = held


def _steps(order: StepOrder, region: RecomputedRegion, op_events: list[int]) -> Iterable[RunStep]:
    passing = dict.fromkeys(op_events, 0)
    built = dict.fromkeys(op_events, 0)
    born = [number for op_event in op_events for number in order.born_in[op_event]]
    for number in born:
        lifetime = order.lifetimes[number]
        if number in region.built:
            built[lifetime.made_in] += lifetime.size_bytes
        else:
            for op_event in op_events:
                if lifetime.birth <= op_event <= lifetime.forward_end:
                    passing[op_event] += lifetime.size_bytes
    temporary = {op_event: order.temporary_bytes[op_event] for op_event in op_events}
    for number, item in region.built.items():
        lifetime = order.lifetimes[number]
        if lifetime.last_place < 0 and lifetime.made_in in built:  # not saved: a temporary of the profile
            built[lifetime.made_in] += item.size_bytes
            temporary[lifetime.made_in] = max(temporary[lifetime.made_in] - item.size_bytes, 0)
    for op_event in op_events:
        ms, passing_bytes = order.op_events[op_event].forward_ms, passing[op_event] + temporary[op_event]
        yield RunStep(op_event, ms, built[op_event], passing_bytes)
