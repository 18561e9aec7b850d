"""A plan's fates scope by scope: regions and when they run, copies, and which storages stay.

Nothing here depends on times, and only the rows of a scope, and of scopes with which it shares storages,
matter. So the result is computed once for each such set of rows, however many plans have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...plan.actions import Scope
from .step_order import StepOrder
from .storage_tickets import CopyOut, HeldTicket, RegionKey, TicketRules

CopyId = tuple[int, int]
"""(number of a storage, number of one of its copies)."""

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class RunStep:
    """One op event that a region runs again.

    Args:
        op_event: number of the op event.
        ms: compute time.
        built_bytes: bytes of the tensors made here that the region is run for.
        passing_bytes: bytes on the device only while the region runs, temporaries included.
    """

    op_event: int
    ms: float
    built_bytes: int
    passing_bytes: int


@dataclass(eq=False, slots=True)
class RebuiltStorage:
    """A storage that a region makes again.

    Args:
        storage: number of the storage.
        size_bytes: its size.
        tickets: how often it is read before it is dropped.
    """

    storage: int
    size_bytes: int
    tickets: int = 0


@dataclass(eq=False, slots=True)
class RecomputedRegion:
    """A region: a call that runs again in backward.

    Args:
        key: key of the region.
        first_event: op event in which it begins in forward.
        last_op: the last operator of forward in it; backward reaches this one first, and may need its inputs.
        steps: the op events that run again.
        inputs: what it reads before it runs, in order: host copies, and storages that other regions build.
        built: the storages that it builds, by number.
        first_place: place of backward by which it must have run.
        last_place: place of backward after which its inputs are not held any more.
        ms, built_bytes: sums over all steps.
        peak_bytes, peak_event: the most bytes on the device for it while it runs, and in which op event.
    """

    key: RegionKey
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


@dataclass(eq=False, slots=True)
class StorageFate:
    """The fate of one storage.

    Args:
        storage: its number in the profile.
        tickets: all its tickets, in order.
        copies: its copies to the host.
        kept_place: place of backward until which its own tickets keep it; -1: none of them does.
    """

    storage: int
    tickets: tuple[HeldTicket, ...]
    copies: tuple[CopyOut, ...]
    kept_place: int


@dataclass(eq=False, slots=True)
class ScopeFate:
    """The fates of the storages and calls of one scope.

    Args:
        checkpointed: the scope, if it is a layer that is recomputed whole.
        storages: fates of the storages that the scope makes.
        kept: (first op event, last place of backward, bytes) of storages that simply stay.
        dropped: (first op event, last op event of forward, bytes) of storages that are built again.
        moved: fates of storages that have copies, or that a region may hold.
        dropped_bytes: bytes of the storages that are built again.
        regions: its regions, in the order of forward.
        reads: (place, region, storage) of rebuilt storages that nodes themselves read.
        holds: (storage, place): a region keeps the storage until that place.
        swap_reads: (place, copy) of copies that nodes themselves read.
        wants: (copy, operator): the operator whose backward needs the copy; a copy may have several.
        swap_holds: (copy, place): until when a region would keep the storage if it were not swapped.
    """

    checkpointed: Scope | None = None
    storages: list[StorageFate] = field(default_factory=list)
    kept: list[tuple[int, int, int]] = field(default_factory=list)
    dropped: list[tuple[int, int, int]] = field(default_factory=list)
    moved: list[StorageFate] = field(default_factory=list)
    dropped_bytes: int = 0
    regions: list[RecomputedRegion] = field(default_factory=list)
    reads: list[tuple[int, RecomputedRegion, RebuiltStorage]] = field(default_factory=list)
    holds: list[tuple[int, int]] = field(default_factory=list)
    swap_reads: list[tuple[int, CopyId]] = field(default_factory=list)
    wants: list[tuple[CopyId, int]] = field(default_factory=list)
    swap_holds: list[tuple[CopyId, int]] = field(default_factory=list)


def scope_fate(order: StepOrder, rules: TicketRules, scope: Scope) -> ScopeFate:
    """Return what a plan does in one scope.

    Args:
        order: the profile in the order of its step.
        rules: rules of a plan that has at least the rows of this scope and of those that share its storages.
        scope: a scope of the profile.
    """
    fate = ScopeFate(scope if scope in rules.recomputed.whole_layers else None)
    known = {number: rules.of_storage(number) for number in order.touching.get(scope, ())}
    fate.regions = _regions(order, rules, scope, known, fate)
    for number, (tickets, copies) in known.items():
        storage = order.profile.saved.storages[number]
        if storage.uses[0].producer[0] == scope:
            _sort_in(order, fate, number, tickets, copies)
    return fate


def _sort_in(
    order: StepOrder, fate: ScopeFate, number: int, tickets: list[HeldTicket], copies: list[CopyOut]
) -> None:
    lifetime = order.lifetimes[number]
    direct = [ticket for ticket in tickets if ticket.holder is None]
    kept = max((order.places.of_reader(item.op_event) for item in direct if item.kind == "keep"), default=-1)
    found = StorageFate(number, tuple(tickets), tuple(copies), kept)
    fate.storages.append(found)
    for ticket in direct:
        if ticket.kind == "swap":
            copy = number, ticket.copy
            fate.swap_reads.append((order.places.of_reader(ticket.op_event), copy))
            inside = next(item.op for item in copies if item.number == ticket.copy)
            fate.wants.append((copy, max(inside, order.saved_op(ticket.order, ticket.op_event))))
    is_held = any(ticket.holder is not None and ticket.kind != "built" for ticket in tickets)
    if copies or is_held:
        fate.moved.append(found)
    elif kept >= 0:
        fate.kept.append((lifetime.birth, kept, lifetime.size_bytes))
    elif direct:
        fate.dropped.append((lifetime.birth, lifetime.forward_end, lifetime.size_bytes))
    if direct and kept < 0 and not copies:
        fate.dropped_bytes += lifetime.size_bytes


def _regions(
    order: StepOrder,
    rules: TicketRules,
    scope: Scope,
    known: Mapping[int, tuple[list[HeldTicket], list[CopyOut]]],
    fate: ScopeFate,
) -> list[RecomputedRegion]:
    """Return the regions of a scope; those that nothing needs are left out, as in the engine."""
    found: dict[RegionKey, RecomputedRegion] = {}
    inputs: dict[RegionKey, list[tuple[int, int, HeldTicket]]] = {}
    readers: dict[RegionKey, list[tuple[int, HeldTicket]]] = {}
    for number, (tickets, _) in known.items():
        for ticket in tickets:
            if ticket.source is not None and rules.scope_of(ticket.source) == scope:
                readers.setdefault(ticket.source, []).append((number, ticket))
            if ticket.holder is not None and rules.scope_of(ticket.holder) == scope:
                inputs.setdefault(ticket.holder, []).append((ticket.order, number, ticket))
    for key in readers:
        found[key] = RecomputedRegion(key, _op_events(order, key)[0])
    needed: list[RecomputedRegion] = []
    for region in sorted(found.values(), key=lambda item: (-item.first_event, not isinstance(item.key, int))):
        for number, ticket in readers[region.key]:
            _read_by(order, fate, region, number, ticket, found)
        if not region.built:
            del found[region.key]
            continue
        needed.append(region)
        _lay_out(order, rules, region, [ticket for _, ticket in readers[region.key]])
        _hold(order, region, sorted(inputs.get(region.key, ()), key=lambda item: item[:2]), found, fate)
    return needed[::-1]


def _read_by(
    order: StepOrder,
    fate: ScopeFate,
    region: RecomputedRegion,
    number: int,
    ticket: HeldTicket,
    found: Mapping[RegionKey, RecomputedRegion],
) -> None:
    """Note that a node, or a region later in forward, needs storage ``number``, which ``region`` builds."""
    if ticket.holder is not None and ticket.holder not in found:
        return
    item = region.built.get(number)
    if item is None:
        item = region.built[number] = RebuiltStorage(number, order.lifetimes[number].size_bytes)
    item.tickets += 1
    if ticket.holder is None:
        place = order.places.of_reader(ticket.op_event)
        fate.reads.append((place, region, item))
        first, last = place, place
    else:
        reader = found[ticket.holder]
        first, last = reader.first_place, reader.last_place
    region.first_place = min(region.first_place, first)
    region.last_place = max(region.last_place, last)


def _hold(
    order: StepOrder,
    region: RecomputedRegion,
    inputs: Iterable[tuple[int, int, HeldTicket]],
    found: Mapping[RegionKey, RecomputedRegion],
    fate: ScopeFate,
) -> None:
    for _, number, ticket in inputs:
        if ticket.kind == "keep":
            fate.holds.append((number, region.last_place))
        elif ticket.kind == "swap":
            copy = number, ticket.copy
            region.inputs.append(copy)
            fate.wants.append((copy, region.last_op))
            fate.swap_holds.append((copy, region.last_place))
        elif ticket.source is not None and ticket.source in found:
            source = found[ticket.source]
            item = source.built.setdefault(number, RebuiltStorage(number, order.lifetimes[number].size_bytes))
            region.inputs.append((source, item))


def _op_events(order: StepOrder, key: RegionKey) -> list[int]:
    return [key] if isinstance(key, int) else order.inside(*key)


def _lay_out(
    order: StepOrder, rules: TicketRules, region: RecomputedRegion, tickets: list[HeldTicket]
) -> None:
    """Set which op events of a region run again, for how long, and with how much memory."""
    key, op_events = region.key, _op_events(order, region.key)
    if isinstance(key, int):
        region.last_op = order.op_events[key].first_op + max(order.op_events[key].num_ops - 1, 0)
    else:
        packs = [pack for pack in order.packs_between(op_events[0], op_events[-1])]
        last = max(ticket.order for ticket in tickets if ticket.holder is None)
        end = next(pack for pack in packs if pack.order == last)
        region.last_op = max(pack.op for pack in packs)
        if key[0] in rules.recomputed.whole_layers:
            region.last_op = order.last_op(key[0])
        # The run stops as soon as the last tensor is there: before the op that saves it, unless that made it.
        op_events = [
            op_event
            for op_event in op_events
            if op_event < end.op_event or (op_event == end.op_event and end.at_end)
        ]
        op_events = [op_event for op_event in op_events if rules.runs_again(key[0], key[1], op_event)]
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
