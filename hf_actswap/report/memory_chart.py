"""Memory over a step, by fate: stacked, measured or predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.step_record import ComputePart, StepMemory
from ..planner.profile import Prediction
from .axes import LEGEND_ROW, add_legend, add_parts, add_time_axis, legend_rows
from .drawing import Area, Drawing, Label, Stroke
from .saving import Saving
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
        saving: says what the peak is without a plan; ``None``: not known.
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
        """When most is in use, and how much."""
        ms, sizes = max(self.points, key=lambda point: sum(point[1]))
        return ms, sum(sizes)

    @property
    def limits(self) -> list[tuple[int, str, str]]:
        """Lines across the picture: bytes, text, colour. The highest first."""
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
        saving,
    )


def predicted_curve(
    prediction: Prediction, budget_bytes: int | None = None, saving: Saving | None = None
) -> MemoryCurve:
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
    return MemoryCurve(
        title, _PREDICTED_LAYERS, points, parts, prediction.step_ms, budget_bytes, saving=saving
    )


def memory_chart(curve: MemoryCurve, width: float) -> Drawing:
    """Draw it.

    Args:
        curve: with one point at least.
        width: in px.
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
    for size, text, means in limits:  # from above: a text that has no room over its line goes below the last
        height = y(size / unit_bytes)
        drawing.add(Stroke([(left, height), (right, height)], means, 1.5, dashed=True))
        free = max(height - 4, free + 13)
        drawing.add(Label(left + 4, free, text, means))
    add_parts(drawing, curve.parts, x, bottom + 4, 15)
    add_time_axis(drawing, x, bottom + 19, bottom + 22, "ms since the step began")
    return drawing


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
