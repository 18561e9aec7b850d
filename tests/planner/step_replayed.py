"""The simulator's rules played through with tickets that live and die one by one: slow, and written anew.

Nothing is shared with `hf_actswap.planner` but the data. Everything on the device is added up afresh in every
moment. Plans: keep, swap and recompute of functions, and whole layers; links on which the directions do not
slow each other down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_actswap.engine import Link
from hf_actswap.plan import MemoryPlan, OpCall, Use
from hf_actswap.planner import Profile


@dataclass(eq=False)
class Group:
    storage: int
    size_bytes: int
    order: int
    op_event: int
    op: int
    at_end: bool
    prefetch_ops: int
    release_ops: int
    want: int = 0
    tickets: int = 0
    on_device: bool = True
    fetched: bool = False
    ever_fetched: bool = False
    unread: int = 0
    out_end: float = 0.0
    in_end: float = 0.0


@dataclass(eq=False)
class Region:
    op_events: list[int]
    last_op: int
    layer: int | None = None
    inputs: list[Ticket] = field(default_factory=list)
    refs: list[Ticket] = field(default_factory=list)
    built: dict[int, int] = field(default_factory=dict)
    has_run: bool = False


@dataclass(eq=False)
class Ticket:
    storage: int
    order: int
    keeps: bool = False
    group: Group | None = None
    source: Region | None = None
    alive: bool = True
    unread: bool = True


@dataclass
class Replayed:
    peak_bytes: int = 0
    step_ms: float = 0.0
    forward_stall_ms: float = 0.0
    backward_stall_ms: float = 0.0
    recompute_ms: float = 0.0


class Replay:
    def __init__(self, profile: Profile, plan: MemoryPlan, link: Link) -> None:
        self.profile, self.plan, self.link = profile, plan, link
        self.op_events = profile.op_events
        self.result = Replayed()
        self.places = sorted(range(len(self.op_events)), key=lambda n: self.op_events[n].backward_place)
        self.event_of: dict[int, int] = {}
        for number, op_event in enumerate(self.op_events):
            for order in range(op_event.first_order, op_event.last_order + 1):
                self.event_of[order] = number
        self.uses = sorted(
            ((use, number) for number, storage in enumerate(profile.saved.storages) for use in storage.uses),
            key=lambda item: item[0].order,
        )
        self.birth, self.end = {}, {}
        for use, number in self.uses:
            at = self.event_of[use.order]
            self.birth.setdefault(number, at)
            if use.kind == "module":
                at = max(n for n, op_event in enumerate(self.op_events) if op_event.call[0] == use.at[0])
            self.end[number] = max(at, self.end.get(number, 0))
        self.made_in = {
            number: self.birth[number] if storage.uses[0].kind in ("returned", "saved") else -1
            for number, storage in enumerate(profile.saved.storages)
        }
        self.is_saved = {number for use, number in self.uses if use.kind == "saved"}
        self.groups: list[Group] = []
        self.of_storage: dict[int, Group] = {}
        self.regions: dict[int, Region] = {}
        self.layers: dict[int, Region] = {}
        self.made: dict[int, tuple[OpCall, Region]] = {}
        self.nodes: dict[int, list[Ticket]] = {n: [] for n in range(len(self.op_events))}
        self.packs: list[tuple[int, int, int, bool]] = []
        self.clock = self.out_free = self.in_free = 0.0

    def run(self) -> Replayed:
        for use, number in self.uses:
            self.meet(use, number)
        self.kill_useless()
        self.forward()
        self.backward()
        self.result.step_ms = self.clock + self.profile.outside_ms
        self.result.peak_bytes = max(self.result.peak_bytes, self.profile.outside_base_bytes)
        return self.result

    def fate(self, call: OpCall) -> str:
        row = None if call[0] is None else self.plan.row(*call)
        return "keep" if row is None else row.fate

    def is_whole(self, layer: object) -> bool:
        row = self.plan.row(layer, "") if isinstance(layer, int) else None
        return row is not None and row.fate == "recompute"

    def last_op(self, op_event: int) -> int:
        return self.op_events[op_event].first_op + max(self.op_events[op_event].num_ops - 1, 0)

    def meet(self, use: Use, number: int) -> None:
        """The forward's tickets, use by use."""
        at = self.event_of[use.order]
        scope = use.at[0]
        if use.kind == "module" and self.is_whole(scope):
            inside = [n for n, op_event in enumerate(self.op_events) if op_event.call[0] == scope]
            region = self.layers.setdefault(scope, Region(inside, self.last_op(inside[-1]), scope))
            self.packs.append(
                (self.op_events[inside[0]].first_order, inside[0], self.op_events[inside[0]].first_op, False)
            )
            region.inputs.append(self.ticket(use, number, at))
        elif use.kind == "function" and self.recomputed(use.at):
            region = self.regions.setdefault(at, Region([at], self.last_op(at)))
            region.inputs.append(self.ticket(use, number, at))
        elif use.kind == "returned" and self.recomputed(use.at):
            region = self.regions.setdefault(at, Region([at], self.last_op(at)))
            self.made[number] = use.at, region
        elif use.kind == "saved" and self.is_whole(scope):
            ticket = Ticket(number, use.order)
            if self.made_in[number] >= 0 and self.op_events[self.made_in[number]].call[0] == scope:
                ticket.source = self.layers[scope]
                ticket.source.refs.append(ticket)
            elif number in self.of_storage:
                self.join(ticket, self.of_storage[number], self.last_op(at))
            else:
                ticket.keeps = True
            self.nodes[at].append(ticket)
        elif use.kind == "saved":
            self.packs.append((use.order, at, self.last_op(at), self.made_in[number] == at))
            self.nodes[at].append(self.ticket(use, number, at))

    def recomputed(self, call: OpCall) -> bool:
        return isinstance(call[0], int) and not self.is_whole(call[0]) and self.fate(call) == "recompute"

    def ticket(self, use: Use, number: int, at: int) -> Ticket:
        ticket = Ticket(number, use.order)
        fate = self.fate(use.producer)
        if fate == "swap" and use.size_bytes >= max(1, self.plan.min_tensor_bytes):
            if number not in self.of_storage:
                windows = self.plan.row(*use.producer).windows
                op = self.last_op(at) if use.kind == "saved" else max(self.op_events[at].first_op - 1, 0)
                at_end = use.kind == "saved" and self.made_in[number] == at
                group = Group(
                    number,
                    use.size_bytes,
                    use.order,
                    at,
                    op,
                    at_end,
                    windows.prefetch_ops,
                    windows.release_ops,
                    op,
                )
                self.groups.append(group)
                self.of_storage[number] = group
            self.join(ticket, self.of_storage[number], self.last_op(at) if use.kind == "saved" else 0)
        elif fate == "recompute" and number in self.made and self.made[number][0] == use.producer:
            ticket.source = self.made[number][1]
            ticket.source.refs.append(ticket)
        elif use.kind == "saved" and fate == "recompute" and self.op_events[at].call == use.producer:
            ticket.source = self.regions.setdefault(at, Region([at], self.last_op(at)))
            ticket.source.refs.append(ticket)
        else:
            ticket.keeps = True
        return ticket

    def join(self, ticket: Ticket, group: Group, want: int) -> None:
        ticket.group = group
        group.tickets += 1
        group.want = max(group.want, want)

    def kill_useless(self) -> None:
        """Regions that nobody will ask are gone, and so are their inputs."""
        for at in sorted(self.regions, reverse=True):
            region = self.regions[at]
            region.refs = [ticket for ticket in region.refs if ticket.alive]
            if not region.refs:
                for ticket in region.inputs:
                    self.kill(ticket)
                region.inputs = []
        for region in self.layers.values():
            if not region.refs:
                for ticket in region.inputs:
                    self.kill(ticket)
                region.inputs = []
        for region in [*self.regions.values(), *self.layers.values()]:
            for ticket in region.inputs:
                if ticket.group is not None:
                    ticket.group.want = max(ticket.group.want, region.last_op)

    def kill(self, ticket: Ticket) -> None:
        ticket.alive = False
        if ticket.group is not None:
            ticket.group.tickets -= 1

    def tickets(self) -> list[Ticket]:
        found = [ticket for tickets in self.nodes.values() for ticket in tickets]
        for region in [*self.regions.values(), *self.layers.values()]:
            found += region.inputs
        return [ticket for ticket in found if ticket.alive]

    def device_bytes(self, op_event: int | None, base_bytes: int) -> int:
        """All that is on the device; ``op_event`` of forward, ``None`` in backward."""
        total = base_bytes
        keeping = {ticket.storage for ticket in self.tickets() if ticket.keeps}
        for number, storage in enumerate(self.profile.saved.storages):
            born, end = self.birth[number], self.end[number]
            if number not in self.is_saved:  # part of the base until forward has done with it
                born = end + 1
            there = number in keeping
            there |= any(g.on_device and g.tickets for g in self.groups if g.storage == number)
            if op_event is not None:
                there = born <= op_event and (there or op_event <= end)
            total += storage.size_bytes * there
        total += sum(group.size_bytes for group in self.groups if group.fetched)
        for region in [*self.regions.values(), *self.layers.values()]:
            total += sum(self.profile.saved.storages[number].size_bytes for number in region.built)
        return total

    def look(self, op_event: int | None, base_bytes: int) -> None:
        self.result.peak_bytes = max(self.result.peak_bytes, self.device_bytes(op_event, base_bytes))

    def forward(self) -> None:
        due: list[tuple[int, Group]] = []
        for number, op_event in enumerate(self.op_events):
            for at_end in (False, True):
                points = [(order, op) for order, at, op, end in self.packs if at == number and end == at_end]
                starts = [g for g in self.groups if g.op_event == number and g.at_end == at_end]
                events = sorted({(order, 0, op) for order, op in points} | {(g.order, 1, 0) for g in starts})
                for order, kind, op in events:
                    if kind == 0:
                        for point, group in sorted(due, key=lambda item: (item[0], item[1].order)):
                            if point <= op and group.on_device:
                                self.release(group)
                    for group in starts:
                        if kind == 1 and group.order == order:
                            self.out_free = max(self.out_free, self.clock) + self.link.out_ms(
                                group.size_bytes
                            )
                            group.out_end = self.out_free
                            if group.tickets:
                                due.append((group.op + group.release_ops, group))
                if not at_end:
                    self.look(number, op_event.forward_base_bytes)
                    self.clock += op_event.forward_ms
        for _, group in sorted(due, key=lambda item: (item[0], item[1].order)):
            if group.on_device:
                self.release(group)
        last, first = self.op_events[-1], self.op_events[self.places[0]]
        self.look(len(self.op_events), min(last.forward_base_bytes, first.backward_base_bytes))

    def release(self, group: Group) -> None:
        waited = max(group.out_end - self.clock, 0.0)
        self.result.forward_stall_ms += waited
        self.clock += waited
        group.on_device = False

    def backward(self) -> None:
        hooks = {
            at: sorted({op for _, op_event, op, _ in self.packs if op_event == at}, reverse=True)
            for at in self.places
        }
        for region in self.layers.values():
            for at in region.op_events:
                hooks[at] = []
            if region.refs:
                first = min(self.places.index(self.event_of[t.order]) for t in region.refs)
                hooks[self.places[first]] = [region.last_op]
        points = sorted({op for ops in hooks.values() for op in ops})
        waiting = []
        for group in self.groups:
            if group.tickets:
                point = group.want + group.prefetch_ops
                later = [op for op in points if op >= point]
                waiting.append((min(later) if later else max(points, default=point), group))
        waiting.sort(key=lambda item: (-item[0], -item[1].want, item[1].order))
        before = self.op_events[-1].forward_base_bytes
        for at in self.places:
            op_event = self.op_events[at]
            for op in hooks[at]:
                for point, group in waiting:
                    if point >= op:
                        self.fetch(group)
            self.leaving: list[object] = []
            boundary = min(before, op_event.backward_base_bytes)
            for ticket in self.nodes[at]:
                if ticket.group is not None:
                    self.read_group(ticket.group)
            built = [ticket for ticket in self.nodes[at] if ticket.source is not None]
            for ticket in sorted(built, key=lambda t: (-t.source.op_events[0], t.storage, t.order)):
                self.build(ticket.source, boundary)
            self.look(None, op_event.backward_base_bytes)
            self.clock += op_event.backward_ms
            for ticket in self.nodes[at]:
                self.read(ticket)
                self.die(ticket)
            before = op_event.backward_base_bytes

    def fetch(self, group: Group) -> None:
        if not group.ever_fetched:
            group.fetched = group.ever_fetched = True
            group.unread = group.tickets
            self.in_free = max(self.in_free, self.clock) + self.link.in_ms(group.size_bytes)
            group.in_end = self.in_free

    def read_group(self, group: Group) -> None:
        self.fetch(group)
        waited = max(group.in_end - self.clock, 0.0)
        self.result.backward_stall_ms += waited
        self.clock += waited

    def read(self, ticket: Ticket) -> None:
        """A ticket has been read: what nobody will read again leaves the device."""
        ticket.unread = False
        if ticket.group is not None:
            ticket.group.unread -= 1
            ticket.group.fetched = ticket.group.unread > 0
        if ticket.source is not None:
            others = (other for other in ticket.source.refs if other.storage == ticket.storage)
            if not any(other.unread for other in others):
                ticket.source.built.pop(ticket.storage, None)

    def die(self, ticket: Ticket) -> None:
        """Its holder is gone; a region that nobody holds frees its inputs."""
        ticket.alive = False
        region = ticket.source
        if region is not None and not any(other.alive for other in region.refs):
            for held in region.inputs:
                if held.alive:
                    self.die(held)

    def build(self, region: Region, boundary: int) -> None:
        if region.has_run:
            return
        region.has_run = True
        for ticket in region.inputs:
            if ticket.source is not None:
                self.build(ticket.source, boundary)
        for ticket in region.inputs:
            if ticket.group is not None:
                self.read_group(ticket.group)
        wanted = {ticket.storage for ticket in region.refs}
        op_events = region.op_events
        if region.layer is not None:
            last = max(ticket.order for ticket in region.refs)
            stop = self.event_of[last]
            at_end = any(self.made_in[t.storage] == stop for t in region.refs if t.order == last)
            op_events = [at for at in op_events if at < stop or (at == stop and at_end)]
        for at in op_events:
            temporary = self.op_events[at].forward_base_bytes - min(
                s.forward_base_bytes for s in self.op_events[at:]
            )
            for number in wanted:
                if self.made_in[number] == at:
                    size_bytes = self.profile.saved.storages[number].size_bytes
                    region.built[number] = 1
                    if number not in self.is_saved:
                        temporary = max(temporary - size_bytes, 0)
            passing = sum(
                storage.size_bytes
                for number, storage in enumerate(self.profile.saved.storages)
                if number in self.is_saved
                and number not in wanted
                and self.made_in[number] in op_events
                and self.birth[number] <= at <= self.end[number]
            )
            self.look(None, boundary + temporary + passing)
            self.clock += self.op_events[at].forward_ms
            self.result.recompute_ms += self.op_events[at].forward_ms
        for ticket in region.inputs:
            if ticket.group is not None or ticket.source is not None:
                self.read(ticket)
