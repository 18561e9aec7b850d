"""Draws the pictures of a run's report, each in any width.

* Memory over a step, by fate: stacked, measured or predicted.
* The timeline of one step, measured: compute, copies out, copies in, and where compute waited.
* Bytes by layer and op: the colour of a cell is its fate, and it is stronger for more bytes.
* Time and loss of the steps that a training logged, with the planner's phases marked.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..engine.step_watch import ComputePart, StepMemory, StepTimeline
from ..plan import MemoryPlan
from ..plan.actions import SCOPES, Scope, layer_order
from ..planner.cost.simulate import fates_of
from ..planner.profile import Prediction, Profile
from .drawing import (
    LEGEND_ROW,
    Area,
    Box,
    Drawing,
    Label,
    Scale,
    Stroke,
    add_legend,
    add_parts,
    add_time_axis,
    byte_unit,
    legend_rows,
    ms_text,
    size_text,
    text_width,
    tick_text,
)
from .run_files import LoggedStep
from .saving import Saving

LAYERS = (
    ("base", "weights, optimizer, what was there before"),
    ("keep", "kept for backward"),
    ("swap", "swapped, while on the device"),
    ("recompute", "the rest: run again, temporary, gradients"),
)
_PREDICTED_LAYERS = (
    ("base", "weights, optimizer, gradients, temporary"),
    ("keep", "kept for backward"),
    ("swap", "swapped, while on the device"),
    ("recompute", "run again"),
)
_MOST_POINTS = 600


@dataclass(frozen=True)
class MemoryCurve:
    """The data of a chart of memory over a step: areas on top of each other.

    Args:
        title: title of the picture.
        entries: meaning and text of each area, from the bottom up.
        points: (ms, bytes of each area), in order of time.
        parts: what compute does; may be empty.
        end_ms: time at which the step ends.
        budget_bytes: the memory budget; ``None``: none is drawn.
        peak_bytes: the allocator's peak, which may be above the points; ``None``: not known.
        saving: gives the peak without a plan; ``None``: not known.
    """

    title: str
    entries: Sequence[tuple[str, str]]
    points: Sequence[tuple[float, tuple[int, int, int, int]]]
    parts: Sequence[ComputePart]
    end_ms: float
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    saving: Saving | None = None

    @property
    def peak(self) -> tuple[float, int]:
        """Time (ms) and bytes of the highest point."""
        ms, sizes = max(self.points, key=lambda point: sum(point[1]))
        return ms, sum(sizes)

    @property
    def limits(self) -> list[tuple[int, str, str]]:
        """Lines across the picture: bytes, text, meaning (`COLOURS`). The highest comes first."""
        most, budget, seen, saving = self.peak[1], self.budget_bytes, self.peak_bytes, self.saving
        found = []
        if budget and budget < 2 * most:
            found.append((budget, f"budget {size_text(budget)}", "stall"))
        if seen and seen > 1.02 * most:
            found.append((seen, f"allocator's peak {size_text(seen)}", "muted"))
        if saving is not None and saving.saved_bytes and saving.without_peak_bytes:
            without = f"{saving.at_most}{size_text(saving.without_peak_bytes)}"
            found.append((saving.without_peak_bytes, f"without a plan {without}", "ink"))
        return sorted(found, reverse=True)


def measured_curve(
    memory: StepMemory,
    budget_bytes: int | None = None,
    peak_bytes: int | None = None,
    saving: Saving | None = None,
) -> MemoryCurve:
    """Return the curve of a measured step; bytes not kept, swapped or in use before it are the rest."""
    points = []
    for sample in memory.samples:
        base = min(memory.start_bytes, max(sample.total_bytes - sample.kept_bytes - sample.swapped_bytes, 0))
        rest = max(sample.total_bytes - base - sample.kept_bytes - sample.swapped_bytes, 0)
        points.append((sample.ms, (base, sample.kept_bytes, sample.swapped_bytes, rest)))
    return MemoryCurve(
        "Memory over a step, measured",
        LAYERS,
        points,
        memory.parts,
        memory.step_ms,
        budget_bytes,
        peak_bytes,
        saving,
    )


def predicted_curve(
    prediction: Prediction, budget_bytes: int | None = None, saving: Saving | None = None
) -> MemoryCurve:
    """Return the curve of a predicted step."""
    points = [
        (point.ms, (point.base_bytes, point.kept_bytes, point.swapped_bytes, point.rebuilt_bytes))
        for point in prediction.memory
    ]
    parts = (
        ComputePart("forward", None, 0.0, prediction.forward_end_ms),
        ComputePart("backward", None, prediction.forward_end_ms, max(ms for ms, _ in points)),
    )
    title = "Memory over a step, predicted"
    return MemoryCurve(
        title, _PREDICTED_LAYERS, points, parts, prediction.step_ms, budget_bytes, saving=saving
    )


def memory_chart(curve: MemoryCurve, width: float) -> Drawing:
    """Draw memory over a step.

    Args:
        curve: the data, with at least one point.
        width: width in px.
    """
    peak_ms, peak_bytes = curve.peak
    limits = curve.limits
    unit, unit_bytes = byte_unit(peak_bytes)
    narrow = width < 600
    left, right = (44.0 if narrow else 56.0), width - 8
    top = legend_rows(curve.entries, width - left) * LEGEND_ROW + 26
    bottom = top + (190.0 if narrow else 260.0)
    peak_text = f"peak {size_text(peak_bytes)}"
    title = f"{curve.title}: {', '.join([peak_text, *(text for _, text, _ in limits)])}"
    drawing = Drawing(width, bottom + 62, title)
    add_legend(drawing, curve.entries, left, 2, width - left)
    x = Scale(curve.end_ms, left, right)
    y = Scale(max([peak_bytes, *(size for size, _, _ in limits)]) / unit_bytes * 1.08, bottom, top)
    for value in y.ticks(5):
        drawing.add(Stroke([(left, y(value)), (right, y(value))], "grid"))
        drawing.add(Label(left - 6, y(value) + 4, tick_text(value), anchor="end", size=11))
    drawing.add(Label(left - 6, top - 8, unit, anchor="end", size=11))
    points = _thinned(curve.points)
    below = [0.0] * len(points)
    for number, (means, text) in enumerate(curve.entries):
        above = [base + sizes[number] / unit_bytes for base, (_, sizes) in zip(below, points, strict=True)]
        times = [x(ms) for ms, _ in points]
        edge = _steps(times, [y(value) for value in above], right)
        floor = _steps(times, [y(value) for value in below], right)
        most = max(sizes[number] for _, sizes in points)
        drawing.add(Area([*edge, *reversed(floor)], means, f"{text}: {size_text(most)} at most"))
        below = above
    at, height = x(peak_ms), y(peak_bytes / unit_bytes)
    drawing.add(Stroke([(at, height), (at, top - 4)], "ink"))
    anchor, shift = ("end", -5.0) if at > (left + right) / 2 else ("start", 5.0)
    drawing.add(
        Label(at + shift, top - 6, peak_text, "ink", "start" if anchor == "start" else "end", bold=True)
    )
    free = top
    for size, text, means in limits:  # from the top: a text without room above its line goes below the last
        height = y(size / unit_bytes)
        drawing.add(Stroke([(left, height), (right, height)], means, 1.5, dashed=True))
        free = max(height - 4, free + 13)
        drawing.add(Label(left + 4, free, text, means))
    add_parts(drawing, curve.parts, x, bottom + 4, 15)
    add_time_axis(drawing, x, bottom + 19, bottom + 22, "ms since the step began")
    return drawing


def _steps(xs: Sequence[float], ys: Sequence[float], end: float) -> list[tuple[float, float]]:
    """Return the corners of a step curve: each y holds until the next x, the last one until ``end``."""
    found: list[tuple[float, float]] = []
    for x, y, until in zip(xs, ys, [*xs[1:], max(end, xs[-1])], strict=True):
        found += [(x, y), (until, y)]
    return found


def _thinned(
    points: Sequence[tuple[float, tuple[int, int, int, int]]],
) -> list[tuple[float, tuple[int, int, int, int]]]:
    """Return the highest point of each of `_MOST_POINTS` intervals."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = -(-len(points) // _MOST_POINTS)
    runs = (points[at : at + size] for at in range(0, len(points), size))
    return [(part[0][0], max(part, key=lambda point: sum(point[1]))[1]) for part in runs]


