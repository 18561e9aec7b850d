"""Finds which calls of a layer to run again, for every price of a held byte: minimum cuts.

Calls on the source's side of a cut run again, and cost their time (an edge to the sink). A storage that is
read in backward, or by a call that runs again, costs its bytes times the price, unless its maker runs again
too (an edge to the maker). So a cut is a consistent choice, and its capacity is the cost of that choice.
"""

from __future__ import annotations

from itertools import pairwise

from ...errors import PlanError, Problem
from .layer_graph import RECOMPUTE, LayerGraph

try:
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow
except ImportError:  # `need_scipy` raises: only planning needs scipy
    csr_array = None

_SCALE = 2**30
_DEPTH = 7
_FREE_MS = 1e-6
"""Added to the time of each call, so that calls which take no time do not run again needlessly."""


def need_scipy() -> None:
    """Raise if scipy, the planner's solver, is missing.

    Raises:
        PlanError: scipy is missing; the error says how to install it.
    """
    if csr_array is None:
        raise PlanError(
            [
                Problem(
                    "memory.mode",
                    "scipy, which solves the planner's problems",
                    "no scipy",
                    "pip install scipy",
                )
            ]
        )


def best_runs(graph: LayerGraph) -> list[frozenset[int]]:
    """Return the sets of calls that are best to run again at some price of a byte, from few to many.

    Raises:
        PlanError: scipy is missing.
    """
    need_scipy()
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
            (graph.forward_ms[call.place] if call.place >= 0 else 0.0) + _FREE_MS for call in graph.calls
        ]
        pairs = {
            (number, maker) for number, storage in enumerate(graph.storages) for _, maker in storage.saved
        }
        self._saved = frozenset(pairs)
        pairs |= {read for reads in graph.reads for read in reads}
        self._pairs = sorted(pairs)
        self._at = {pair: len(graph.calls) + place for place, pair in enumerate(self._pairs)}
        self._sink = len(graph.calls) + len(pairs)
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
