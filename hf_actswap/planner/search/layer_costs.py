"""Computes what one combination of fates costs a layer: a walk through its forward and its backward.

Backward runs one op event after the other. What its nodes read is held, fetched back, or rebuilt at the first
need, together with the inputs that rebuilding needs. One walk gives the time of what runs again, the bytes
that stay, when copies can start and must have ended, and the most bytes alive at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.link import Link
from ..profile import FrontierPoint
from .layer_graph import RECOMPUTE, SWAP, GraphStorage, LayerGraph


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Assumed rates of copies; both 0: there is no link, and copies take no time.

    Args:
        out_bytes_per_ms, in_bytes_per_ms: rates to the host and back.
        latency_ms: time that each copy takes in addition.
    """

    out_bytes_per_ms: float
    in_bytes_per_ms: float
    latency_ms: float

    @staticmethod
    def of(link: Link | None, safety: float) -> LinkRate:
        """Return the rates of a link, with copies that take ``safety`` times as long as it says."""
        if link is None:
            return LinkRate(0.0, 0.0, 0.0)
        return LinkRate(
            link.out_bytes_per_ms / safety, link.in_bytes_per_ms / safety, link.latency_ms * safety
        )

    def out_ms(self, size_bytes: int) -> float:
        """Return the duration of a copy to the host."""
        return size_bytes / self.out_bytes_per_ms + self.latency_ms if self.out_bytes_per_ms else 0.0

    def in_ms(self, size_bytes: int) -> float:
        """Return the duration of a copy back."""
        return size_bytes / self.in_bytes_per_ms + self.latency_ms if self.in_bytes_per_ms else 0.0


@dataclass(frozen=True, slots=True)
class Option:
    """One combination of fates for a layer, with its costs.

    Args:
        fates: one fate for each call of its graph; if it is recomputed whole, only calls before it count.
        whole: whether the layer is recomputed whole.
        recompute_ms: time of what runs again.
        kept_bytes: bytes on the device from its forward to its backward.
        swapped_bytes: bytes that move to the host.
        swapped_input_bytes: those of them that the layer was handed as input.
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


def evaluate(graph: LayerGraph, fates: Sequence[str], link_rate: LinkRate, whole: bool = False) -> Option:
    """Return one combination of fates with its costs.

    Args:
        graph: graph of the layer.
        fates: one fate for each call of the graph.
        link_rate: rates of copies.
        whole: whether the layer is recomputed whole; then only the fates of calls before it count.
    """
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
            outs.append((ready_ms[costs.ready_after(number, maker)], storage.size_bytes))
            ins.append((first_read_ms, storage.size_bytes))
        else:
            kept_bytes += storage.size_bytes
    end_ms, backlog_ms, lead_ms, out_ms, in_ms = ready_ms[-1], 0.0, 0.0, 0.0, 0.0
    for at_ms, size_bytes in sorted(outs, reverse=True):
        out_ms += link_rate.out_ms(size_bytes)
        backlog_ms = max(backlog_ms, out_ms - (end_ms - at_ms))
    for at_ms, size_bytes in sorted(ins):
        in_ms += link_rate.in_ms(size_bytes)
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
        backward_start_ms: when backward reaches each op event, before what runs again for it.
        recompute_ms: time of what runs again.
        backward_peak_bytes: most bytes alive in backward, base bytes included.
    """

    def __init__(self, graph: LayerGraph, fates: Sequence[str], whole: bool) -> None:
        self._graph, self._fates, self._whole = graph, fates, whole
        self.held: dict[int, tuple[int, float]] = {}
        self.recompute_ms = 0.0
        self.backward_peak_bytes = 0
        self.backward_start_ms: list[float] = []
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
            self.backward_start_ms.append(self._now_ms)
            for number, maker in wanted.get(place, ()):
                self._require(number, maker)
            self._now_ms += graph.backward_ms[place]
        for places in wanted.keys() - set(
            graph.backward_order
        ):  # backward does not visit these op events: held until the end
            for number, maker in wanted[places]:
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
            if fate == RECOMPUTE and call.place >= 0 and any(other == number for other, _ in reads):
                found.append((call.place, False))
        return sorted(found) or [(storage.born, True)]

    def ready_after(self, number: int, maker: int) -> int:
        """Return how many op events have run when the copy out can start; a result: its own call too."""
        place, saved = self.readers(number)[0]
        return place + (saved and place == self._graph.calls[maker].place)

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
        place = self._graph.calls[maker].place
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
        own = any(place == last and graph.calls[maker].place == last for place, maker, _ in inside)
        self.recompute_ms = sum(graph.forward_ms[: last + own])
        for number, storage in enumerate(graph.storages):
            for maker in {maker for _, maker in storage.saved} | self._inputs_of(number):
                if graph.calls[maker].from_before:
                    self.held.setdefault(number, (maker, 0.0))
                    self._alive[number] = (0, 0)
        for number in {number for _, _, number in inside}:
            self._alive[number] = (0, 0)
        self._now_ms = self.recompute_ms

    def _inputs_of(self, number: int) -> set[int]:
        return {maker for reads in self._graph.reads for other, maker in reads if other == number}

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


def _peak(storages: Sequence[GraphStorage], ends: Sequence[int], bases: Sequence[int]) -> int:
    changes = [0] * (len(bases) + 2)
    for storage, end in zip(storages, ends, strict=True):
        changes[storage.born] += storage.size_bytes
        changes[min(end, len(bases))] -= storage.size_bytes
    alive = itertools.accumulate(changes)
    return max((size + base for size, base in zip(alive, bases, strict=False)), default=0)