_TIMELINE_LEGEND = (
    ("forward", "forward, by layer"),
    ("backward", "backward, by layer"),
    ("outside", "optimizer and the rest"),
    ("out", "copy to the host"),
    ("in", "copy back"),
    ("stall", "compute waits for a copy"),
)
_LANES = ("compute", "waits", "copies out", "copies in")


def timeline_chart(timeline: StepTimeline, width: float) -> Drawing:
    """Draw compute, waits and copies of a step over time.

    Args:
        timeline: the measured step.
        width: width in px.
    """
    narrow = width < 600
    left, right = (4.0 if narrow else 78.0), width - 8
    lane, gap = 24.0, 22.0 if narrow else 8.0
    top = legend_rows(_TIMELINE_LEGEND, width - left) * LEGEND_ROW + (22 if narrow else 8)
    bottom = top + len(_LANES) * (lane + gap)
    drawing = Drawing(width, bottom + 34, "Timeline of a step: compute, copies, waits")
    add_legend(drawing, _TIMELINE_LEGEND, left, 2, width - left)
    x = Scale(timeline.step_ms, left, right)
    add_time_axis(drawing, x, top, bottom, "ms since the step began")
    tops = {name: top + number * (lane + gap) for number, name in enumerate(_LANES)}
    for name, y in tops.items():
        drawing.add(Stroke([(left, y + lane), (right, y + lane)], "grid"))
        if narrow:
            drawing.add(Label(left, y - 5, name, size=11))
        else:
            drawing.add(Label(left - 8, y + lane / 2 + 4, name, anchor="end"))
    add_parts(drawing, timeline.compute, x, tops["compute"], lane)
    for stall in timeline.stalls:
        name = _name(stall.scope, stall.op_path)
        title = f"waits {ms_text(stall.length_ms)} for {name} ({stall.direction})"
        drawing.add(_box(x, stall.start_ms, stall.length_ms, tops["waits"], lane, "stall", title))
    for copy in timeline.copies:
        length_ms = copy.end_ms - copy.start_ms
        rate = f", {copy.size_bytes / length_ms / 1e6:.1f} GB/s" if length_ms > 0 else ""
        title = f"{_name(copy.scope, copy.op_path)}: {size_text(copy.size_bytes)}, {ms_text(length_ms)}{rate}"
        y = tops["copies out" if copy.direction == "out" else "copies in"]
        drawing.add(_box(x, copy.start_ms, length_ms, y, lane, copy.direction, title))
    return drawing


