"""Memory over a step, by fate: stacked, measured or predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.step_record import ComputePart, StepMemory
from ..planner.profile import Prediction
from .axes import LEGEND_ROW, add_legend, add_parts, add_time_axis, legend_rows
from .drawing import Area, Drawing, Label, Stroke
from .scales import Scale, byte_unit, size_text, tick_text

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
    """What the chart shows.

    Args:
        title: of the picture.
        entries: meaning and text of each layer, from the bottom up.
        points: (ms, bytes of each layer), in order of time.
        parts: of compute; may be empty.
        end_ms: where the step ends.
        budget_bytes: to keep within; ``None``: none is drawn.
        peak_bytes: that the allocator saw, if that is more than the points show; ``None``: not known.
    """

    title: str
    entries: Sequence[tuple[str, str]]
    points: Sequence[tuple[float, tuple[int, int, int, int]]]
    parts: Sequence[ComputePart]
    end_ms: float
    budget_bytes: int | None = None
    peak_bytes: int | None = None

    @property
    def peak(self) -> tuple[float, int]:
        """When most is in use, and how much."""
        ms, sizes = max(self.points, key=lambda point: sum(point[1]))
        return ms, sum(sizes)


def measured_curve(
    memory: StepMemory, budget_bytes: int | None = None, peak_bytes: int | None = None
) -> MemoryCurve:
    """Return what was measured; what is neither kept nor swapped nor there before is the rest."""
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
    )


def predicted_curve(prediction: Prediction, budget_bytes: int | None = None) -> MemoryCurve:
    """Return what was predicted."""
    points = [
        (point.ms, (point.base_bytes, point.kept_bytes, point.swapped_bytes, point.rebuilt_bytes))
        for point in prediction.memory
    ]
    parts = (
        ComputePart("forward", None, 0.0, prediction.turn_ms),
        ComputePart("backward", None, prediction.turn_ms, max(ms for ms, _ in points)),
    )
    title = "Memory over a step, predicted"
    return MemoryCurve(title, _PREDICTED_LAYERS, points, parts, prediction.step_ms, budget_bytes)


def memory_chart(curve: MemoryCurve, width: float) -> Drawing:
    """Draw it.

    Args:
        curve: with one point at least.
        width: in px.
    """
    peak_ms, peak_bytes = curve.peak
    budget = curve.budget_bytes if curve.budget_bytes and curve.budget_bytes < 2 * peak_bytes else None
    seen = curve.peak_bytes if curve.peak_bytes and curve.peak_bytes > 1.02 * peak_bytes else None
    unit, unit_bytes = byte_unit(peak_bytes)
    narrow = width < 600
    left, right = (44.0 if narrow else 56.0), width - 8
    top = legend_rows(curve.entries, width - left) * LEGEND_ROW + 26
    bottom = top + (190.0 if narrow else 260.0)
    drawing = Drawing(width, bottom + 62, curve.title)
    add_legend(drawing, curve.entries, left, 2, width - left)
    x = Scale(curve.end_ms, left, right)
    y = Scale(max(peak_bytes, budget or 0, seen or 0) / unit_bytes * 1.08, bottom, top)
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
    text = f"peak {size_text(peak_bytes)}"
    drawing.add(Label(at + shift, top - 6, text, "ink", "start" if anchor == "start" else "end", bold=True))
    if budget is not None:
        _add_limit(drawing, y(budget / unit_bytes), (left, right), f"budget {size_text(budget)}", "stall")
    if seen is not None:
        text = f"allocator's peak {size_text(seen)}"
        _add_limit(drawing, y(seen / unit_bytes), (right, left), text, "muted")
    add_parts(drawing, curve.parts, x, bottom + 4, 15)
    add_time_axis(drawing, x, bottom + 19, bottom + 22, "ms since the step began")
    return drawing


def _add_limit(drawing: Drawing, y: float, ends: tuple[float, float], text: str, means: str) -> None:
    """A line from end to end, its text at the first."""
    start, end = ends
    drawing.add(Stroke([(start, y), (end, y)], means, 1.5, dashed=True))
    if start < end:
        drawing.add(Label(start + 4, y - 4, text, means))
    else:
        drawing.add(Label(start - 4, y - 4, text, means, "end"))


def _steps(xs: Sequence[float], ys: Sequence[float], end: float) -> list[tuple[float, float]]:
    """A value holds until the next one."""
    found: list[tuple[float, float]] = []
    for x, y, until in zip(xs, ys, [*xs[1:], max(end, xs[-1])], strict=True):
        found += [(x, y), (until, y)]
    return found


def _thinned(
    points: Sequence[tuple[float, tuple[int, int, int, int]]],
) -> list[tuple[float, tuple[int, int, int, int]]]:
    """Of many points the highest of each stretch."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = -(-len(points) // _MOST_POINTS)
    stretches = (points[at : at + size] for at in range(0, len(points), size))
    return [(part[0][0], max(part, key=lambda point: sum(point[1]))[1]) for part in stretches]
