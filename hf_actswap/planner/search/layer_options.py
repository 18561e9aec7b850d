"""Lists the options of one layer with their costs: milliseconds, bytes kept, bytes that move, and peaks.

There are too many combinations of fates to list, but few of them can be best. With a price p for each held
byte, the best set of calls to run again is a minimum cut: a call that runs again costs its time and needs its
inputs; what is held costs its bytes. As p rises from 0, cuts change at a few prices only, and these cuts are
all that a mixture over many layers needs (the lower hull of time against bytes). For each cut, several shares
of what is held are swapped. For a layer with few calls all combinations are listed instead. A compiled layer
has options for each point of its frontier (`FrontierPoint`) beside those of its default compilation.

In the network of a cut, calls on the source's side run again, and cost their time (an edge to the sink). A
storage that is read in backward, or by a call that runs again, costs its bytes times the price, unless its
maker runs again too (an edge to the maker). So a cut is a consistent choice, and its capacity its cost.

What a combination costs follows from a walk through the layer's backward: what the nodes of an op event read
is held, fetched back, or rebuilt at the first need, together with the inputs that rebuilding needs. The walk
gives the time of what runs again, the bytes that stay, when copies can start and must end, and the peak.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np

from ...engine.link import Link
from ..profile import FrontierPoint
from .layer_graph import KEEP, RECOMPUTE, SWAP, GraphStorage, LayerGraph, Segment


@dataclass(frozen=True, slots=True)
class Option:
    """One combination of fates for a layer, with its costs.

    Args:
        fates: one fate for each call of its graph; if it is recomputed ``whole``, only calls before it count.
        kept_bytes: bytes on the device from its forward to its backward.
        swapped_input_bytes: those of ``swapped_bytes`` that the layer was handed as input.
        out_ms, in_ms: time of the link for copies out and back.
        backlog_ms: least time of copies out that is left when the layer's forward ends.
        lead_ms: least time of copies back that is needed before the layer's backward starts.
        forward_peak_bytes, backward_peak_bytes: peak while it runs, beyond the segment's least base.
        point: how a compiled layer is compiled instead; ``None``: as by default.
        again_ms: how much longer its backward lasts because of ``point``.
    """

    fates: tuple[str, ...]
    whole: bool
    recompute_ms: float
    kept_bytes: int
    swapped_bytes: int
    swapped_input_bytes: int
    out_ms: float
    in_ms: float
    backlog_ms: float
    lead_ms: float
    forward_peak_bytes: int
    backward_peak_bytes: int
    point: FrontierPoint | None = None
    again_ms: float = 0.0

    @property
    def extra_ms(self) -> float:
        """Time of what runs again, by the engine or inside a compiled layer."""
        return self.recompute_ms + self.again_ms


def evaluate(graph: LayerGraph, fates: Sequence[str], link: Link, whole: bool = False) -> Option:
    """Return one combination of fates with its costs; if ``whole``, only fates of calls before it count."""
    costs = LayerCosts(graph, fates, whole)
    costs.backward()
    kept_bytes = swapped_bytes = input_bytes = 0
    outs: list[tuple[float, int]] = []
    ins: list[tuple[float, int]] = []
    ready_ms = list(itertools.accumulate(graph.forward_ms, initial=0.0))
    for number, (maker, first_read_ms) in sorted(costs.held.items()):
        storage = graph.storages[number]
        if costs.moves(number, maker):
            swapped_bytes += storage.size_bytes
            input_bytes += storage.size_bytes if graph.calls[maker].from_before else 0
            place, saved = costs.readers(number)[0]
            own = saved and place == graph.calls[maker].op_event  # a result: there when its call has run
            ready = place + own
            outs.append((ready_ms[ready], storage.size_bytes))
            ins.append((first_read_ms, storage.size_bytes))
        else:
            kept_bytes += storage.size_bytes
    end_ms, backlog_ms, lead_ms, out_ms, in_ms = ready_ms[-1], 0.0, 0.0, 0.0, 0.0
    for at_ms, size_bytes in sorted(outs, reverse=True):
        out_ms += link.out_ms(size_bytes)
        backlog_ms = max(backlog_ms, out_ms - (end_ms - at_ms))
    for at_ms, size_bytes in sorted(ins):
        in_ms += link.in_ms(size_bytes)
        lead_ms = max(lead_ms, in_ms - at_ms)
    return Option(
        fates=tuple(fates),
        whole=whole,
        recompute_ms=costs.recompute_ms,
        kept_bytes=kept_bytes,
        swapped_bytes=swapped_bytes,
        swapped_input_bytes=input_bytes,
        out_ms=out_ms,
        in_ms=in_ms,
        backlog_ms=backlog_ms,
        lead_ms=lead_ms,
        forward_peak_bytes=costs.forward_peak(),
        backward_peak_bytes=costs.backward_peak_bytes,
    )


class LayerCosts:
    """Walks through a layer's backward, and rebuilds what is dropped when it is first needed.

    Attributes:
        held: number of each storage that is held -> the call that makes it, and when it is first read, in ms
            since the layer's backward began.
        backward_peak_bytes: most bytes alive in backward, base bytes included.
    """

    def __init__(self, graph: LayerGraph, fates: Sequence[str], whole: bool) -> None:
        self._graph, self._fates, self._whole = graph, fates, whole
        self.held: dict[int, tuple[int, float]] = {}
        self.recompute_ms = 0.0
        self.backward_peak_bytes = 0
        self._now_ms, self._step = 0.0, 0
        self._alive: dict[int, tuple[int, int]] = {}
        self._ran: set[int] = set()

    def backward(self) -> None:
        """Walk through all of backward, in its order."""
        graph = self._graph
        wanted: dict[int, list[tuple[int, int]]] = {}
        for number in sorted(range(len(graph.storages)), key=lambda at: graph.storages[at].rank):
            for place, maker in graph.storages[number].saved:
                wanted.setdefault(place, []).append((number, maker))
        if self._whole:
            self._rebuild_whole()
        for step, place in enumerate(graph.backward_order):
            self._step = step
            for number, maker in wanted.get(place, ()):
                self._require(number, maker)
            self._now_ms += graph.backward_ms[place]
        # What op events save that backward does not visit is held until its end.
        for place in wanted.keys() - set(graph.backward_order):
            for number, maker in wanted[place]:
                if not self._is_rebuilt(maker):
                    self.held.setdefault(number, (maker, self._now_ms))
                    self._alive[number] = (self._alive.get(number, (0, 0))[0], len(graph.backward_order))
        self._count_peak()

    def moves(self, number: int, maker: int) -> bool:
        """Return whether a held storage is swapped."""
        return self._fates[maker] == SWAP and self._graph.storages[number].moves

    def readers(self, number: int) -> list[tuple[int, bool]]:
        """Return the op events in which the engine meets a held storage, each with whether its nodes save it.

        If they do not, its call runs again with the storage, and meets it before its first node. The first
        of these op events starts the copy out; the last one's backward is the first to read it.
        """
        graph, storage = self._graph, self._graph.storages[number]
        if self._whole:
            return [(0, True)]
        found = [(place, True) for place, maker in storage.saved if not self._is_rebuilt(maker)]
        for call, fate, reads in zip(graph.calls, self._fates, graph.reads, strict=True):
            if fate == RECOMPUTE and call.op_event >= 0 and any(other == number for other, _ in reads):
                found.append((call.op_event, False))
        return sorted(found) or [(storage.born, True)]

    def forward_peak(self) -> int:
        """Return the most bytes alive in forward, base bytes included."""
        graph = self._graph
        last = len(graph.forward_ms)
        ends = [
            last if number in self.held else storage.last_used + 1 if storage.saved else storage.born
            for number, storage in enumerate(graph.storages)
        ]
        return _peak(graph.storages, ends, graph.forward_base_bytes)

    def _is_rebuilt(self, maker: int) -> bool:
        if self._whole:
            return not self._graph.calls[maker].from_before
        return self._fates[maker] == RECOMPUTE

    def _require(self, number: int, maker: int) -> None:
        start, _ = self._alive.get(number, (self._step, 0))
        if not self._is_rebuilt(maker):
            self.held.setdefault(number, (maker, self._now_ms))
            if not self.moves(number, maker):
                start = 0
        elif not self._whole:
            self._run(maker)
        self._alive[number] = (start, self._step)

    def _run(self, maker: int) -> None:
        if maker in self._ran:
            return
        self._ran.add(maker)
        for number, source in self._graph.reads[maker]:
            self._require(number, source)
        place = self._graph.calls[maker].op_event
        if place >= 0:
            self.recompute_ms += self._graph.forward_ms[place]
            self._now_ms += self._graph.forward_ms[place]

    def _rebuild_whole(self) -> None:
        """Rebuild as ``torch.utils.checkpoint`` does: up to the last call that saves, which need not run."""
        graph = self._graph
        inside = [
            (place, maker, number)
            for number, storage in enumerate(graph.storages)
            for place, maker in storage.saved
            if not graph.calls[maker].from_before
        ]
        last = max((place for place, _, _ in inside), default=-1)
        own = any(place == last and graph.calls[maker].op_event == last for place, maker, _ in inside)
        self.recompute_ms = sum(graph.forward_ms[: last + own])
        for number, maker in sorted(_reads_of(graph)):
            if graph.calls[maker].from_before:
                self.held.setdefault(number, (maker, 0.0))
                self._alive[number] = (0, 0)
        for number in {number for _, _, number in inside}:
            self._alive[number] = (0, 0)
        self._now_ms = self.recompute_ms

    def _count_peak(self) -> None:
        graph = self._graph
        changes = [0] * (len(graph.backward_order) + 2)
        for number, (start, stop) in self._alive.items():
            changes[start] += graph.storages[number].size_bytes
            changes[min(stop, len(graph.backward_order)) + 1] -= graph.storages[number].size_bytes
        alive = itertools.accumulate(changes)
        peaks = [
            size + graph.backward_base_bytes[place]
            for size, place in zip(alive, graph.backward_order, strict=False)
        ]
        self.backward_peak_bytes = max(peaks, default=0)
        if self._whole:
            ends = [len(graph.forward_ms) if storage.saved else storage.born for storage in graph.storages]
            again = _peak(graph.storages, ends, graph.forward_base_bytes)
            self.backward_peak_bytes = max(self.backward_peak_bytes, again)


def _reads_of(graph: LayerGraph) -> set[tuple[int, int]]:
    """Return (storage, its maker) of all that is read in backward, or by a call that runs again."""
    saved = {(number, maker) for number, storage in enumerate(graph.storages) for _, maker in storage.saved}
    return saved.union(*graph.reads)


def _peak(storages: Sequence[GraphStorage], ends: Sequence[int], bases: Sequence[int]) -> int:
    changes = [0] * (len(bases) + 2)
    for storage, end in zip(storages, ends, strict=True):
        changes[storage.born] += storage.size_bytes
        changes[min(end, len(bases))] -= storage.size_bytes
    alive = itertools.accumulate(changes)
    return max((size + base for size, base in zip(alive, bases, strict=False)), default=0)


try:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow
except ImportError:  # `layer_milp.need_solvers` raises: only planning needs scipy
    csr_array = None

_SCALE = 2**30
_DEPTH = 7
_FREE_MS = 1e-6
"""Added to the time of each call, so that calls which take no time do not run again needlessly."""


def best_runs(graph: LayerGraph) -> list[frozenset[int]]:
    """Return the sets of calls that are best to run again at some price of a byte, from few to many."""
    cuts = _Cuts(graph)
    lowest, highest = cuts.at(0.0), cuts.at(cuts.highest)
    found = {lowest: cuts.cost(lowest), highest: cuts.cost(highest)}
    _between(cuts, lowest, highest, found, _DEPTH)
    return sorted(found, key=lambda again: (found[again], sorted(again)))


def _between(
    cuts: _Cuts,
    few: frozenset[int],
    many: frozenset[int],
    found: dict[frozenset[int], tuple[float, int]],
    depth: int,
) -> None:
    """Add cuts between ``few`` and ``many`` to ``found``, beginning at the price where both cost the same."""
    (few_ms, few_bytes), (many_ms, many_bytes) = found[few], found[many]
    if depth == 0 or few_bytes <= many_bytes:
        return
    price = (many_ms - few_ms) / (few_bytes - many_bytes)
    middle = cuts.at(price)
    if middle in found:
        return
    found[middle] = ms, size_bytes = cuts.cost(middle)
    best = few_ms + price * few_bytes
    if ms + price * size_bytes < best * (1 - 1e-6):
        for one, other in pairwise((few, middle, many)):
            _between(cuts, one, other, found, depth - 1)


class _Cuts:
    """The flow network of one layer's graph, whose capacities depend on the price of a byte."""

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        self._free = [RECOMPUTE in call.fates for call in graph.calls]
        self._forced = [call.fates == RECOMPUTE for call in graph.calls]
        self._ms = [
            (graph.forward_ms[call.op_event] if call.op_event >= 0 else 0.0) + _FREE_MS
            for call in graph.calls
        ]
        self._saved = frozenset(
            (number, maker) for number, storage in enumerate(graph.storages) for _, maker in storage.saved
        )
        self._pairs = sorted(_reads_of(graph))
        self._at = {pair: len(graph.calls) + place for place, pair in enumerate(self._pairs)}
        self._sink = len(graph.calls) + len(self._pairs)
        self._source = self._sink + 1
        sizes = [graph.storages[number].size_bytes for number, _ in self._pairs]
        least = min((size for size in sizes if size), default=1)
        self.highest = max(sum(self._ms), 1.0) / max(least, 2**16)
        """A price (ms per byte) so high that only bytes count."""

    def at(self, price: float) -> frozenset[int]:
        """Return the calls to run again where a held byte costs ``price`` ms; of equal sets the smallest."""
        graph, edges = self._graph, []
        sizes = {pair: graph.storages[pair[0]].size_bytes * price for pair in self._pairs}
        unit = (_SCALE // 4) / max(sum(self._ms) + sum(sizes.values()), 1e-9)
        for call, ms in enumerate(self._ms):
            if not self._free[call]:
                continue
            edges.append((call, self._sink, round(ms * unit)))
            if self._forced[call]:
                edges.append((self._source, call, _SCALE))
            edges += [(call, self._at[read], _SCALE) for read in graph.reads[call] if read[1] != call]
        for pair in self._pairs:
            maker = pair[1] if self._free[pair[1]] else self._sink
            edges.append((self._at[pair], maker, round(sizes[pair] * unit)))
            if pair in self._saved:
                edges.append((self._source, self._at[pair], _SCALE))
        return self._source_side(edges)

    def cost(self, again: frozenset[int]) -> tuple[float, int]:
        """Return the recompute time and the held bytes of a choice; each storage counts once."""
        graph, held, seen = self._graph, set(), set()
        wanted = list(self._saved)
        while wanted:
            number, maker = wanted.pop()
            if maker not in again:
                held.add(number)
            elif maker not in seen:
                seen.add(maker)
                wanted += graph.reads[maker]
        size_bytes = sum(graph.storages[number].size_bytes for number in held)
        return sum(self._ms[call] for call in seen), size_bytes

    def _source_side(self, edges: list[tuple[int, int, int]]) -> frozenset[int]:
        size = self._source + 1
        rows, columns, values = (np.array(part, dtype=np.int32) for part in zip(*edges, strict=True))
        network = csr_array((values, (rows, columns)), shape=(size, size))
        flow = maximum_flow(network, self._source, self._sink).flow
        left = csr_array(network - flow)
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reached = breadth_first_order(left, self._source, return_predecessors=False)
        return frozenset(int(node) for node in reached if node < len(self._graph.calls))


_ENUMERATED = 700
"""For layers with at most so many combinations of fates, all are listed."""

_MOST_SHARES = 12


def options_of(
    graph: LayerGraph, link: Link, shares: int, points: Sequence[FrontierPoint] = ()
) -> list[Option]:
    """Return the options of a layer that can be part of a best plan, in a fixed order.

    For swap, held bytes are divided into ``shares`` parts, but at most `_MOST_SHARES`.
    """
    combinations = prod(len(call.fates) for call in graph.calls)
    if combinations <= _ENUMERATED:
        fates: Iterable[tuple[str, ...]] = itertools.product(*(call.fates for call in graph.calls))
    else:
        fates = _likely(graph, min(shares, _MOST_SHARES))
    found = [evaluate(graph, variant, link) for variant in dict.fromkeys(fates)]
    if graph.whole:
        before = [call.fates if call.from_before else KEEP for call in graph.calls]
        found += [evaluate(graph, variant, link, whole=True) for variant in itertools.product(*before)]
    own = own_call(graph)
    own_ms = 0.0 if own is None else graph.forward_ms[graph.calls[own].op_event]
    for point in points:
        less, again_ms = at_point(graph, point), point.again * own_ms
        for variant in itertools.product(*(call.fates for call in graph.calls)):
            found.append(replace(evaluate(less, variant, link), point=point, again_ms=again_ms))
    return _undominated(found)


def _likely(graph: LayerGraph, shares: int) -> list[tuple[str, ...]]:
    """Return the fates of each minimum cut, with none, some or all of the bytes that it holds swapped."""
    found: list[tuple[str, ...]] = []
    for again in best_runs(graph):
        base = tuple(
            RECOMPUTE if number in again else call.fates[0] if len(call.fates) == 1 else KEEP
            for number, call in enumerate(graph.calls)
        )
        held = _held_bytes(graph, base)
        free = [call for call in held if SWAP in graph.calls[call].fates and len(graph.calls[call].fates) > 1]
        found.append(base)
        early = sorted(free, key=lambda call: (not graph.calls[call].from_before, graph.calls[call].op_event))
        large = sorted(free, key=lambda call: -held[call])
        for order in (early, large):
            for share in range(1, shares + 1):
                moved = set(_prefix(order, held, share / shares))
                found.append(tuple(SWAP if number in moved else fate for number, fate in enumerate(base)))
    return found


def _held_bytes(graph: LayerGraph, fates: Sequence[str]) -> dict[int, int]:
    """Return the bytes held of each call's storages, by number of the call; only those that can move."""
    costs = LayerCosts(graph, fates, whole=False)
    costs.backward()
    found: dict[int, int] = {}
    for number, (maker, _) in sorted(costs.held.items()):
        if graph.storages[number].moves:
            found[maker] = found.get(maker, 0) + graph.storages[number].size_bytes
    return found


def _prefix(order: Sequence[int], sizes: dict[int, int], share: float) -> Sequence[int]:
    total, wanted = 0, share * sum(sizes[call] for call in order) - 0.5
    for count, call in enumerate(order):
        if total >= wanted:
            return order[:count]
        total += sizes[call]
    return order


def _undominated(options: list[Option]) -> list[Option]:
    """Drop each option that another one equals or beats in every respect."""
    metrics = np.array(
        [
            (
                option.extra_ms,
                option.kept_bytes,
                option.swapped_bytes - option.swapped_input_bytes,
                option.swapped_input_bytes,
                option.out_ms,
                option.in_ms,
                option.backlog_ms,
                option.lead_ms,
                option.forward_peak_bytes,
                option.backward_peak_bytes,
            )
            for option in options
        ]
    )
    kept: list[Option] = []
    taken: list[np.ndarray] = []
    for at in np.lexsort(metrics.T[::-1]):
        if not taken or not (np.array(taken) <= metrics[at] + 1e-12).all(axis=1).any():
            kept.append(options[at])
            taken.append(metrics[at])
    return kept


def own_call(graph: LayerGraph) -> int | None:
    """Return the number of the call that represents all of a compiled layer; ``None``: there is none."""
    calls = enumerate(graph.calls)
    return next((at for at, call in calls if not (call.from_before or call.path or call.op_event < 0)), None)


def at_point(graph: LayerGraph, point: FrontierPoint) -> LayerGraph:
    """Return the graph of a layer, compiled by default in ``graph``, that is compiled as ``point`` says."""
    own = own_call(graph)
    if own is None:
        return graph
    place = graph.calls[own].op_event
    mine = [all(maker == own for _, maker in storage.saved) for storage in graph.storages]
    all_bytes = sum(item.size_bytes for item, is_mine in zip(graph.storages, mine, strict=True) if is_mine)
    passing_bytes = int(point.passing * all_bytes)

    def more(bases: Sequence[int]) -> tuple[int, ...]:
        return tuple(size + passing_bytes if at == place else size for at, size in enumerate(bases))

    return replace(
        graph,
        storages=tuple(
            replace(item, size_bytes=int(item.size_bytes * point.saved)) if is_mine else item
            for item, is_mine in zip(graph.storages, mine, strict=True)
        ),
        backward_ms=tuple(
            ms + point.again * graph.forward_ms[at] if at == place else ms
            for at, ms in enumerate(graph.backward_ms)
        ),
        forward_base_bytes=more(graph.forward_base_bytes),
        backward_base_bytes=more(graph.backward_base_bytes),
    )


def as_chosen(segment: Segment, option: Option) -> Segment:
    """Return ``segment`` with the graph at the option's point, if it has one."""
    return segment if option.point is None else replace(segment, graph=at_point(segment.graph, option.point))