def _box(x: Scale, start_ms: float, length_ms: float, y: float, lane: float, means: str, title: str) -> Box:
    """Return the box of a wait or a copy, at least wide enough to be seen."""
    left = x(start_ms)
    return Box(left, y, max(x(start_ms + length_ms) - left - 0.3, 0.8), lane, means, title)


def _name(scope: object, op_path: str) -> str:
    place = f"layer {scope}" if isinstance(scope, int) else str(scope or "")
    return ", ".join(part for part in (place, op_path) if part) or "unnamed"


Cells = Mapping[tuple[str, Scope], Mapping[str, int]]
"""Bytes by fate, for each (op path, scope)."""

_FATES_LEGEND = (("keep", "kept"), ("swap", "swapped"), ("recompute", "run again in backward"))
_SWAPPED_ONLY = (("swap", "swapped"),)
_MOST_ROWS = 24
_ROW = 20.0
_REST = "all others"


def planned_cells(profile: Profile, plan: MemoryPlan) -> Cells:
    """Return the bytes that autograd saves without a plan, by the fate that they have under ``plan``."""
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
    """Return the bytes swapped in a measured step, by op path and scope of the plan's rows."""
    found: defaultdict[tuple[str, Scope], Counter[str]] = defaultdict(Counter)
    for copy in timeline.copies:
        if copy.direction == "out" and copy.scope is not None:
            found[copy.op_path or "everything", copy.scope]["swap"] += copy.size_bytes
    return found


def bytes_chart(cells: Cells, width: float) -> Drawing:
    """Draw bytes by op and layer: a row for each op, the largest first, and a column for each layer.

    Args:
        cells: the bytes; at least one entry.
        width: width in px.
    """
    narrow = width < 600
    rows, columns = _rows(cells), _columns(cells)
    fates = {fate for sizes in cells.values() for fate in sizes}
    legend = _SWAPPED_ONLY if fates == {"swap"} else _FATES_LEGEND
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
    """Draw a cell; several fates in it share its width."""
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
    """Draw the names of the columns, as many as fit."""
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
    """Return the rows of ops, the largest first; if there are too many, the last row joins the others."""
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


