"""What a compiled layer can do beside what it does by itself: its options at each point of the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..profile import FrontierPoint
from .layer_graph import LayerGraph, Segment
from .layer_sweep import Option


def own_call(graph: LayerGraph) -> int | None:
    """Return the number of the call that stands for all of a compiled layer; ``None``: there is none."""
    for number, call in enumerate(graph.calls):
        if not call.from_before and not call.path and call.place >= 0:
            return number
    return None


def at_point(graph: LayerGraph, point: FrontierPoint) -> LayerGraph:
    """Return the graph of a compiled layer of which only a part is saved.

    Args:
        graph: of the layer as the compiler compiles it by itself.
        point: what is saved, and what that costs.
    """
    own = own_call(graph)
    if own is None:
        return graph
    place = graph.calls[own].place
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


def with_point(graph: LayerGraph, option: Option, point: FrontierPoint) -> Option:
    """Return ``option``, which was evaluated on the graph at ``point``, as one of ``graph``."""
    own = own_call(graph)
    place = None if own is None else graph.calls[own].place
    again_ms = 0.0 if place is None else point.again * graph.forward_ms[place]
    return replace(option, point=point, again_ms=again_ms)


def as_chosen(segment: Segment, option: Option) -> Segment:
    """Return the segment as ``option`` makes it."""
    return segment if option.point is None else replace(segment, graph=at_point(segment.graph, option.point))
