"""Lists the options of one layer with their costs: milliseconds, bytes kept, bytes that move, and peaks.

There are too many combinations of fates to list, but few of them can be best. With a price p for each held
byte, the best set of calls to run again is a minimum cut: a call that runs again costs its time and needs its
inputs; what is held costs its bytes. As p rises from 0, cuts change at a few prices only, and these cuts are
all that a mixture over many layers needs (the lower hull of time against bytes). For each cut, several shares
of what is held are swapped. For a layer with few calls all combinations are listed instead. A compiled layer
has options for each point of its frontier (`FrontierPoint`) beside those of its default compilation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from ..profile import FrontierPoint
from .layer_costs import LayerCosts, LinkRate, Option, evaluate
from .layer_cuts import best_runs
from .layer_graph import KEEP, RECOMPUTE, SWAP, LayerGraph, Segment

_ENUMERATED = 700
"""For layers with at most so many combinations of fates, all are listed."""

_MOST_SHARES = 12


def options_of(
    graph: LayerGraph, link_rate: LinkRate, shares: int, points: Sequence[FrontierPoint] = ()
) -> list[Option]:
    """Return the options of a layer that can be part of a best plan, in a fixed order.

    Args:
        graph: graph of the layer.
        link_rate: rates of copies.
        shares: in how many parts the held bytes are divided for swap, at most `_MOST_SHARES`.
        points: other ways to compile a compiled layer.
    """
    combinations = prod(len(call.fates) for call in graph.calls)
    if combinations <= _ENUMERATED:
        fates: Iterable[tuple[str, ...]] = itertools.product(*(call.fates for call in graph.calls))
    else:
        fates = _likely(graph, min(shares, _MOST_SHARES))
    found = [evaluate(graph, variant, link_rate) for variant in dict.fromkeys(fates)]
    if graph.whole:
        before = [call.fates if call.from_before else KEEP for call in graph.calls]
        found += [evaluate(graph, variant, link_rate, whole=True) for variant in itertools.product(*before)]
    for point in points:
        less = at_point(graph, point)
        variants = itertools.product(*(call.fates for call in graph.calls))
        found += [with_point(graph, evaluate(less, variant, link_rate), point) for variant in variants]
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
        early = sorted(free, key=lambda call: (not graph.calls[call].from_before, graph.calls[call].place))
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
    for number, call in enumerate(graph.calls):
        if not call.from_before and not call.path and call.place >= 0:
            return number
    return None


def at_point(graph: LayerGraph, point: FrontierPoint) -> LayerGraph:
    """Return the graph of a compiled layer that is compiled so that it saves less.

    Args:
        graph: graph of the layer as it is compiled by default.
        point: the way to compile it, with what it saves and costs.
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
    """Return ``option``, evaluated on the graph at ``point``, with the point and the time that it adds."""
    own = own_call(graph)
    place = None if own is None else graph.calls[own].place
    again_ms = 0.0 if place is None else point.again * graph.forward_ms[place]
    return replace(option, point=point, again_ms=again_ms)


def as_chosen(segment: Segment, option: Option) -> Segment:
    """Return ``segment`` with the graph at the option's point, if it has one."""
    return segment if option.point is None else replace(segment, graph=at_point(segment.graph, option.point))
