"""Turns the chosen options into a plan: the fewest rows that say the same, with windows.

Windows say when swapped tensors move: device memory is released as soon as the copy out has ended, and copies
back start as late as possible. The simulation of the plan without windows says when hooks come, and
`engine.windows` chooses from that. What is swapped is decided already, so copies that the link cannot bring
back in time start when backward begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...plan.actions import COMPILE_BUDGET, Fate, MemoryPlan, PlanRow, Scope, Windows
from ...plan.model_structure import OUTPUT
from ...plan.saved_bytes import OpCall
from ..profile import FrontierPoint
from .layer_graph import KEEP, RECOMPUTE, SWAP, Segment
from .layer_options import Option

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
    choice: Choice, fixed: MemoryPlan, windows: Mapping[OpCall, Sequence[Windows]], min_tensor_bytes: int
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


def _rows(segment: Segment, option: Option, windows: Mapping[OpCall, Sequence[Windows]]) -> list[PlanRow]:
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
            found = [window for maker, _ in free_calls for window in windows.get(maker, ())]
            rows.append(PlanRow(scope, path, _FATES[fates.pop()], windows=widest(found)))
        else:
            rows += [
                PlanRow(scope, path, _FATES[fate], maker[2], widest(windows.get(maker, ())))
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
