"""The graphs on which the search decides: calls of a layer, the storages they make, and what reads these.

The step consists of *segments*: what runs before the layers, each layer, what runs after them. A storage
belongs to the segment that makes it. The hidden state that a layer hands on belongs to the segment that reads
it, because only there it is known whether anything holds it. All numbers in a graph count from the segment's
own start, so that layers of the same kind have equal graphs and share what is computed for one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...plan.saved_bytes import OpCall

KEEP, SWAP, RECOMPUTE = "k", "s", "r"
"""Fates of a call in an option."""

_SAME_TIMES = 0.1
"""Layers whose times differ by at most this share have one graph."""


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A call that makes storages.

    Args:
        from_before: whether it runs before the segment, and hands its hidden state to it.
        path, ordinal: op path and number of the call, as in plan rows.
        fates: possible fates of the storages that it makes (letters of `KEEP`, `SWAP`, `RECOMPUTE`); if there
            is one only, it is decided already.
        place: number of its op event in the segment; -1: it has none.
    """

    from_before: bool
    path: str
    ordinal: int | None
    fates: str
    place: int


@dataclass(frozen=True, slots=True)
class GraphStorage:
    """A storage of a segment.

    Args:
        size_bytes: size of the whole storage.
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
    """One kind of segment.

    Args:
        calls: the calls that make storages.
        storages: the storages of the segment.
        reads: for each call its inputs when it runs again: (storage number, number of its maker's call).
        forward_ms, backward_ms: times of each op event.
        backward_order: numbers of op events in the order of backward.
        forward_base_bytes, backward_base_bytes: base bytes of each op event, beyond the segment's least.
        whole: whether the segment can be recomputed as a whole.
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

    @property
    def shape(self) -> object:
        """All of the graph except times and base bytes; equal for segments of one kind."""
        return self.calls, self.storages, self.reads, self.backward_order, self.whole


@dataclass(frozen=True)
class Segment:
    """A segment of the step.

    Args:
        layer: index of its layer; -1: before the layers; the number of layers: after them.
        graph: the graph of its kind.
        makers: for each call of the graph, its name in plan rows.
        forward_base_bytes, backward_base_bytes: the least base bytes while it runs.
    """

    layer: int
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
