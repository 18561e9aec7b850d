"""Turns the chosen options into a plan: the fewest rows that say the same, with windows.

Windows say when swapped tensors move: device memory is released as soon as the copy out has ended, and copies
back start as late as possible. They are chosen as in `engine.windows`, with the predicted times of hooks,
recomputation in backward included. What is swapped is decided already, so copies that the link cannot bring
back in time start when backward begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ...engine.windows import HookTimes, out_ends_ms
from ...plan.actions import COMPILE_BUDGET, Fate, MemoryPlan, PlanRow, Scope, Windows
from ...plan.model_structure import OUTPUT
from ...plan.saved_bytes import OpCall
from ..cost.scope_fates import timeline
from ..profile import FrontierPoint, OpEvent, Profile
from .layer_graph import KEEP, RECOMPUTE, SWAP, LayerGraph, Segment
from .layer_options import LayerCosts, LinkRate, Option

_FATES: Mapping[str, Fate] = {KEEP: "keep", SWAP: "swap", RECOMPUTE: "recompute"}


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen option of each segment.

    Args:
        segments: the segments in the order of forward, after `layer_options.as_chosen`.
        options: the option of each segment.
    """

    segments: tuple[Segment, ...]
    options: tuple[Option, ...]


def plan_of(
    choice: Choice, fixed: MemoryPlan, windows: Mapping[OpCall, Windows], min_tensor_bytes: int
) -> MemoryPlan:
    """Return a plan with the rows of ``fixed`` and those that follow from ``choice``.

    Args:
        choice: the chosen options.
        fixed: the fates written by hand; the other fields of this plan are carried over.
        windows: windows of swapped tensors, by the call that makes them.
        min_tensor_bytes: smaller tensors are not swapped under the plan.
    """
    rows: list[PlanRow] = []
    for segment, option in zip(choice.segments, choice.options, strict=True):
        rows += _rows(segment, option, windows)
    order = {row: number for number, row in enumerate(rows)}
    rows.sort(key=lambda row: (_place(row.scope, fixed.num_layers), order[row]))
    return replace(fixed, rows=(*fixed.rows, *rows), min_tensor_bytes=min_tensor_bytes)


def _place(scope: Scope, num_layers: int) -> int:
    return scope if isinstance(scope, int) else -1 if scope == "embedding" else num_layers


def _rows(segment: Segment, option: Option, windows: Mapping[OpCall, Windows]) -> list[PlanRow]:
    rows: list[PlanRow] = []
    by_path: dict[tuple[Scope, str], list[tuple[OpCall, str, bool]]] = {}
    for call, maker, fate in zip(segment.graph.calls, segment.makers, option.fates, strict=True):
        scope, path, _ = maker
        free = len(call.fates) > 1
        if scope is not None and (not option.whole or call.from_before):
            by_path.setdefault((scope, path), []).append((maker, fate, free))
    if option.whole and isinstance(segment.layer, int):
        rows.append(PlanRow(segment.layer, "", "recompute"))
    for (scope, path), calls in by_path.items():
        free_calls = [(maker, fate) for maker, fate, free in calls if free]
        fates = {fate for _, fate in free_calls}
        if not free_calls or fates == {KEEP}:
            continue
        if len(fates) == 1 and len(free_calls) == len(calls):
            found = [windows[maker] for maker, _ in free_calls if maker in windows]
            rows.append(PlanRow(scope, path, _FATES[fates.pop()], windows=widest(found)))
        else:
            rows += [
                PlanRow(scope, path, _FATES[fate], maker[2], windows.get(maker) if fate == SWAP else None)
                for maker, fate in free_calls
                if fate != KEEP
            ]
    if any(row.op_path == "" and row.fate == "swap" for row in rows):  # the hidden state has its own fate
        rows.append(PlanRow(segment.layer, OUTPUT, "keep"))
    return rows if option.point is None else _with_compiler_rows(rows, segment.layer, option.point)


def _with_compiler_rows(rows: Sequence[PlanRow], layer: int, point: FrontierPoint) -> list[PlanRow]:
    """Return the rows of a compiled layer with those added that tell the compiler what to save."""
    given: list[PlanRow] = []
    if point.share < 1:
        parameters = {COMPILE_BUDGET: point.share}
        kept = PlanRow(layer, "", "keep")
        own = next((row for row in rows if row.scope == layer and not row.op_path), kept)
        rows = [row for row in rows if row is not own]
        given.append(replace(own, parameters=parameters))
    given += [PlanRow(layer, path, "recompute") for path in point.recomputed]
    given += [PlanRow(layer, path, "keep") for path in point.kept]
    return [*given, *rows]


def widest(windows: Sequence[Windows]) -> Windows | None:
    """Return windows that are wide enough for all; ``None``: there are none."""
    if not windows:
        return None
    return Windows(max(item.prefetch_ops for item in windows), max(item.release_ops for item in windows))


