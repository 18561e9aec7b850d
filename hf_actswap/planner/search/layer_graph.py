"""The graphs on which the search decides: calls of a layer, the storages they make, and what reads these.

The step consists of *segments*: what runs before the layers, each layer, what runs after them. A storage
belongs to the segment that makes it. The hidden state that a layer hands on belongs to the segment that reads
it, because only there it is known whether anything holds it. All numbers in a graph count from the segment's
own start, so that layers of the same kind have equal graphs and share what is computed for one.

Recomputation follows the rule of `plan.settle`: what autograd saves of the results of a call that runs again
is dropped, and the inputs of the call are held in its place, unless they are rebuilt too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...plan.actions import MemoryPlan, PlanRow, Scope
from ...plan.model_structure import OUTPUT
from ...plan.op_facts import is_communication, is_repeatable
from ...plan.saved_bytes import OpCall, RecomputedModules, Use
from ..profile import Limits, OpEvent, Places, Profile, events_of_uses

KEEP, SWAP, RECOMPUTE = "k", "s", "r"
"""Fates of a call in an option."""

_SAME_TIMES = 0.1
"""Layers whose times differ by at most this share have one graph."""


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A call that makes storages.

    Args:
        from_before: whether it runs before the segment, and hands its hidden state to it.
        fates: possible fates of the storages that it makes (letters of `KEEP`, `SWAP`, `RECOMPUTE`); if there
            is one only, it is decided already.
        op_event: number of its op event in the segment; -1: it has none.
    """

    from_before: bool
    path: str
    ordinal: int | None
    fates: str
    op_event: int


@dataclass(frozen=True, slots=True)
class GraphStorage:
    """A storage of a segment.

    Args:
        born, last_used: numbers of the op events of its first and last use in forward.
        saved: pairs (number of the op event whose nodes read it in backward, number of its maker's call).
        moves: whether a swap moves it: it is not too small.
        rank: its place in the order in which nodes save storages.
    """

    size_bytes: int
    born: int
    last_used: int
    saved: tuple[tuple[int, int], ...]
    moves: bool
    rank: int