_CUT = 4.0
"""Times above this many medians are cut off, so that a first step of a minute does not flatten the rest."""


def steps_chart(steps: Sequence[LoggedStep], width: float) -> Drawing:
    """Draw the time of a step over the training.

    Args:
        steps: lines of the record, at least one.
        width: width in px.
    """
    times = [float(line["step_ms"]) for line in steps]
    seconds = median(times) > 10_000
    unit_ms, unit = (1e3, "s") if seconds else (1.0, "ms")
    most_ms = min(max(times), _CUT * median(times))
    drawing = Drawing(width, 184.0, "Time of a step over the training")
    values = [ms / unit_ms for ms in times]
    _add_curve(drawing, steps, values, (0.0, most_ms / unit_ms), [f"{value:,.1f} {unit}" for value in values])
    drawing.add(Label(46.0, 16.0, unit, anchor="end", size=11))
    return drawing


def with_loss(steps: Sequence[LoggedStep]) -> list[tuple[LoggedStep, float]]:
    """Return the lines with a loss, and the loss; a loss that is not a number becomes NaN."""
    found = ((line, line.get("loss")) for line in steps if "loss" in line)
    return [(line, float(loss) if isinstance(loss, int | float) else math.nan) for line, loss in found]


def loss_chart(steps: Sequence[LoggedStep], width: float) -> Drawing:
    """Draw the loss over the training.

    Args:
        steps: lines of the record, at least one of them with a finite loss (`with_loss`).
        width: width in px.
    """
    lines, losses = zip(*with_loss(steps), strict=True)
    finite = [loss for loss in losses if math.isfinite(loss)]
    title = f"Loss over the training: from {losses[0]:.4g} to {losses[-1]:.4g}"
    drawing = Drawing(width, 184.0, title)
    _add_curve(drawing, lines, losses, (min(finite), max(finite)), [f"loss {loss:.4g}" for loss in losses])
    return drawing


def _add_curve(
    drawing: Drawing,
    steps: Sequence[LoggedStep],
    values: Sequence[float],
    ends: tuple[float, float],
    texts: Sequence[str],
) -> None:
    """Draw a line with a point for each step; points above ``ends[1]`` or not finite are red, at the top."""
    least, most = ends
    left, right, top, bottom = 52.0, drawing.width - 8, 24.0, 150.0
    numbers = [float(line["step"]) for line in steps]
    x = Scale(max(numbers), left + 6, right - 6, min(numbers))
    y = Scale(most + (most - least) * 0.1, bottom, top, least)
    for value in y.ticks(4):
        drawing.add(Stroke([(left, y(value)), (right, y(value))], "grid"))
        drawing.add(Label(left - 6, y(value) + 4, tick_text(value), anchor="end", size=11))
    shown = max(2, int((right - left) // 70))
    for number in numbers[:: max(1, -(-len(numbers) // shown))]:
        drawing.add(Label(x(number), bottom + 15, tick_text(number), anchor="middle", size=11))
    drawing.add(Label(right, bottom + 30, "step", anchor="end", size=11))
    _add_phases(drawing, steps, x, top, bottom)
    within = [math.isfinite(value) and value <= most for value in values]
    heights = [y(value if fits else most) for value, fits in zip(values, within, strict=True)]
    points = list(zip(map(x, numbers), heights, strict=True))
    drawing.add(Stroke(points, "keep", 2))
    for (at, height), number, fits, text in zip(points, numbers, within, texts, strict=True):
        title = f"step {number:,.0f}: {text}{'' if fits else ' (beyond the picture)'}"
        drawing.add(Box(at - 2.5, height - 2.5, 5, 5, "keep" if fits else "stall", title))


def _add_phases(drawing: Drawing, steps: Sequence[LoggedStep], x: Scale, top: float, bottom: float) -> None:
    phase, free = "", 0.0
    for line in steps:
        if line.get("phase", "") == phase:
            continue
        phase = str(line.get("phase", ""))
        at = x(float(line["step"]))
        drawing.add(Stroke([(at, top - 4), (at, bottom)], "muted", dashed=True))
        if phase and at >= free:
            drawing.add(Label(at + 3, top - 8, phase, "ink", size=11))
            free = at + text_width(phase, 11) + 8