@dataclass(eq=False, slots=True)
class _Copy:
    """The copies of one swapped storage: when and at which operators they can start and must have ended."""

    maker: OpCall
    ready_ms: float
    ready_op: int
    out_ms: float
    read_ms: float
    in_ms: float
    last_op: int
    segment: int
    rank: int

    @property
    def out_order(self) -> tuple[float, int, int]:
        """Sort key for the order of copies out: what a layer hands on goes after what it saves."""
        return self.ready_ms, self.segment, self.rank

    @property
    def back_order(self) -> tuple[float, int, int]:
        """Sort key for copies back, from the last to the first."""
        return -self.read_ms, -self.segment, -self.rank


class _Moves:
    """The hooks and copies of a step under a choice."""

    def __init__(self, choice: Choice, profile: Profile, link_rate: LinkRate) -> None:
        self._link_rate = link_rate
        self._forward: list[tuple[float, int]] = []
        self._backward: list[tuple[float, int]] = []
        self.copies: list[_Copy] = []
        op_events = iter(profile.op_events)
        operators = [[next(op_events) for _ in segment.graph.forward_ms] for segment in choice.segments]
        starts, now_ms = [], 0.0
        for segment in choice.segments:
            starts.append(now_ms)
            now_ms += sum(segment.graph.forward_ms)
        self._forward_end_ms = now_ms
        for number in reversed(range(len(choice.segments))):
            now_ms = self._add(choice, number, operators[number], starts[number], now_ms)
        self._end_op = (
            max((op_event.first_op + op_event.num_ops for op_event in profile.op_events), default=0) + 1
        )

    def hooks(self) -> HookTimes:
        """Return the hooks where the engine gets control; at the end of forward it releases what is left."""
        forward = [(op, ms) for ms, op in sorted(self._forward)]
        found = timeline(forward, self._forward_end_ms, [(op, ms) for ms, op in self._backward])
        return HookTimes(replace(found, forward=(*found.forward[:-1], (self._end_op, self._forward_end_ms))))

    def _add(
        self, choice: Choice, number: int, op_events: list[OpEvent], forward_ms: float, backward_ms: float
    ) -> float:
        """Add the hooks and copies of one segment; return when its backward ends."""
        segment, option = choice.segments[number], choice.options[number]
        graph = segment.graph
        costs = LayerCosts(graph, option.fates, option.whole)
        costs.backward()
        begin_ms = list(accumulate(graph.forward_ms, initial=forward_ms))
        asks = [max(op_event.first_op - 1, 0) for op_event in op_events]  # before a call's first node
        saves = [op_event.first_op + max(op_event.num_ops - 1, 0) for op_event in op_events]  # last node
        ops = (asks, saves)
        if option.whole:  # one hook in forward, at its start, and one in backward, at its last operator
            self._forward.append((begin_ms[0], saves[0]))
            self._backward.append((backward_ms, saves[-1]))
        else:
            hooks = _hooks(graph)
            for place, delay in sorted(hooks.items()):
                self._forward.append((begin_ms[place + delay], saves[place]))
            starts = zip(costs.backward_start_ms, graph.backward_order, strict=True)
            self._backward += [(backward_ms + ms, saves[place]) for ms, place in starts if place in hooks]
        for index, (maker, read_ms) in sorted(costs.held.items()):
            if not costs.moves(index, maker):
                continue
            readers = costs.readers(index)
            self.copies.append(
                _Copy(
                    segment.makers[maker],
                    begin_ms[costs.ready_after(index, maker)],
                    ops[readers[0][1]][readers[0][0]],
                    self._link_rate.out_ms(graph.storages[index].size_bytes),
                    backward_ms + read_ms,
                    self._link_rate.in_ms(graph.storages[index].size_bytes),
                    saves[-1] if option.whole else ops[readers[-1][1]][readers[-1][0]],
                    number,
                    graph.storages[index].rank,
                )
            )
        return (
            backward_ms
            + option.recompute_ms
            + sum(graph.backward_ms[place] for place in graph.backward_order)
        )


def _hooks(graph: LayerGraph) -> dict[int, bool]:
    """Return the op events that save a storage, each with whether they save only results of their own."""
    found: dict[int, bool] = {}
    for storage in graph.storages:
        for place, maker in storage.saved:
            found[place] = found.get(place, True) and graph.calls[maker].place == place
    return found


def windows_of(choice: Choice, profile: Profile, link_rate: LinkRate) -> Mapping[OpCall, Windows]:
    """Return windows by the call that makes swapped storages, wide enough for all that it makes.

    Args:
        choice: the chosen options.
        profile: profile of the step.
        link_rate: rates of copies.
    """
    moves = _Moves(choice, profile, link_rate)
    if not moves.copies:
        return {}
    hooks = moves.hooks()
    out = sorted(moves.copies, key=lambda copy: copy.out_order)
    release_ops = {
        copy: max(hooks.release_op(end_ms) - copy.ready_op, 1)
        for copy, end_ms in zip(out, out_ends_ms(out), strict=True)
    }
    found: dict[OpCall, list[Windows]] = {}
    next_ms = math.inf
    for copy in sorted(moves.copies, key=lambda copy: copy.back_order):
        next_ms = min(copy.read_ms, next_ms) - copy.in_ms
        prefetch_ops = max(hooks.prefetch_op(next_ms) - copy.last_op, 0)
        found.setdefault(copy.maker, []).append(Windows(prefetch_ops, release_ops[copy]))
    return {maker: wide for maker, windows in found.items() if (wide := widest(windows)) is not None}
