"""Bytes by layer and op: a cell's colour is what becomes of it, and the stronger, the more bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ..engine.step_record import StepTimeline
from ..plan import MemoryPlan
from ..plan.actions import SCOPES, Scope, layer_order
from ..planner.cost.simulate import fates_of
from ..planner.profile import Profile
from .axes import LEGEND_ROW, add_legend, legend_rows
from .drawing import Box, Drawing, Label, text_width
from .scales import size_text

Cells = Mapping[tuple[str, Scope], Mapping[str, int]]
"""Of (op path, scope): fate -> bytes."""

_LEGEND = (("keep", "kept"), ("swap", "swapped"), ("recompute", "run again in backward"))
_SWAPPED_ONLY = (("swap", "swapped"),)
_MOST_ROWS = 24
_ROW = 20.0
_REST = "all others"


def planned_cells(profile: Profile, plan: MemoryPlan) -> Cells:
    """Return what autograd saves in the layers without a plan, and what becomes of it under one."""
    found: defaultdict[tuple[str, Scope], Counter[str]] = defaultdict(Counter)
    for storage, fate in zip(profile.saved.storages, fates_of(profile, plan), strict=True):
        first = next((use for use in storage.uses if use.kind == "saved"), None)
        if first is None or fate == "unsaved":
            continue
        scope, path, _ = first.producer
        if scope is not None:
            found[path or "everything", scope][fate] += storage.size_bytes
    return found


def swapped_cells(timeline: StepTimeline) -> Cells:
    """Return what was swapped in a measured step, by the rows of the plan."""
    found: defaultdict[tuple[str, Scope], Counter[str]] = defaultdict(Counter)
    for copy in timeline.copies:
        if copy.way == "out" and copy.scope is not None:
            found[copy.op_path or "everything", copy.scope]["swap"] += copy.size_bytes
    return found


def bytes_chart(cells: Cells, width: float) -> Drawing:
    """Draw them: a row for each op, the largest first, a column for each layer.

    Args:
        cells: at least one.
        width: in px.
    """
    narrow = width < 600
    rows, columns = _rows(cells), _columns(cells)
    fates = {fate for sizes in cells.values() for fate in sizes}
    legend = _SWAPPED_ONLY if fates == {"swap"} else _LEGEND
    names = [name for name, _ in rows]
    left = 4.0 if narrow else max(text_width(name) for name in names) + 18
    right = width - 8 - (0 if narrow else 84)
    row_height = 36.0 if narrow else _ROW
    top = legend_rows(legend, width - 8) * LEGEND_ROW + 24
    drawing = Drawing(width, top + len(rows) * row_height + 8, "Bytes by layer and op")
    add_legend(drawing, legend, left, 2, width - 8)
    cell_width = (right - left) / len(columns)
    _add_column_names(drawing, columns, left, cell_width, top - 6)
    most = max(sum(sizes.values()) for _, by_scope in rows for sizes in by_scope.values())
    for number, (name, by_scope) in enumerate(rows):
        total = size_text(sum(sum(sizes.values()) for sizes in by_scope.values()))
        y = top + number * row_height
        if narrow:
            drawing.add(Label(left, y + 12, name, "ink", size=11))
            drawing.add(Label(right, y + 12, total, anchor="end", size=11))
            y += 16
        else:
            drawing.add(Label(left - 8, y + 14, name, "ink", "end"))
            drawing.add(Label(width - 8, y + 14, total, anchor="end"))
        for column, scope in enumerate(columns):
            sizes = by_scope.get(scope, {})
            _add_cell(drawing, sizes, left + column * cell_width, y, cell_width, most, f"{scope} {name}")
    return drawing


def _add_cell(
    drawing: Drawing, sizes: Mapping[str, int], x: float, y: float, width: float, most: int, name: str
) -> None:
    """Several fates in one cell share its width."""
    height, gap = _ROW - 2, 1.0 if width > 5 else 0.3
    drawing.add(Box(x, y, width - gap, height, "grid", opacity=0.45))
    total = sum(sizes.values())
    at = x
    for fate, size_bytes in sizes.items():
        share = (width - gap) * size_bytes / total
        means = "stall" if fate not in ("keep", "swap", "recompute") else fate
        title = f"layer {name}: {size_text(size_bytes)} {fate}"
        drawing.add(Box(at, y, share, height, means, title, 0.25 + 0.75 * total / most))
        at += share


def _add_column_names(
    drawing: Drawing, columns: Sequence[Scope], left: float, cell_width: float, y: float
) -> None:
    """As many as fit."""
    every = max(1, -(-int(text_width("00", 11) + 6) // max(int(cell_width), 1)))
    for number, scope in enumerate(columns):
        x = left + (number + 0.5) * cell_width
        if isinstance(scope, int):
            if number % every == 0:
                drawing.add(Label(x, y, str(scope), anchor="middle", size=11))
        elif text_width(scope, 11) < cell_width:
            drawing.add(Label(x, y, scope, anchor="middle", size=11))
        else:
            drawing.add(Label(x, y, scope[0].upper(), anchor="middle", size=11))


def _columns(cells: Cells) -> list[Scope]:
    met = {scope for _, scope in cells}
    layers = sorted((scope for scope in met if scope not in SCOPES), key=layer_order)
    around: list[Scope] = [name for name in SCOPES if name in met]
    before: list[Scope] = ["embedding"] if "embedding" in around else []
    return [*before, *layers, *(name for name in around if name != "embedding")]


def _rows(cells: Cells) -> list[tuple[str, dict[Scope, Mapping[str, int]]]]:
    """Ops by bytes; what is beyond the rows is put together in the last one."""
    totals: Counter[str] = Counter()
    for (op, _), sizes in cells.items():
        totals[op] += sum(sizes.values())
    names = [op for op, _ in totals.most_common()]
    shown = names if len(names) <= _MOST_ROWS else names[: _MOST_ROWS - 1]
    merged: dict[str, dict[Scope, Counter[str]]] = {name: {} for name in shown}
    for (op, scope), sizes in cells.items():
        name = op if op in merged or op in shown else _REST
        merged.setdefault(name, {}).setdefault(scope, Counter()).update(sizes)
    return [(name, dict(by_scope)) for name, by_scope in merged.items()]