@dataclass(frozen=True)
class LayerGraph:
    """One kind of segment. Times and base bytes are those of each op event.

    Args:
        calls: the calls that make storages.
        reads: for each call its inputs when it runs again: (storage number, number of its maker's call).
        backward_order: numbers of op events in the order of backward.
        forward_base_bytes, backward_base_bytes: beyond the segment's least.
        whole: whether the segment can be recomputed as a whole.
        values_read: numbers of the first and the last op event in which the host reads values; may be empty.
    """

    calls: tuple[GraphCall, ...]
    storages: tuple[GraphStorage, ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    backward_order: tuple[int, ...]
    forward_base_bytes: tuple[int, ...]
    backward_base_bytes: tuple[int, ...]
    whole: bool
    values_read: tuple[int, ...] = ()

    @property
    def shape(self) -> object:
        """All of the graph except times and base bytes; equal for segments of one kind."""
        return self.calls, self.storages, self.reads, self.backward_order, self.whole, self.values_read

    def before(self, op_event: int) -> tuple[float, float]:
        """Return the time before an op event in forward, and the share of all bytes made before it."""
        made_bytes = sum(storage.size_bytes for storage in self.storages if storage.born < op_event)
        all_bytes = sum(storage.size_bytes for storage in self.storages)
        return sum(self.forward_ms[:op_event]), made_bytes / max(all_bytes, 1)


@dataclass(frozen=True)
class Segment:
    """A segment of the step.

    Args:
        layer: place of its layer in `Profile.layers`; -1: before the layers; their number: after them.
        scope: its layer; ``None``: before or after the layers.
        makers: for each call of the graph, its name in plan rows.
        forward_base_bytes, backward_base_bytes: the least base bytes while it runs.
    """

    layer: int
    scope: Scope | None
    graph: LayerGraph
    makers: tuple[OpCall, ...]
    forward_base_bytes: int
    backward_base_bytes: int


def grouped(segments: list[Segment]) -> list[Segment]:
    """Give segments of one shape and nearly equal times one graph, with mean times and the highest bases."""
    kinds: dict[object, list[list[Segment]]] = {}
    for segment in segments:
        alike = kinds.setdefault(segment.graph.shape, [])
        for group in alike:
            if _near(group[0].graph, segment.graph):
                group.append(segment)
                break
        else:
            alike.append([segment])
    shared: dict[int, LayerGraph] = {}
    for group in (group for alike in kinds.values() for group in alike):
        graph = _mean([segment.graph for segment in group])
        shared.update({segment.layer: graph for segment in group})
    return [replace(segment, graph=shared[segment.layer]) for segment in segments]


def _near(one: LayerGraph, other: LayerGraph) -> bool:
    pairs = ((one.forward_ms, other.forward_ms), (one.backward_ms, other.backward_ms))
    return all(
        len(a) == len(b) and abs(sum(a) - sum(b)) <= _SAME_TIMES * max(sum(a), sum(b), 1e-9) for a, b in pairs
    )


def _mean(graphs: list[LayerGraph]) -> LayerGraph:
    def mean(rows: list[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(sum(column) / len(column) for column in zip(*rows, strict=True))

    def highest(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(max(column) for column in zip(*rows, strict=True))

    return replace(
        graphs[0],
        forward_ms=mean([graph.forward_ms for graph in graphs]),
        backward_ms=mean([graph.backward_ms for graph in graphs]),
        forward_base_bytes=highest([graph.forward_base_bytes for graph in graphs]),
        backward_base_bytes=highest([graph.backward_base_bytes for graph in graphs]),
    )


def segments_of(profile: Profile, fixed: MemoryPlan, limits: Limits) -> list[Segment]:
    """Return the segments in the order of forward, equal graphs shared.

    Of ``limits`` only ``min_tensor_bytes`` and ``frees_optimizer_states`` count.
    """
    places: dict[Scope | None, int] = {scope: place for place, scope in enumerate(profile.layers)}
    uses = _UsesBySegment(profile, places)
    recomputed = RecomputedModules(fixed, profile.saved.modules)
    layers = sorted(set(uses.segment_of_events))
    return grouped([_Builder(profile, recomputed, limits, layer, uses).segment() for layer in layers])


def effective_min_bytes(fixed: MemoryPlan, limits: Limits) -> int:
    """Return the size under which no tensor moves: the limits', unless rows written by hand swap."""
    if any(row.fate == "swap" for row in fixed.rows):
        return fixed.min_tensor_bytes
    return max(fixed.min_tensor_bytes, limits.min_tensor_bytes)


def _segment_of_events(profile: Profile, places: Mapping[Scope | None, int]) -> Iterator[int]:
    """Yield the segment of each op event by its scope; without one it belongs to what ran before it."""
    current, last = -1, len(places)
    for op_event in profile.op_events:
        scope = op_event.call[0]
        if scope in places:
            current = places[scope]
        elif current >= 0 and (scope not in (None, "embedding") or current == last - 1):
            current = last
        yield current


class _UsesBySegment:
    """The uses of storages by segment; knows which storages several segments read.

    ``places``: the segment of each layer.
    """

    def __init__(self, profile: Profile, places: Mapping[Scope | None, int]) -> None:
        self.places = places
        self.segment_of_events = whose = list(_segment_of_events(profile, places))
        self.by_segment: dict[int, dict[int, list[tuple[int, Use]]]] = {}
        """Segment -> number of a storage -> (op event, use)."""
        self.shared: set[int] = set()
        found = events_of_uses(profile.saved, profile.op_events)
        self.last_events = [op_events[-1] for op_events in found]
        """For each storage, the op event of its last use."""
        for number, (storage, op_events) in enumerate(zip(profile.saved.storages, found, strict=True)):
            readers: set[int] = set()
            for use, op_event in zip(storage.uses, op_events, strict=True):
                segment = whose[op_event]
                self.by_segment.setdefault(segment, {}).setdefault(number, []).append((op_event, use))
                if use.kind == "saved" and not is_handed_on(use.producer):
                    readers |= {segment, self.places.get(use.producer[0], segment)}
            if len(readers) > 1:
                self.shared.add(number)


def is_handed_on(producer: OpCall) -> bool:
    """Return whether ``producer`` made a hidden state that a layer, or the embedding, hands to the next."""
    return producer[1] == OUTPUT and producer[0] not in ("final_norm", "head")


class _Builder:
    def __init__(
        self,
        profile: Profile,
        recomputed: RecomputedModules,
        limits: Limits,
        layer: int,
        uses: _UsesBySegment,
    ) -> None:
        self._profile, self._recomputed, self._limits, self._layer = profile, recomputed, limits, layer
        self._fixed, self._uses = recomputed.plan, uses
        numbers = [number for number, whose in enumerate(uses.segment_of_events) if whose == layer]
        self._op_events: list[OpEvent] = [profile.op_events[number] for number in numbers]
        self._local = {number: place for place, number in enumerate(numbers)}
        self._is_layer = 0 <= layer < len(profile.layers)
        self._scope = profile.layers[layer] if self._is_layer else None
        self._min_bytes = effective_min_bytes(self._fixed, limits)
        self._makers: dict[OpCall, int] = {}
        self._calls: list[GraphCall] = []
        self._by_call: dict[OpCall, list[int]] = {}
        for place, op_event in enumerate(self._op_events):
            self._by_call.setdefault(op_event.call, []).append(place)
        self._functions: set[OpCall] = set()
        self._spoiled: set[OpCall] = set()
        self._swappable: set[OpCall] = set()

    def segment(self) -> Segment:
        uses = self._uses.by_segment.get(self._layer, {})
        self._look(uses)
        storages: list[GraphStorage] = []
        reads: dict[int, dict[tuple[int, int], None]] = {}
        for number, found in uses.items():
            storage = self._storage(number, found, len(storages), reads)
            if storage is not None:
                storages.append(storage)
        op_events = self._op_events
        states = self._profile.optimizer_state_bytes if self._limits.frees_optimizer_states else 0
        forward = [max(op_event.forward_base_bytes - states, 0) for op_event in op_events]
        backward = [max(op_event.backward_base_bytes - states, 0) for op_event in op_events]
        backward_order = Places(op_events).order
        least_forward = min(forward, default=0)
        least_backward = min((backward[place] for place in backward_order), default=0)
        numbers, kept, kept_reads = _useful(self._calls, storages, reads)
        makers = list(self._makers)
        values_read = [at for at, op_event in enumerate(op_events) if op_event.reads_values]
        graph = LayerGraph(
            tuple(self._calls[number] for number in numbers),
            kept,
            kept_reads,
            tuple(op_event.forward_ms for op_event in op_events),
            tuple(op_event.backward_ms for op_event in op_events),
            tuple(backward_order),
            tuple(size - least_forward for size in forward),
            tuple(max(size - least_backward, 0) for size in backward),
            self._can_be_whole(),
            tuple(dict.fromkeys((*values_read[:1], *values_read[-1:]))),
        )
        chosen = tuple(makers[number] for number in numbers)
        return Segment(self._layer, self._scope, graph, chosen, least_forward, least_backward)

    def _can_be_whole(self) -> bool:
        rows = [row for row in self._fixed.rows if row.scope == self._scope and row.op_path != OUTPUT]
        free = self._is_layer and not rows and not any(op_event.communicates for op_event in self._op_events)
        compiled = self._scope in self._profile.compiled_layers and (self._scope, "", None) in self._by_call
        return free and not compiled  # a compiled layer does this with a share of 0

    def _look(self, uses: Mapping[int, list[tuple[int, Use]]]) -> None:
        """Note which calls are functions, which overwrite tensors, and which make tensors that can move."""
        for number, found in uses.items():
            storage = self._profile.saved.storages[number]
            written = len({use.version for use in storage.uses}) > 1
            for _, use in found:
                if use.kind in ("function", "returned") and use.at[2] is not None:
                    self._functions.add(use.at)
                if written or number in self._uses.shared:
                    self._spoiled |= {use.at, use.producer} if written else {use.producer}
            size_bytes = max((use.size_bytes for _, use in found if use.kind != "module"), default=0)
            if size_bytes >= max(self._min_bytes, self._limits.min_tensor_bytes):
                self._swappable |= {use.producer for _, use in found if number not in self._uses.shared}

    def _storage(
        self,
        number: int,
        found: list[tuple[int, Use]],
        index: int,
        reads: dict[int, dict[tuple[int, int], None]],
    ) -> GraphStorage | None:
        producer = found[0][1].producer
        mine, shared = self._home(producer) == self._layer, number in self._uses.shared
        if shared and not mine:
            return None  # it counts in the segment that makes it, where it stays
        places = [self._local[op_event] for op_event, _ in found]
        saved: list[tuple[int, int]] = []
        returned: OpCall | None = None
        for place, (_, use) in zip(places, found, strict=True):
            if use.kind == "returned":
                returned = use.producer if self._recomputed.is_root(*use.at[:2]) else returned
                continue
            maker = self._maker(use.producer, use.producer == returned)
            if use.kind == "saved":
                saved.append((place, maker))
            elif (reader := self._reader(use)) is not None and reader != maker:
                reads.setdefault(reader, {})[index, maker] = None
        if shared:
            saved.append((len(self._op_events) - 1, self._maker(producer, True)))
        storage = self._profile.saved.storages[number]
        goes_on = self._uses.last_events[number] not in self._local
        moved = max((use.size_bytes for _, use in found), default=0)
        return GraphStorage(
            storage.size_bytes,
            min(places) if mine else 0,
            len(self._op_events) - 1 if goes_on else max(places),
            tuple(dict.fromkeys(saved)),
            moved >= self._min_bytes,
            min((use.order for _, use in found if use.kind == "saved"), default=found[0][1].order),
        )

    def _home(self, producer: OpCall) -> int:
        scope = producer[0]
        if is_handed_on(producer):
            return self._layer - 1
        return self._uses.places.get(scope, self._layer)

    def _reader(self, use: Use) -> int | None:
        """Return the number of the call that reads a storage at ``use``, if that call can run again."""
        scope, path, ordinal = use.at
        if scope != self._scope or not self._is_layer:
            return None
        root = self._recomputed.root(scope, path)
        runs_again = root == path if use.kind == "module" else root is None and ordinal is not None
        return self._maker(use.at, False) if runs_again else None

    def _maker(self, producer: OpCall, kept: bool) -> int:
        scope, path, _ = producer
        row = self._recomputed.row(producer)
        root = self._recomputed.rebuilt_by(producer) if scope == self._scope else None
        if root is not None and root[2] is None:
            producer = (scope, path, None) if kept else root
        elif self._scope in self._profile.compiled_layers and scope == self._scope and path != OUTPUT:
            producer = (scope, "", None)
        at = self._makers.get(producer)
        if at is None:
            at = self._makers[producer] = len(self._calls)
            places = self._by_call.get(producer, [-1])
            before = is_handed_on(producer) and self._home(producer) != self._layer
            fates = KEEP if kept and row is not None else self._fates(producer, row)
            self._calls.append(GraphCall(before, producer[1], producer[2], fates, places[0]))
        return at

    def _fates(self, producer: OpCall, row: PlanRow | None) -> str:
        scope, path, _ = producer
        if row is not None:
            if is_handed_on(producer) and row.fate != "swap":
                return KEEP
            return {"swap": SWAP, "recompute": RECOMPUTE, "re-gather": RECOMPUTE}.get(row.fate, KEEP)
        before = is_handed_on(producer)
        if scope is None or producer in self._spoiled or not (self._is_layer or before):
            return KEEP
        fates = KEEP
        if before and self._uses.places.get(scope, self._layer - 1) != self._layer - 1:
            return KEEP  # of an encoder's output, which all layers of the decoder read, the first one decides
        may_swap = self._profile.link is not None and self._layer < len(self._profile.layers)
        if may_swap and (producer in self._swappable or path == ""):
            fates += SWAP
        return fates + RECOMPUTE if self._runs_again(producer) and not before else fates

    def _runs_again(self, producer: OpCall) -> bool:
        _, path, ordinal = producer
        op_events = [self._op_events[place] for place in self._by_call.get(producer, ())]
        return (
            ordinal is not None
            and producer in self._functions
            and is_repeatable(path)
            and not is_communication(path)
            and bool(op_events)
            and not any(op_event.communicates for op_event in op_events)
        )


def _useful(
    calls: Sequence[GraphCall],
    storages: Sequence[GraphStorage],
    reads: Mapping[int, Mapping[tuple[int, int], None]],
) -> tuple[list[int], tuple[GraphStorage, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """Leave out storages that nothing can hold, and calls that make only such; number the rest anew.

    Returns the numbers of the calls that remain, the storages, and the reads of these calls.
    """
    wanted = {(number, maker) for number, storage in enumerate(storages) for _, maker in storage.saved}
    open_ = sorted(wanted)
    while open_:
        _, maker = open_.pop()
        if RECOMPUTE in calls[maker].fates:
            new = [pair for pair in reads.get(maker, ()) if pair not in wanted]
            wanted.update(new)
            open_ += new
    numbers = sorted({maker for _, maker in wanted})
    places = sorted({number for number, _ in wanted})
    call_at = {number: at for at, number in enumerate(numbers)}
    storage_at = {number: at for at, number in enumerate(places)}
    in_order = sorted(places, key=lambda number: storages[number].rank)
    kept_storages = tuple(
        replace(
            storages[number],
            saved=tuple((place, call_at[maker]) for place, maker in storages[number].saved),
            rank=in_order.index(number),
        )
        for number in places
    )
    kept_reads = tuple(
        tuple(
            (storage_at[n], call_at[m]) for n, m in reads.get(number, ()) if RECOMPUTE in calls[number].fates
        )
        for number in numbers
    )
    return numbers, kept_storages, kept_reads
